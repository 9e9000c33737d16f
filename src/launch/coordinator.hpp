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

/// Node 0's side of the rendezvous: gathers the nodes, broadcasts the first failure or the end, and
/// serves the ranks' store. A state machine on the hub's thread.
///
///     gathering --all joined--> running --all finished--> finished
///         ^                        |
///         +-------- failed --------+
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

  struct Node {
    PeerId peer = 0;
    NodeOffer offer;        // offer.node_rank is -1 until the first attempt starts
    bool ready = true;      // for the attempt that is being gathered
    bool finished = false;  // with the running attempt
    int64_t heard_ns = 0;
  };

  void handle(Hub& hub, PeerId peer, const JoinMessage& message);
  void handle(Hub& hub, PeerId peer, const RejoinMessage& message);
  void handle(Hub& hub, PeerId peer, const FailedMessage& message);
  void handle(Hub& hub, PeerId peer, const FinishedMessage& message);

  std::optional<RefusedMessage> objection(PeerId peer, const JoinMessage& message) const;
  void refuse(Hub& hub, PeerId peer, const std::string& who, const RefusedMessage& refusal);
  void note_turned_away(const std::string& who, const std::string& why);
  void start_attempt_if_complete(Hub& hub);
  void assign_free_ranks();
  std::string address_of_node_0(const Hub& hub) const;
  void fail(Hub& hub, const RemoteFailure& failure);
  void lose(Hub& hub, PeerId peer, const std::string& why);
  void send_status(Hub& hub);
  void broadcast(Hub& hub, const NodeMessage& message);
  Node* find(PeerId peer);
  Node& known(PeerId peer);  // throws if it has not joined

  const RendezvousOptions options_;
  Phase phase_ = Phase::kGathering;
  std::vector<Node> nodes_;                 // in order of arrival
  int finished_ = 0;                        // nodes, in the running attempt
  int attempts_ = 0;                        // started
  std::unique_ptr<StoreServer> store_;      // of the running attempt
  std::map<std::string, int> turned_away_;  // who and why: how often
};

}  // namespace lockstep
