#include <fmt/format.h>

#include <algorithm>

#include "lockstep/error.hpp"
#include "schedule/play.hpp"
#include "schedule/sizes.hpp"

namespace lockstep {
namespace {

constexpr const char* kRules =
    "every stage needs one F and one B, or one F, one I and one W, of each micro-batch, in this "
    "order and on its own place";

[[noreturn]] void refuse(const Schedule& schedule, const std::string& reason,
                         const std::string& help = kRules, std::vector<std::string> notes = {}) {
  throw Error(Code::kSchedule, fmt::format("schedule \"{}\": {}", schedule.name, reason), help,
              std::move(notes));
}

void require_places(const Schedule& schedule) {
  std::vector<bool> used(schedule.actions.size());
  for (int stage = 0; stage < schedule.stages(); ++stage) {
    const int place = schedule.place_of_stage[static_cast<size_t>(stage)];
    if (place < 0 || place >= schedule.places()) {
      refuse(schedule,
             fmt::format("stage {} lies on place {}, but there are lists of {}", stage, place,
                         counted(schedule.places(), "place")),
             "number the places from 0 and give each a list of actions");
    }
    used[static_cast<size_t>(place)] = true;
  }
  const auto unused = std::find(used.begin(), used.end(), false);
  if (unused == used.end()) return;
  refuse(schedule, fmt::format("place {} has no stage", unused - used.begin()),
         "give each place a stage, or leave the place out");
}

void require_in_range(const Schedule& schedule, int place, const Action& action) {
  if (action.stage < 0 || action.stage >= schedule.stages()) {
    refuse(schedule, fmt::format("place {} runs {}, but stages are 0 to {}", place,
                                 describe(action), schedule.stages() - 1));
  }
  if (action.micro_batch < 0 || action.micro_batch >= schedule.micro_batches) {
    refuse(schedule, fmt::format("place {} runs {}, but micro-batches are 0 to {}", place,
                                 describe(action), schedule.micro_batches - 1));
  }
  const int home = schedule.place_of_stage[static_cast<size_t>(action.stage)];
  if (home != place) {
    refuse(schedule,
           fmt::format("place {} runs {}, which lies on place {}", place, describe(action), home));
  }
}

// The kinds that a stage runs of each micro-batch, as bits: 1 << kind.
using Seen = std::vector<uint8_t>;  // [stage][micro_batch]

constexpr uint8_t bit(ActionKind kind) {
  return static_cast<uint8_t>(1U << static_cast<unsigned>(kind));
}

constexpr uint8_t kSplit = bit(ActionKind::kBackwardInput) | bit(ActionKind::kBackwardWeight);

// Takes an action into account that comes after those seen.
void require_next(const Schedule& schedule, int place, const Action& action, uint8_t* seen) {
  const auto refuse_action = [&](const std::string& reason) {
    refuse(schedule, fmt::format("place {} runs {} {}", place, describe(action), reason));
  };
  if ((*seen & bit(action.kind)) != 0) refuse_action("twice");
  const bool whole = action.kind == ActionKind::kBackward;
  if ((whole && (*seen & kSplit) != 0) ||
      ((bit(action.kind) & kSplit) != 0 && (*seen & bit(ActionKind::kBackward)) != 0)) {
    refuse_action("whole and split: B beside I or W");
  }
  if (action.kind == ActionKind::kBackwardWeight &&
      (*seen & bit(ActionKind::kBackwardInput)) == 0) {
    refuse_action("before its I");
  }
  if (action.kind != ActionKind::kForward && (*seen & bit(ActionKind::kForward)) == 0) {
    refuse_action("before its F");
  }
  *seen |= bit(action.kind);
}

void require_all(const Schedule& schedule, const Seen& seen) {
  for (size_t i = 0; i < seen.size(); ++i) {
    const auto stage = static_cast<int>(i / static_cast<size_t>(schedule.micro_batches));
    const auto micro_batch = static_cast<int>(i % static_cast<size_t>(schedule.micro_batches));
    const auto require = [&](ActionKind kind) {
      if ((seen[i] & bit(kind)) != 0) return;
      refuse(schedule, fmt::format("place {} never runs {}",
                                   schedule.place_of_stage[static_cast<size_t>(stage)],
                                   describe({kind, stage, micro_batch})));
    };
    require(ActionKind::kForward);
    if ((seen[i] & kSplit) == 0) {
      require(ActionKind::kBackward);
    } else {
      require(ActionKind::kBackwardInput);
      require(ActionKind::kBackwardWeight);
    }
  }
}

// Why a place does not go on.
struct Wait {
  int place;
  Action waiting;  // the action it cannot begin
  Action needed;
  int on_place;  // that runs the needed one
};

class Waits {
 public:
  Waits(const Schedule& schedule, const std::vector<std::vector<PlannedAction>>& timeline)
      : schedule_(schedule), timeline_(timeline), ended_(table_index(schedule, 3, 0, 0)) {
    for (const auto& place : timeline) {
      for (const auto& planned : place) {
        const Action& action = planned.action;
        ended_[table_index(schedule, part_of(action.kind), action.stage, action.micro_batch)] =
            true;
      }
    }
  }

