#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "base/descriptor.hpp"

namespace lockstep {

/// A process that holds a rank, watched by the kernel: its number cannot be taken by another one
/// unnoticed.
class PeerProcess {
 public:
  explicit PeerProcess(pid_t pid);

  pid_t pid() const { return pid_; }

  /// Whether it has ended. Of this process itself: never.
  bool ended() const;

  /// "process 1234 is stopped by a signal (state T)".
  std::string state() const;

 private:
  pid_t pid_;
  bool own_;
  std::shared_ptr<const Descriptor> watch_;  // a pidfd; null where the system has none
};

}  // namespace lockstep
