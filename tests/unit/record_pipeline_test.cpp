// What a record keeps of a pipeline.

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "record_support.hpp"

namespace lockstep::test {
namespace {

using nlohmann::json;

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
}  // namespace lockstep::test
