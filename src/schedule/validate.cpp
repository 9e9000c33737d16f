#include <fmt/format.h>

#include <algorithm>

#include "base/counted.hpp"
#include "lockstep/error.hpp"
#include "schedule/checks.hpp"

namespace lockstep {
namespace {

constexpr const char* kRules =
    "every stage needs one F and one B, or one F, one I and one W, of each micro-batch, in this "
    "order and on its own rank";

[[noreturn]] void refuse(const Schedule& schedule, const std::string& reason,
                         const std::string& help = kRules, std::vector<std::string> notes = {}) {
  throw Error(Code::kSchedule, fmt::format("schedule \"{}\": {}", schedule.name, reason), help,
              std::move(notes));
}

void require_ranks(const Schedule& schedule) {
  std::vector<bool> used(schedule.actions.size());
  for (int stage = 0; stage < schedule.stages(); ++stage) {
    const int rank = schedule.rank_of_stage[static_cast<size_t>(stage)];
    if (rank < 0 || rank >= schedule.ranks()) {
      refuse(schedule,
             fmt::format("stage {} is on rank {}, but there are lists for {}", stage, rank,
                         counted(schedule.ranks(), "rank")),
             "number the ranks from 0 and give each a list of actions");
    }
    used[static_cast<size_t>(rank)] = true;
  }
  const auto unused = std::find(used.begin(), used.end(), false);
  if (unused == used.end()) return;
  refuse(schedule, fmt::format("rank {} has no stage", unused - used.begin()),
         "give each rank a stage, or remove the rank");
}

void require_in_range(const Schedule& schedule, int rank, const Action& action) {
  if (action.stage < 0 || action.stage >= schedule.stages()) {
    refuse(schedule, fmt::format("rank {} runs {}, but stages are 0 to {}", rank, describe(action),
                                 schedule.stages() - 1));
  }
  if (action.micro_batch < 0 || action.micro_batch >= schedule.micro_batches) {
    refuse(schedule, fmt::format("rank {} runs {}, but micro-batches are 0 to {}", rank,
                                 describe(action), schedule.micro_batches - 1));
  }
  const int home = schedule.rank_of_stage[static_cast<size_t>(action.stage)];
  if (home != rank) {
    refuse(schedule,
           fmt::format("rank {} runs {}, which is on rank {}", rank, describe(action), home));
  }
}

// The kinds of action that a stage has run on each micro-batch, as bits: 1 << kind.
using Seen = std::vector<uint8_t>;  // [stage][micro_batch]

constexpr uint8_t bit(ActionKind kind) {
  return static_cast<uint8_t>(1U << static_cast<unsigned>(kind));
}

constexpr uint8_t kSplit = bit(ActionKind::kBackwardInput) | bit(ActionKind::kBackwardWeight);

// Checks an action against those seen before it, and adds it to them.
void require_next(const Schedule& schedule, int rank, const Action& action, uint8_t* seen) {
  const auto refuse_action = [&](const std::string& reason) {
    refuse(schedule, fmt::format("rank {} runs {} {}", rank, describe(action), reason));
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
      refuse(schedule, fmt::format("rank {} never runs {}",
                                   schedule.rank_of_stage[static_cast<size_t>(stage)],
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

// Why a rank cannot continue.
struct Wait {
  int rank;
  Action waiting;  // the action it cannot begin
  Action needed;
  int on_rank;  // the rank that runs `needed`
};

class Waits {
 public:
  Waits(const Schedule& schedule, const std::vector<std::vector<PlannedAction>>& timeline)
      : schedule_(schedule), timeline_(timeline), ended_(table_index(schedule, 3, 0, 0)) {
    for (const auto& rank : timeline) {
      for (const auto& planned : rank) {
        const Action& action = planned.action;
        ended_[table_index(schedule, part_of(action.kind), action.stage, action.micro_batch)] =
            true;
      }
    }
  }

  bool has_ended(int rank) const { return done(rank) == list(rank).size(); }

  // Why a rank that has not ended waits. All lists are whole, so one contains what it needs.
  Wait of(int rank) const {
    const Action& waiting = list(rank)[done(rank)];
    const Needs needs = needs_of(waiting, schedule_.stages());
    const auto* need = std::find_if(needs.need, needs.need + needs.count, [&](const Need& each) {
      return !ended_[table_index(schedule_, each.part, each.stage, each.micro_batch)];
    });
    const int on_rank = schedule_.rank_of_stage[static_cast<size_t>(need->stage)];
    const auto& other = list(on_rank);
    const auto needed = std::find_if(other.begin(), other.end(), [&](const Action& action) {
      return part_of(action.kind) == need->part && action.stage == need->stage &&
             action.micro_batch == need->micro_batch;
    });
    return {rank, waiting, *needed, on_rank};
  }

 private:
  size_t done(int rank) const { return timeline_[static_cast<size_t>(rank)].size(); }
  const std::vector<Action>& list(int rank) const {
    return schedule_.actions[static_cast<size_t>(rank)];
  }

  const Schedule& schedule_;
  const std::vector<std::vector<PlannedAction>>& timeline_;
  std::vector<bool> ended_;  // [part][stage][micro_batch]
};

std::string describe(const Wait& wait) {
  return fmt::format("rank {} waits for {} before {}", wait.rank, describe(wait.needed),
                     describe(wait.waiting));
}

}  // namespace

void require_positive(const char* what, int64_t count) {
  if (count >= 1) return;
  throw Error(Code::kSchedule, fmt::format("a schedule cannot have {} {}", count, what),
              fmt::format("use 1 or more {}", what));
}

void require_sizes(int64_t stages, int64_t micro_batches) {
  require_positive("stages", stages);
  require_positive("micro-batches", micro_batches);
  if (stages > kMaxStages) {
    throw Error(Code::kSchedule, fmt::format("a schedule of {} stages is too large", stages),
                fmt::format("use at most {} stages", kMaxStages));
  }
  if (micro_batches > kMaxForwards / stages) {
    throw Error(Code::kSchedule,
                fmt::format("a schedule of {} and {} is too large", counted(stages, "stage"),
                            counted(micro_batches, "micro-batch")),
                fmt::format("use at most {} with {}", counted(kMaxForwards / stages, "micro-batch"),
                            counted(stages, "stage")));
  }
}

std::string describe(const Action& action) {
  return fmt::format("{} of micro-batch {} in stage {}", letter(action.kind), action.micro_batch,
                     action.stage);
}

void require_lists(const Schedule& schedule) {
  require_sizes(schedule.stages(), schedule.micro_batches);
  require_ranks(schedule);
  const auto micro_batches = static_cast<size_t>(schedule.micro_batches);
  Seen seen(schedule.rank_of_stage.size() * micro_batches);
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    for (const Action& action : schedule.actions[static_cast<size_t>(rank)]) {
      require_in_range(schedule, rank, action);
      require_next(schedule, rank, action,
                   &seen[static_cast<size_t>(action.stage) * micro_batches +
                         static_cast<size_t>(action.micro_batch)]);
    }
  }
  require_all(schedule, seen);
}

void require_whole(const Schedule& schedule,
                   const std::vector<std::vector<PlannedAction>>& timeline) {
  const Waits waits(schedule, timeline);
  int rank = 0;
  while (rank < schedule.ranks() && waits.has_ended(rank)) ++rank;
  if (rank == schedule.ranks()) return;
  // A rank that waits does so for one that waits too: following them leads into a cycle.
  std::vector<Wait> cycle;
  const auto repeated = [&] {
    return std::find_if(cycle.begin(), cycle.end(), [&](const Wait& w) { return w.rank == rank; });
  };
  for (; repeated() == cycle.end(); rank = cycle.back().on_rank) cycle.push_back(waits.of(rank));
  cycle.erase(cycle.begin(), repeated());
  if (cycle.size() == 1) {
    refuse(schedule, describe(cycle.front()) + ", but its own list has them in the opposite order",
           "in a rank's list, put an action after those it needs");
  }
  std::vector<std::string> notes;
  for (size_t i = 1; i < cycle.size(); ++i) notes.push_back(describe(cycle[i]));
  refuse(
      schedule,
      fmt::format("{}, in a cycle of {} ranks: a deadlock", describe(cycle.front()), cycle.size()),
      "change the order in one of these lists, so that one of the ranks can continue",
      std::move(notes));
}

void validate(const Schedule& schedule) {
  require_lists(schedule);
  const std::vector<StageTimes> times(schedule.rank_of_stage.size());
  require_whole(schedule, play(schedule, times));
}

}  // namespace lockstep
