#include <fmt/format.h>

#include "lockstep/error.hpp"
#include "parallel/gradient_sync_state.hpp"
#include "parallel/model_tensors.hpp"

namespace lockstep {

// What every rank tells every other before a step, in this order.
enum Notice : int64_t { kActive, kSynchronise, kTrains, kBuffers, kMicroSteps, kNotices };

JoinProtocol::Round JoinProtocol::exchange(GradientSync::State& state, bool active,
                                           bool synchronise) {
  const torch::Tensor mine = torch::zeros({kNotices}, torch::kInt64);
  auto* notice = mine.data_ptr<int64_t>();
  notice[kActive] = active ? 1 : 0;
  notice[kSynchronise] = active && synchronise ? 1 : 0;
  notice[kTrains] = active && state.trains() ? 1 : 0;
  notice[kBuffers] = active && state.shares_buffers() ? 1 : 0;
  notice[kMicroSteps] = active ? state.reducer->open_micro_steps() : 0;
  const torch::Tensor all = torch::empty({state.comm.size(), kNotices}, torch::kInt64);
  state.comm.all_gather(all, mine, {.label = "join"});
  Round round;
  int64_t micro_steps = 0;  // of the others' window
  for (int rank = 0; rank < state.comm.size(); ++rank) {
    const int64_t* said = all.data_ptr<int64_t>() + rank * kNotices;
    if (said[kActive] == 0) {
      round.everybody = false;
      continue;
    }
    if (round.anybody && round.synchronise != (said[kSynchronise] != 0)) {
      throw Error(Code::kSyncMisuse,
                  fmt::format("rank {} is inside NoSync where rank {} is not, or the reverse", rank,
                              round.last_active),
                  "accumulate over the same micro-steps on every rank");
    }
    round.anybody = true;
    round.last_active = rank;
    round.synchronise = said[kSynchronise] != 0;
    round.trains = said[kTrains] != 0;
    round.buffers = said[kBuffers] != 0;
    micro_steps = said[kMicroSteps];
  }
  if (!active) state.reducer->shadow_window(micro_steps);
  if (round.anybody) last_active_ = round.last_active;
  if (options_.throw_on_early_termination && round.anybody && !round.everybody) {
    throw Error(Code::kSyncMisuse, "a rank has no more data while others still have some",
                "give every rank the same number of steps, or join without "
                "throw_on_early_termination");
  }
  return round;
}

int JoinProtocol::begin_step(GradientSync::State& state, bool synchronise) {
  const Round round = exchange(state, /*active=*/true, synchronise);
  return round.everybody ? 0 : round.last_active;
}

void JoinProtocol::follow(GradientSync::State& state) {
  for (Round round = exchange(state, false, false); round.anybody;
       round = exchange(state, false, false)) {
    if (round.trains) {
      state.reducer->rebuild_if_due();
      if (round.buffers) state.share_buffers(round.last_active);
      state.last_forward_synchronised = round.synchronise;
    }
    if (round.synchronise) {
      state.reducer->shadow_backward(options_.divide_by_initial_world_size);
    }
  }
  broadcast_model(state.comm, *state.module, last_active_, "joined model");
  state.reducer->drop_window();
}

void GradientSync::run_joined(const std::function<void()>& loop, const JoinOptions& options) {
  if (state_->joining != nullptr) {
    throw Error(Code::kSyncMisuse, "join inside join", "join once, around the whole loop");
  }
  JoinProtocol protocol(options);
  struct Leave {
    State& state;
    ~Leave() { state.joining = nullptr; }
  } leave{*state_};
  state_->joining = &protocol;
  loop();
  protocol.follow(*state_);
}

}  // namespace lockstep
