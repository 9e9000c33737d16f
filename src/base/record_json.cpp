#include <fmt/format.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <type_traits>
#include <utility>

#include "base/json_text.hpp"
#include "lockstep/error.hpp"
#include "lockstep/record.hpp"

namespace lockstep {
namespace {

using nlohmann::json;

constexpr const char* kRecordRemedy = "make the record again, with --json";
constexpr int64_t kMostCounted = int64_t{1} << 53;  // sums over many records do not overflow

// NaN and infinity are written as texts, because JSON has no such numbers: a diverged loss must
// survive the round trip.
json number_to_json(double number) {
  if (std::isfinite(number)) return number;
  return std::isnan(number) ? "nan" : (number > 0 ? "inf" : "-inf");
}

// Nothing if the value is not a number.
std::optional<double> number_from_json(const json& value) {
  if (value.is_number()) return value.get<double>();
  if (value == "nan") return std::nan("");
  if (value == "inf") return INFINITY;
  if (value == "-inf") return -INFINITY;
  return std::nullopt;
}

// Reads the fields of one JSON object. Errors name the field that is missing, has the wrong type or
// is out of range. Writer has the same functions, so that each field is described once, below.
class Reader {
 public:
  // `where` names the object in errors: "a device".
  Reader(const json& object, std::string where) : object_(object), where_(std::move(where)) {
    if (!object.is_object()) fail(fmt::format("{} is not a JSON object", where_));
  }

  // Whether an optional field is there.
  bool has(const char* name, bool /*has_value*/) const { return object_.contains(name); }

  // A text, a list of texts, or a map of texts.
  template <class T>
  void text(const char* name, T& value) const {
    try {
      value = raw(name).get<T>();
    } catch (const json::exception&) {
      fail_type(name);
    }
  }

  void flag(const char* name, bool& value) const {
    const json& found = raw(name);
    if (!found.is_boolean()) fail_type(name);
    value = found.get<bool>();
  }

  // Any number: a loss, or a time relative to a clock that may start later.
  void number(const char* name, double& value) const { value = to_number(name, raw(name)); }

  void numbers(const char* name, std::vector<double>& values) const {
    for (const auto& value : list(name)) values.push_back(to_number(name, value));
  }

  // 0 or more: a duration, a rate. NaN stands for what could not be measured.
  void amount(const char* name, double& value) const {
    number(name, value);
    if (value < 0) fail_range(name, raw(name), "0 or more");
  }

  // 0 to 1, or NaN.
  void share(const char* name, double& value) const {
    number(name, value);
    if (value < 0 || value > 1) fail_range(name, raw(name), "0 to 1");
  }

  // `least` or more: bytes, elements, ranks.
  template <class Integer>
  void count(const char* name, Integer& value, Integer least = 0) const {
    const int64_t found = to_integer(name, raw(name), least);
    if (found > kMostCounted) fail_range(name, raw(name), fmt::format("at most {}", kMostCounted));
    value = static_cast<Integer>(found);
    if (value != found) fail_range(name, raw(name), "at most 2147483647");
  }

  void counts(const char* name, std::vector<int64_t>& values) const {
    for (const auto& value : list(name)) values.push_back(to_integer(name, value, 0));
  }

  template <class Describe>
  void object(const char* name, const Describe& describe) const {
    Reader fields(raw(name), name);
    describe(fields);
  }

  template <class T>
  void objects(const char* name, const char* where, std::vector<T>& values) const {
    for (const auto& value : list(name)) {
      Reader fields(value, where);
      describe_fields(fields, values.emplace_back());
    }
  }

 private:
  [[noreturn]] static void fail(const std::string& message) {
    throw Error(Code::kRecord, message, kRecordRemedy);
  }

  [[noreturn]] void fail_type(const char* name) const {
    fail(fmt::format("\"{}\" of {} has the wrong type", name, where_));
  }

  [[noreturn]] void fail_range(const char* name, const json& value,
                               const std::string& range) const {
    fail(fmt::format("\"{}\" of {} is {}; it must be {}", name, where_, value.dump(), range));
  }

  const json& raw(const char* name) const {
    const auto found = object_.find(name);
    if (found == object_.end()) fail(fmt::format("{} has no \"{}\"", where_, name));
    return *found;
  }

