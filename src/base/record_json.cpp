#include <fmt/format.h>

#include "base/record_fields.hpp"
#include "base/record_pipeline_json.hpp"
#include "lockstep/error.hpp"
#include "lockstep/record.hpp"

namespace lockstep {
namespace {

using nlohmann::json;

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

json skipped_to_json(const SkippedStepRecord& skipped) {
  return {{"step", skipped.step},
          {"parameter", skipped.parameter},
          {"scale_before", number_to_json(skipped.scale_before)},
          {"scale_after", number_to_json(skipped.scale_after)}};
}

json memory_to_json(const MemorySplit& memory) {
  return {{"weights", memory.weights},
          {"gradients", memory.gradients},
          {"optimizer_state", memory.optimizer_state},
          {"low_precision", memory.low_precision},
          {"activations", memory.activations}};
}

json gradients_to_json(const GradientCheck& check) {
  return {{"norm", number_to_json(check.norm)},
          {"count", check.count},
          {"zero_share", number_to_json(check.zero_share)},
          {"fp16_lost", number_to_json(check.fp16_lost)},
          {"fp16_lost_scaled", number_to_json(check.fp16_lost_scaled)},
          {"fp16_overflow_scaled", number_to_json(check.fp16_overflow_scaled)}};
}

json capture_to_json(const CaptureRecord& capture) {
  return {{"captured", capture.captured},
          {"reason", capture.reason},
          {"graphs", capture.graphs},
          {"replays", capture.replays},
          {"memory_bytes", capture.memory_bytes}};
}

Stats stats_from_json(const json& value) {
  const Fields fields(value, "step_ms");
  return {.mean = fields.amount("mean"),
          .stddev = fields.amount("stddev"),
          .median = fields.amount("median"),
          .p95 = fields.amount("p95"),
          .min = fields.amount("min"),
          .max = fields.amount("max"),
          .n = fields.count("n")};
}

DeviceRecord device_from_json(const json& value) {
  const Fields fields(value, "a device");
  return {.name = fields.get<std::string>("name"),
          .physical = fields.get<std::string>("physical"),
          .shared_by = fields.small_count("shared_by", 1),
          .threads = fields.small_count("threads", 1),
          .peak_bytes = fields.count("peak_bytes"),
          .final_bytes = fields.count("final_bytes"),
          .busy_fraction = fields.share("busy_fraction"),
          .sent_bytes_per_step = fields.count("sent_bytes_per_step"),
          .received_bytes_per_step = fields.count("received_bytes_per_step")};
}

BucketRecord bucket_from_json(const json& value) {
  const Fields fields(value, "a bucket");
  return {.index = fields.small_count("index"),
          .bytes = fields.count("bytes"),
          .parameters = fields.count("parameters"),
          .launched_ms = fields.number("launched_ms"),
          .finished_ms = fields.number("finished_ms")};
}

RankRecord rank_from_json(const json& value) {
  const Fields fields(value, "a rank");
  return {.host = fields.get<std::string>("host"), .step_ms = fields.amount("step_ms")};
}

SkippedStepRecord skipped_from_json(const json& value) {
  const Fields fields(value, "a skipped step");
  return {.step = fields.count("step", 1),
          .parameter = fields.get<std::string>("parameter"),
          .scale_before = fields.amount("scale_before"),
          .scale_after = fields.amount("scale_after")};
}

MemorySplit memory_from_json(const json& value) {
  const Fields fields(value, "memory");
  return {.weights = fields.count("weights"),
          .gradients = fields.count("gradients"),
          .optimizer_state = fields.count("optimizer_state"),
          .low_precision = fields.count("low_precision"),
          .activations = fields.count("activations")};
}

GradientCheck gradients_from_json(const json& value) {
  const Fields fields(value, "gradient_check");
  return {.norm = fields.amount("norm"),
          .count = fields.count("count"),
          .zero_share = fields.share("zero_share"),
          .fp16_lost = fields.share("fp16_lost"),
          .fp16_lost_scaled = fields.share("fp16_lost_scaled"),
          .fp16_overflow_scaled = fields.share("fp16_overflow_scaled")};
}

CaptureRecord capture_from_json(const json& value) {
  const Fields fields(value, "capture");
  return {.captured = fields.boolean("captured"),
          .reason = fields.get<std::string>("reason"),
          .graphs = fields.count("graphs"),
          .replays = fields.count("replays"),
          .memory_bytes = fields.count("memory_bytes")};
}

// Accumulation and lower precision: records of other programs are written without these fields.
void add_precision(const RunRecord& record, json& value) {
  if (record.accum_steps != 1) value["accum_steps"] = record.accum_steps;
  if (record.amp != "off") value["amp"] = record.amp;
  if (record.scale) {
    value["scale"] = number_to_json(*record.scale);
    value["skipped_steps"] = list_to_json(record.skipped_steps, skipped_to_json);
  }
  if (record.nonfinite != 0) value["nonfinite"] = record.nonfinite;
  if (record.memory) value["memory"] = memory_to_json(*record.memory);
  if (record.gradient_check) value["gradient_check"] = gradients_to_json(*record.gradient_check);
}

void read_precision(const Fields& fields, RunRecord& record) {
  if (fields.has("accum_steps")) record.accum_steps = fields.count("accum_steps", 1);
  if (fields.has("amp")) record.amp = fields.get<std::string>("amp");
  if (fields.has("scale")) record.scale = fields.amount("scale");
  if (fields.has("skipped_steps")) {
    record.skipped_steps = list_from_json(fields, "skipped_steps", skipped_from_json);
  }
  if (fields.has("nonfinite")) record.nonfinite = fields.count("nonfinite");
  if (fields.has("memory")) record.memory = memory_from_json(fields.raw("memory"));
  if (fields.has("gradient_check")) {
    record.gradient_check = gradients_from_json(fields.raw("gradient_check"));
  }
}

}  // namespace

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
  add_precision(record, value);
  if (record.capture) value["capture"] = capture_to_json(*record.capture);
  if (record.pipeline) add_pipeline(*record.pipeline, value);
  return value;
}

RunRecord record_from_json(const json& value) {
  const Fields fields(value, "the record");
  const int schema = fields.small_count("schema");
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
  record.world_size = fields.small_count("world_size", 1);
  record.devices = list_from_json(fields, "devices", device_from_json);
  record.split = fields.counts("split");
  record.step_ms = stats_from_json(fields.raw("step_ms"));
  record.warmup_steps = fields.count("warmup_steps");
  record.total_s = fields.amount("total_s");
  record.losses = fields.numbers("losses");
  record.samples_per_s = fields.amount("samples_per_s");
  record.effective_batch = fields.count("effective_batch");
  const Fields all_reduces(fields.raw("all_reduces"), "all_reduces");
  record.all_reduces = {.count = all_reduces.amount("count"), .bytes = all_reduces.count("bytes")};
  record.comm_ms = fields.amount("comm_ms");
  record.exposed_comm_ms = fields.amount("exposed_comm_ms");
  if (fields.has("buckets")) record.buckets = list_from_json(fields, "buckets", bucket_from_json);
  if (fields.has("backward_ms")) record.backward_ms = fields.number("backward_ms");
  if (fields.has("ranks")) record.ranks = list_from_json(fields, "ranks", rank_from_json);
  read_precision(fields, record);
  if (fields.has("capture")) record.capture = capture_from_json(fields.raw("capture"));
  record.pipeline = read_pipeline(fields);
  return record;
}

}  // namespace lockstep
