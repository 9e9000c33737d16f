#include "base/record_pipeline_json.hpp"

#include <algorithm>
#include <array>
#include <map>

namespace lockstep {
namespace {

using nlohmann::json;

constexpr std::array kOwnFields = {"micro_batches", "schedule", "bubble", "device_of_stage",
                                   "pipeline"};

json action_to_json(const ActionRecord& action) {
  return {{"kind", action.kind},
          {"rank", action.rank},
          {"stage", action.stage},
          {"micro_batch", action.micro_batch},
          {"device", action.device},
          {"begin_ms", number_to_json(action.begin_ms)},
          {"end_ms", number_to_json(action.end_ms)}};
}

ActionRecord action_from_json(const json& value) {
  const Fields fields(value, "an action");
  return {.kind = fields.get<std::string>("kind"),
          .rank = fields.small_count("rank"),
          .stage = fields.small_count("stage"),
          .micro_batch = fields.small_count("micro_batch"),
          .device = fields.get<std::string>("device"),
          .begin_ms = fields.number("begin_ms"),
          .end_ms = fields.number("end_ms")};
}

json stage_to_json(const StageRecord& stage) {
  return {{"rank", stage.rank},
          {"stage", stage.stage},
          {"device", stage.device},
          {"layers", stage.layers},
          {"parameters", stage.parameters},
          {"forward_ms", number_to_json(stage.forward_ms)},
          {"backward_ms", number_to_json(stage.backward_ms)},
          {"weight_ms", number_to_json(stage.weight_ms)},
          {"peak_micro_batches", stage.peak_micro_batches},
          {"message_bytes", stage.message_bytes}};
}

StageRecord stage_from_json(const json& value) {
  const Fields fields(value, "a stage");
  return {.rank = fields.small_count("rank"),
          .stage = fields.small_count("stage"),
          .device = fields.get<std::string>("device"),
          .layers = fields.count("layers"),
          .parameters = fields.count("parameters"),
          .forward_ms = fields.amount("forward_ms"),
          .backward_ms = fields.amount("backward_ms"),
          .weight_ms = fields.amount("weight_ms"),
          .peak_micro_batches = fields.count("peak_micro_batches"),
          .message_bytes = fields.count("message_bytes")};
}

json axis_to_json(const AxisRecord& axis) {
  return {{"name", axis.name},
          {"size", axis.size},
          {"calls", number_to_json(axis.calls)},
          {"predicted_bytes", axis.predicted_bytes},
          {"bytes", axis.bytes},
          {"predicted_ms", number_to_json(axis.predicted_ms)},
          {"ms", number_to_json(axis.ms)}};
}

AxisRecord axis_from_json(const json& value) {
  const Fields fields(value, "an axis");
  return {.name = fields.get<std::string>("name"),
          .size = fields.small_count("size", 1),
          .calls = fields.amount("calls"),
          .predicted_bytes = fields.count("predicted_bytes"),
          .bytes = fields.count("bytes"),
          .predicted_ms = fields.amount("predicted_ms"),
          .ms = fields.amount("ms")};
}

}  // namespace

void add_pipeline(const PipelineRecord& pipeline, json& record) {
  std::map<int, std::string> first;  // [stage] on the lowest rank that has it
  for (const auto& stage : pipeline.stages) first.emplace(stage.stage, stage.device);
  json device_of_stage = json::array();
  for (const auto& [stage, device] : first) device_of_stage.push_back(device);
  record["micro_batches"] = pipeline.micro_batches;
  record["schedule"] = pipeline.schedule;
  record["bubble"] = {{"predicted", number_to_json(pipeline.predicted_bubble)},
                      {"measured", number_to_json(pipeline.bubble)}};
  record["device_of_stage"] = std::move(device_of_stage);
  record["pipeline"] = {{"place", pipeline.place},
                        {"rows", pipeline.rows},
                        {"stages", list_to_json(pipeline.stages, stage_to_json)},
                        {"predicted_span_ms", number_to_json(pipeline.predicted_span_ms)},
                        {"span_ms", number_to_json(pipeline.span_ms)},
                        {"actions", list_to_json(pipeline.actions, action_to_json)},
                        {"predicted", list_to_json(pipeline.predicted, action_to_json)},
                        {"axes", list_to_json(pipeline.axes, axis_to_json)}};
}

std::optional<PipelineRecord> read_pipeline(const Fields& record) {
  const auto given = [&record](const char* name) { return record.has(name); };
  if (std::none_of(kOwnFields.begin(), kOwnFields.end(), given)) return std::nullopt;
  const Fields bubble(record.raw("bubble"), "bubble");
  const Fields fields(record.raw("pipeline"), "pipeline");
  record.get<std::vector<std::string>>("device_of_stage");  // the stages say it too
  return PipelineRecord{.schedule = record.get<std::string>("schedule"),
                        .place = fields.get<std::string>("place"),
                        .micro_batches = record.count("micro_batches", 1),
                        .rows = fields.counts("rows"),
                        .stages = list_from_json(fields, "stages", stage_from_json),
                        .predicted_span_ms = fields.amount("predicted_span_ms"),
                        .span_ms = fields.amount("span_ms"),
                        .predicted_bubble = bubble.share("predicted"),
                        .bubble = bubble.number("measured"),
                        .actions = list_from_json(fields, "actions", action_from_json),
                        .predicted = list_from_json(fields, "predicted", action_from_json),
                        .axes = list_from_json(fields, "axes", axis_from_json)};
}

}  // namespace lockstep