  const json& list(const char* name) const {
    const json& value = raw(name);
    if (!value.is_array()) fail_type(name);
    return value;
  }

  double to_number(const char* name, const json& value) const {
    const auto number = number_from_json(value);
    if (!number) fail_type(name);
    return *number;
  }

  int64_t to_integer(const char* name, const json& value, int64_t least) const {
    const auto number = whole_number_in(value, INT64_MIN, INT64_MAX);
    if (!number) fail_type(name);
    if (*number < least) fail_range(name, value, fmt::format("{} or more", least));
    return *number;
  }

  const json& object_;
  std::string where_;
};

class Writer {
 public:
  explicit Writer(json& object) : object_(object) { object_ = json::object(); }

  // Whether an optional field is written.
  bool has(const char* /*name*/, bool has_value) const { return has_value; }

  template <class T>
  void text(const char* name, const T& value) const {
    object_[name] = value;
  }
  void flag(const char* name, bool value) const { object_[name] = value; }
  void number(const char* name, double value) const { object_[name] = number_to_json(value); }
  void numbers(const char* name, const std::vector<double>& values) const {
    json& list = object_[name] = json::array();
    for (const double value : values) list.push_back(number_to_json(value));
  }
  void amount(const char* name, double value) const { number(name, value); }
  void share(const char* name, double value) const { number(name, value); }
  void count(const char* name, int64_t value, int64_t /*least*/ = 0) const {
    object_[name] = value;
  }
  void counts(const char* name, const std::vector<int64_t>& values) const {
    object_[name] = values;
  }
  template <class Describe>
  void object(const char* name, const Describe& describe) const {
    Writer fields(object_[name]);
    describe(fields);
  }
  template <class T>
  void objects(const char* name, const char* /*where*/, const std::vector<T>& values) const {
    json& list = object_[name] = json::array();
    for (const auto& value : values) {
      Writer fields(list.emplace_back());
      describe_fields(fields, value);
    }
  }

