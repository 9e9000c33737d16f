#pragma once

#include <poll.h>

#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "launch/rendezvous.hpp"
#include "launch/rendezvous_messages.hpp"
#include "lockstep/version.hpp"
#include "net/socket.hpp"
#include "net_support.hpp"

namespace lockstep::test {

using Link = std::unique_ptr<NodeLink>;

inline int free_port(const std::string& host = "127.0.0.1") {
  return bound_port(listen_tcp({host, 0}));
}

inline RendezvousOptions options_for(HostCount nnodes, int port, bool serve = false) {
  RendezvousOptions options;
  options.host = "127.0.0.1";
  options.port = port;
  options.serve = serve;
  options.token = kToken;
  options.job_id = "job";
  options.nnodes = nnodes;
  options.heartbeat_ns = 100'000'000;
  options.max_restarts = 2;
  options.deadline_ns = in_ms(20'000);
  return options;
}

inline RendezvousOptions options_for(int nnodes, int port, bool serve = false) {
  return options_for(HostCount{nnodes, nnodes}, port, serve);
}

/// What a launcher with these options says first.
inline JoinMessage join_of(const RendezvousOptions& options, const NodeOffer& offer) {
  return {kVersion,
          options.job_id,
          options.nnodes,
          options.max_restarts,
          options.heartbeat_ns,
          options.lost_after_ns,
          offer};
}

inline NodeOffer offer_of(const std::string& host, int node_rank = -1, int local_world_size = 1,
                          int master_port = 1000) {
  return {node_rank, local_world_size, host, master_port};
}

inline std::future<Link> join_later(RendezvousOptions options, NodeOffer offer) {
  return std::async(std::launch::async,
                    [options, offer] { return NodeLink::join(options, offer); });
}

// A job of this many hosts, [node]; node n offers n + 1 ranks.
inline std::vector<Link> start_job(int nnodes, RendezvousOptions options) {
  std::vector<std::future<Link>> joining;
  for (int node = 0; node < nnodes; ++node) {
    options.serve = node == 0;
    joining.push_back(
        join_later(options, offer_of("host" + std::to_string(node), node, node + 1, 1000 + node)));
  }
  std::vector<Link> links;
  for (auto& link : joining) links.push_back(link.get());
  return links;
}

inline std::vector<Link> start_job(int nnodes) {
  return start_job(nnodes, options_for(nnodes, free_port()));
}

// The next event, waited for by the descriptor, as a launcher does.
inline std::optional<NodeEvent> next_event(NodeLink& link, int64_t milliseconds) {
  pollfd item{link.descriptor(), POLLIN, 0};
  if (::poll(&item, 1, static_cast<int>(milliseconds)) <= 0) return std::nullopt;
  return link.take();
}

inline RemoteFailure expect_failure(NodeLink& link, int64_t milliseconds = 10'000) {
  const auto event = next_event(link, milliseconds);
  if (!event || event->kind != NodeEvent::Kind::kFailed || !event->failure) {
    ADD_FAILURE() << "no failure was told";
    return {};
  }
  EXPECT_FALSE(link.take()) << "one failure, one event";
  return *event->failure;
}

inline void rejoin_all(std::vector<Link>& links, int master_port) {
  std::vector<std::future<void>> waiting;
  for (auto& link : links) {
    waiting.push_back(std::async(
        std::launch::async, [&link, master_port] { link->rejoin(master_port, in_ms(20'000)); }));
  }
  for (auto& one : waiting) one.get();
}

inline void expect_finish(std::vector<Link>& links) {
  for (auto& link : links) link->report_finished();
  for (auto& link : links) {
    const auto event = next_event(*link, 10'000);
    ASSERT_TRUE(event);
    EXPECT_EQ(event->kind, NodeEvent::Kind::kFinished);
    EXPECT_FALSE(event->failure);
  }
}

}  // namespace lockstep::test
