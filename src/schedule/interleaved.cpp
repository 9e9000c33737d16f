#include <fmt/format.h>

#include <algorithm>

#include "lockstep/error.hpp"
#include "lockstep/schedule.hpp"
#include "schedule/sizes.hpp"

namespace lockstep {
namespace {

// Micro-batches pass a place in rounds: a round goes through all its stages before the next begins.
bool fits(int64_t places, int64_t micro_batches) {
  const int64_t rounds = std::max<int64_t>(1, micro_batches / places);
  return micro_batches % rounds == 0;
}

void require_fit(int places, int micro_batches) {
  if (fits(places, micro_batches)) return;
  // Multiples of `places` fit, so both searches end.
  int64_t fewer = micro_batches;
  while (!fits(places, fewer)) --fewer;
  int64_t more = micro_batches;
  while (!fits(places, more)) ++more;
  throw Error(Code::kSchedule,
              fmt::format("interleaved: {} micro-batches cannot be dealt evenly to {} rounds of {} "
                          "places",
                          micro_batches, micro_batches / places, places),
              fmt::format("use {} or {} micro-batches", fewer, more));
}

// The i-th forward, or backward, of a place.
struct Order {
  int places;
  int chunks;
  int per_round;  // micro-batches of one round

  Action forward(int place, int i) const { return at(ActionKind::kForward, place, i); }
  Action backward(int place, int i) const { return at(ActionKind::kBackward, place, i); }

 private:
  Action at(ActionKind kind, int place, int i) const {
    const int turn = i / per_round % chunks;
    const int chunk = kind == ActionKind::kForward ? turn : chunks - 1 - turn;
    const int round = i / (per_round * chunks);
    return {kind, chunk * places + place, round * per_round + i % per_round};
  }
};

}  // namespace

Schedule interleaved(int places, int micro_batches, int chunks) {
  require_positive("places", places);
  require_positive("chunks", chunks);
  require_sizes(int64_t{places} * chunks, micro_batches);
  require_fit(places, micro_batches);
  Schedule schedule;
  schedule.name = "interleaved";
  schedule.micro_batches = micro_batches;
  for (int stage = 0; stage < places * chunks; ++stage) {
    schedule.place_of_stage.push_back(stage % places);
  }
  const int rounds = std::max(1, micro_batches / places);
  const Order order{places, chunks, micro_batches / rounds};
  const int total = micro_batches * chunks;  // forwards of a place
  for (int place = 0; place < places; ++place) {
    // The first backward comes after the first round's last chunk has gone to the last place and
    // back; until then forwards keep this place busy.
    const int warm_up =
        std::min(total - 1, (chunks - 1) * order.per_round + 2 * (places - 1 - place));
    std::vector<Action> actions;
    actions.reserve(2 * static_cast<size_t>(total));
    for (int i = 0; i < total + warm_up; ++i) {
      if (i < total) actions.push_back(order.forward(place, i));
      if (i >= warm_up) actions.push_back(order.backward(place, i - warm_up));
    }
    schedule.actions.push_back(std::move(actions));
  }
  return schedule;
}

}  // namespace lockstep
