#pragma once

#include <span>
#include <string>
#include <vector>

#include "lockstep/schedule.hpp"

namespace lockstep {

/// Refuses everything validate() refuses except places that wait for each other.
void require_lists(const Schedule& schedule);

/// Runs lists that passed require_lists(). Where places wait for each other, the timeline ends
/// before the list.
std::vector<std::vector<PlannedAction>> play(const Schedule& schedule,
                                             std::span<const StageTimes> times);

/// Refuses a timeline that ends before its list, and says who waits for whom.
void require_whole(const Schedule& schedule,
                   const std::vector<std::vector<PlannedAction>>& timeline);

/// What must have ended before an action begins. A backward may be whole or split, so what it needs
/// of the next stage is named as a part of the work, not as a kind.
struct Need {
  int part;  ///< part_of() that is needed
  int stage;
  int micro_batch;
};

/// At most two; `count` are valid.
struct Needs {
  Need need[2];
  int count = 0;
};

/// 0 for a forward, 1 for what gives the input's gradient, 2 for the weights' gradient alone.
int part_of(ActionKind kind);

Needs needs_of(const Action& action, int stages);

/// Index into a table of [part][stage][micro_batch] with 3 parts.
size_t table_index(const Schedule& schedule, int part, int stage, int micro_batch);

/// "B of micro-batch 2 in stage 0".
std::string describe(const Action& action);

}  // namespace lockstep
