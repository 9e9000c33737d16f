#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/file.hpp"

namespace lockstep {

/// The scope in which a process id names a process. Trivially copyable, so that it can be sent to
/// other ranks.
struct ProcessHome {
  std::array<char, 64> kernel = {};  ///< boot id of the running kernel, which is unique
  uint64_t pid_namespace = 0;
  int64_t pid = 0;

  static ProcessHome own();

  /// Whether process ids of one mean the same in the other.
  bool numbers_as(const ProcessHome& other) const {
    return kernel == other.kernel && pid_namespace == other.pid_namespace;
  }
};

/// A process that holds a rank, watched by the kernel: its number cannot be taken by another one
/// unnoticed.
class PeerProcess {
 public:
  explicit PeerProcess(pid_t pid);

  pid_t pid() const { return pid_; }

  /// Whether it has ended. Never true of this process itself.
  bool ended() const;

  /// Whether a signal or a debugger has stopped it.
  bool stopped() const;

  /// "process 1234 is stopped by a signal (state T)".
  std::string state() const;

  /// The same as ended() of each, by one system call: [index].
  static std::vector<bool> which_ended(std::span<const PeerProcess> processes);

 private:
  pid_t pid_;
  bool own_;
  std::shared_ptr<const Descriptor> watch_;  // a pidfd; null if the system has none
};

}  // namespace lockstep
