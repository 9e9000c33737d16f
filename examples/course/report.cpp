#include "course/report.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>

#include "lockstep/job_record.hpp"
#include "lockstep/units.hpp"

namespace course {
namespace {

using lockstep::ActionRecord;
using lockstep::Align;
using lockstep::AxisRecord;
using lockstep::Communicator;
using lockstep::DeviceRecord;
using lockstep::PipelineRecord;
using lockstep::RunRecord;
using lockstep::StageRecord;
using lockstep::StageTimes;
using lockstep::Table;
using lockstep::TraceSpan;
using nlohmann::json;

json span_to_json(const TraceSpan& span) {
  return json::array({span.rank, span.device, span.name, span.begin_ns, span.end_ns, span.args});
}

TraceSpan span_from_json(const json& value) {
  return {.rank = value.at(0).get<int>(),
          .device = value.at(1).get<int>(),
          .name = value.at(2).get<std::string>(),
          .begin_ns = value.at(3).get<int64_t>(),
          .end_ns = value.at(4).get<int64_t>(),
          .args = value.at(5).get<std::map<std::string, std::string>>()};
}

json pipeline_to_json(const std::optional<PipelineReport>& report) {
  if (!report) return nullptr;
  json calls = json::array();
  for (const auto& call : report->calls) {
    calls.push_back(json::array({call.begin_ns, call.end_ns, call.busy_ns}));
  }
  return {{"pipeline", report->pipeline}, {"ranks", report->ranks}, {"calls", std::move(calls)}};
}

std::optional<PipelineReport> pipeline_from_json(const json& value) {
  if (value.is_null()) return std::nullopt;
  PipelineReport report{.pipeline = value.at("pipeline").get<int>(),
                        .ranks = value.at("ranks").get<int>()};
  for (const auto& call : value.at("calls")) {
    report.calls.push_back({.begin_ns = call.at(0).get<int64_t>(),
                            .end_ns = call.at(1).get<int64_t>(),
                            .busy_ns = call.at(2).get<int64_t>()});
  }
  return report;
}

std::string to_text(const RankReport& report) {
  json spans = json::array();
  for (const auto& span : report.spans) spans.push_back(span_to_json(span));
  const json value = {{"record", lockstep::to_json(report.record)},
                      {"step_ms", report.step_ms},
                      {"spans", std::move(spans)},
                      {"clock_ns", report.clock_ns},
                      {"pipeline", pipeline_to_json(report.pipeline)}};
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

RankReport from_text(const std::string& text) {
  const json value = json::parse(text);
  RankReport report{.record = lockstep::record_from_json(value.at("record")),
                    .step_ms = value.at("step_ms").get<std::vector<double>>(),
                    .spans = {},
                    .clock_ns = value.at("clock_ns").get<int64_t>(),
                    .pipeline = pipeline_from_json(value.at("pipeline"))};
  for (const auto& span : value.at("spans")) report.spans.push_back(span_from_json(span));
  return report;
}

}  // namespace

std::vector<RankReport> gather_reports(const Communicator& comm, const RankReport& mine) {
  std::vector<RankReport> reports;
  for (const auto& text : comm.gather_text(to_text(mine))) {
    reports.push_back(from_text(text));
  }
  comm.barrier({.label = "reports"});  // no rank leaves before all reports have arrived
  return reports;
}

lockstep::RunRecord job_record(const std::vector<RankReport>& reports) {
  std::vector<lockstep::RankMeasurements> ranks;
  for (const auto& report : reports) ranks.push_back({report.record, report.step_ms});
  return lockstep::job_record(ranks);
}

void fill_job_trace(const std::vector<RankReport>& reports, lockstep::Trace& trace) {
  trace.enable();
  for (size_t i = 0; i < reports.size(); ++i) {
    const auto& report = reports[i];
    const int rank = static_cast<int>(i);
    const auto& devices = report.record.devices;
    trace.name_rank(rank, fmt::format("rank {} on {}", rank, report.record.host.at("name")));
    for (size_t device = 0; device < devices.size(); ++device) {
      trace.name_device(rank, static_cast<int>(device), devices[device].name);
    }
    trace.name_device(rank, static_cast<int>(devices.size()), "communication");
    const int64_t ahead_ns = report.clock_ns - reports.front().clock_ns;
    for (TraceSpan span : report.spans) {
      span.begin_ns -= ahead_ns;
      span.end_ns -= ahead_ns;
      trace.add(std::move(span));
    }
  }
}

// The pipeline of a job.
namespace {

// How far the clock of this rank is ahead of rank 0's.
int64_t ahead_ns(const std::vector<RankReport>& reports, size_t rank) {
  return reports[rank].clock_ns - reports.front().clock_ns;
}

// A call of Pipeline::step on all ranks of a pipeline.
struct WholeCall {
  int64_t begin_ns = std::numeric_limits<int64_t>::max();
  int64_t end_ns = std::numeric_limits<int64_t>::min();
  int64_t busy_ns = 0;
  int64_t ranks = 0;  // pipeline ranks that took part

