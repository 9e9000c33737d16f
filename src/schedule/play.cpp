#include "schedule/play.hpp"

#include <algorithm>
#include <optional>
#include <queue>

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

class Player {
 public:
  Player(const Schedule& schedule, std::span<const StageTimes> times)
      : schedule_(schedule),
        times_(times),
        ends_(table_index(schedule, 3, 0, 0)),
        timeline_(schedule.actions.size()) {}

  std::vector<std::vector<PlannedAction>> run() {
    for (int place = 0; place < schedule_.places(); ++place) runnable_.push(place);
    while (!runnable_.empty()) {
      const int place = runnable_.front();
      runnable_.pop();
      advance(place);
    }
    return std::move(timeline_);
  }

 private:
  // Runs a place until it must wait. Whoever might wait for an action is looked at again.
  void advance(int place) {
    const auto& list = schedule_.actions[static_cast<size_t>(place)];
    auto& done = timeline_[static_cast<size_t>(place)];
    while (done.size() < list.size()) {
      const Action& action = list[done.size()];
      const auto ready = ready_at(action);
      if (!ready) return;
      const double begin = std::max(*ready, done.empty() ? 0 : done.back().end);
      const double end = begin + duration(times_[static_cast<size_t>(action.stage)], action.kind);
      done.push_back({action, begin, end});
      const int part = part_of(action.kind);
      ends_[table_index(schedule_, part, action.stage, action.micro_batch)] = end;
      if (part == 0) wake(action.stage + 1, place);
      if (part == 1) wake(action.stage - 1, place);
    }
  }

  void wake(int stage, int running_place) {
    if (stage < 0 || stage >= schedule_.stages()) return;
    const int place = schedule_.place_of_stage[static_cast<size_t>(stage)];
    if (place != running_place) runnable_.push(place);
  }

  // When all that the action needs is at its place; nothing while one of them has not run.
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
    if (schedule_.place_of_stage[from] == schedule_.place_of_stage[to]) return 0;
    return from < to ? times_[from].send_forward : times_[from].send_backward;
  }

  const Schedule& schedule_;
  std::span<const StageTimes> times_;                 // [stage]
  std::vector<std::optional<double>> ends_;           // [part][stage][micro_batch]
  std::vector<std::vector<PlannedAction>> timeline_;  // [place]
  std::queue<int> runnable_;                          // places that may go on
};

}  // namespace

int part_of(ActionKind kind) {
  if (kind == ActionKind::kForward) return 0;
  return kind == ActionKind::kBackwardWeight ? 2 : 1;
}

size_t table_index(const Schedule& schedule, int part, int stage, int micro_batch) {
  const auto stages = schedule.place_of_stage.size();
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

}  // namespace lockstep
