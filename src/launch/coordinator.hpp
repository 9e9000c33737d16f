#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "launch/rendezvous_messages.hpp"
#include "net/hub.hpp"
#include "net/store.hpp"

namespace lockstep {

/// The hosts that wait for an attempt to begin.
struct Attendance {
  int ready = 0;
  int stopping = 0;             ///< still end the ranks of the attempt that failed
  int64_t last_arrival_ns = 0;  ///< of one that is ready
};

/// True if an attempt may begin: with all hosts at once, and with enough of them if no other came
/// for last_call_ns. Hosts that still end their ranks are waited for: they come back, or are lost.
bool may_begin(const Attendance& attendance, const HostCount& wanted, int64_t last_call_ns,
               int64_t now_ns);

/// Node 0's side of the rendezvous: gathers the nodes, broadcasts the first failure or the end, and
/// serves the ranks' store. A state machine on the hub's thread.
///
///     gathering --may_begin--> running --all finished--> finished
///         ^                       |
///         +-------- failed -------+
class Coordinator final : public HubHandler {
 public:
  /// The hub's first peer is node 0's own launcher.
  static constexpr PeerId kOwnPeer = 1;

  explicit Coordinator(RendezvousOptions options) : options_(std::move(options)) {}

  void received(Hub& hub, PeerId peer, std::string_view payload) override;
  void left(Hub& hub, PeerId peer, const std::string& why) override;
  void turned_away(Hub& hub, const std::string& address, const std::string& why) override;
  void tick(Hub& hub) override;

 private:
  enum class Phase { kGathering, kRunning, kFinished };

  enum class NodeState {
    kReady,     // joined, or came back after a failure: waits for the next attempt
    kRunning,   // takes part in the running attempt
    kFinished,  // took part, and all its ranks have ended well
    kStopping   // took part in the attempt that failed, and ends its ranks
  };

  struct Node {
    PeerId peer = 0;
    NodeOffer offer;  // its node_rank, once assigned, orders the nodes of every attempt
    NodeState state = NodeState::kReady;
    int node_rank = -1;  // in the attempt that it takes part in: 0, 1, ... without gaps
    int64_t last_message_ns = 0;
  };

  // A failure that is blamed on a rank of a silent node. If that node is lost, it is the root
  // cause.
  struct Suspicion {
    PeerId silent = 0;
    RemoteFailure failure;
  };

  void handle(Hub& hub, PeerId peer, const JoinMessage& message);
  void handle(Hub& hub, PeerId peer, const RejoinMessage& message);
  void handle(Hub& hub, PeerId peer, const FailedMessage& message);
  void handle(Hub& hub, PeerId peer, const LeftMessage& message);
  void handle(Hub& hub, PeerId peer, const FinishedMessage& message);

  std::optional<RefusedMessage> objection(PeerId peer, const JoinMessage& message) const;
  std::optional<RefusedMessage> difference(const JoinMessage& message) const;
  std::string name_of_node_0() const;
  void refuse(Hub& hub, PeerId peer, const std::string& who, const RefusedMessage& refusal);
  void note_turned_away(const std::string& who, const std::string& why);
  Attendance attendance() const;
  void begin_attempt_if_possible(Hub& hub);
  void begin_attempt(Hub& hub);
  std::vector<Node*> assign_node_ranks();
  std::string address_of_node_0(const Hub& hub) const;
  const Node* node_of_rank(int rank) const;
  bool is_silent(const Node& node) const;
  void fail(Hub& hub, const RemoteFailure& failure);
  void lose(Hub& hub, PeerId peer, const std::string& why);
  void tell_status(Hub& hub);
  void send_status(Hub& hub);
  void broadcast(Hub& hub, const NodeMessage& message);
  Node* find(PeerId peer);
  Node& known(PeerId peer);  // throws if it has not joined

  const RendezvousOptions options_;
  Phase phase_ = Phase::kGathering;
  std::vector<Node> nodes_;  // in order of arrival
  int64_t last_arrival_ns_ = 0;
  JobLayout layout_;                        // of the latest attempt
  int finished_ = 0;                        // nodes, in the running attempt
  std::vector<int> early_leavers_;          // nodes, in the running attempt; see LeftMessage
  int attempts_ = 0;                        // begun
  std::optional<Suspicion> suspicion_;      // while running
  std::unique_ptr<StoreServer> store_;      // of the running attempt
  std::vector<std::string> lost_;           // since the latest attempt began: who, and why
  std::map<std::string, int> turned_away_;  // who and why: how often
  bool status_changed_ = false;             // and was not sent yet
};

}  // namespace lockstep
