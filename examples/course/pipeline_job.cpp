#include "course/pipeline_job.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <tuple>
#include <utility>

namespace course {
namespace {

using lockstep::ActionRecord;
using lockstep::AxisRecord;
using lockstep::PipelineRecord;
using lockstep::StageRecord;
using lockstep::StageTimes;

// This rank's clock against rank 0's.
int64_t ahead_ns(const std::vector<RankReport>& reports, size_t rank) {
  return reports[rank].clock_ns - reports.front().clock_ns;
}

// A call as one pipeline made it: its ranks together.
struct WholeCall {
  int64_t begin_ns = std::numeric_limits<int64_t>::max();
  int64_t end_ns = std::numeric_limits<int64_t>::min();
  int64_t busy_ns = 0;
  int64_t places = 0;

  double span_ms() const { return static_cast<double>(end_ns - begin_ns) * 1e-6; }
  double bubble() const {
    return 1 - static_cast<double>(busy_ns) / static_cast<double>((end_ns - begin_ns) * places);
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
      whole.places += report.places;
    }
  }
  for (const auto& [key, call] : calls) {
    job.span_ms += call.span_ms() / static_cast<double>(calls.size());
    job.bubble += call.bubble() / static_cast<double>(calls.size());
  }
}

// The ranks' last calls on one clock, from the begin of the first of them.
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

// A message's time shows where someone waited for it: from its maker's end to its taker's begin.
// The median, since a wait for a busy core is not the message's.
double median_message_ms(const std::vector<RankReport>& reports, const HybridPlan& plan,
                         const std::vector<ActionRecord>& actions) {
  using Key = std::tuple<int, int, bool, int, int>;  // pipeline, tp, forward, stage, micro-batch
  const auto key_of = [&](const ActionRecord& action, int stage) -> Key {
    const auto& report = reports[static_cast<size_t>(action.rank)].pipeline.value();
    return {report.pipeline, action.rank % plan.tensor, action.kind == "F", stage,
            action.micro_batch};
  };
  std::map<Key, const ActionRecord*> makers;
  for (const auto& action : actions) {
    if (action.kind != "S" && action.kind != "W") makers[key_of(action, action.stage)] = &action;
  }
  std::map<std::pair<int, std::string>, double> free_ms;  // [rank, device], since when
  std::vector<double> waits_ms;
  for (const auto& action : actions) {
    if (action.kind == "S") continue;
    const auto maker = makers.find(key_of(action, action.stage + (action.kind == "F" ? -1 : 1)));
    auto& free_since = free_ms[{action.rank, action.device}];
    if (action.kind != "W" && maker != makers.end()) {
      const ActionRecord& made = *maker->second;
      const bool elsewhere = made.rank != action.rank || made.device != action.device;
      if (elsewhere && free_since <= made.end_ms) {
        waits_ms.push_back(std::max(0.0, action.begin_ms - made.end_ms));
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

// Of each stage, the mean over the ranks that have it. A whole backward counts as one of the input.
std::vector<StageTimes> mean_times(const PipelineRecord& job, size_t stages, const Link& link) {
  std::vector<StageTimes> times(stages, {.forward = 0, .backward_input = 0, .backward_weight = 0});
  std::vector<double> copies(stages, 0);
  for (const auto& stage : job.stages) copies[static_cast<size_t>(stage.stage)] += 1;
  for (const auto& stage : job.stages) {
    const auto place = static_cast<size_t>(stage.stage);
    times[place].forward += stage.forward_ms / copies[place];
    times[place].backward_input += stage.backward_ms / copies[place];
    times[place].backward_weight += stage.weight_ms / copies[place];
    times[place].send_forward = link.ms(1, stage.message_bytes);
    if (place + 1 < stages) times[place + 1].send_backward = link.ms(1, stage.message_bytes);
  }
  return times;
}

void predict(const HybridPlan& plan, const Link& link, PipelineRecord& job) {
  const auto stages = plan.schedule.place_of_stage.size();
  const auto simulation = lockstep::simulate(plan.schedule, mean_times(job, stages, link));
  job.predicted_span_ms = simulation.makespan;
  job.predicted_bubble = simulation.bubble;
  std::map<int, const StageRecord*> first;  // [stage] on the lowest rank that has it
  for (const auto& stage : job.stages) first.emplace(stage.stage, &stage);
  for (const auto& place : simulation.timeline) {
    for (const auto& [action, begin, end] : place) {
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

}  // namespace course