 private:
  json& object_;
};

// A record that is read is not const.
template <class Io, class T>
using Ref = std::conditional_t<std::is_same_v<Io, Reader>, T&, const T&>;

// The value of an optional that is about to be read, or has one to be written.
template <class T>
T& value_of(std::optional<T>& value) {
  return value ? *value : value.emplace();
}
template <class T>
const T& value_of(const std::optional<T>& value) {
  return *value;
}

template <class Io>
void describe_fields(Io& io, Ref<Io, Stats> stats) {
  io.amount("mean", stats.mean);
  io.amount("stddev", stats.stddev);
  io.amount("median", stats.median);
  io.amount("p95", stats.p95);
  io.amount("min", stats.min);
  io.amount("max", stats.max);
  io.count("n", stats.n);
}

template <class Io>
void describe_fields(Io& io, Ref<Io, DeviceRecord> device) {
  io.text("name", device.name);
  io.text("physical", device.physical);
  io.count("shared_by", device.shared_by, 1);
  io.count("threads", device.threads, 1);
  io.count("peak_bytes", device.peak_bytes);
  io.count("final_bytes", device.final_bytes);
  io.share("busy_fraction", device.busy_fraction);
  if (io.has("queued_fraction", device.queued_fraction.has_value())) {
    io.share("queued_fraction", value_of(device.queued_fraction));
  }
  io.count("sent_bytes_per_step", device.sent_bytes_per_step);
  io.count("received_bytes_per_step", device.received_bytes_per_step);
}

template <class Io>
void describe_fields(Io& io, Ref<Io, ModelRecord> model) {
  io.text("description", model.description);
  io.count("parameters", model.parameters);
  io.text("dtype", model.dtype);
}

template <class Io>
void describe_fields(Io& io, Ref<Io, ReplicaRecord> replica) {
  io.text("device", replica.device);
  io.counts("input", replica.input);
  io.counts("output", replica.output);
}

template <class Io>
void describe_fields(Io& io, Ref<Io, AllReduces> all_reduces) {
  io.amount("count", all_reduces.count);
  io.count("bytes", all_reduces.bytes);
}

template <class Io>
void describe_fields(Io& io, Ref<Io, BucketRecord> bucket) {
  io.count("index", bucket.index);
  io.count("bytes", bucket.bytes);
  io.count("parameters", bucket.parameters);
  io.number("launched_ms", bucket.launched_ms);
  io.number("finished_ms", bucket.finished_ms);
}

template <class Io>
void describe_fields(Io& io, Ref<Io, RankRecord> rank) {
  io.text("host", rank.host);
  io.amount("step_ms", rank.step_ms);
}

template <class Io>
void describe_fields(Io& io, Ref<Io, SkippedStepRecord> skipped) {
  io.count("step", skipped.step, int64_t{1});
  io.text("parameter", skipped.parameter);
  io.amount("scale_before", skipped.scale_before);
  io.amount("scale_after", skipped.scale_after);
}

template <class Io>
void describe_fields(Io& io, Ref<Io, MemorySplit> memory) {
  io.count("weights", memory.weights);
  io.count("gradients", memory.gradients);
  io.count("optimizer_state", memory.optimizer_state);
  io.count("low_precision", memory.low_precision);
  io.count("activations", memory.activations);
}

template <class Io>
void describe_fields(Io& io, Ref<Io, GradientCheck> check) {
  io.amount("norm", check.norm);
  io.count("count", check.count);
  io.share("zero_share", check.zero_share);
  io.share("fp16_lost", check.fp16_lost);
  io.share("fp16_lost_scaled", check.fp16_lost_scaled);
  io.share("fp16_overflow_scaled", check.fp16_overflow_scaled);
}

template <class Io>
void describe_fields(Io& io, Ref<Io, CaptureRecord> capture) {
  io.flag("captured", capture.captured);
  io.text("reason", capture.reason);
  io.count("graphs", capture.graphs);
  io.count("replays", capture.replays);
  io.count("memory_bytes", capture.memory_bytes);
}

template <class Io>
void describe_fields(Io& io, Ref<Io, ActionRecord> action) {
  io.text("kind", action.kind);
  io.count("rank", action.rank);
  io.count("stage", action.stage);
  io.count("micro_batch", action.micro_batch);
  io.text("device", action.device);
  io.number("begin_ms", action.begin_ms);
  io.number("end_ms", action.end_ms);
}

template <class Io>
void describe_fields(Io& io, Ref<Io, StageRecord> stage) {
  io.count("rank", stage.rank);
  io.count("stage", stage.stage);
  io.text("device", stage.device);
  io.count("layers", stage.layers);
  io.count("parameters", stage.parameters);
  io.amount("forward_ms", stage.forward_ms);
  io.amount("backward_ms", stage.backward_ms);
  io.amount("weight_ms", stage.weight_ms);
  io.count("peak_micro_batches", stage.peak_micro_batches);
  io.count("message_bytes", stage.message_bytes);
}

template <class Io>
void describe_fields(Io& io, Ref<Io, AxisRecord> axis) {
  io.text("name", axis.name);
  io.count("size", axis.size, 1);
  io.amount("calls", axis.calls);
  io.count("predicted_bytes", axis.predicted_bytes);
  io.count("bytes", axis.bytes);
  io.amount("predicted_ms", axis.predicted_ms);
  io.amount("ms", axis.ms);
}

// The device of each stage, on the lowest rank that has it.
std::vector<std::string> device_of_stage(const PipelineRecord& pipeline) {
  std::map<int, std::string> first;  // [stage]
  for (const auto& stage : pipeline.stages) first.emplace(stage.stage, stage.device);
  std::vector<std::string> devices;
  for (const auto& [stage, device] : first) devices.push_back(device);
  return devices;
}

template <class Io>
void describe_fields(Io& io, Ref<Io, PipelineRecord> pipeline) {
  auto devices = device_of_stage(pipeline);
  io.object("bubble", [&](Io& bubble) {
    bubble.share("predicted", pipeline.predicted_bubble);
    bubble.number("measured", pipeline.bubble);
  });
  io.object("pipeline", [&](Io& fields) {
    fields.text("place", pipeline.place);
    fields.counts("rows", pipeline.rows);
    fields.objects("stages", "a stage", pipeline.stages);
    fields.amount("predicted_span_ms", pipeline.predicted_span_ms);
    fields.amount("span_ms", pipeline.span_ms);
    fields.objects("actions", "an action", pipeline.actions);
    fields.objects("predicted", "an action", pipeline.predicted);
    fields.objects("axes", "an axis", pipeline.axes);
  });
  io.text("device_of_stage", devices);  // for other readers: here the stages have it
  io.text("schedule", pipeline.schedule);
  io.count("micro_batches", pipeline.micro_batches, int64_t{1});
}

// Fields of accumulation and lower precision, only for programs that use them.
template <class Io>
void describe_precision(Io& io, Ref<Io, RunRecord> record) {
  if (io.has("accum_steps", record.accum_steps != 1)) {
    io.count("accum_steps", record.accum_steps, int64_t{1});
  }
  if (io.has("amp", record.amp != "off")) io.text("amp", record.amp);
  if (io.has("scale", record.scale.has_value())) io.amount("scale", value_of(record.scale));
  if (io.has("skipped_steps", record.scale.has_value())) {
    io.objects("skipped_steps", "a skipped step", record.skipped_steps);
  }
  if (io.has("nonfinite", record.nonfinite != 0)) io.count("nonfinite", record.nonfinite);
  if (io.has("memory", record.memory.has_value())) {
    io.object("memory", [&](Io& fields) { describe_fields(fields, value_of(record.memory)); });
  }
  if (io.has("gradient_check", record.gradient_check.has_value())) {
    io.object("gradient_check",
              [&](Io& fields) { describe_fields(fields, value_of(record.gradient_check)); });
  }
}

template <class Io>
void describe_fields(Io& io, Ref<Io, RunRecord> record) {
  io.text("program", record.program);
  io.text("options", record.options);
  io.text("host", record.host);
  io.text("versions", record.versions);
  if (io.has("model", record.model.has_value())) {
    io.object("model", [&](Io& fields) { describe_fields(fields, value_of(record.model)); });
  }
  if (io.has("replicas", !record.replicas.empty())) {
    io.objects("replicas", "a replica", record.replicas);
  }
  io.count("world_size", record.world_size, 1);
  io.objects("devices", "a device", record.devices);
  io.counts("split", record.split);
  io.object("step_ms", [&](Io& fields) { describe_fields(fields, record.step_ms); });
  io.count("warmup_steps", record.warmup_steps);
  io.amount("total_s", record.total_s);
  io.numbers("losses", record.losses);
  if (io.has("resumed_after", record.resumed_after != 0)) {
    io.count("resumed_after", record.resumed_after);
  }
  io.amount("samples_per_s", record.samples_per_s);
  io.count("effective_batch", record.effective_batch);
  io.object("all_reduces", [&](Io& fields) { describe_fields(fields, record.all_reduces); });
  io.amount("comm_ms", record.comm_ms);
  io.amount("exposed_comm_ms", record.exposed_comm_ms);
  if (io.has("buckets", !record.buckets.empty())) {
    io.objects("buckets", "a bucket", record.buckets);
  }
  if (io.has("backward_ms", record.backward_ms != 0)) io.number("backward_ms", record.backward_ms);
  if (io.has("ranks", !record.ranks.empty())) io.objects("ranks", "a rank", record.ranks);
  describe_precision(io, record);
  if (io.has("capture", record.capture.has_value())) {
    io.object("capture", [&](Io& fields) { describe_fields(fields, value_of(record.capture)); });
  }
  // One of these fields requires all.
  const bool has_pipeline = record.pipeline.has_value();
  if (io.has("micro_batches", has_pipeline) || io.has("schedule", has_pipeline) ||
      io.has("bubble", has_pipeline) || io.has("device_of_stage", has_pipeline) ||
      io.has("pipeline", has_pipeline)) {
    describe_fields(io, value_of(record.pipeline));
  }
}

}  // namespace

json to_json(const RunRecord& record) {
  json value;
  Writer writer(value);
  writer.count("schema", RunRecord::kSchema);
  describe_fields(writer, record);
  return value;
}

RunRecord record_from_json(const json& value) {
  Reader reader(value, "the record");
  int schema = 0;
  reader.count("schema", schema);
  if (schema != RunRecord::kSchema) {
    throw Error(Code::kRecord, fmt::format("the record has schema {}", schema),
                fmt::format("this version of lockstep reads schema {}; make the record again",
                            RunRecord::kSchema));
  }
  RunRecord record;
  describe_fields(reader, record);
  return record;
}

}  // namespace lockstep
