#include "launch/coordinator.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "base/random.hpp"
#include "base/running_clock.hpp"
#include "lockstep/error.hpp"
#include "lockstep/units.hpp"
#include "lockstep/version.hpp"

namespace lockstep {
namespace {

constexpr size_t kMostNoted = 8;   // peers that were turned away, or lost
constexpr size_t kFewHosts = 64;   // whose status may be sent at every change
constexpr int64_t kLateBeats = 2;  // a host that misses so many heartbeats is silent

template <class... Handlers>
struct Overloaded : Handlers... {
  using Handlers::operator()...;
};
template <class... Handlers>
Overloaded(Handlers...) -> Overloaded<Handlers...>;

[[noreturn]] void throw_unexpected() {
  throw Error(Code::kRendezvous, "an unexpected message",
              "install the same version of lockstep on all hosts");
}

RefusedMessage differs(const std::string& what, const std::string& theirs, const std::string& ours,
                       const std::string& node_0) {
  return {fmt::format("{} is {} on this host, but {} on node 0 ({})", what, theirs, ours, node_0),
          fmt::format("start all launchers of a job with the same {}", what)};
}

std::string in_seconds(int64_t ns) {
  return format_seconds(static_cast<double>(ns) / 1e9);
}

}  // namespace

bool may_begin(const Attendance& attendance, const HostCount& wanted, int64_t last_call_ns,
               int64_t now_ns) {
  if (attendance.stopping > 0 || attendance.ready < wanted.least) return false;
  return attendance.ready == wanted.most || now_ns - attendance.last_arrival_ns >= last_call_ns;
}

Coordinator::Node* Coordinator::find(PeerId peer) {
  const auto found = std::find_if(nodes_.begin(), nodes_.end(),
                                  [peer](const Node& node) { return node.peer == peer; });
  return found == nodes_.end() ? nullptr : &*found;
}

Coordinator::Node& Coordinator::known(PeerId peer) {
  Node* node = find(peer);
  if (node == nullptr) throw_unexpected();
  return *node;
}

void Coordinator::received(Hub& hub, PeerId peer, std::string_view payload) {
  if (Node* node = find(peer)) node->last_message_ns = running_ns();
  if (suspicion_ && suspicion_->silent == peer) fail(hub, RemoteFailure(suspicion_->failure));
  std::visit(Overloaded{[&](const JoinMessage& message) { handle(hub, peer, message); },
                        [&](const RejoinMessage& message) { handle(hub, peer, message); },
                        [&](const FailedMessage& message) { handle(hub, peer, message); },
                        [&](const LeftMessage& message) { handle(hub, peer, message); },
                        [&](const FinishedMessage& message) { handle(hub, peer, message); },
                        [&](const BeatMessage&) {}, [&](const auto&) { throw_unexpected(); }},
             decode_node_message(payload));
}

void Coordinator::handle(Hub& hub, PeerId peer, const JoinMessage& message) {
  if (find(peer) != nullptr) throw_unexpected();
  if (const auto refusal = objection(peer, message)) {
    refuse(hub, peer, fmt::format("{} ({})", message.offer.host, hub.peer_address(peer)), *refusal);
    return;
  }
  last_arrival_ns_ = running_ns();
  Node node{.peer = peer, .offer = message.offer, .last_message_ns = last_arrival_ns_};
  if (peer == kOwnPeer) node.offer.node_rank = 0;
  nodes_.push_back(std::move(node));
  tell_status(hub);
  begin_attempt_if_possible(hub);
}

std::string Coordinator::name_of_node_0() const {
  const auto own = std::find_if(nodes_.begin(), nodes_.end(),
                                [](const Node& node) { return node.peer == kOwnPeer; });
  return own == nodes_.end() ? options_.host : own->offer.host;
}

// Names what must be the same on all hosts and is not.
std::optional<RefusedMessage> Coordinator::difference(const JoinMessage& message) const {
  const std::string node_0 = name_of_node_0();
  if (message.version != kVersion)
    return differs("lockstep's version", message.version, kVersion, node_0);
  if (message.job_id != options_.job_id)
    return differs("--rdzv-id", fmt::format("\"{}\"", message.job_id),
                   fmt::format("\"{}\"", options_.job_id), node_0);
  if (message.nnodes != options_.nnodes)
    return differs("--nnodes", message.nnodes.text(), options_.nnodes.text(), node_0);
  if (message.max_restarts != options_.max_restarts)
    return differs("--max-restarts", std::to_string(message.max_restarts),
                   std::to_string(options_.max_restarts), node_0);
  if (message.heartbeat_ns != options_.heartbeat_ns)
    return differs("--heartbeat", in_seconds(message.heartbeat_ns),
                   in_seconds(options_.heartbeat_ns), node_0);
  if (message.lost_after_ns != options_.lost_after_ns)
    return differs("--host-timeout", in_seconds(message.lost_after_ns),
                   in_seconds(options_.lost_after_ns), node_0);
  return std::nullopt;
}

std::optional<RefusedMessage> Coordinator::objection(PeerId peer,
                                                     const JoinMessage& message) const {
  if (auto refusal = difference(message)) return refusal;
  const int wanted = message.offer.node_rank;
  if (wanted >= options_.nnodes.most) {
    return RefusedMessage{fmt::format("node rank {} does not exist in a job of {} hosts", wanted,
                                      options_.nnodes.words()),
                          fmt::format("use --node-rank 0 to {}", options_.nnodes.most - 1)};
  }
  if (wanted == 0 && peer != kOwnPeer) {
    return RefusedMessage{
        fmt::format("node rank 0 is taken by {}, which serves the rendezvous", name_of_node_0()),
        "give every host a different --node-rank, or none"};
  }
  for (const Node& node : nodes_) {
    if (wanted < 0 || node.offer.node_rank != wanted) continue;
    return RefusedMessage{fmt::format("node rank {} is taken by {}", wanted, node.offer.host),
                          "give every host a different --node-rank, or none"};
  }
  if (phase_ == Phase::kFinished) {
    return RefusedMessage{"this job has finished", "start it again on all hosts"};
  }
  if (static_cast<int>(nodes_.size()) >= options_.nnodes.most) {
    return RefusedMessage{
        fmt::format("all {} hosts of this job have already joined", options_.nnodes.most),
        "start each host's launcher once, or use another endpoint for another "
        "job"};
  }
  return std::nullopt;
}

void Coordinator::refuse(Hub& hub, PeerId peer, const std::string& who,
                         const RefusedMessage& refusal) {
  hub.send(peer, encode(refusal));
  hub.drop(peer, refusal.why);
  note_turned_away(who, refusal.why);
  tell_status(hub);
}

void Coordinator::note_turned_away(const std::string& who, const std::string& why) {
  const std::string note = fmt::format("{}: {}", who, why);
  if (turned_away_.size() < kMostNoted || turned_away_.count(note) != 0) ++turned_away_[note];
}

void Coordinator::turned_away(Hub& hub, const std::string& address, const std::string& why) {
  note_turned_away(address, why);
  tell_status(hub);
}

void Coordinator::handle(Hub& hub, PeerId peer, const RejoinMessage& message) {
  Node& node = known(peer);
  if (phase_ == Phase::kFinished || node.state == NodeState::kReady) throw_unexpected();
  if (phase_ == Phase::kRunning) {
    fail(hub, {.node_rank = node.node_rank,
               .rank = -1,
               .exit_code = 1,
               .text = fmt::format("{} asked for a restart", node.offer.host)});
  }
  node.offer.master_port = message.master_port;
  node.state = NodeState::kReady;
  last_arrival_ns_ = running_ns();
  tell_status(hub);
  begin_attempt_if_possible(hub);
}

Attendance Coordinator::attendance() const {
  Attendance here{.last_arrival_ns = last_arrival_ns_};
  for (const Node& node : nodes_) {
    ++(node.state == NodeState::kReady ? here.ready : here.stopping);
  }
  return here;
}

void Coordinator::begin_attempt_if_possible(Hub& hub) {
  if (phase_ != Phase::kGathering || find(kOwnPeer) == nullptr) return;
  if (may_begin(attendance(), options_.nnodes, options_.last_call_ns, running_ns())) {
    begin_attempt(hub);
  }
}

void Coordinator::begin_attempt(Hub& hub) {
  try {
    store_.reset();
    store_ = std::make_unique<StoreServer>(
        StoreAddress{.unix_name = "", .host = options_.host, .port = 0, .token = options_.token});
  } catch (const Error& error) {
    broadcast(hub,
              RefusedMessage{"node 0 cannot serve the ranks: " + error.message(), error.help()});
    return;
  }
  const std::vector<Node*> members = assign_node_ranks();
  layout_ = {};
  for (Node* node : members) {
    layout_.local_world_sizes.push_back(node->offer.local_world_size);
    layout_.hosts.push_back(node->offer.host);
    node->state = NodeState::kRunning;
  }
  layout_.master_port = members[0]->offer.master_port;
  layout_.attempt = attempts_++;
  layout_.session = random_hex(32);
  phase_ = Phase::kRunning;
  finished_ = 0;
  early_leavers_.clear();
  lost_.clear();
  for (const Node* node : members) {
    LayoutMessage message{layout_, store_->port()};
    message.layout.node_rank = node->node_rank;
    message.layout.master_addr = node->peer == kOwnPeer ? address_of_node_0(hub) : "";
    hub.send(node->peer, encode(message));
  }
}

// A node that asked for no rank gets a free one, in order of arrival, and keeps it. In an attempt
// the nodes are renumbered in that order, without gaps. Node 0 comes first: rank 0, which alone
// publishes checkpoints, is always on the host that decides which hosts take part.
std::vector<Coordinator::Node*> Coordinator::assign_node_ranks() {
  std::set<int> free;
  for (int rank = 0; rank < options_.nnodes.most; ++rank) free.insert(rank);
  for (const Node& node : nodes_) free.erase(node.offer.node_rank);
  std::vector<Node*> members;
  for (Node& node : nodes_) {
    members.push_back(&node);
    if (node.offer.node_rank >= 0) continue;
    node.offer.node_rank = *free.begin();
    free.erase(free.begin());
  }
  std::sort(members.begin(), members.end(),
            [](const Node* a, const Node* b) { return a->offer.node_rank < b->offer.node_rank; });
  for (size_t i = 0; i < members.size(); ++i) members[i]->node_rank = static_cast<int>(i);
  return members;
}

// The address by which others reached this host, preferably not a loopback address.
std::string Coordinator::address_of_node_0(const Hub& hub) const {
  std::string address;
  for (const Node& node : nodes_) {
    if (node.peer == kOwnPeer) continue;
    const std::string reached = hub.own_address(node.peer);
    if (address.empty() || is_loopback(address)) address = reached;
  }
  return address.empty() ? "127.0.0.1" : address;
}

const Coordinator::Node* Coordinator::node_of_rank(int rank) const {
  if (rank < 0) return nullptr;
  int end = 0;
  for (size_t i = 0; i < layout_.local_world_sizes.size(); ++i) {
    end += layout_.local_world_sizes[i];
    if (rank >= end) continue;
    const auto found = std::find_if(nodes_.begin(), nodes_.end(), [i](const Node& node) {
      return node.node_rank == static_cast<int>(i) && node.state != NodeState::kReady;
    });
    return found == nodes_.end() ? nullptr : &*found;
  }
  return nullptr;
}

bool Coordinator::is_silent(const Node& node) const {
  return running_ns() - node.last_message_ns > kLateBeats * options_.heartbeat_ns;
}

void Coordinator::handle(Hub& hub, PeerId peer, const FailedMessage& message) {
  const Node& reporter = known(peer);
  if (phase_ != Phase::kRunning || reporter.state == NodeState::kReady) return;
  RemoteFailure failure = message.failure;
  failure.node_rank = reporter.node_rank;
  const Node* accused = node_of_rank(failure.rank);
  if (accused != nullptr && accused != &reporter && is_silent(*accused)) {
    suspicion_ = Suspicion{accused->peer, failure};
    return;
  }
  fail(hub, failure);
}

// Only the first failure of an attempt counts; later ones are its consequences.
void Coordinator::fail(Hub& hub, const RemoteFailure& failure) {
  if (phase_ != Phase::kRunning) return;
  phase_ = Phase::kGathering;
  suspicion_.reset();
  for (Node& node : nodes_) {
    if (node.state == NodeState::kReady) continue;
    node.state = NodeState::kStopping;
    hub.send(node.peer, encode(FailedMessage{failure}));
  }
  tell_status(hub);
}

// The other hosts find out whether any rank waits for that one. Two such hosts are enough for
// every host to learn of another one.
void Coordinator::handle(Hub& hub, PeerId peer, const LeftMessage& message) {
  const Node& reporter = known(peer);
  if (phase_ != Phase::kRunning || node_of_rank(message.rank) != &reporter) return;
  auto& reporters = early_leavers_;
  if (reporters.size() == 2 || (!reporters.empty() && reporters[0] == reporter.node_rank)) return;
  reporters.push_back(reporter.node_rank);
  for (const Node& node : nodes_) {
    if (node.state == NodeState::kRunning && &node != &reporter)
      hub.send(node.peer, encode(message));
  }
}

void Coordinator::handle(Hub& hub, PeerId peer, const FinishedMessage& /*message*/) {
  Node& node = known(peer);
  if (phase_ != Phase::kRunning || node.state != NodeState::kRunning) return;
  node.state = NodeState::kFinished;
  if (++finished_ < static_cast<int>(layout_.hosts.size())) return;
  phase_ = Phase::kFinished;
  broadcast(hub, FinishedMessage{});
}

void Coordinator::left(Hub& hub, PeerId peer, const std::string& why) {
  if (find(peer) != nullptr) lose(hub, peer, why);
}

// A host whose ranks have all ended well, or that takes no part in the attempt, may leave.
void Coordinator::lose(Hub& hub, PeerId peer, const std::string& why) {
  const Node node = known(peer);
  if (peer == kOwnPeer) {
    fail(hub, loss_of_node_0(node.offer.host, why));
  } else if (node.state == NodeState::kRunning) {
    fail(hub, {.node_rank = node.node_rank,
               .rank = -1,
               .exit_code = 1,
               .text = fmt::format("host {} (node {}) was lost: {}", node.offer.host,
                                   node.node_rank, why)});
  }
  hub.drop(peer, why);
  nodes_.erase(std::find_if(nodes_.begin(), nodes_.end(),
                            [peer](const Node& other) { return other.peer == peer; }));
  if (node.state != NodeState::kFinished && lost_.size() < kMostNoted) {
    lost_.push_back(fmt::format("{}: {}", node.offer.host, why));
  }
  tell_status(hub);
  begin_attempt_if_possible(hub);
}

void Coordinator::tick(Hub& hub) {
  broadcast(hub, BeatMessage{});
  if (status_changed_) send_status(hub);
  std::vector<PeerId> silent;
  for (const Node& node : nodes_) {
    // Node 0's own launcher shares this process: it is silent while this process is stopped.
    const bool own = node.peer == kOwnPeer;
    if (!own && running_ns() - node.last_message_ns > options_.lost_after_ns)
      silent.push_back(node.peer);
  }
  for (const PeerId peer : silent) {
    lose(hub, peer, fmt::format("it was silent for {}", in_seconds(options_.lost_after_ns)));
  }
  begin_attempt_if_possible(hub);
}

// Sends the status of all hosts to all hosts. With many hosts that is done once in a heartbeat, not
// for each host that comes.
void Coordinator::tell_status(Hub& hub) {
  status_changed_ = true;
  if (nodes_.size() <= kFewHosts) send_status(hub);
}

// Sends the status to the hosts that wait for an attempt.
void Coordinator::send_status(Hub& hub) {
  status_changed_ = false;
  StatusMessage status;
  if (phase_ == Phase::kRunning) status.running = static_cast<int>(layout_.hosts.size());
  for (const Node& node : nodes_) {
    if (node.state == NodeState::kReady) {
      status.present.emplace_back(node.offer.node_rank, node.offer.host);
    }
  }
  status.lost = lost_;
  for (const auto& [note, count] : turned_away_) {
    status.turned_away.push_back(count == 1 ? note : fmt::format("{} ({} times)", note, count));
  }
  const std::string payload = encode(status);
  for (const Node& node : nodes_) {
    if (node.state == NodeState::kReady) hub.send(node.peer, payload);
  }
}

void Coordinator::broadcast(Hub& hub, const NodeMessage& message) {
  const std::string payload = encode(message);
  for (const Node& node : nodes_) hub.send(node.peer, payload);
}

}  // namespace lockstep
