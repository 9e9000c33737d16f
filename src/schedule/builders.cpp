#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <tuple>

#include "base/counted.hpp"
#include "lockstep/error.hpp"
#include "schedule/checks.hpp"

namespace lockstep {
namespace {

// Puts stage s on rank s, where it runs `ahead(s)` forwards, then alternates forwards and
// backwards, then runs the remaining backwards.
template <class Ahead>
Schedule one_stage_per_rank(std::string name, int stages, int micro_batches, const Ahead& ahead) {
  require_sizes(stages, micro_batches);
  Schedule schedule;
  schedule.name = std::move(name);
  schedule.micro_batches = micro_batches;
  for (int stage = 0; stage < stages; ++stage) {
    std::vector<Action> actions;
    actions.reserve(2 * static_cast<size_t>(micro_batches));
    const int first = ahead(stage);
    for (int i = 0; i < micro_batches + first; ++i) {
      if (i < micro_batches) actions.push_back({ActionKind::kForward, stage, i});
      if (i >= first) actions.push_back({ActionKind::kBackward, stage, i - first});
    }
    schedule.rank_of_stage.push_back(stage);
    schedule.actions.push_back(std::move(actions));
  }
  return schedule;
}

Schedule interleaved_of_stages(int stages, int micro_batches, int chunks) {
  require_positive("stages", stages);
  require_positive("chunks", chunks);
  if (stages % chunks != 0) {
    const int64_t more = (int64_t{stages} / chunks + 1) * chunks;
    const std::string fit =
        stages > chunks ? fmt::format("{} or {}", more - chunks, more) : fmt::format("{}", more);
    throw Error(Code::kSchedule,
                fmt::format("{} cannot be put on ranks with {} each", counted(stages, "stage"),
                            counted(chunks, "stage")),
                fmt::format("use {} stages, or a number of chunks that divides {}", fit, stages));
  }
  return interleaved(stages / chunks, micro_batches, chunks);
}

// Micro-batches come in rounds: a round passes all stages of a rank before the next round begins.
bool fits(int64_t ranks, int64_t micro_batches) {
  const int64_t rounds = std::max<int64_t>(1, micro_batches / ranks);
  return micro_batches % rounds == 0;
}

void require_fit(int ranks, int micro_batches) {
  if (fits(ranks, micro_batches)) return;
  // Multiples of `ranks` fit, so both searches end.
  int64_t fewer = micro_batches;
  while (!fits(ranks, fewer)) --fewer;
  int64_t more = micro_batches;
  while (!fits(ranks, more)) ++more;
  throw Error(Code::kSchedule,
              fmt::format("interleaved: {} cannot be divided evenly into {} of {}",
                          counted(micro_batches, "micro-batch"),
                          counted(micro_batches / ranks, "round"), counted(ranks, "rank")),
              fmt::format("use {} or {} micro-batches", fewer, more));
}

// Gives the i-th forward or backward of a rank.
struct InterleavedOrder {
  int ranks;
  int chunks;
  int per_round;  // micro-batches of one round

  Action forward(int rank, int i) const { return at(ActionKind::kForward, rank, i); }
  Action backward(int rank, int i) const { return at(ActionKind::kBackward, rank, i); }

