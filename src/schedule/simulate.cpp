#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "lockstep/error.hpp"
#include "schedule/play.hpp"
#include "schedule/sizes.hpp"

namespace lockstep {
namespace {

void require_times(const Schedule& schedule, std::span<const StageTimes> times) {
  if (times.size() != schedule.place_of_stage.size()) {
    throw Error(Code::kSchedule,
                fmt::format("schedule \"{}\" has {}, but times of {} are given", schedule.name,
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

// A stage runs on one place, so its list tells what it holds: from the forward to the end of the
// last backward.
std::vector<int> peaks(const Schedule& schedule) {
  std::vector<int> held(schedule.place_of_stage.size());
  std::vector<int> peak(schedule.place_of_stage.size());
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

Simulation simulate(const Schedule& schedule, std::span<const StageTimes> times) {
  require_times(schedule, times);
  require_lists(schedule);
  Simulation simulation;
  simulation.timeline = play(schedule, times);
  require_whole(schedule, simulation.timeline);
  simulation.peak_micro_batches = peaks(schedule);
  double busy = 0;
  for (const auto& place : simulation.timeline) {
    for (const auto& planned : place) {
      busy += planned.end - planned.begin;
      simulation.makespan = std::max(simulation.makespan, planned.end);
    }
  }
  const double available = simulation.makespan * schedule.places();
  if (available > 0) simulation.bubble = std::max(0.0, 1 - busy / available);
  return simulation;
}

}  // namespace lockstep
