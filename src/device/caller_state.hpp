#pragma once

#include <ATen/ThreadLocalState.h>

#include "torch_compat.hpp"

namespace lockstep {

/// The modes of a thread that must hold wherever its work runs: grad mode, inference mode,
/// autocast.
class CallerState {
 public:
  CallerState() : autocast_(compat::AutocastDtypes::get()) {}

  /// Guard: they hold on this thread.
  class Applied {
   public:
    explicit Applied(const CallerState& state)
        : autocast_before_(compat::AutocastDtypes::get()),
          thread_local_state_(state.thread_local_state_) {
      state.autocast_.set();
      at::autocast::increment_nesting();
    }

    // As autocast's own guard does: casts of this task's weights must not outlive it. libtorch 1.13
    // keeps them per thread, where the caller's guard cannot reach them.
    ~Applied() {
      if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
      autocast_before_.set();
    }
    Applied(const Applied&) = delete;
    Applied& operator=(const Applied&) = delete;

   private:
    compat::AutocastDtypes autocast_before_;
    at::ThreadLocalStateGuard thread_local_state_;
  };

 private:
  at::ThreadLocalState thread_local_state_;
  compat::AutocastDtypes autocast_;
};

}  // namespace lockstep
