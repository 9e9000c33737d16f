#include "lockstep/schedule.hpp"

namespace lockstep {

// Forwards and input gradients come as in 1f1b. Stage s puts its weight gradients off by s
// micro-batches: this lets the input gradients through to the first stages sooner, and what was put
// off fills the end, where a place would only wait. Held at once: stages - s micro-batches on their
// way as in 1f1b, and s whose weight gradients are late, so as many on each stage as 1f1b holds on
// the first.
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

}  // namespace lockstep
