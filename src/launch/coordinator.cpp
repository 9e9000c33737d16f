#include "launch/coordinator.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "base/running_clock.hpp"
#include "lockstep/error.hpp"
#include "lockstep/units.hpp"
#include "lockstep/version.hpp"
#include "net/secret.hpp"

namespace lockstep {
namespace {

constexpr size_t kMostNoted = 8;  // peers that were turned away

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

}  // namespace

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
  if (Node* node = find(peer)) node->heard_ns = running_ns();
  std::visit(Overloaded{[&](const JoinMessage& message) { handle(hub, peer, message); },
                        [&](const RejoinMessage& message) { handle(hub, peer, message); },
                        [&](const FailedMessage& message) { handle(hub, peer, message); },
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
  Node node{.peer = peer, .offer = message.offer, .heard_ns = running_ns()};
  if (peer == kOwnPeer) node.offer.node_rank = 0;
  nodes_.push_back(std::move(node));
  send_status(hub);
  start_attempt_if_complete(hub);
}

std::optional<RefusedMessage> Coordinator::objection(PeerId peer,
                                                     const JoinMessage& message) const {
  const auto own = std::find_if(nodes_.begin(), nodes_.end(),
                                [](const Node& node) { return node.peer == kOwnPeer; });
  const std::string node_0 = own == nodes_.end() ? options_.host : own->offer.host;
  if (message.version != kVersion)
    return differs("lockstep's version", message.version, kVersion, node_0);
  if (message.job_id != options_.job_id)
    return differs("--rdzv-id", fmt::format("\"{}\"", message.job_id),
                   fmt::format("\"{}\"", options_.job_id), node_0);
  if (message.nnodes != options_.nnodes)
    return differs("--nnodes", std::to_string(message.nnodes), std::to_string(options_.nnodes),
                   node_0);
  if (message.max_restarts != options_.max_restarts)
    return differs("--max-restarts", std::to_string(message.max_restarts),
                   std::to_string(options_.max_restarts), node_0);
  const int wanted = message.offer.node_rank;
  if (wanted >= options_.nnodes) {
    return RefusedMessage{
        fmt::format("node rank {} does not exist in a job of {} hosts", wanted, options_.nnodes),
        fmt::format("use --node-rank 0 to {}", options_.nnodes - 1)};
  }
  if (wanted == 0 && peer != kOwnPeer) {
    return RefusedMessage{
        fmt::format("node rank 0 is taken by {}, which serves the rendezvous", node_0),
        "give every host a different --node-rank, or none"};
  }
  for (const Node& node : nodes_) {
    if (wanted < 0 || node.offer.node_rank != wanted) continue;
    return RefusedMessage{fmt::format("node rank {} is taken by {}", wanted, node.offer.host),
                          "give every host a different --node-rank, or none"};
  }
  if (phase_ != Phase::kGathering || static_cast<int>(nodes_.size()) >= options_.nnodes) {
    return RefusedMessage{
        fmt::format("all {} hosts of this job have already joined", options_.nnodes),
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
  send_status(hub);
}

void Coordinator::note_turned_away(const std::string& who, const std::string& why) {
  const std::string note = fmt::format("{}: {}", who, why);
  if (turned_away_.size() < kMostNoted || turned_away_.count(note) != 0) ++turned_away_[note];
}

void Coordinator::turned_away(Hub& hub, const std::string& address, const std::string& why) {
  note_turned_away(address, why);
  send_status(hub);
}

void Coordinator::handle(Hub& hub, PeerId peer, const RejoinMessage& message) {
  Node& node = known(peer);
  if (phase_ == Phase::kFinished) throw_unexpected();
  if (phase_ == Phase::kRunning) {
    fail(hub, {.node_rank = node.offer.node_rank,
               .rank = -1,
               .exit_code = 1,
               .text = fmt::format("{} asked for a restart", node.offer.host)});
  }
  node.offer.master_port = message.master_port;
  node.ready = true;
  send_status(hub);
  start_attempt_if_complete(hub);
}

void Coordinator::start_attempt_if_complete(Hub& hub) {
  const bool all_ready =
      std::all_of(nodes_.begin(), nodes_.end(), [](const Node& node) { return node.ready; });
  if (static_cast<int>(nodes_.size()) != options_.nnodes || !all_ready) return;
  assign_free_ranks();
  try {
    store_.reset();
    store_ = std::make_unique<StoreServer>(
        StoreAddress{.unix_name = "", .host = options_.host, .port = 0, .token = options_.token});
  } catch (const Error& error) {
    broadcast(hub,
              RefusedMessage{"node 0 cannot serve the ranks: " + error.message(), error.help()});
    return;
  }
  std::vector<const Node*> by_rank(nodes_.size());
  for (const Node& node : nodes_) by_rank[static_cast<size_t>(node.offer.node_rank)] = &node;
  LayoutMessage message;
  JobLayout& layout = message.layout;
  for (const Node* node : by_rank) {
    layout.local_world_sizes.push_back(node->offer.local_world_size);
    layout.hosts.push_back(node->offer.host);
  }
  layout.master_port = by_rank[0]->offer.master_port;
  layout.attempt = attempts_++;
  layout.session = random_hex(32);
  message.store_port = store_->port();
  phase_ = Phase::kRunning;
  finished_ = 0;
  for (const Node* node : by_rank) {
    layout.node_rank = node->offer.node_rank;
    layout.master_addr = node->peer == kOwnPeer ? address_of_node_0(hub) : "";
    hub.send(node->peer, encode(message));
  }
}

// By order of arrival, among the ranks that no node asked for.
void Coordinator::assign_free_ranks() {
  std::set<int> free;
  for (int rank = 0; rank < options_.nnodes; ++rank) free.insert(rank);
  for (const Node& node : nodes_) free.erase(node.offer.node_rank);
  for (Node& node : nodes_) {
    if (node.offer.node_rank >= 0) continue;
    node.offer.node_rank = *free.begin();
    free.erase(free.begin());
  }
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

void Coordinator::handle(Hub& hub, PeerId peer, const FailedMessage& message) {
  RemoteFailure failure = message.failure;
  failure.node_rank = known(peer).offer.node_rank;
  fail(hub, failure);
}

// Only the first failure of an attempt counts; later ones are its consequences.
void Coordinator::fail(Hub& hub, const RemoteFailure& failure) {
  if (phase_ != Phase::kRunning) return;
  phase_ = Phase::kGathering;
  for (Node& node : nodes_) node.ready = node.finished = false;
  broadcast(hub, FailedMessage{failure});
}

void Coordinator::handle(Hub& hub, PeerId peer, const FinishedMessage& /*message*/) {
  Node& node = known(peer);
  if (phase_ != Phase::kRunning || node.finished) return;
  node.finished = true;
  if (++finished_ < options_.nnodes) return;
  phase_ = Phase::kFinished;
  broadcast(hub, FinishedMessage{});
}

void Coordinator::left(Hub& hub, PeerId peer, const std::string& why) {
  if (find(peer) != nullptr) lose(hub, peer, why);
}

// A host whose ranks have all ended well may leave.
void Coordinator::lose(Hub& hub, PeerId peer, const std::string& why) {
  const Node node = known(peer);
  if (!node.finished) {
    fail(hub, {.node_rank = node.offer.node_rank,
               .rank = -1,
               .exit_code = 1,
               .text = fmt::format("host {} was lost: {}", node.offer.host, why)});
  }
  hub.drop(peer, why);
  nodes_.erase(std::find_if(nodes_.begin(), nodes_.end(),
                            [peer](const Node& other) { return other.peer == peer; }));
  send_status(hub);
}

void Coordinator::tick(Hub& hub) {
  broadcast(hub, BeatMessage{});
  std::vector<PeerId> silent;
  for (const Node& node : nodes_) {
    // Node 0's own launcher shares this process: it is silent while this process is stopped.
    const bool own = node.peer == kOwnPeer;
    if (!own && running_ns() - node.heard_ns > options_.lost_after_ns) silent.push_back(node.peer);
  }
  for (const PeerId peer : silent) {
    const double seconds = static_cast<double>(options_.lost_after_ns) / 1e9;
    lose(hub, peer, fmt::format("it was silent for {}", format_seconds(seconds)));
  }
}

void Coordinator::send_status(Hub& hub) {
  if (phase_ != Phase::kGathering) return;
  StatusMessage status;
  for (const Node& node : nodes_) {
    if (node.ready) status.present.emplace_back(node.offer.node_rank, node.offer.host);
  }
  for (const auto& [note, count] : turned_away_) {
    status.turned_away.push_back(count == 1 ? note : fmt::format("{} ({} times)", note, count));
  }
  broadcast(hub, status);
}

void Coordinator::broadcast(Hub& hub, const NodeMessage& message) {
  const std::string payload = encode(message);
  for (const Node& node : nodes_) hub.send(node.peer, payload);
}

}  // namespace lockstep
