#include "comm/gpu/ipc_watch.hpp"

#include <chrono>

#include "net/quiet_thread.hpp"

namespace lockstep {
namespace {

constexpr auto kLook = std::chrono::milliseconds(20);

}  // namespace

IpcWatch::IpcWatch(std::vector<Peer> peers, std::function<void(int place)> died)
    : peers_(std::move(peers)), died_(std::move(died)) {
  thread_ = start_quiet_thread([this] { watch(); });
}

IpcWatch::~IpcWatch() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

void IpcWatch::watch() {
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kLook, [this] { return stopping_; })) {
    std::erase_if(peers_, [this](const Peer& peer) {
      if (!peer.process.ended()) return false;
      died_(peer.place);
      return true;
    });
  }
}

}  // namespace lockstep