  double span_ms() const { return static_cast<double>(end_ns - begin_ns) * 1e-6; }
  double bubble() const {
    return 1 - static_cast<double>(busy_ns) / static_cast<double>((end_ns - begin_ns) * ranks);
  }
};

void measure_span(const std::vector<RankReport>& reports, PipelineRecord& job) {
  std::map<std::pair<int, size_t>, WholeCall> calls;  // [pipeline, number of the call]
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    const PipelineReport& report = reports[rank].pipeline.value();
    for (size_t i = 0; i < report.calls.size(); ++i) {
      WholeCall& whole = calls[{report.pipeline, i}];
      const PipelineCall& call = report.calls[i];
      whole.begin_ns = std::min(whole.begin_ns, call.begin_ns - ahead_ns(reports, rank));
      whole.end_ns = std::max(whole.end_ns, call.end_ns - ahead_ns(reports, rank));
      whole.busy_ns += call.busy_ns;
      whole.ranks += report.ranks;
    }
  }
  for (const auto& [key, call] : calls) {
    job.span_ms += call.span_ms() / static_cast<double>(calls.size());
    job.bubble += call.bubble() / static_cast<double>(calls.size());
  }
}

// The last calls of all ranks on one clock, which starts with the first of them.
std::vector<ActionRecord> merge_actions(const std::vector<RankReport>& reports) {
  const auto begin_ns = [&](size_t rank) {
    const auto& calls = reports[rank].pipeline.value().calls;
    return calls.empty() ? 0 : calls.back().begin_ns - ahead_ns(reports, rank);
  };
  int64_t first_ns = begin_ns(0);
  for (size_t rank = 1; rank < reports.size(); ++rank) {
    first_ns = std::min(first_ns, begin_ns(rank));
  }
  std::vector<ActionRecord> actions;
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    const double later_ms = static_cast<double>(begin_ns(rank) - first_ns) * 1e-6;
    for (ActionRecord action : reports[rank].record.pipeline.value().actions) {
      action.begin_ms += later_ms;
      action.end_ms += later_ms;
      actions.push_back(std::move(action));
    }
  }
  std::stable_sort(actions.begin(), actions.end(),
                   [](const auto& a, const auto& b) { return a.begin_ms < b.begin_ms; });
  return actions;
}

// The time of a message shows only if somebody waited for it: from the end of the action that sent
// it to the begin of the action that received it. The median, since some waits are for a busy core.
double median_message_ms(const std::vector<RankReport>& reports, const HybridPlan& plan,
                         const std::vector<ActionRecord>& actions) {
  using Key = std::tuple<int, int, bool, int, int>;  // pipeline, tp, forward, stage, micro-batch
  const auto key_of = [&](const ActionRecord& action, int stage) -> Key {
    const auto& report = reports[static_cast<size_t>(action.rank)].pipeline.value();
    return {report.pipeline, action.rank % plan.tensor, action.kind == "F", stage,
            action.micro_batch};
  };
  std::map<Key, const ActionRecord*> senders;
  for (const auto& action : actions) {
    if (action.kind != "S" && action.kind != "W") senders[key_of(action, action.stage)] = &action;
  }
  std::map<std::pair<int, std::string>, double> free_ms;  // [rank, device], since when
  std::vector<double> waits_ms;
  for (const auto& action : actions) {
    if (action.kind == "S") continue;
    const auto sender = senders.find(key_of(action, action.stage + (action.kind == "F" ? -1 : 1)));
    auto& free_since = free_ms[{action.rank, action.device}];
    if (action.kind != "W" && sender != senders.end()) {
      const ActionRecord& sent = *sender->second;
      const bool elsewhere = sent.rank != action.rank || sent.device != action.device;
      if (elsewhere && free_since <= sent.end_ms) {
        waits_ms.push_back(std::max(0.0, action.begin_ms - sent.end_ms));
      }
    }
    free_since = action.end_ms;
  }
  return lockstep::summarize(waits_ms).median;
}

std::vector<AxisRecord> mean_axes(const std::vector<RankReport>& reports, double message_ms) {
  const auto ranks = static_cast<double>(reports.size());
  std::vector<AxisRecord> axes = reports.front().record.pipeline.value().axes;
  for (size_t i = 0; i < axes.size(); ++i) {
    const auto mean = [&](auto member) {
      double sum = 0;
      for (const auto& report : reports)
        sum += static_cast<double>(report.record.pipeline.value().axes.at(i).*member);
      return sum / ranks;
    };
    AxisRecord& axis = axes[i];
    axis.calls = mean(&AxisRecord::calls);
    axis.predicted_bytes = std::llround(mean(&AxisRecord::predicted_bytes));
    axis.bytes = std::llround(mean(&AxisRecord::bytes));
    axis.predicted_ms = mean(&AxisRecord::predicted_ms);
    axis.ms = axis.name == "pipeline" ? axis.calls * message_ms : mean(&AxisRecord::ms);
  }
  return axes;
}

// The mean of each stage over the ranks that have it. An undivided backward counts as that of the
// input.
std::vector<StageTimes> mean_times(const PipelineRecord& job, size_t stages, const Link& link) {
  std::vector<StageTimes> times(stages, {.forward = 0, .backward_input = 0, .backward_weight = 0});
  std::vector<double> copies(stages, 0);
  for (const auto& stage : job.stages) copies[static_cast<size_t>(stage.stage)] += 1;
  for (const auto& stage : job.stages) {
    const auto i = static_cast<size_t>(stage.stage);
    times[i].forward += stage.forward_ms / copies[i];
    times[i].backward_input += stage.backward_ms / copies[i];
    times[i].backward_weight += stage.weight_ms / copies[i];
    times[i].send_forward = link.ms(1, stage.message_bytes);
    if (i + 1 < stages) times[i + 1].send_backward = link.ms(1, stage.message_bytes);
  }
  return times;
}

void predict(const HybridPlan& plan, const Link& link, PipelineRecord& job) {
  const auto stages = plan.schedule.rank_of_stage.size();
  const auto simulation = lockstep::simulate(plan.schedule, mean_times(job, stages, link));
  job.predicted_span_ms = simulation.makespan;
  job.predicted_bubble = simulation.bubble;
  std::map<int, const StageRecord*> first;  // [stage] on the lowest rank that has it
  for (const auto& stage : job.stages) first.emplace(stage.stage, &stage);
  for (const auto& actions : simulation.timeline) {
    for (const auto& [action, begin, end] : actions) {
      const StageRecord& home = *first.at(action.stage);
      job.predicted.push_back({.kind = std::string(1, letter(action.kind)),
                               .rank = home.rank,
                               .stage = action.stage,
                               .micro_batch = action.micro_batch,
                               .device = home.device,
                               .begin_ms = begin,
                               .end_ms = end});
    }
  }
  std::stable_sort(job.predicted.begin(), job.predicted.end(),
                   [](const auto& a, const auto& b) { return a.begin_ms < b.begin_ms; });
}

}  // namespace

