#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "net/channel.hpp"
#include "net/socket.hpp"

namespace lockstep {

class Hub;

/// Identifies one connection of a hub; never reused.
using PeerId = uint64_t;

/// A server's reaction to its clients. All calls come from the hub's thread.
class HubHandler {
 public:
  virtual ~HubHandler() = default;

  /// Throwing an Error drops this peer only.
  virtual void received(Hub& hub, PeerId peer, std::string_view payload) = 0;

  /// An authenticated peer is gone.
  virtual void left(Hub& hub, PeerId peer, const std::string& why) = 0;

  /// A peer at `address` failed authentication and was turned away.
  virtual void turned_away(Hub& /*hub*/, const std::string& /*address*/,
                           const std::string& /*why*/) {}

  /// Called every tick_ns, after everything that had arrived was delivered.
  virtual void tick(Hub& /*hub*/) {}
};

struct HubOptions {
  std::string token;       ///< empty for a Unix socket, whose peers must be this user
  size_t max_payload = 0;  ///< bytes
  int64_t tick_ns = 0;     ///< 0: none
  /// How long the destructor waits for peers to read the last messages and disconnect.
  int64_t linger_ns = 0;
};

/// Serves connections from a thread of its own, in time that does not grow with the number of those
/// that are silent. Unauthenticated peers are limited in number and dropped after five seconds, the
/// oldest first if there are too many. A peer that sends garbage, part of a message, or nothing
/// cannot delay the others.
class Hub {
 public:
  static constexpr int kMaxUnauthenticated = 192;
  static constexpr int64_t kAuthenticationNs = 5'000'000'000;

  /// `adopted` are ends of socket pairs within this process; they become peers 1, 2, ...
  Hub(Socket listener, HubOptions options, HubHandler& handler, std::vector<Socket> adopted = {});
  ~Hub();
  Hub(const Hub&) = delete;
  Hub& operator=(const Hub&) = delete;

  int port() const { return port_; }

  // For the handler, on the hub's thread. Calls for a peer that is gone are ignored.
  void send(PeerId peer, std::string_view payload);
  void drop(PeerId peer, const std::string& why);  ///< after pending output is written
  std::string peer_address(PeerId peer) const;
  std::string own_address(PeerId peer) const;  ///< the address by which that peer reached us

 private:
  struct Peer {
    PeerId id = 0;
    Socket socket;
    Channel channel;
    std::string address;
    int64_t since_ns = 0;
    bool authenticated = false;
    std::string why_closing = {};  // if not empty: close after pending output is written
    int64_t close_by_ns = 0;       // or at this time
    bool gone = false;             // close now
    bool waits_to_write = false;   // the kernel tells when it can take more
  };

  void run();
  void one_pass(int64_t latest_ns, bool accepting);
  void linger();
  int64_t next_wake_ns(int64_t latest_ns) const;
  void watch(int descriptor, uint64_t name, uint32_t events, int change) const;
  void listen(bool on);
  void add_peer(Peer peer);
  void accept_some();
  void make_room();
  bool full() const { return authenticated_ >= max_peers_; }
  void read_from(Peer& peer);
  void deliver(Peer& peer);
  void write_to(Peer& peer);
  void write_some(Peer& peer);
  void close_peer(Peer& peer, const std::string& why, bool at_once);
  void drop_expired();
  void remove_gone();

  Socket listener_;
  const HubOptions options_;
  HubHandler& handler_;
  const int port_;
  const size_t max_peers_;
  Wake wake_;
  std::atomic<bool> stop_ = false;

  // Used by the hub's thread only.
  const Descriptor events_;  // an epoll: its cost is that of the peers that have something to say
  std::map<PeerId, Peer> peers_;
  std::set<PeerId> timed_;  // unauthenticated, or being closed: all that have a deadline
  size_t authenticated_ = 0;
  bool listening_ = false;
  PeerId last_id_ = 0;
  int64_t accept_again_ns_ = 0;  // set while there are no descriptors left
  int64_t next_tick_ns_ = 0;

  std::thread thread_;
};

}  // namespace lockstep
