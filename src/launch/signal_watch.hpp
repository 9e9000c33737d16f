#pragma once

#include <signal.h>

namespace lockstep {

/// Turns SIGINT, SIGTERM, SIGHUP and SIGQUIT into events as long as it lives. A SIGHUP that was
/// ignored before (nohup) stays ignored.
class SignalWatch {
 public:
  SignalWatch();
  ~SignalWatch();
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;

  int descriptor() const { return descriptor_; }  ///< readable when a signal waits
  int take() const;                               ///< the waiting signal, or 0

  /// The mask before, which the ranks get.
  const sigset_t& mask_before() const { return before_; }

 private:
  int descriptor_;
  sigset_t before_;
};

}  // namespace lockstep
