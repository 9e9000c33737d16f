#include "lockstep/metrics_log.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <limits>
#include <set>
#include <span>
#include <vector>

#include "base/event_file.hpp"
#include "base/file.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

constexpr std::string_view kCsvHeader = "step,time,name,value\n";
constexpr std::string_view kEventPrefix = "events.out.tfevents.";

[[noreturn]] void fail_write(const std::string& path) {
  const int error = errno;
  throw Error(Code::kFileWrite,
              fmt::format("metrics cannot be written to {}: {}", path, std::strerror(error)),
              limit_help(error, "give a folder that this process can write to, with space left"));
}

double wall_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

// A file that only grows.
class AppendedFile {
 public:
  explicit AppendedFile(std::string path)
      : path_(std::move(path)),
        file_(::open(path_.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644)) {
    if (file_.get() < 0) fail_write(path_);
  }

  void append(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t written = ::write(file_.get(), bytes.data(), bytes.size());
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) fail_write(path_);
      bytes.remove_prefix(static_cast<size_t>(written));
    }
  }

 private:
  std::string path_;
  Descriptor file_;
};

namespace {

void cut_file(const std::string& path, size_t before, size_t kept) {
  if (kept < before && ::truncate(path.c_str(), static_cast<off_t>(kept)) != 0) fail_write(path);
}

// Lines are what survives a crash whole.
void require_name(std::string_view name) {
  if (!name.empty() && name.find_first_of("\n\r") == std::string_view::npos) return;
  throw Error(Code::kUsage, fmt::format("\"{}\" cannot be the name of a metric", name),
              "give it a name of one line, such as loss/train");
}

// A text in quotes where CSV needs them.
std::string csv_text(std::string_view text) {
  if (text.find_first_of(",\"") == std::string_view::npos) return std::string(text);
  std::string quoted = "\"";
  for (const char letter : text) {
    if (letter == '"') quoted.push_back('"');
    quoted.push_back(letter);
  }
  return quoted + "\"";
}

using Names = std::set<std::string, std::less<>>;

// The name in a line "step,time,name,value".
std::string name_in(std::string_view line) {
  for (int field = 0; field < 2; ++field)
    line.remove_prefix(std::min(line.find(','), line.size() - 1) + 1);
  if (!line.starts_with('"')) return std::string(line.substr(0, line.find(',')));
  std::string name;
  for (size_t i = 1; i < line.size(); ++i) {
    if (line[i] == '"' && (i + 1 == line.size() || line[++i] != '"')) break;
    name.push_back(line[i]);
  }
  return name;
}

struct CsvLines {
  size_t kept = 0;  // bytes of whole lines up to the step
  std::optional<int64_t> last_step = {};
  Names names = {};  // of last_step
};

// Steps ascend, so what belongs to later ones is the end of the file. So is a line that a crash
// tore.
CsvLines read_lines(const std::string& path, const std::string& text, int64_t last_step) {
  CsvLines lines;
  if (text.empty()) return lines;
  if (!text.starts_with(kCsvHeader)) {
    throw Error(Code::kFileFormat, fmt::format("{} is not a file of MetricsLog", path),
                "give a folder of its own to the metrics");
  }
  lines.kept = kCsvHeader.size();
  for (;;) {
    const size_t end = text.find('\n', lines.kept);
    if (end == std::string::npos) return lines;
    int64_t step = 0;
    const auto [after, error] = std::from_chars(text.data() + lines.kept, text.data() + end, step);
    if (error != std::errc() || *after != ',' || step > last_step) return lines;
    if (lines.last_step != step) lines.names.clear();
    lines.names.insert(name_in(std::string_view(text).substr(lines.kept, end - lines.kept)));
    lines.kept = end + 1;
    lines.last_step = step;
  }
}

}  // namespace

struct MetricsLog::State {
  State(const std::string& folder, const std::optional<int64_t>& resumed_after);

  void write(int64_t step, std::span<const Metric> metrics);

