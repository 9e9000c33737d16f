#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "net/channel.hpp"
#include "net/socket.hpp"
#include "net/wake.hpp"

namespace lockstep {

class Hub;

/// Names one connection of a hub; never used twice.
using PeerId = uint64_t;

/// What a server does with what its clients say. All calls come from the hub's thread.
class HubHandler {
 public:
  virtual ~HubHandler() = default;

  /// An Error drops this peer, and only this one.
  virtual void received(Hub& hub, PeerId peer, std::string_view payload) = 0;

  /// A peer that had proved itself is gone.
  virtual void left(Hub& hub, PeerId peer, const std::string& why) = 0;

  /// Somebody at `address` who did not prove himself was turned away.
  virtual void turned_away(Hub& /*hub*/, const std::string& /*address*/,
                           const std::string& /*why*/) {}

  /// Every tick_ns; all that had arrived before has been received.
  virtual void tick(Hub& /*hub*/) {}
};

struct HubOptions {
  std::string token;       ///< empty: a Unix socket, whose peers must be this user
  size_t max_payload = 0;  ///< bytes
  int64_t tick_ns = 0;     ///< 0: none
  /// At the end: how long to wait until the peers have read the last words and hung up.
  int64_t linger_ns = 0;
};

/// Serves connections from one thread of its own. Strangers (no proof yet) are few and are dropped
/// after five seconds, the oldest first when there are too many; nobody who sends rubbish, a part
/// of a message, or nothing can delay the others.
class Hub {
 public:
  static constexpr int kMaxStrangers = 64;
  static constexpr int64_t kStrangerNs = 5'000'000'000;

  /// `adopted` are ends of socket pairs of this process: peers 1, 2, … from the start.
  Hub(Socket listener, HubOptions options, HubHandler& handler, std::vector<Socket> adopted = {});
  ~Hub();
  Hub(const Hub&) = delete;
  Hub& operator=(const Hub&) = delete;

  int port() const { return port_; }

  // For the handler, on the hub's thread. A peer that has gone meanwhile is ignored.
  void send(PeerId peer, std::string_view payload);
  void drop(PeerId peer, const std::string& why);  ///< once what was sent is written
  std::string peer_address(PeerId peer) const;
  std::string own_address(PeerId peer) const;  ///< by which that peer reached us

 private:
  struct Peer {
    Socket socket;
    Channel channel;
    std::string address;
    int64_t since_ns = 0;
    bool arrived = false;          // has proved itself
    std::string why_closing = {};  // not empty: close once written
    int64_t close_by_ns = 0;       // and at the latest then
    bool gone = false;             // close now
  };

  void run();
  void one_pass(int64_t latest_ns, bool accepting);
  void linger();
  int64_t next_wake_ns(int64_t latest_ns) const;
  void accept_all();
  void make_room();
  bool full() const;
  void read_from(PeerId id, Peer& peer);
  void deliver(PeerId id, Peer& peer);
  void write_to(Peer& peer);
  void close_peer(Peer& peer, const std::string& why, bool at_once);
  void drop_the_late();
  void sweep();

  Socket listener_;
  const HubOptions options_;
  HubHandler& handler_;
  const int port_;
  const size_t max_peers_;
  Wake wake_;
  std::atomic<bool> stop_ = false;

  // The hub's thread only.
  std::map<PeerId, Peer> peers_;
  PeerId last_id_ = 0;
  int64_t accept_again_ns_ = 0;  // no descriptors left: pause
  int64_t next_tick_ns_ = 0;

  std::thread thread_;
};

}  // namespace lockstep
