#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "lockstep/error.hpp"
#include "lockstep/schedule.hpp"
#include "schedule/sizes.hpp"

namespace lockstep {
namespace {

// A schedule without actions, stage s on place s.
Schedule one_stage_a_place(std::string name, int stages, int micro_batches) {
  require_sizes(stages, micro_batches);
  Schedule schedule;
  schedule.name = std::move(name);
  schedule.micro_batches = micro_batches;
  schedule.place_of_stage.resize(static_cast<size_t>(stages));
  std::iota(schedule.place_of_stage.begin(), schedule.place_of_stage.end(), 0);
  schedule.actions.resize(static_cast<size_t>(stages));
  return schedule;
}

// `ahead` forwards more than backwards, then a backward after each forward, then the rest.
std::vector<Action> forwards_ahead(int stage, int micro_batches, int ahead) {
  std::vector<Action> actions;
  actions.reserve(2 * static_cast<size_t>(micro_batches));
  for (int i = 0; i < micro_batches + ahead; ++i) {
    if (i < micro_batches) actions.push_back({ActionKind::kForward, stage, i});
    if (i >= ahead) actions.push_back({ActionKind::kBackward, stage, i - ahead});
  }
  return actions;
}

Schedule interleaved_of_stages(int stages, int micro_batches, int chunks) {
  require_positive("stages", stages);
  require_positive("chunks", chunks);
  if (stages % chunks != 0) {
    const int64_t more = (int64_t{stages} / chunks + 1) * chunks;
    const std::string fit =
        stages > chunks ? fmt::format("{} or {}", more - chunks, more) : fmt::format("{}", more);
    throw Error(Code::kSchedule,
                fmt::format("{} cannot lie on places with {} each", counted(stages, "stage"),
                            counted(chunks, "stage")),
                fmt::format("use {} stages, or a number of chunks that divides {}", fit, stages));
  }
  return interleaved(stages / chunks, micro_batches, chunks);
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
  Schedule schedule = one_stage_a_place("sequential", stages, micro_batches);
  for (int stage = 0; stage < stages; ++stage) {
    schedule.actions[static_cast<size_t>(stage)] = forwards_ahead(stage, micro_batches, 0);
  }
  return schedule;
}

Schedule gpipe(int stages, int micro_batches) {
  Schedule schedule = one_stage_a_place("gpipe", stages, micro_batches);
  for (int stage = 0; stage < stages; ++stage) {
    schedule.actions[static_cast<size_t>(stage)] =
        forwards_ahead(stage, micro_batches, micro_batches - 1);
  }
  return schedule;
}

Schedule one_f_one_b(int stages, int micro_batches) {
  Schedule schedule = one_stage_a_place("1f1b", stages, micro_batches);
  for (int stage = 0; stage < stages; ++stage) {
    schedule.actions[static_cast<size_t>(stage)] =
        forwards_ahead(stage, micro_batches, std::min(micro_batches, stages - stage) - 1);
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

}  // namespace lockstep