PipelineRecord job_pipeline(const std::vector<RankReport>& reports, const HybridPlan& plan,
                            const Link& link) {
  PipelineRecord job = reports.front().record.pipeline.value();
  job.stages.clear();
  for (const auto& report : reports) {
    const auto& stages = report.record.pipeline.value().stages;
    job.stages.insert(job.stages.end(), stages.begin(), stages.end());
  }
  job.actions = merge_actions(reports);
  job.axes = mean_axes(reports, median_message_ms(reports, plan, job.actions));
  measure_span(reports, job);
  predict(plan, link, job);
  return job;
}

// Tables and the notes below them.
namespace {

std::string device_label(const DeviceRecord& device) {
  return fmt::format("{} ({})", device.name, device.hardware());
}

// Rows of a batch that pass through a device. All rows of a pipeline pass through each of its
// devices.
int64_t rows_on(const RunRecord& record, size_t device) {
  if (record.pipeline) {
    const auto& rows = record.pipeline->rows;
    return std::accumulate(rows.begin(), rows.end(), int64_t{0});
  }
  return device < record.split.size() ? record.split[device] : 0;
}

std::string percent(double fraction) {
  return fmt::format("{:.0f} %", fraction * 100);
}

std::string step_note(const RunRecord& record) {
  const auto& step = record.step_ms;
  return fmt::format(
      "step time {:.3f} ms ± {:.3f} (median {:.3f}, {:.3f} to {:.3f}, {} step{} after {} of "
      "warm-up{}), {:.0f} samples/s, {} in all",
      step.mean, step.stddev, step.median, step.min, step.max, step.n, step.n == 1 ? "" : "s",
      record.warmup_steps,
      record.resumed_after == 0 ? "" : fmt::format(", resumed after {}", record.resumed_after),
      record.samples_per_s, lockstep::format_seconds(record.total_s));
}

// Time of a step that a rank spent on its own work. Ranks wait for each other in every step, so
// their step times are equal, and only this tells which rank made the others wait.
double own_ms(const RankReport& report) {
  return report.record.step_ms.mean - report.record.exposed_comm_ms;
}

std::string slowest_note(const std::vector<RankReport>& reports) {
  double sum_ms = 0;
  size_t slowest = 0;
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    sum_ms += own_ms(reports[rank]);
    if (own_ms(reports[rank]) > own_ms(reports[slowest])) slowest = rank;
  }
  const double mean_ms = sum_ms / static_cast<double>(reports.size());
  return fmt::format("slowest rank: {}, {:.3f} ms of its own work a step, {:.2f} times the mean",
                     slowest, own_ms(reports[slowest]),
                     mean_ms > 0 ? own_ms(reports[slowest]) / mean_ms : 1.0);
}

