#include "lockstep/record.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "support.hpp"

namespace lockstep::test::record_test {
namespace {

using nlohmann::json;

RunRecord sample() {
  RunRecord record;
  record.program = "practical5_dp";
  record.options = {{"steps", "20"}, {"devices", "cpu:2"}};
  record.host = {{"name", "here"}};
  record.versions = {{"lockstep", "0.1.0"}};
  record.world_size = 1;
  record.devices = {{.name = "cpu:0",
                     .physical = "core 0",
                     .shared_by = 2,
                     .threads = 3,
                     .peak_bytes = int64_t{1} << 40,
                     .final_bytes = 7,
                     .busy_fraction = 0.5,
                     .sent_bytes_per_step = 11,
                     .received_bytes_per_step = 13},
                    {.name = "cpu:1", .physical = "core 1"}};
  record.split = {22, 22, 20};
  record.step_ms = {
      .mean = 1.5, .stddev = 0.25, .median = 1.4, .p95 = 1.9, .min = 1, .max = 2, .n = 18};
  record.warmup_steps = 2;
  record.total_s = 0.1;
  record.losses = {1.0, 0.1, 1e-300};
  record.samples_per_s = 1e6;
  record.effective_batch = 64;
  record.all_reduces = {.count = 2.5, .bytes = 4096};
  record.comm_ms = 0.7;
  record.exposed_comm_ms = 0.3;
  return record;
}

TEST(DeviceRecord, SaysItsHardwareAndWhoSharesIt) {
  DeviceRecord device{.name = "cpu:1", .physical = "core 1"};
  EXPECT_TRUE(device.on_cpu());
  EXPECT_EQ(device.hardware(), "core 1");
  device = {.name = "cpu:1", .physical = "all cores, shared", .shared_by = 4};
  EXPECT_EQ(device.hardware(), "all cores, shared by 4");
  device = {.name = "cuda:0#1", .physical = "GPU 0", .shared_by = 2};
  EXPECT_FALSE(device.on_cpu());
  EXPECT_EQ(device.hardware(), "GPU 0, shared by 2");
}

/// Each field in turn is removed, and then given a value of another type.
void expect_each_field_named(const json::json_pointer& object, const RunRecord& record) {
  const json whole = to_json(record);
  for (const auto& [name, value] : whole.at(object).items()) {
    SCOPED_TRACE(name);
    json without = whole;
    without.at(object).erase(name);
    expect_error(Code::kRecord, {"has no \"" + name + "\""}, [&] { record_from_json(without); });
    for (const json& wrong :
         {json(nullptr), json(true), json("text"), json{{"a", 1}}, json{1, "x"}}) {
      json changed = whole;
      changed.at(object)[name] = wrong;
      // Any text is a valid text.
      if (value.type() == wrong.type() && value.is_string()) continue;
      SCOPED_TRACE(wrong.dump());
      expect_error(Code::kRecord, {}, [&] { record_from_json(changed); });
    }
  }
}

TEST(Record, KeepsWhatACaptureCost) {
  RunRecord record = sample();
  EXPECT_FALSE(to_json(record).contains("capture"));
  EXPECT_FALSE(record_from_json(to_json(record)).capture);
  record.capture = {
      .captured = true, .reason = "", .graphs = 3, .replays = 17, .memory_bytes = 1 << 20};
  const auto again = record_from_json(to_json(record)).capture;
  ASSERT_TRUE(again);
  EXPECT_TRUE(again->captured);
  EXPECT_EQ(again->graphs, 3);
  EXPECT_EQ(again->replays, 17);
  EXPECT_EQ(again->memory_bytes, 1 << 20);
  json wrong = to_json(record);
  wrong["capture"]["captured"] = 1;
  expect_error(Code::kRecord, {"capture", "captured"}, [&] { record_from_json(wrong); });
}

TEST(Record, DescribesTheModelAndWhatItsReplicasSaw) {
  RunRecord record = sample();
  for (const char* field : {"model", "replicas"}) EXPECT_FALSE(to_json(record).contains(field));
  record.model = {.description = "mlp", .parameters = 4198400, .dtype = "float32"};
  record.replicas = {{.device = "cpu:0", .input = {22, 16}, .output = {22, 8}}};
  const RunRecord again = record_from_json(to_json(record));
  ASSERT_TRUE(again.model);
  EXPECT_EQ(again.model->parameters, 4198400);
  EXPECT_EQ(again.model->dtype, "float32");
  ASSERT_EQ(again.replicas.size(), 1U);
  EXPECT_EQ(again.replicas[0].output, (std::vector<int64_t>{22, 8}));
  EXPECT_EQ(to_json(again), to_json(record));
  expect_each_field_named(json::json_pointer("/model"), record);
  expect_each_field_named(json::json_pointer("/replicas/0"), record);
}

TEST(Record, TimeWithoutACoreIsAShareThatMayBeMissing) {
  RunRecord record = sample();
  EXPECT_FALSE(record_from_json(to_json(record)).devices[0].queued_fraction);
  record.devices[0].queued_fraction = 0.25;
  EXPECT_EQ(record_from_json(to_json(record)).devices[0].queued_fraction, 0.25);
  EXPECT_FALSE(record_from_json(to_json(record)).devices[1].queued_fraction);
  json wrong = to_json(record);
  wrong["devices"][0]["queued_fraction"] = 1.5;
  expect_error(Code::kRecord, {"\"queued_fraction\"", "0 to 1"}, [&] { record_from_json(wrong); });
}

TEST(Record, SurvivesTheRoundTripThroughAFile) {
  const ScratchFolder scratch;
  const RunRecord record = sample();
  write_record(record, scratch.file("r.json"));
  const RunRecord again = read_record(scratch.file("r.json"));
  EXPECT_EQ(to_json(again), to_json(record));
  EXPECT_EQ(again.losses, record.losses);
  EXPECT_EQ(again.split, record.split);
  EXPECT_EQ(again.options, record.options);
  ASSERT_EQ(again.devices.size(), 2U);
  EXPECT_EQ(again.devices[0].peak_bytes, int64_t{1} << 40);
  EXPECT_EQ(again.devices[0].shared_by, 2);
  EXPECT_EQ(again.devices[0].received_bytes_per_step, 13);
  EXPECT_EQ(again.step_ms.n, 18);
  EXPECT_EQ(again.step_ms.stddev, 0.25);
  EXPECT_EQ(again.all_reduces.bytes, 4096);
  EXPECT_EQ(again.exposed_comm_ms, 0.3);
}

TEST(Record, HasTheSchemaAndTheFieldsOfTheContract) {
  const json value = to_json(sample());
  EXPECT_EQ(value.at("schema"), RunRecord::kSchema);
  for (const char* field :
       {"program", "options", "host", "versions", "world_size", "devices", "split", "step_ms",
        "warmup_steps", "total_s", "losses", "samples_per_s", "effective_batch", "all_reduces",
        "comm_ms", "exposed_comm_ms"}) {
    EXPECT_TRUE(value.contains(field)) << field;
  }
  EXPECT_EQ(value.size(), 17U);
}

TEST(Record, SaysAfterWhichStepARunResumed) {
  RunRecord record = sample();
  EXPECT_FALSE(to_json(record).contains("resumed_after"));
  record.resumed_after = 40;
  EXPECT_EQ(record_from_json(to_json(record)).resumed_after, 40);
}

RunRecord sample_with_buckets() {
  RunRecord record = sample();
  record.program = "practical6_ddp";
  record.world_size = 2;
  record.buckets = {
      {.index = 0, .bytes = 1 << 20, .parameters = 2, .launched_ms = 0.5, .finished_ms = 1.25},
      {.index = 1,
       .bytes = int64_t{1} << 33,
       .parameters = 4,
       .launched_ms = 1.5,
       .finished_ms = 2.75}};
  record.backward_ms = 2.5;
  record.ranks = {{.host = "here", .step_ms = 1.5}, {.host = "there", .step_ms = 1.25}};
  return record;
}

TEST(Record, KeepsTheBucketsAndRanksOfAJob) {
  const RunRecord record = sample_with_buckets();
  const RunRecord again = record_from_json(json::parse(to_json(record).dump()));
  EXPECT_EQ(to_json(again), to_json(record));
  ASSERT_EQ(again.buckets.size(), 2U);
  EXPECT_EQ(again.buckets[1].index, 1);
  EXPECT_EQ(again.buckets[1].bytes, int64_t{1} << 33);
  EXPECT_EQ(again.buckets[1].parameters, 4);
  EXPECT_EQ(again.buckets[1].launched_ms, 1.5);
  EXPECT_EQ(again.buckets[1].finished_ms, 2.75);
  EXPECT_EQ(again.backward_ms, 2.5);
  ASSERT_EQ(again.ranks.size(), 2U);
  EXPECT_EQ(again.ranks[1].host, "there");
  EXPECT_EQ(again.ranks[1].step_ms, 1.25);
}

TEST(Record, BucketsAndRanksMayBeAbsent) {
  const json value = to_json(sample());
  for (const char* field : {"buckets", "backward_ms", "ranks"})
    EXPECT_FALSE(value.contains(field)) << field;
  const RunRecord again = record_from_json(value);
  EXPECT_TRUE(again.buckets.empty());
  EXPECT_EQ(again.backward_ms, 0);
  EXPECT_TRUE(again.ranks.empty());
}

TEST(Record, KeepsNumbersThatAreNotFinite) {
  RunRecord record = sample();
  record.losses = {1.0, std::nan(""), INFINITY, -INFINITY};
  record.samples_per_s = INFINITY;
  record.step_ms.mean = std::nan("");
  const RunRecord again = record_from_json(json::parse(to_json(record).dump()));
  ASSERT_EQ(again.losses.size(), 4U);
  EXPECT_EQ(again.losses[0], 1.0);
  EXPECT_TRUE(std::isnan(again.losses[1]));
  EXPECT_EQ(again.losses[2], INFINITY);
  EXPECT_EQ(again.losses[3], -INFINITY);
  EXPECT_EQ(again.samples_per_s, INFINITY);
  EXPECT_TRUE(std::isnan(again.step_ms.mean));
}

TEST(Record, NamesWhateverIsMissingOrOfTheWrongType) {
  expect_each_field_named(json::json_pointer(""), sample());
  for (const char* object : {"/step_ms", "/all_reduces", "/devices/0", "/buckets/0", "/ranks/0"}) {
    expect_each_field_named(json::json_pointer(object), sample_with_buckets());
  }
}

TEST(Record, NamesTheFieldOfTheWrongType) {
  const auto with = [](const char* pointer, const json& value) {
    json changed = to_json(sample_with_buckets());
    changed[json::json_pointer(pointer)] = value;
    return [changed] { record_from_json(changed); };
  };
  expect_error(Code::kRecord, {"\"world_size\" of the record"}, with("/world_size", "2"));
  expect_error(Code::kRecord, {"\"world_size\""}, with("/world_size", 1.5));
  expect_error(Code::kRecord, {"\"world_size\""}, with("/world_size", int64_t{1} << 32));
  expect_error(Code::kRecord, {"\"warmup_steps\""}, with("/warmup_steps", UINT64_MAX));
  expect_error(Code::kRecord, {"\"losses\" of the record"}, with("/losses", nullptr));
  expect_error(Code::kRecord, {"\"losses\""}, with("/losses/1", "big"));
  expect_error(Code::kRecord, {"\"losses\""}, with("/losses/1", nullptr));
  expect_error(Code::kRecord, {"\"devices\""}, with("/devices", nullptr));
  expect_error(Code::kRecord, {"\"split\""}, with("/split/0", 1.5));
  expect_error(Code::kRecord, {"a device is not a JSON object"}, with("/devices/0", 3));
  expect_error(Code::kRecord, {"\"peak_bytes\" of a device"}, with("/devices/1/peak_bytes", "x"));
  expect_error(Code::kRecord, {"\"p95\" of step_ms"}, with("/step_ms/p95", "x"));
  expect_error(Code::kRecord, {"\"options\""}, with("/options/steps", 20));
  expect_error(Code::kRecord, {"\"buckets\" of the record"}, with("/buckets", nullptr));
  expect_error(Code::kRecord, {"a bucket is not a JSON object"}, with("/buckets/0", 3));
  expect_error(Code::kRecord, {"\"bytes\" of a bucket"}, with("/buckets/1/bytes", 1.5));
  expect_error(Code::kRecord, {"\"backward_ms\" of the record"}, with("/backward_ms", true));
  expect_error(Code::kRecord, {"\"step_ms\" of a rank"}, with("/ranks/0/step_ms", "x"));
  expect_error(Code::kRecord, {"is not a JSON object"}, [] { record_from_json(json::array()); });
}

// Every count of a record in turn becomes -1, and every duration -0.5.
void expect_no_negative(const json& whole, const std::set<std::string>& clocks) {
  const json flat = whole.flatten();
  for (const auto& [pointer, value] : flat.items()) {
    const std::string name = pointer.substr(pointer.rfind('/') + 1);
    const bool may_be_negative = clocks.contains(name) || pointer.starts_with("/losses/");
    if (!value.is_number() || may_be_negative) continue;
    SCOPED_TRACE(pointer);
    json changed = whole;
    changed[json::json_pointer(pointer)] = value.is_number_integer() ? json(-1) : json(-0.5);
    expect_error(Code::kRecord, {"must be"}, [&] { record_from_json(changed); });
  }
}

TEST(Record, RefusesNumbersOutOfRange) {
  RunRecord record = sample_with_buckets();
  record.accum_steps = 8;
  record.scale = 0.5;
  record.skipped_steps = {{.step = 3, .parameter = "a", .scale_before = 1.5, .scale_after = 0.5}};
  record.nonfinite = 1;
  record.memory = MemorySplit{1, 2, 3, 4, 5};
  record.gradient_check = GradientCheck{.norm = 1.5, .count = 9, .zero_share = 0.5};
  record.capture = CaptureRecord{.captured = true, .reason = "", .graphs = 1};
  expect_no_negative(to_json(record), {"launched_ms", "finished_ms", "backward_ms"});
  const auto with = [&record](const char* pointer, const json& value) {
    json changed = to_json(record);
    changed[json::json_pointer(pointer)] = value;
    return [changed] { record_from_json(changed); };
  };
  expect_error(Code::kRecord, {"\"peak_bytes\" of a device is -1", "0 or more"},
               with("/devices/0/peak_bytes", -1));
  expect_error(Code::kRecord, {"\"world_size\" of the record is 0", "1 or more"},
               with("/world_size", 0));
  expect_error(Code::kRecord, {"\"busy_fraction\"", "0 to 1"},
               with("/devices/0/busy_fraction", 1.5));
  expect_error(Code::kRecord, {"\"total_s\"", "0 or more"}, with("/total_s", "-inf"));
}

TEST(Record, RefusesAnotherSchema) {
  json value = to_json(sample());
  value["schema"] = RunRecord::kSchema + 1;
  expect_error(Code::kRecord, {"has schema 2", "reads schema 1"}, [&] { record_from_json(value); });
  value["schema"] = 1.5;
  expect_error(Code::kRecord, {"\"schema\""}, [&] { record_from_json(value); });
}

TEST(Record, RefusesAFileThatNestsWithoutEnd) {
  const ScratchFolder folder;
  test::write_bytes(folder.file("deep.json"), "{\"schema\":" + std::string(100'000, '['));
  expect_error(Code::kRecord, {"deep.json is not valid JSON"},
               [&] { read_record(folder.file("deep.json")); });
  const std::string deep = std::string(100'000, '[') + std::string(100'000, ']');
  test::write_bytes(folder.file("deep.json"), "{\"schema\":" + deep + "}");
  expect_error(Code::kRecord, {"deep.json is not valid JSON"},
               [&] { read_record(folder.file("deep.json")); });
}

TEST(Record, ReadingNamesTheFile) {
  const ScratchFolder scratch;
  const std::string path = scratch.file("r.json");
  expect_error(Code::kFileRead, {path}, [&] { read_record(path); });
  for (const char* text : {"", "{", "not json", "{\"schema\": 1e999}"}) {
    write_bytes(path, text);
    expect_error(Code::kRecord, {path, "is not valid JSON"}, [&] { read_record(path); });
  }
  write_bytes(path, "{\"schema\": 1}");
  expect_error(Code::kRecord, {path, "has no \"program\""}, [&] { read_record(path); });
}

TEST(Record, WritesBytesThatAreNotUtf8AsReplacements) {
  const ScratchFolder scratch;
  RunRecord record = sample();
  record.options["data"] = "caf\xe9";
  write_record(record, scratch.file("r.json"));
  EXPECT_EQ(read_record(scratch.file("r.json")).options.at("data"), "caf\xEF\xBF\xBD");
}

TEST(Record, DashIsStandardOutput) {
  testing::internal::CaptureStdout();
  write_record(sample(), "-");
  EXPECT_EQ(json::parse(testing::internal::GetCapturedStdout()), to_json(sample()));
}

TEST(Record, WriteErrorsNameTheFile) {
  expect_error(Code::kFileWrite, {"/proc/r.json"}, [] { write_record(sample(), "/proc/r.json"); });
}

TEST(Record, KeepsWhatAccumulationAndPrecisionAdd) {
  RunRecord record;
  const auto plain = to_json(record);
  for (const char* name :
       {"accum_steps", "amp", "scale", "skipped_steps", "nonfinite", "memory", "gradient_check"}) {
    EXPECT_FALSE(plain.contains(name)) << name;
  }
  record.accum_steps = 8;
  record.amp = "fp16";
  record.scale = 0.5;
  record.skipped_steps = {{.step = 3, .parameter = "a", .scale_before = 1, .scale_after = 0.5}};
  record.nonfinite = 2;
  record.memory = {
      .weights = 1, .gradients = 2, .optimizer_state = 3, .low_precision = 4, .activations = 5};
  record.gradient_check = {.norm = INFINITY,
                           .count = 7,
                           .zero_share = 0.1,
                           .fp16_lost = 0.2,
                           .fp16_lost_scaled = 0.3,
                           .fp16_overflow_scaled = 0.4};
  const RunRecord read = record_from_json(to_json(record));
  EXPECT_EQ(read.accum_steps, 8);
  EXPECT_EQ(read.amp, "fp16");
  EXPECT_EQ(read.scale, 0.5);
  ASSERT_EQ(read.skipped_steps.size(), 1U);
  EXPECT_EQ(read.skipped_steps[0].step, 3);
  EXPECT_EQ(read.skipped_steps[0].parameter, "a");
  EXPECT_EQ(read.skipped_steps[0].scale_before, 1);
  EXPECT_EQ(read.skipped_steps[0].scale_after, 0.5);
  EXPECT_EQ(read.nonfinite, 2);
  ASSERT_TRUE(read.memory && read.gradient_check);
  EXPECT_EQ(read.memory->weights, 1);
  EXPECT_EQ(read.memory->gradients, 2);
  EXPECT_EQ(read.memory->optimizer_state, 3);
  EXPECT_EQ(read.memory->low_precision, 4);
  EXPECT_EQ(read.memory->activations, 5);
  EXPECT_EQ(read.gradient_check->norm, INFINITY);
  EXPECT_EQ(read.gradient_check->count, 7);
  EXPECT_EQ(read.gradient_check->zero_share, 0.1);
  EXPECT_EQ(read.gradient_check->fp16_lost, 0.2);
  EXPECT_EQ(read.gradient_check->fp16_lost_scaled, 0.3);
  EXPECT_EQ(read.gradient_check->fp16_overflow_scaled, 0.4);
}

TEST(Record, NamesABadFieldOfThese) {
  RunRecord record;
  record.memory.emplace();
  auto damaged = to_json(record);
  damaged["memory"].erase("weights");
  try {
    record_from_json(damaged);
    ADD_FAILURE() << "a record without weights was read";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kRecord);
    EXPECT_NE(error.message().find("memory has no \"weights\""), std::string::npos);
  }
}

TEST(Summarize, ComputesTheDistribution) {
  const std::vector<double> values = {4, 1, 3, 2};
  const Stats stats = summarize(values);
  EXPECT_EQ(stats.n, 4);
  EXPECT_DOUBLE_EQ(stats.mean, 2.5);
  EXPECT_DOUBLE_EQ(stats.stddev, std::sqrt(5.0 / 3.0));
  EXPECT_DOUBLE_EQ(stats.median, 2.5);
  EXPECT_DOUBLE_EQ(stats.p95, 3.85);
  EXPECT_EQ(stats.min, 1);
  EXPECT_EQ(stats.max, 4);
}

TEST(Summarize, OneValueOrNone) {
  const std::vector<double> one = {7};
  const Stats stats = summarize(one);
  EXPECT_EQ(stats.n, 1);
  EXPECT_EQ(stats.stddev, 0);
  EXPECT_EQ(stats.median, 7);
  EXPECT_EQ(stats.p95, 7);
  EXPECT_EQ(summarize({}).n, 0);
}

TEST(DescribeHost, KnowsThisMachine) {
  const auto host = describe_host();
  for (const char* key : {"name", "cpu", "cores", "memory", "os"}) {
    ASSERT_TRUE(host.contains(key)) << key;
    EXPECT_FALSE(host.at(key).empty()) << key;
  }
  EXPECT_GE(std::stoi(host.at("cores")), 1);
}

PipelineRecord sample_pipeline() {
  PipelineRecord pipeline;
  pipeline.schedule = "1f1b";
  pipeline.place = "split";
  pipeline.micro_batches = 3;
  pipeline.rows = {11, 11, 10};
  pipeline.stages = {{.rank = 0,
                      .stage = 0,
                      .device = "cpu:0",
                      .layers = 4,
                      .parameters = int64_t{1} << 35,
                      .forward_ms = 1.5,
                      .backward_ms = 2.5,
                      .weight_ms = 0.5,
                      .peak_micro_batches = 2,
                      .message_bytes = 4096},
                     {.rank = 0, .stage = 1, .device = "cpu:2"},
                     {.rank = 1, .stage = 0, .device = "cpu:1"}};
  pipeline.predicted_span_ms = 10;
  pipeline.span_ms = 12.5;
  pipeline.predicted_bubble = 0.25;
  pipeline.bubble = 0.375;
  pipeline.actions = {{.kind = "F",
                       .rank = 1,
                       .stage = 2,
                       .micro_batch = 3,
                       .device = "cpu:1",
                       .begin_ms = 0.25,
                       .end_ms = 1.75},
                      {.kind = "S", .device = "cpu:0", .begin_ms = 9, .end_ms = 9.5}};
  pipeline.predicted = {{.kind = "B", .device = "cpu:2", .begin_ms = 3, .end_ms = 4}};
  pipeline.axes = {{.name = "data",
                    .size = 2,
                    .calls = 2.5,
                    .predicted_bytes = 100,
                    .bytes = 104,
                    .predicted_ms = 0.5,
                    .ms = 0.75}};
  return pipeline;
}

RunRecord sample_with_pipeline() {
  RunRecord record = sample();
  record.pipeline = sample_pipeline();
  return record;
}

TEST(Record, KeepsWhatAPipelineDid) {
  const RunRecord record = sample_with_pipeline();
  const json value = to_json(record);
  EXPECT_EQ(value.at("micro_batches"), 3);
  EXPECT_EQ(value.at("schedule"), "1f1b");
  EXPECT_EQ(value.at("bubble"), (json{{"predicted", 0.25}, {"measured", 0.375}}));
  EXPECT_EQ(value.at("device_of_stage"), (json{"cpu:0", "cpu:2"})) << "the lowest rank's";
  RunRecord over_ranks = record;
  over_ranks.pipeline->stages = {{.rank = 0, .stage = 0, .device = "cpu:0"},
                                 {.rank = 1, .stage = 1, .device = "cpu:1"}};
  EXPECT_EQ(to_json(over_ranks).at("device_of_stage"), (json{"cpu:0", "cpu:1"}));
  const RunRecord again = record_from_json(json::parse(value.dump()));
  EXPECT_EQ(to_json(again), value);
  ASSERT_TRUE(again.pipeline);
  const PipelineRecord& pipeline = *again.pipeline;
  EXPECT_EQ(pipeline.schedule, "1f1b");
  EXPECT_EQ(pipeline.place, "split");
  EXPECT_EQ(pipeline.micro_batches, 3);
  EXPECT_EQ(pipeline.rows, (std::vector<int64_t>{11, 11, 10}));
  EXPECT_EQ(pipeline.predicted_span_ms, 10);
  EXPECT_EQ(pipeline.span_ms, 12.5);
  EXPECT_EQ(pipeline.predicted_bubble, 0.25);
  EXPECT_EQ(pipeline.bubble, 0.375);
}

TEST(Record, KeepsStagesActionsAndAxesOfAPipeline) {
  const PipelineRecord pipeline =
      *record_from_json(json::parse(to_json(sample_with_pipeline()).dump())).pipeline;
  ASSERT_EQ(pipeline.stages.size(), 3U);
  EXPECT_EQ(pipeline.stages[0].device, "cpu:0");
  EXPECT_EQ(pipeline.stages[0].layers, 4);
  EXPECT_EQ(pipeline.stages[0].parameters, int64_t{1} << 35);
  EXPECT_EQ(pipeline.stages[0].forward_ms, 1.5);
  EXPECT_EQ(pipeline.stages[0].backward_ms, 2.5);
  EXPECT_EQ(pipeline.stages[0].weight_ms, 0.5);
  EXPECT_EQ(pipeline.stages[0].peak_micro_batches, 2);
  EXPECT_EQ(pipeline.stages[0].message_bytes, 4096);
  EXPECT_EQ(pipeline.stages[1].stage, 1);
  EXPECT_EQ(pipeline.stages[2].rank, 1);
  ASSERT_EQ(pipeline.actions.size(), 2U);
  EXPECT_EQ(pipeline.actions[0].kind, "F");
  EXPECT_EQ(pipeline.actions[0].rank, 1);
  EXPECT_EQ(pipeline.actions[0].stage, 2);
  EXPECT_EQ(pipeline.actions[0].micro_batch, 3);
  EXPECT_EQ(pipeline.actions[0].device, "cpu:1");
  EXPECT_EQ(pipeline.actions[0].begin_ms, 0.25);
  EXPECT_EQ(pipeline.actions[0].end_ms, 1.75);
  ASSERT_EQ(pipeline.predicted.size(), 1U);
  EXPECT_EQ(pipeline.predicted[0].kind, "B");
  ASSERT_EQ(pipeline.axes.size(), 1U);
  EXPECT_EQ(pipeline.axes[0].name, "data");
  EXPECT_EQ(pipeline.axes[0].size, 2);
  EXPECT_EQ(pipeline.axes[0].calls, 2.5);
  EXPECT_EQ(pipeline.axes[0].predicted_bytes, 100);
  EXPECT_EQ(pipeline.axes[0].bytes, 104);
  EXPECT_EQ(pipeline.axes[0].predicted_ms, 0.5);
  EXPECT_EQ(pipeline.axes[0].ms, 0.75);
}

TEST(Record, APipelineMayBeAbsentButNotInParts) {
  EXPECT_FALSE(record_from_json(to_json(sample())).pipeline);
  for (const char* object : {"", "/bubble", "/pipeline", "/pipeline/stages/0",
                             "/pipeline/actions/0", "/pipeline/predicted/0", "/pipeline/axes/0"}) {
    SCOPED_TRACE(object);
    expect_each_field_named(json::json_pointer(object), sample_with_pipeline());
  }
  const auto with = [](const char* pointer, const json& value) {
    json changed = to_json(sample_with_pipeline());
    changed[json::json_pointer(pointer)] = value;
    return [changed] { record_from_json(changed); };
  };
  expect_error(Code::kRecord, {"\"micro_batches\" of the record"}, with("/micro_batches", 1.5));
  expect_error(Code::kRecord, {"bubble is not a JSON object"}, with("/bubble", 0.5));
  expect_error(Code::kRecord, {"\"device_of_stage\""}, with("/device_of_stage/0", 3));
  expect_error(Code::kRecord, {"a stage is not a JSON object"}, with("/pipeline/stages/1", 3));
  expect_error(Code::kRecord, {"\"rank\" of an action"}, with("/pipeline/actions/0/rank", "x"));
  expect_error(Code::kRecord, {"\"ms\" of an axis"}, with("/pipeline/axes/0/ms", nullptr));
}

TEST(Record, RefusesNumbersOfAPipelineThatAreOutOfRange) {
  const auto with = [](const char* pointer, const json& value) {
    json changed = to_json(sample_with_pipeline());
    changed[json::json_pointer(pointer)] = value;
    return [changed] { record_from_json(changed); };
  };
  for (const char* pointer :
       {"/micro_batches", "/pipeline/rows/0", "/pipeline/stages/0/rank",
        "/pipeline/stages/0/layers", "/pipeline/stages/0/parameters",
        "/pipeline/stages/0/forward_ms", "/pipeline/stages/0/message_bytes", "/pipeline/span_ms",
        "/bubble/predicted", "/pipeline/actions/0/stage", "/pipeline/actions/0/micro_batch",
        "/pipeline/axes/0/size", "/pipeline/axes/0/bytes", "/pipeline/axes/0/calls"}) {
    expect_error(Code::kRecord, {"must be"}, with(pointer, -1));
  }
  expect_error(Code::kRecord, {"\"predicted\" of bubble", "0 to 1"},
               with("/bubble/predicted", 1.5));
}

}  // namespace
}  // namespace lockstep::test::record_test
