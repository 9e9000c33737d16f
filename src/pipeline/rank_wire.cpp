#include "pipeline/rank_wire.hpp"

#include <fmt/format.h>

#include "lockstep/error.hpp"

namespace lockstep {
namespace {

// The micro-batches of one kind of action in a stage, in the order of its place's list.
std::vector<int> order_of(const Schedule& schedule, int stage, bool forward) {
  std::vector<int> order;
  for (const Action& action :
       schedule.actions[static_cast<size_t>(schedule.place_of_stage[static_cast<size_t>(stage)])]) {
    if (action.stage != stage || action.kind == ActionKind::kBackwardWeight) continue;
    if ((action.kind == ActionKind::kForward) == forward) order.push_back(action.micro_batch);
  }
  return order;
}

void require_same_order(const Schedule& schedule, int stage) {
  for (const bool forward : {true, false}) {
    if (order_of(schedule, stage, forward) == order_of(schedule, stage + 1, forward)) continue;
    throw Error(Code::kSchedule,
                fmt::format("stages {} and {} of schedule {} take their {} in different orders",
                            stage, stage + 1, schedule.name, forward ? "forwards" : "backwards"),
                "between ranks messages arrive in the order they were sent: give both stages one");
  }
}

}  // namespace

RankWire::RankWire(const Communicator& axis, const Schedule& schedule, Device& device)
    : at_home_(own_, device) {
  const auto place_of = [&](int stage) {
    return schedule.place_of_stage[static_cast<size_t>(stage)];
  };
  for (int stage = 0; stage + 1 < schedule.stages(); ++stage) {
    const int left = place_of(stage);
    const int right = place_of(stage + 1);
    if (left == right) continue;
    require_same_order(schedule, stage);
    for (const Cargo cargo : {Cargo::kActivation, Cargo::kGradient}) {
      const bool forward = cargo == Cargo::kActivation;
      const bool takes_part = axis.rank() == left || axis.rank() == right;
      Communicator pair = axis.split(
          takes_part ? 0 : 1 + axis.rank(), axis.rank(),
          fmt::format("stages {} and {}, {}", stage, stage + 1, forward ? "forward" : "backward"));
      if (!takes_part) continue;
      const bool sends = axis.rank() == (forward ? left : right);
      if (sends) pair.hide();
      lines_[{cargo, forward ? stage : stage + 1}] =
          std::make_unique<RankChannel>(pair, sends, device);
    }
  }
}

void RankWire::send(const ParcelName& name, const torch::Tensor& tensor, int64_t rows) {
  const auto line = lines_.find({name.cargo, name.from_stage});
  if (line == lines_.end()) return at_home_.send(name, tensor, rows);
  line->second->send(name, tensor, rows);
}

torch::Tensor RankWire::receive(const ParcelName& name, int64_t rows) {
  const auto line = lines_.find({name.cargo, name.from_stage});
  return line == lines_.end() ? at_home_.receive(name, rows) : line->second->receive(name, rows);
}

void RankWire::abort(const std::string& reason) {
  own_.clear();
  for (const auto& [name, line] : lines_) line->abort(reason);
}

LinkStats RankWire::stats() const {
  LinkStats stats;
  for (const auto& [name, line] : lines_) {
    stats.messages += line->messages();
    stats.bytes += line->bytes();
  }
  return stats;
}

}  // namespace lockstep
