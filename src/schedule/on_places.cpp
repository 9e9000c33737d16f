#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "lockstep/error.hpp"
#include "lockstep/schedule.hpp"
#include "schedule/sizes.hpp"

namespace lockstep {
namespace {

// How many places the stages lie on.
int count_places(const Schedule& schedule, std::span<const int> place_of_stage) {
  if (place_of_stage.size() != schedule.place_of_stage.size()) {
    throw Error(Code::kSchedule,
                fmt::format("schedule \"{}\" has {}, but places of {} are given", schedule.name,
                            counted(schedule.stages(), "stage"), place_of_stage.size()),
                "give one place for each stage");
  }
  std::vector<bool> used(place_of_stage.size());
  for (size_t stage = 0; stage < place_of_stage.size(); ++stage) {
    const int place = place_of_stage[stage];
    if (place < 0 || static_cast<size_t>(place) >= used.size()) {
      throw Error(Code::kSchedule, fmt::format("stage {} cannot lie on place {}", stage, place),
                  fmt::format("number the places from 0; {} stages lie on at most {} places",
                              used.size(), used.size()));
    }
    used[static_cast<size_t>(place)] = true;
  }
  const auto gap = std::find(used.begin(), used.end(), false);
  if (std::find(gap, used.end(), true) != used.end()) {
    throw Error(
        Code::kSchedule,
        fmt::format("no stage lies on place {}, but one does on a later place", gap - used.begin()),
        "number the places from 0 without a gap");
  }
  return static_cast<int>(gap - used.begin());
}

// What others wait for goes first where two actions could begin at once.
int rank_of(ActionKind kind) {
  if (kind == ActionKind::kForward) return 1;
  return kind == ActionKind::kBackwardWeight ? 2 : 0;
}

}  // namespace

// What an action needs begins before it, so any lists in the order of beginnings can be run.
Schedule on_places(const Schedule& schedule, std::span<const int> place_of_stage) {
  const auto places = static_cast<size_t>(count_places(schedule, place_of_stage));
  const std::vector<StageTimes> times(place_of_stage.size());
  const Simulation simulation = simulate(schedule, times);
  std::vector<std::vector<PlannedAction>> planned(places);
  for (const auto& list : simulation.timeline) {
    for (const PlannedAction& each : list) {
      planned[static_cast<size_t>(place_of_stage[static_cast<size_t>(each.action.stage)])]
          .push_back(each);
    }
  }
  Schedule moved;
  moved.name = schedule.name;
  moved.micro_batches = schedule.micro_batches;
  moved.place_of_stage.assign(place_of_stage.begin(), place_of_stage.end());
  moved.actions.resize(places);
  for (size_t place = 0; place < places; ++place) {
    const auto key = [](const PlannedAction& each) {
      return std::make_tuple(each.begin, rank_of(each.action.kind), each.action.stage);
    };
    std::sort(planned[place].begin(), planned[place].end(),
              [&](const auto& a, const auto& b) { return key(a) < key(b); });
    for (const PlannedAction& each : planned[place]) moved.actions[place].push_back(each.action);
  }
  return moved;
}

}  // namespace lockstep
