#include "lockstep/record.hpp"

#include <fmt/format.h>
#include <sys/sysinfo.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "lockstep/error.hpp"
#include "lockstep/file.hpp"
#include "lockstep/units.hpp"

namespace lockstep {
namespace {

using nlohmann::json;

constexpr const char* kRemedy = "make the record again, with --json";

// The value at a fraction of the way through sorted values, interpolated.
double quantile(const std::vector<double>& sorted, double fraction) {
  const double position = fraction * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<size_t>(position);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (sorted[above] - sorted[below]) * (position - static_cast<double>(below));
}

// NaN and infinity have no JSON number; a diverged loss must survive the round trip.
json number_to_json(double number) {
  if (std::isfinite(number)) return number;
  return std::isnan(number) ? "nan" : (number > 0 ? "inf" : "-inf");
}

// Nothing where the value is no number.
std::optional<double> number_from_json(const json& value) {
  if (value.is_number()) return value.get<double>();
  if (value == "nan") return std::nan("");
  if (value == "inf") return INFINITY;
  if (value == "-inf") return -INFINITY;
  return std::nullopt;
}

json stats_to_json(const Stats& stats) {
  return {{"mean", number_to_json(stats.mean)},
          {"stddev", number_to_json(stats.stddev)},
          {"median", number_to_json(stats.median)},
          {"p95", number_to_json(stats.p95)},
          {"min", number_to_json(stats.min)},
          {"max", number_to_json(stats.max)},
          {"n", stats.n}};
}

json device_to_json(const DeviceRecord& device) {
  return {{"name", device.name},
          {"physical", device.physical},
          {"shared_by", device.shared_by},
          {"threads", device.threads},
          {"peak_bytes", device.peak_bytes},
          {"final_bytes", device.final_bytes},
          {"busy_fraction", number_to_json(device.busy_fraction)},
          {"sent_bytes_per_step", device.sent_bytes_per_step},
          {"received_bytes_per_step", device.received_bytes_per_step}};
}

json bucket_to_json(const BucketRecord& bucket) {
  return {{"index", bucket.index},
          {"bytes", bucket.bytes},
          {"parameters", bucket.parameters},
          {"launched_ms", number_to_json(bucket.launched_ms)},
          {"finished_ms", number_to_json(bucket.finished_ms)}};
}

json rank_to_json(const RankRecord& rank) {
  return {{"host", rank.host}, {"step_ms", number_to_json(rank.step_ms)}};
}

template <class T>
json list_to_json(const std::vector<T>& items, json (*convert)(const T&)) {
  json list = json::array();
  for (const auto& item : items) list.push_back(convert(item));
  return list;
}

// Reads fields of one JSON object and names the one that is missing or of the wrong type.
class Fields {
 public:
  Fields(const json& object, std::string where) : object_(object), where_(std::move(where)) {
    if (!object.is_object())
      throw Error(Code::kRecord, fmt::format("{} is not a JSON object", where_), kRemedy);
  }

  bool has(const char* name) const { return object_.contains(name); }

  const json& raw(const char* name) const {
    const auto found = object_.find(name);
    if (found == object_.end())
      throw Error(Code::kRecord, fmt::format("{} has no \"{}\"", where_, name), kRemedy);
    return *found;
  }

  const json& list(const char* name) const {
    const json& value = raw(name);
    if (!value.is_array()) fail(name);
    return value;
  }

  double number(const char* name) const { return number(name, raw(name)); }
  std::vector<double> numbers(const char* name) const {
    std::vector<double> values;
    for (const auto& value : list(name)) values.push_back(number(name, value));
    return values;
  }

  // The parser alone would take 1.5, true and numbers past the end of the type for an integer.
  int64_t integer(const char* name) const { return integer(name, raw(name)); }
  std::vector<int64_t> integers(const char* name) const {
    std::vector<int64_t> values;
    for (const auto& value : list(name)) values.push_back(integer(name, value));
    return values;
  }
  int small_integer(const char* name) const {
    const int64_t value = integer(name);
    if (value != static_cast<int>(value)) fail(name);
    return static_cast<int>(value);
  }

  template <class T>  // a text, or a map of texts
  T get(const char* name) const {
    try {
      return raw(name).get<T>();
    } catch (const json::exception&) {
      fail(name);
    }
  }

 private:
  [[noreturn]] void fail(const char* name) const {
    throw Error(Code::kRecord, fmt::format("\"{}\" of {} has the wrong type", name, where_),
                kRemedy);
  }

  double number(const char* name, const json& value) const {
    const auto number = number_from_json(value);
    if (!number) fail(name);
    return *number;
  }

  int64_t integer(const char* name, const json& value) const {
    if (!value.is_number_integer()) fail(name);
    if (value.is_number_unsigned() && value.get<uint64_t>() > uint64_t{INT64_MAX}) fail(name);
    return value.get<int64_t>();
  }

