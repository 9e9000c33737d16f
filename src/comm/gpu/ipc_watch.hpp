#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/shm/shm_peers.hpp"

namespace lockstep {

/// Tells, from a thread of its own, when a peer's process has ended. A stream may wait for that
/// peer's events while the program waits for the stream, and makes no call that would find out.
class IpcWatch {
 public:
  struct Peer {
    int place = 0;
    PeerProcess process;
  };

  /// `died` is called once for each, and must not throw.
  IpcWatch(std::vector<Peer> peers, std::function<void(int place)> died);
  ~IpcWatch();
  IpcWatch(const IpcWatch&) = delete;
  IpcWatch& operator=(const IpcWatch&) = delete;

 private:
  void watch();

  std::vector<Peer> peers_;
  std::function<void(int place)> died_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace lockstep