std::string overlap_note(const RunRecord& job) {
  const double hidden_ms = std::max(0.0, job.comm_ms - job.exposed_comm_ms);
  return fmt::format(
      "communication {:.3f} ms a step ({} in {:.3g} all-reduce{}): {:.3f} ms ({}) hidden behind "
      "backward, {:.3f} ms exposed",
      job.comm_ms, lockstep::format_bytes(job.all_reduces.bytes), job.all_reduces.count,
      job.all_reduces.count == 1 ? "" : "s", hidden_ms, percent(hidden_ms / job.comm_ms),
      job.exposed_comm_ms);
}

std::string accumulation_note(const RunRecord& job) {
  return fmt::format("{} micro-steps in each step: effective batch {}, {:.3f} ms a micro-step",
                     job.accum_steps, job.effective_batch,
                     job.step_ms.mean / static_cast<double>(job.accum_steps));
}

std::string precision_note(const RunRecord& job) {
  if (!job.scale) return fmt::format("matrix products in {}, without a scaler", job.amp);
  return fmt::format("matrix products in {}; scale {:g} at the end, {} step{} skipped", job.amp,
                     *job.scale, job.skipped_steps.size(),
                     job.skipped_steps.size() == 1 ? "" : "s");
}

std::string capture_note(const lockstep::CaptureRecord& capture) {
  if (!capture.captured) return fmt::format("the step was not captured: {}", capture.reason);
  return fmt::format("captured into {} CUDA graph{}, replayed in {} steps; they hold {}",
                     capture.graphs, capture.graphs == 1 ? "" : "s", capture.replays,
                     lockstep::format_bytes(capture.memory_bytes));
}

std::string memory_note(const lockstep::MemorySplit& memory) {
  return fmt::format(
      "peak memory of rank 0: weights {}, gradients {}, optimizer {}, low-precision copies {}, "
      "activations and the rest {}",
      lockstep::format_bytes(memory.weights), lockstep::format_bytes(memory.gradients),
      lockstep::format_bytes(memory.optimizer_state), lockstep::format_bytes(memory.low_precision),
      lockstep::format_bytes(memory.activations));
}

}  // namespace

Table device_table(const RunRecord& record) {
  Table table("Result", {{"device"},
                         {"rows", Align::kRight},
                         {"busy", Align::kRight},
                         {"peak memory", Align::kRight},
                         {"memory at rest", Align::kRight},
                         {"sent a step", Align::kRight},
                         {"received a step", Align::kRight}});
  for (size_t i = 0; i < record.devices.size(); ++i) {
    const auto& device = record.devices[i];
    table.add_row({device_label(device),
                   std::to_string(i < record.split.size() ? record.split[i] : 0),
                   percent(device.busy_fraction), lockstep::format_bytes(device.peak_bytes),
                   lockstep::format_bytes(device.final_bytes),
                   lockstep::format_bytes(device.sent_bytes_per_step),
                   lockstep::format_bytes(device.received_bytes_per_step)});
  }
  table.add_note(step_note(record));
  if (record.capture) table.add_note(capture_note(*record.capture));
  return table;
}