  const json& object_;
  std::string where_;
};

Stats stats_from_json(const json& value) {
  const Fields fields(value, "step_ms");
  return {.mean = fields.number("mean"),
          .stddev = fields.number("stddev"),
          .median = fields.number("median"),
          .p95 = fields.number("p95"),
          .min = fields.number("min"),
          .max = fields.number("max"),
          .n = fields.integer("n")};
}

DeviceRecord device_from_json(const json& value) {
  const Fields fields(value, "a device");
  return {.name = fields.get<std::string>("name"),
          .physical = fields.get<std::string>("physical"),
          .shared_by = fields.small_integer("shared_by"),
          .threads = fields.small_integer("threads"),
          .peak_bytes = fields.integer("peak_bytes"),
          .final_bytes = fields.integer("final_bytes"),
          .busy_fraction = fields.number("busy_fraction"),
          .sent_bytes_per_step = fields.integer("sent_bytes_per_step"),
          .received_bytes_per_step = fields.integer("received_bytes_per_step")};
}

BucketRecord bucket_from_json(const json& value) {
  const Fields fields(value, "a bucket");
  return {.index = fields.small_integer("index"),
          .bytes = fields.integer("bytes"),
          .parameters = fields.integer("parameters"),
          .launched_ms = fields.number("launched_ms"),
          .finished_ms = fields.number("finished_ms")};
}

RankRecord rank_from_json(const json& value) {
  const Fields fields(value, "a rank");
  return {.host = fields.get<std::string>("host"), .step_ms = fields.number("step_ms")};
}

template <class T>
std::vector<T> list_from_json(const Fields& fields, const char* name, T (*convert)(const json&)) {
  std::vector<T> items;
  for (const auto& value : fields.list(name)) items.push_back(convert(value));
  return items;
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

json to_json(const RunRecord& record) {
  json losses = json::array();
  for (const double loss : record.losses) losses.push_back(number_to_json(loss));
  json value = {
      {"schema", RunRecord::kSchema},
      {"program", record.program},
      {"options", record.options},
      {"host", record.host},
      {"versions", record.versions},
      {"world_size", record.world_size},
      {"devices", list_to_json(record.devices, device_to_json)},
      {"split", record.split},
      {"step_ms", stats_to_json(record.step_ms)},
      {"warmup_steps", record.warmup_steps},
      {"total_s", number_to_json(record.total_s)},
      {"losses", losses},
      {"samples_per_s", number_to_json(record.samples_per_s)},
      {"effective_batch", record.effective_batch},
      {"all_reduces",
       {{"count", number_to_json(record.all_reduces.count)}, {"bytes", record.all_reduces.bytes}}},
      {"comm_ms", number_to_json(record.comm_ms)},
      {"exposed_comm_ms", number_to_json(record.exposed_comm_ms)}};
  if (!record.buckets.empty()) value["buckets"] = list_to_json(record.buckets, bucket_to_json);
  if (record.backward_ms != 0) value["backward_ms"] = number_to_json(record.backward_ms);
  if (!record.ranks.empty()) value["ranks"] = list_to_json(record.ranks, rank_to_json);
  return value;
}

RunRecord record_from_json(const json& value) {
  const Fields fields(value, "the record");
  const int schema = fields.small_integer("schema");
  if (schema != RunRecord::kSchema) {
    throw Error(Code::kRecord, fmt::format("the record has schema {}", schema),
                fmt::format("this version of lockstep reads schema {}; make the record again",
                            RunRecord::kSchema));
  }
  RunRecord record;
  record.program = fields.get<std::string>("program");
  record.options = fields.get<std::map<std::string, std::string>>("options");
  record.host = fields.get<std::map<std::string, std::string>>("host");
  record.versions = fields.get<std::map<std::string, std::string>>("versions");
  record.world_size = fields.small_integer("world_size");
  record.devices = list_from_json(fields, "devices", device_from_json);
  record.split = fields.integers("split");
  record.step_ms = stats_from_json(fields.raw("step_ms"));
  record.warmup_steps = fields.integer("warmup_steps");
  record.total_s = fields.number("total_s");
  record.losses = fields.numbers("losses");
  record.samples_per_s = fields.number("samples_per_s");
  record.effective_batch = fields.integer("effective_batch");
  const Fields all_reduces(fields.raw("all_reduces"), "all_reduces");
  record.all_reduces = {.count = all_reduces.number("count"),
                        .bytes = all_reduces.integer("bytes")};
  record.comm_ms = fields.number("comm_ms");
  record.exposed_comm_ms = fields.number("exposed_comm_ms");
  if (fields.has("buckets")) record.buckets = list_from_json(fields, "buckets", bucket_from_json);
  if (fields.has("backward_ms")) record.backward_ms = fields.number("backward_ms");
  if (fields.has("ranks")) record.ranks = list_from_json(fields, "ranks", rank_from_json);
  return record;
}

RunRecord read_record(const std::string& path) {
  json value;
  try {
    value = json::parse(read_text_file(path));
  } catch (const json::exception&) {
    throw Error(Code::kRecord, fmt::format("{} is not valid JSON", path), "make the record again");
  }
  try {
    return record_from_json(value);
  } catch (const Error& error) {
    throw Error(error.code(), fmt::format("{}: {}", path, error.message()), error.help());
  }
}

void write_record(const RunRecord& record, const std::string& path) {
  // An option may hold a path in any encoding; JSON may not.
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