 private:
  Action at(ActionKind kind, int rank, int i) const {
    const int turn = i / per_round % chunks;
    const int chunk = kind == ActionKind::kForward ? turn : chunks - 1 - turn;
    const int round = i / (per_round * chunks);
    return {kind, chunk * ranks + rank, round * per_round + i % per_round};
  }
};

// Counts the ranks and refuses gaps in their numbers.
int count_ranks(const Schedule& schedule, std::span<const int> rank_of_stage) {
  if (rank_of_stage.size() != schedule.rank_of_stage.size()) {
    throw Error(Code::kSchedule,
                fmt::format("schedule \"{}\" has {}, but ranks were given for {}", schedule.name,
                            counted(schedule.stages(), "stage"), rank_of_stage.size()),
                "give one rank for each stage");
  }
  std::vector<bool> used(rank_of_stage.size());
  for (size_t stage = 0; stage < rank_of_stage.size(); ++stage) {
    const int rank = rank_of_stage[stage];
    if (rank < 0 || static_cast<size_t>(rank) >= used.size()) {
      throw Error(Code::kSchedule, fmt::format("stage {} cannot be on rank {}", stage, rank),
                  fmt::format("number the ranks from 0; {} stages use at most {} ranks",
                              used.size(), used.size()));
    }
    used[static_cast<size_t>(rank)] = true;
  }
  const auto gap = std::find(used.begin(), used.end(), false);
  if (std::find(gap, used.end(), true) != used.end()) {
    throw Error(
        Code::kSchedule,
        fmt::format("no stage is on rank {}, but one is on a later rank", gap - used.begin()),
        "number the ranks from 0 without a gap");
  }
  return static_cast<int>(gap - used.begin());
}

// Where two actions could begin at once, the one that other ranks wait for goes first.
int priority(ActionKind kind) {
  if (kind == ActionKind::kForward) return 1;
  return kind == ActionKind::kBackwardWeight ? 2 : 0;
}

}  // namespace

char letter(ActionKind kind) {
  switch (kind) {
    case ActionKind::kForward:
      return 'F';
    case ActionKind::kBackward:
      return 'B';
    case ActionKind::kBackwardInput:
      return 'I';
    case ActionKind::kBackwardWeight:
      return 'W';
  }
  throw Error(Code::kInternal, "no such kind of action");
}

std::string action_name(ActionKind kind) {
  switch (kind) {
    case ActionKind::kForward:
      return "forward";
    case ActionKind::kBackward:
      return "backward";
    case ActionKind::kBackwardInput:
      return "input gradient";
    case ActionKind::kBackwardWeight:
      return "weight gradient";
  }
  throw Error(Code::kInternal, "no such kind of action");
}

Schedule sequential(int stages, int micro_batches) {
  return one_stage_per_rank("sequential", stages, micro_batches, [](int) { return 0; });
}

Schedule gpipe(int stages, int micro_batches) {
  return one_stage_per_rank("gpipe", stages, micro_batches, [&](int) { return micro_batches - 1; });
}

Schedule one_f_one_b(int stages, int micro_batches) {
  return one_stage_per_rank("1f1b", stages, micro_batches,
                            [&](int stage) { return std::min(micro_batches, stages - stage) - 1; });
}

Schedule interleaved(int ranks, int micro_batches, int chunks) {
  require_positive("ranks", ranks);
  require_positive("chunks", chunks);
  require_sizes(int64_t{ranks} * chunks, micro_batches);
  require_fit(ranks, micro_batches);
  Schedule schedule;
  schedule.name = "interleaved";
  schedule.micro_batches = micro_batches;
  for (int stage = 0; stage < ranks * chunks; ++stage) {
    schedule.rank_of_stage.push_back(stage % ranks);
  }
  const int rounds = std::max(1, micro_batches / ranks);
  const InterleavedOrder order{ranks, chunks, micro_batches / rounds};
  const int total = micro_batches * chunks;  // forwards of a rank
  for (int rank = 0; rank < ranks; ++rank) {
    // The first backward arrives after the first round's last chunk has reached the last rank and
    // come back; until then forwards keep this rank busy.
    const int warm_up =
        std::min(total - 1, (chunks - 1) * order.per_round + 2 * (ranks - 1 - rank));
    std::vector<Action> actions;
    actions.reserve(2 * static_cast<size_t>(total));
    for (int i = 0; i < total + warm_up; ++i) {
      if (i < total) actions.push_back(order.forward(rank, i));
      if (i >= warm_up) actions.push_back(order.backward(rank, i - warm_up));
    }
    schedule.actions.push_back(std::move(actions));
  }
  return schedule;
}

// Forwards and input gradients come in the order of 1f1b. Stage s delays its weight gradients by s
// micro-batches: input gradients reach the first stages sooner, and the delayed work fills the end,
// where a rank would only wait. A stage holds stages - s micro-batches in flight, as in 1f1b, and s
// whose weight gradients are delayed: as many as 1f1b holds on the first stage.
Schedule zero_bubble(int stages, int micro_batches) {
  Schedule schedule = one_f_one_b(stages, micro_batches);
  schedule.name = "zero-bubble";
  for (int stage = 0; stage < stages; ++stage) {
    std::vector<Action> split;
    split.reserve(3 * static_cast<size_t>(micro_batches));
    int weights = 0;
    const auto add_weight = [&] {
      split.push_back({ActionKind::kBackwardWeight, stage, weights++});
    };
    auto& list = schedule.actions[static_cast<size_t>(stage)];
    for (const Action& action : list) {
      if (action.kind == ActionKind::kForward) {
        split.push_back(action);
      } else {
        split.push_back({ActionKind::kBackwardInput, stage, action.micro_batch});
        if (action.micro_batch >= stage) add_weight();
      }
    }
    while (weights < micro_batches) add_weight();
    list = std::move(split);
  }
  return schedule;
}

Schedule make_schedule(std::string_view name, int stages, int micro_batches, int chunks) {
  if (name == "sequential") return sequential(stages, micro_batches);
  if (name == "gpipe") return gpipe(stages, micro_batches);
  if (name == "1f1b") return one_f_one_b(stages, micro_batches);
  if (name == "interleaved") return interleaved_of_stages(stages, micro_batches, chunks);
  if (name == "zero-bubble") return zero_bubble(stages, micro_batches);
  const std::string meant = did_you_mean(name, schedule_names());
  throw Error(Code::kSchedule,
              fmt::format("there is no schedule \"{}\"{}", name,
                          meant.empty() ? "" : fmt::format(" (did you mean {}?)", meant)),
              fmt::format("use one of {}", fmt::join(schedule_names(), ", ")));
}

std::vector<std::string> schedule_names() {
  return {"sequential", "gpipe", "1f1b", "interleaved", "zero-bubble"};
}

// An action's needs begin before it does, so lists sorted by begin can always run.
Schedule on_ranks(const Schedule& schedule, std::span<const int> rank_of_stage) {
  const auto ranks = static_cast<size_t>(count_ranks(schedule, rank_of_stage));
  const std::vector<StageTimes> times(rank_of_stage.size());
  const Simulation simulation = simulate(schedule, times);
  std::vector<std::vector<PlannedAction>> planned(ranks);
  for (const auto& list : simulation.timeline) {
    for (const PlannedAction& each : list) {
      planned[static_cast<size_t>(rank_of_stage[static_cast<size_t>(each.action.stage)])].push_back(
          each);
    }
  }
  Schedule moved;
  moved.name = schedule.name;
  moved.micro_batches = schedule.micro_batches;
  moved.rank_of_stage.assign(rank_of_stage.begin(), rank_of_stage.end());
  moved.actions.resize(ranks);
  for (size_t rank = 0; rank < ranks; ++rank) {
    const auto key = [](const PlannedAction& each) {
      return std::tuple(each.begin, priority(each.action.kind), each.action.stage);
    };
    std::sort(planned[rank].begin(), planned[rank].end(),
              [&](const auto& a, const auto& b) { return key(a) < key(b); });
    for (const PlannedAction& each : planned[rank]) moved.actions[rank].push_back(each.action);
  }
  return moved;
}

}  // namespace lockstep
