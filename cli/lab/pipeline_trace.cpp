#include "cli/lab/pipeline_trace.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "cli/lab/lab_measures.hpp"

namespace lockstep::cli {
namespace {

bool is_synchronisation(const ActionRecord& action) {
  return action.kind == "S";
}

void count(ActionCounts& counts, const ActionRecord& action) {
  if (action.kind == "F") ++counts.forwards;
  if (action.kind == "B" || action.kind == "I") ++counts.backwards;
  if (is_synchronisation(action)) ++counts.synchronisations;
}

std::vector<ActionRecord> by_begin(std::vector<ActionRecord> actions) {
  std::stable_sort(
      actions.begin(), actions.end(),
      [](const ActionRecord& a, const ActionRecord& b) { return a.begin_ms < b.begin_ms; });
  return actions;
}

// When rank 0's devices began and ended to compute: +1 and -1, by time; ends come first.
std::vector<std::pair<double, int>> computing_edges(const PipelineRecord& pipeline) {
  std::vector<std::pair<double, int>> edges;
  for (const auto& action : pipeline.actions) {
    if (action.rank != 0 || is_synchronisation(action)) continue;
    edges.emplace_back(action.begin_ms, 1);
    edges.emplace_back(action.end_ms, -1);
  }
  std::sort(edges.begin(), edges.end());
  return edges;
}

// Mean times of rank 0's stages over the repetitions.
std::vector<StageTimes> stage_times(const RunSet& set_up) {
  std::map<int, StageTimes> sums;
  for (const auto& run : set_up.runs) {
    if (!run.pipeline) continue;
    for (const auto& stage : run.pipeline->stages) {
      if (stage.rank != 0) continue;
      const bool split = stage.weight_ms > 0;
      const auto share = static_cast<double>(set_up.runs.size());
      StageTimes& sum = sums.try_emplace(stage.stage, StageTimes{0, 0, 0}).first->second;
      sum.forward += stage.forward_ms / share;
      sum.backward_input += (split ? stage.backward_ms : stage.backward_ms / 2) / share;
      sum.backward_weight += (split ? stage.weight_ms : stage.backward_ms / 2) / share;
    }
  }
  std::vector<StageTimes> times;
  for (const auto& [stage, sum] : sums) times.push_back(sum);
  return times;
}

bool has_times(const std::vector<StageTimes>& times) {
  return !times.empty() && std::all_of(times.begin(), times.end(), [](const StageTimes& stage) {
    return stage.forward > 0 && stage.backward_input > 0;
  });
}

// Two halves of each stage, on the same pipeline rank.
std::vector<StageTimes> halves(const std::vector<StageTimes>& times) {
  std::vector<StageTimes> result;
  for (int chunk = 0; chunk < 2; ++chunk) {
    for (const auto& stage : times) {
      result.push_back({stage.forward / 2, stage.backward_input / 2, stage.backward_weight / 2});
    }
  }
  return result;
}

}  // namespace

const PipelineRecord& pipeline_of(const RunSet& set_up) {
  static const PipelineRecord kNone{};
  if (set_up.runs.empty() || !set_up.runs.front().pipeline) return kNone;
  return *set_up.runs.front().pipeline;
}

double mean_of(const RunSet& set_up, double PipelineRecord::*value) {
  std::vector<double> values;
  for (const auto& run : set_up.runs) {
    if (run.pipeline) values.push_back((*run.pipeline).*value);
  }
  return summarize(values).mean;
}

ActionCounts counts_of(const PipelineRecord& pipeline) {
  ActionCounts counts;
  for (const auto& action : pipeline.actions) count(counts, action);
  return counts;
}

ActionCounts counts_of(const PipelineRecord& pipeline, int rank) {
  ActionCounts counts;
  for (const auto& action : pipeline.actions) {
    if (action.rank == rank) count(counts, action);
  }
  return counts;
}

std::vector<std::pair<std::string, std::string>> order_of(const PipelineRecord& pipeline) {
  std::map<std::string, std::string> orders;
  for (const auto& action : by_begin(pipeline.actions)) {
    if (is_synchronisation(action)) continue;
    std::string& order = orders[fmt::format("rank {} {}", action.rank, action.device)];
    order += fmt::format("{}{}{}", order.empty() ? "" : " ", action.kind, action.micro_batch);
  }
  return {orders.begin(), orders.end()};
}

std::vector<std::string> devices_of(const PipelineRecord& pipeline, int rank) {
  std::vector<std::string> names;
  for (const auto& stage : pipeline.stages) {
    if (stage.rank != rank) continue;
    if (std::find(names.begin(), names.end(), stage.device) == names.end()) {
      names.push_back(stage.device);
    }
  }
  return names;
}

int64_t devices_used(const PipelineRecord& pipeline) {
  std::set<std::string> names;
  for (const auto& stage : pipeline.stages) names.insert(stage.device);
  return static_cast<int64_t>(names.size());
}

int ranks_of(const PipelineRecord& pipeline) {
  int ranks = 0;
  for (const auto& stage : pipeline.stages) ranks = std::max(ranks, stage.rank + 1);
  return ranks;
}

double overlap_of(const PipelineRecord& pipeline) {
  double any = 0;
  double several = 0;
  double since = 0;
  int computing = 0;
  for (const auto& [at, change] : computing_edges(pipeline)) {
    if (computing > 0) any += at - since;
    if (computing > 1) several += at - since;
    computing += change;
    since = at;
  }
  return any > 0 ? several / any : 0;
}

std::vector<Synchronisation> synchronisations_of(const PipelineRecord& pipeline) {
  std::vector<Synchronisation> all;
  for (const auto& sync : by_begin(pipeline.actions)) {
    if (!is_synchronisation(sync)) continue;
    Synchronisation one{
        .rank = sync.rank, .stage = sync.stage, .begin_ms = sync.begin_ms, .end_ms = sync.end_ms};
    double drained = 0;  // when the rank had nothing left to compute
    for (const auto& action : pipeline.actions) {
      if (action.rank != sync.rank || is_synchronisation(action)) continue;
      drained = std::max(drained, action.end_ms);
      if (action.stage != sync.stage || action.kind == "F") continue;
      one.last_backward_ms = std::max(one.last_backward_ms, action.end_ms);
    }
    one.hidden_ms = std::max(0.0, std::min(sync.end_ms, drained) - sync.begin_ms);
    all.push_back(one);
  }
  std::stable_sort(all.begin(), all.end(), [](const Synchronisation& a, const Synchronisation& b) {
    return a.rank < b.rank;
  });
  return all;
}

int64_t most_held(const PipelineRecord& pipeline) {
  int64_t most = 0;
  for (const auto& stage : pipeline.stages) most = std::max(most, stage.peak_micro_batches);
  return most;
}

int64_t message_bytes(const PipelineRecord& pipeline) {
  int64_t most = 0;
  for (const auto& stage : pipeline.stages) most = std::max(most, stage.message_bytes);
  return most;
}

std::vector<SimulatedSchedule> simulate_schedules(const RunSet& set_up) {
  const auto times = stage_times(set_up);
  if (!has_times(times)) return {};
  const int ranks = static_cast<int>(times.size());
  const int micro_batches = static_cast<int>(pipeline_of(set_up).micro_batches);
  std::vector<SimulatedSchedule> all;
  const auto add = [&all](Schedule schedule, const std::vector<StageTimes>& with) {
    Simulation simulation = simulate(schedule, with);
    all.push_back({std::move(schedule), std::move(simulation)});
  };
  add(gpipe(ranks, micro_batches), times);
  add(one_f_one_b(ranks, micro_batches), times);
  if (micro_batches % std::max(1, micro_batches / ranks) == 0) {
    add(interleaved(ranks, micro_batches, 2), halves(times));
  }
  add(zero_bubble(ranks, micro_batches), times);
  return all;
}

double ideal_bubble(int64_t stages, int64_t micro_batches) {
  return static_cast<double>(stages - 1) / static_cast<double>(micro_batches + stages - 1);
}

double largest_deviation(const RunSet& reference, const std::vector<const RunSet*>& set_ups) {
  double largest = -1;
  if (reference.runs.empty()) return largest;
  for (const RunSet* set_up : set_ups) {
    if (set_up->runs.empty() || rows_of(*set_up) != rows_of(reference)) continue;
    const auto apart = loss_deviation(reference.runs.front(), set_up->runs.front());
    if (apart) largest = std::max(largest, *apart);
  }
  return largest;
}

}  // namespace lockstep::cli
