#pragma once

#include <string>

namespace lockstep {

/// A free TCP port, held so that no other job is given it while this one starts. It is bound with
/// SO_REUSEADDR and never listens, so a rank that sets SO_REUSEADDR too, as every store does, may
/// bind and listen on it.
class PortHold {
 public:
  /// `port` 0: any free one. A port that is taken is an Error (kLaunch). `loopback`: on 127.0.0.1
  /// alone, otherwise on every address of this host.
  PortHold(int port, bool loopback);
  ~PortHold();
  PortHold(const PortHold&) = delete;
  PortHold& operator=(const PortHold&) = delete;

  int port() const { return port_; }

 private:
  int fd_ = -1;
  int port_ = 0;
};

}  // namespace lockstep