  bool has_ended(int place) const { return done(place) == list(place).size(); }

  // Of a place that has not ended: every list is whole, so what it needs stands in one of them.
  Wait of(int place) const {
    const Action& waiting = list(place)[done(place)];
    const Needs needs = needs_of(waiting, schedule_.stages());
    const auto* need = std::find_if(needs.need, needs.need + needs.count, [&](const Need& each) {
      return !ended_[table_index(schedule_, each.part, each.stage, each.micro_batch)];
    });
    const int on_place = schedule_.place_of_stage[static_cast<size_t>(need->stage)];
    const auto& other = list(on_place);
    const auto needed = std::find_if(other.begin(), other.end(), [&](const Action& action) {
      return part_of(action.kind) == need->part && action.stage == need->stage &&
             action.micro_batch == need->micro_batch;
    });
    return {place, waiting, *needed, on_place};
  }

 private:
  size_t done(int place) const { return timeline_[static_cast<size_t>(place)].size(); }
  const std::vector<Action>& list(int place) const {
    return schedule_.actions[static_cast<size_t>(place)];
  }

  const Schedule& schedule_;
  const std::vector<std::vector<PlannedAction>>& timeline_;
  std::vector<bool> ended_;  // [part][stage][micro_batch]
};

std::string describe(const Wait& wait) {
  return fmt::format("place {} waits for {} before {}", wait.place, describe(wait.needed),
                     describe(wait.waiting));
}

}  // namespace

std::string describe(const Action& action) {
  return fmt::format("{} of micro-batch {} in stage {}", letter(action.kind), action.micro_batch,
                     action.stage);
}

void require_lists(const Schedule& schedule) {
  require_sizes(schedule.stages(), schedule.micro_batches);
  require_places(schedule);
  const auto micro_batches = static_cast<size_t>(schedule.micro_batches);
  Seen seen(schedule.place_of_stage.size() * micro_batches);
  for (int place = 0; place < schedule.places(); ++place) {
    for (const Action& action : schedule.actions[static_cast<size_t>(place)]) {
      require_in_range(schedule, place, action);
      require_next(schedule, place, action,
                   &seen[static_cast<size_t>(action.stage) * micro_batches +
                         static_cast<size_t>(action.micro_batch)]);
    }
  }
  require_all(schedule, seen);
}

void require_whole(const Schedule& schedule,
                   const std::vector<std::vector<PlannedAction>>& timeline) {
  const Waits waits(schedule, timeline);
  int place = 0;
  while (place < schedule.places() && waits.has_ended(place)) ++place;
  if (place == schedule.places()) return;
  // A place that waits does so for one that waits too: this way leads into a circle.
  std::vector<Wait> way;
  const auto met = [&] {
    return std::find_if(way.begin(), way.end(), [&](const Wait& w) { return w.place == place; });
  };
  for (; met() == way.end(); place = way.back().on_place) way.push_back(waits.of(place));
  way.erase(way.begin(), met());
  if (way.size() == 1) {
    refuse(schedule, describe(way.front()) + ", but its own list has them the other way round",
           "in a place's list, put an action after those it needs");
  }
  std::vector<std::string> notes;
  for (size_t i = 1; i < way.size(); ++i) notes.push_back(describe(way[i]));
  refuse(schedule,
         fmt::format("{}, in a circle of {} places that never ends", describe(way.front()),
                     way.size()),
         "change the order in one of these lists, so that one of the places can go on",
         std::move(notes));
}

void validate(const Schedule& schedule) {
  require_lists(schedule);
  const std::vector<StageTimes> times(schedule.place_of_stage.size());
  require_whole(schedule, play(schedule, times));
}

}  // namespace lockstep