Table rank_table(const RunRecord& job, const std::vector<RankReport>& reports) {
  Table table("Result", {{"rank", Align::kRight},
                         {"device"},
                         {"rows", Align::kRight},
                         {"busy", Align::kRight},
                         {"communicating", Align::kRight},
                         {"peak memory", Align::kRight},
                         {"memory at rest", Align::kRight}});
  const std::string home = reports.front().record.host.at("name");
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    const RunRecord& record = reports[rank].record;
    const std::string& host = record.host.at("name");
    for (size_t i = 0; i < record.devices.size(); ++i) {
      const auto& device = record.devices[i];
      table.add_row(
          {std::to_string(rank), device_label(device) + (host == home ? "" : " of " + host),
           std::to_string(rows_on(record, i)), percent(device.busy_fraction),
           percent(record.step_ms.mean > 0 ? record.exposed_comm_ms / record.step_ms.mean : 0),
           lockstep::format_bytes(device.peak_bytes), lockstep::format_bytes(device.final_bytes)});
    }
  }
  table.add_note(step_note(job));
  if (job.capture) table.add_note(capture_note(*job.capture));
  if (job.accum_steps > 1) table.add_note(accumulation_note(job));
  if (job.amp != "off") table.add_note(precision_note(job));
  if (job.memory) table.add_note(memory_note(*job.memory));
  if (job.comm_ms > 0) table.add_note(overlap_note(job));
  if (reports.size() > 1 && !job.pipeline) table.add_note(slowest_note(reports));
  return table;
}

Table stage_table(const PipelineRecord& pipeline) {
  const bool split = std::any_of(pipeline.stages.begin(), pipeline.stages.end(),
                                 [](const auto& stage) { return stage.weight_ms > 0; });
  Table table("Stages", {{"rank", Align::kRight},
                         {"stage", Align::kRight},
                         {"device"},
                         {"layers", Align::kRight},
                         {"parameters", Align::kRight},
                         {"forward ms", Align::kRight},
                         {split ? "input + weight ms" : "backward ms", Align::kRight},
                         {"micro-batches held", Align::kRight}});
  std::vector<std::string> devices;
  for (const auto& stage : pipeline.stages) {
    table.add_row({std::to_string(stage.rank), std::to_string(stage.stage), stage.device,
                   std::to_string(stage.layers), std::to_string(stage.parameters),
                   fmt::format("{:.3f}", stage.forward_ms),
                   split ? fmt::format("{:.3f} + {:.3f}", stage.backward_ms, stage.weight_ms)
                         : fmt::format("{:.3f}", stage.backward_ms),
                   std::to_string(stage.peak_micro_batches)});
    const std::string device = fmt::format("{} of rank {}", stage.device, stage.rank);
    if (std::find(devices.begin(), devices.end(), device) == devices.end())
      devices.push_back(device);
  }
  table.add_note(fmt::format("{} device{} used", devices.size(), devices.size() == 1 ? "" : "s"));
  table.add_note(fmt::format(
      "{}, {} micro-batches: pipeline {:.3f} ms a step (predicted {:.3f}), bubble {:.1f} % "
      "(predicted {:.1f} %)",
      pipeline.schedule, pipeline.micro_batches, pipeline.span_ms, pipeline.predicted_span_ms,
      pipeline.bubble * 100, pipeline.predicted_bubble * 100));
  return table;
}

Table axis_table(const PipelineRecord& pipeline) {
  Table table("Communication per step and rank", {{"axis"},
                                                  {"size", Align::kRight},
                                                  {"calls", Align::kRight},
                                                  {"sent", Align::kRight},
                                                  {"predicted", Align::kRight},
                                                  {"ms", Align::kRight},
                                                  {"predicted ms", Align::kRight}});
  for (const auto& axis : pipeline.axes) {
    table.add_row({axis.name, std::to_string(axis.size), fmt::format("{:.3g}", axis.calls),
                   lockstep::format_bytes(axis.bytes), lockstep::format_bytes(axis.predicted_bytes),
                   fmt::format("{:.3f}", axis.ms), fmt::format("{:.3f}", axis.predicted_ms)});
  }
  table.add_note(
      "ms of the pipeline: its messages times the median wait for one, while others compute too");
  return table;
}

}  // namespace course
