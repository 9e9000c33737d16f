#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <queue>

#include "base/counted.hpp"
#include "lockstep/error.hpp"
#include "schedule/checks.hpp"

namespace lockstep {
namespace {

double duration(const StageTimes& times, ActionKind kind) {
  switch (kind) {
    case ActionKind::kForward:
      return times.forward;
    case ActionKind::kBackward:
      return times.backward_input + times.backward_weight;
    case ActionKind::kBackwardInput:
      return times.backward_input;
    case ActionKind::kBackwardWeight:
      return times.backward_weight;
  }
  return 0;
}

// Runs every rank's list in order; see play().
class Player {
 public:
  Player(const Schedule& schedule, std::span<const StageTimes> times)
      : schedule_(schedule),
        times_(times),
        ends_(table_index(schedule, 3, 0, 0)),
        timeline_(schedule.actions.size()) {}

  std::vector<std::vector<PlannedAction>> run() {
    for (int rank = 0; rank < schedule_.ranks(); ++rank) runnable_.push(rank);
    while (!runnable_.empty()) {
      const int rank = runnable_.front();
      runnable_.pop();
      advance(rank);
    }
    return std::move(timeline_);
  }

 private:
  // Runs a rank until it must wait, and wakes the ranks that may have waited for its actions.
  void advance(int rank) {
    const auto& list = schedule_.actions[static_cast<size_t>(rank)];
    auto& done = timeline_[static_cast<size_t>(rank)];
    while (done.size() < list.size()) {
      const Action& action = list[done.size()];
      const auto ready = ready_at(action);
      if (!ready) return;
      const double begin = std::max(*ready, done.empty() ? 0 : done.back().end);
      const double end = begin + duration(times_[static_cast<size_t>(action.stage)], action.kind);
      done.push_back({action, begin, end});
      const int part = part_of(action.kind);
      ends_[table_index(schedule_, part, action.stage, action.micro_batch)] = end;
      if (part == 0) wake(action.stage + 1, rank);
      if (part == 1) wake(action.stage - 1, rank);
    }
  }

  void wake(int stage, int running_rank) {
    if (stage < 0 || stage >= schedule_.stages()) return;
    const int rank = schedule_.rank_of_stage[static_cast<size_t>(stage)];
    if (rank != running_rank) runnable_.push(rank);
  }

  // The time at which all the action needs has arrived at its rank; nullopt while some has not run.
  std::optional<double> ready_at(const Action& action) const {
    const Needs needs = needs_of(action, schedule_.stages());
    double ready = 0;
    for (int i = 0; i < needs.count; ++i) {
      const Need& need = needs.need[i];
      const auto& end = ends_[table_index(schedule_, need.part, need.stage, need.micro_batch)];
      if (!end) return std::nullopt;
      ready = std::max(ready, *end + message_time(need.stage, action.stage));
    }
    return ready;
  }

  double message_time(int from_stage, int to_stage) const {
    const auto from = static_cast<size_t>(from_stage);
    const auto to = static_cast<size_t>(to_stage);
    if (schedule_.rank_of_stage[from] == schedule_.rank_of_stage[to]) return 0;
    return from < to ? times_[from].send_forward : times_[from].send_backward;
  }

  const Schedule& schedule_;
  std::span<const StageTimes> times_;                 // [stage]
  std::vector<std::optional<double>> ends_;           // [part][stage][micro_batch]
  std::vector<std::vector<PlannedAction>> timeline_;  // [rank]
  std::queue<int> runnable_;                          // ranks that may be able to continue
};

void require_times(const Schedule& schedule, std::span<const StageTimes> times) {
  if (times.size() != schedule.rank_of_stage.size()) {
    throw Error(Code::kSchedule,
                fmt::format("schedule \"{}\" has {}, but times were given for {}", schedule.name,
                            counted(schedule.stages(), "stage"), times.size()),
                "give one StageTimes for each stage");
  }
  for (size_t stage = 0; stage < times.size(); ++stage) {
    const StageTimes& each = times[stage];
    for (const double time : {each.forward, each.backward_input, each.backward_weight,
                              each.send_forward, each.send_backward}) {
      if (std::isfinite(time) && time >= 0) continue;
      throw Error(Code::kSchedule, fmt::format("stage {} takes a time of {}", stage, time),
                  "times must be 0 or more");
    }
  }
}

// A stage runs on one rank, so that rank's list tells what the stage holds: each micro-batch from
// its forward to the end of its last backward.
std::vector<int> peaks(const Schedule& schedule) {
  std::vector<int> held(schedule.rank_of_stage.size());
  std::vector<int> peak(schedule.rank_of_stage.size());
  for (const auto& list : schedule.actions) {
    for (const Action& action : list) {
      const auto stage = static_cast<size_t>(action.stage);
      if (action.kind == ActionKind::kForward) peak[stage] = std::max(peak[stage], ++held[stage]);
      if (action.kind == ActionKind::kBackward || action.kind == ActionKind::kBackwardWeight) {
        --held[stage];
      }
    }
  }
  return peak;
}

}  // namespace

int part_of(ActionKind kind) {
  if (kind == ActionKind::kForward) return 0;
  return kind == ActionKind::kBackwardWeight ? 2 : 1;
}

size_t table_index(const Schedule& schedule, int part, int stage, int micro_batch) {
  const auto stages = schedule.rank_of_stage.size();
  return (static_cast<size_t>(part) * stages + static_cast<size_t>(stage)) *
             static_cast<size_t>(schedule.micro_batches) +
         static_cast<size_t>(micro_batch);
}

Needs needs_of(const Action& action, int stages) {
  Needs needs;
  const auto add = [&](int part, int stage) {
    needs.need[needs.count++] = {part, stage, action.micro_batch};
  };
  switch (part_of(action.kind)) {
    case 0:
      if (action.stage > 0) add(0, action.stage - 1);
      break;
    case 1:
      add(0, action.stage);
      if (action.stage + 1 < stages) add(1, action.stage + 1);
      break;
    default:
      add(1, action.stage);
  }
  return needs;
}

std::vector<std::vector<PlannedAction>> play(const Schedule& schedule,
                                             std::span<const StageTimes> times) {
  return Player(schedule, times).run();
}

Simulation simulate(const Schedule& schedule, std::span<const StageTimes> times) {
  require_times(schedule, times);
  require_lists(schedule);
  Simulation simulation;
  simulation.timeline = play(schedule, times);
  require_whole(schedule, simulation.timeline);
  simulation.peak_micro_batches = peaks(schedule);
  double busy = 0;
  for (const auto& rank : simulation.timeline) {
    for (const auto& planned : rank) {
      busy += planned.end - planned.begin;
      simulation.makespan = std::max(simulation.makespan, planned.end);
    }
  }
  const double available = simulation.makespan * schedule.ranks();
  if (available > 0) simulation.bubble = std::max(0.0, 1 - busy / available);
  return simulation;
}

}  // namespace lockstep
