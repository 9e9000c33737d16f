#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "lockstep/schedule.hpp"

namespace lockstep {

constexpr int kMaxStages = 4096;
/// Limit on stages times micro-batches: lists of three actions each still fit easily in memory.
constexpr int64_t kMaxForwards = int64_t{1} << 18;

/// Throws kSchedule if a number is below 1 or the schedule is implausibly large.
void require_sizes(int64_t stages, int64_t micro_batches);

/// Throws kSchedule unless `count` is at least 1; `what` names it: "chunks".
void require_positive(const char* what, int64_t count);

/// "B of micro-batch 2 in stage 0".
std::string describe(const Action& action);

/// Refuses everything validate() refuses except deadlocks.
void require_lists(const Schedule& schedule);

/// Runs lists that passed require_lists(). A rank in a deadlock leaves the rest of its list out of
/// the timeline.
std::vector<std::vector<PlannedAction>> play(const Schedule& schedule,
                                             std::span<const StageTimes> times);

/// Refuses a timeline that is shorter than its list, and says which ranks wait for each other.
void require_whole(const Schedule& schedule,
                   const std::vector<std::vector<PlannedAction>>& timeline);

/// What must end before an action begins. A backward may be whole or split, so a need names a part
/// of the work, not a kind of action.
struct Need {
  int part;  ///< see part_of()
  int stage;
  int micro_batch;
};

/// At most two needs, of which `count` are valid.
struct Needs {
  Need need[2];
  int count = 0;
};

/// 0 for a forward, 1 for what computes the input's gradient, 2 for the weights' gradients alone.
int part_of(ActionKind kind);

Needs needs_of(const Action& action, int stages);

/// Index into a table of [part][stage][micro_batch] with 3 parts.
size_t table_index(const Schedule& schedule, int part, int stage, int micro_batch);

}  // namespace lockstep
