#include "lockstep/record.hpp"

#include <fmt/format.h>
#include <sys/sysinfo.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/file.hpp"
#include "base/json_text.hpp"
#include "lockstep/error.hpp"
#include "lockstep/units.hpp"

namespace lockstep {
namespace {

using nlohmann::json;

// The quantile of sorted values, linearly interpolated.
double quantile(const std::vector<double>& sorted, double fraction) {
  const double position = fraction * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<size_t>(position);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (sorted[above] - sorted[below]) * (position - static_cast<double>(below));
}

std::string cpu_model() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.starts_with("model name\t: ")) return line.substr(13);
  }
  return "unknown";
}

std::string os_name() {
  std::ifstream release("/etc/os-release");
  for (std::string line; std::getline(release, line);) {
    if (line.starts_with("PRETTY_NAME=\"")) return line.substr(13, line.size() - 14);
  }
  return "unknown";
}

}  // namespace

std::string DeviceRecord::hardware() const {
  if (shared_by <= 1) return physical;
  const char* shared = physical.ends_with("shared") ? "" : ", shared";
  return fmt::format("{}{} by {}", physical, shared, shared_by);
}

Stats summarize(std::span<const double> values) {
  if (values.empty()) return {};
  std::vector<double> sorted(values.begin(), values.end());
  std::sort(sorted.begin(), sorted.end());
  const auto count = static_cast<double>(sorted.size());
  Stats stats;
  stats.n = static_cast<int64_t>(sorted.size());
  stats.mean = std::accumulate(sorted.begin(), sorted.end(), 0.0) / count;
  double squares = 0;
  for (const double value : sorted) squares += (value - stats.mean) * (value - stats.mean);
  stats.stddev = sorted.size() > 1 ? std::sqrt(squares / (count - 1)) : 0;
  stats.median = quantile(sorted, 0.5);
  stats.p95 = quantile(sorted, 0.95);
  stats.min = sorted.front();
  stats.max = sorted.back();
  return stats;
}

RunRecord read_record(const std::string& path) {
  const auto value = parse_json(read_text_file(path));
  if (!value) {
    throw Error(Code::kRecord, fmt::format("{} is not valid JSON", path), "make the record again");
  }
  try {
    return record_from_json(*value);
  } catch (const Error& error) {
    throw Error(error.code(), fmt::format("{}: {}", path, error.message()), error.help());
  }
}

void write_record(const RunRecord& record, const std::string& path) {
  // An option may contain a path in any encoding, but JSON must be UTF-8.
  const std::string text =
      to_json(record).dump(2, ' ', false, json::error_handler_t::replace) + "\n";
  if (path == "-") {
    const size_t written = std::fwrite(text.data(), 1, text.size(), stdout);
    if (written != text.size() || std::fflush(stdout) != 0) {
      throw Error(Code::kFileWrite,
                  fmt::format("cannot write the record: {}", std::strerror(errno)),
                  "standard output is closed or full; give --json a file");
    }
  } else {
    write_file_atomically(path, text);
  }
}

std::map<std::string, std::string> describe_host() {
  std::array<char, 256> name{};
  gethostname(name.data(), name.size() - 1);
  struct sysinfo memory {};
  sysinfo(&memory);
  return {{"name", name.data()},
          {"cpu", cpu_model()},
          {"cores", std::to_string(get_nprocs())},
          {"memory", format_bytes(static_cast<int64_t>(memory.totalram) * memory.mem_unit)},
          {"os", os_name()}};
}

}  // namespace lockstep