  std::string folder;
  std::optional<AppendedFile> csv;
  std::optional<AppendedFile> events;
  std::optional<int64_t> last_step;  // that the files have
  Names names;                       // of last_step
  Names names_before;                // those of them that the run had written before it was resumed
  bool continues = false;            // last_step may get more names
};

MetricsLog::State::State(const std::string& where, const std::optional<int64_t>& resumed_after)
    : folder(where) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  const int64_t keep = resumed_after.value_or(std::numeric_limits<int64_t>::max());
  const std::string csv_path = folder + "/metrics.csv";
  const std::string text = read_text_or_empty(csv_path);
  const CsvLines lines = read_lines(csv_path, text, keep);
  cut_file(csv_path, text.size(), lines.kept);
  last_step = lines.last_step;
  names = lines.names;
  if (resumed_after) names_before = names;
  continues = resumed_after.has_value();
  csv.emplace(csv_path);
  if (lines.kept == 0) csv->append(kCsvHeader);

  int64_t newest = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(kEventPrefix)) continue;
    const std::string bytes = read_text_or_empty(entry.path().string());
    cut_file(entry.path().string(), bytes.size(), keep_events(bytes, keep));
    int64_t began = 0;
    std::from_chars(name.data() + kEventPrefix.size(), name.data() + name.size(), began);
    newest = std::max(newest, began);
  }
  // TensorBoard reads the files of a folder in the order of their names.
  const double now = wall_seconds();
  const int64_t began = std::max(static_cast<int64_t>(now), newest + 1);
  std::string host(256, '\0');
  if (::gethostname(host.data(), host.size() - 1) != 0) host = "host";
  events.emplace(
      fmt::format("{}/{}{}.{}.{}", folder, kEventPrefix, began, host.c_str(), ::getpid()));
  events->append(tf_record(version_event(now)));
  if (resumed_after) events->append(tf_record(restart_event(now, *resumed_after + 1)));
}

void MetricsLog::State::write(int64_t step, std::span<const Metric> metrics) {
  if (last_step && (step < *last_step || (step == *last_step && !continues))) {
    throw Error(
        Code::kUsage,
        fmt::format("metrics of step {} after those of step {} in {}", step, *last_step, folder),
        continues ? "write the steps in ascending order"
                  : "set MetricsLogOptions::resumed_after to the step after which the run "
                    "goes on, or give another folder");
  }
  Names written = last_step == step ? names : Names();
  Names before = last_step == step ? names_before : Names();
  std::vector<Metric> fresh;
  for (const auto& metric : metrics) {
    require_name(metric.first);
    // What the run computes again for the step that it was resumed after is in the files already.
    if (before.erase(std::string(metric.first)) != 0) continue;
    if (!written.insert(std::string(metric.first)).second) {
      throw Error(Code::kUsage,
                  fmt::format("metric {} of step {} was written twice", metric.first, step),
                  "write each metric once per step");
    }
    fresh.push_back(metric);
  }
  last_step = step;
  names = std::move(written);
  names_before = std::move(before);
  continues = true;
  if (fresh.empty()) return;
  const double now = wall_seconds();
  std::string lines;
  for (const auto& [name, value] : fresh) {
    lines += fmt::format("{},{:.3f},{},{}\n", step, now, csv_text(name), value);
  }
  csv->append(lines);
  events->append(tf_record(scalar_event(now, step, fresh)));
}

MetricsLog::MetricsLog(const std::string& folder, const MetricsLogOptions& options) {
  if (options.every_rank) {
    state_ = std::make_unique<State>(fmt::format("{}/rank{}", folder, options.rank),
                                     options.resumed_after);
  } else if (options.rank == 0) {
    state_ = std::make_unique<State>(folder, options.resumed_after);
  }
}

MetricsLog::~MetricsLog() = default;

void MetricsLog::write(int64_t step, std::initializer_list<Metric> metrics) {
  if (state_) state_->write(step, {metrics.begin(), metrics.size()});
}

}  // namespace lockstep
