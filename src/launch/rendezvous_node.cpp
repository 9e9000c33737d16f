#include "launch/rendezvous_node.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "base/running_clock.hpp"
#include "lockstep/error.hpp"
#include "lockstep/units.hpp"
#include "lockstep/version.hpp"
#include "net/quiet_thread.hpp"

namespace lockstep {
namespace {

constexpr int64_t kLastWordsNs = 1'000'000'000;

// At least once a second, whatever this host's own patience is: another host's may be shorter.
int64_t beat_ns(const RendezvousOptions& options) {
  return std::min<int64_t>(options.lost_after_ns / 10, 1'000'000'000);
}

void check(const RendezvousOptions& options, const NodeOffer& offer) {
  const auto refuse = [](const std::string& message, const char* help) {
    throw Error(Code::kUsage, message, help);
  };
  if (options.nnodes < 1 || options.nnodes > kMaxNodes)
    refuse(fmt::format("a job of {} hosts", options.nnodes), "use --nnodes 1 to 2048");
  if (offer.node_rank >= options.nnodes) {
    refuse(fmt::format("node rank {} does not exist in a job of {} hosts", offer.node_rank,
                       options.nnodes),
           "count --node-rank from 0");
  }
  if (options.serve && offer.node_rank > 0) {
    refuse(fmt::format("node rank {} cannot serve the meeting: node 0 does", offer.node_rank),
           "start node 0 on the host that the endpoint names");
  }
  if (options.token.empty())
    refuse("a job of several hosts needs a token", "set LOCKSTEP_TOKEN on all hosts");
}

std::array<Socket, 2> socket_pair() {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()) != 0) {
    throw Error(Code::kRendezvous, fmt::format("cannot make a socket: {}", std::strerror(errno)),
                "raise the limit of open files: ulimit -n");
  }
  return {Socket(ends[0]), Socket(ends[1])};
}

}  // namespace

CoordinatorServer::CoordinatorServer(const RendezvousOptions& options, Socket own_launcher)
    : coordinator(options),
      hub(listen_tcp({options.host, options.port}),
          {.token = options.token,
           .max_payload = kMaxNodeMessage,
           .tick_ns = beat_ns(options),
           .linger_ns = kLastWordsNs},
          coordinator, [&] {
            std::vector<Socket> adopted;
            adopted.push_back(std::move(own_launcher));
            return adopted;
          }()) {}

std::unique_ptr<NodeLink> NetworkNodeLink::join(const RendezvousOptions& options,
                                                const NodeOffer& offer) {
  check(options, offer);
  std::unique_ptr<NetworkNodeLink> link;
  if (options.serve) {
    auto ends = socket_pair();
    auto server = std::make_unique<CoordinatorServer>(options, std::move(ends[0]));
    link.reset(new NetworkNodeLink(
        options, std::move(server),
        Connection(std::move(ends[1]), Channel::plain(kMaxNodeMessage), "this launcher")));
  } else {
    link.reset(new NetworkNodeLink(options, nullptr,
                                   Connection::open_tcp({options.host, options.port}, options.token,
                                                        kMaxNodeMessage, options.deadline_ns)));
  }
  link->say(JoinMessage{.version = kVersion,
                        .job_id = options.job_id,
                        .nnodes = options.nnodes,
                        .max_restarts = options.max_restarts,
                        .offer = offer});
  link->await_layout(options.deadline_ns);
  return link;
}

NetworkNodeLink::NetworkNodeLink(const RendezvousOptions& options,
                                 std::unique_ptr<CoordinatorServer> server, Connection connection)
    : options_(options),
      server_(std::move(server)),
      connection_(std::move(connection)),
      server_address_(connection_->peer_address()) {
  thread_ = start_quiet_thread([this] { run(); });
}

NetworkNodeLink::~NetworkNodeLink() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  outbox_wake_.raise();
  thread_.join();
}

std::optional<NodeEvent> NetworkNodeLink::take() {
  const std::lock_guard lock(mutex_);
  if (events_.empty()) return std::nullopt;
  NodeEvent event = std::move(events_.front());
  events_.pop_front();
  if (events_.empty()) events_wake_.clear();
  return event;
}

void NetworkNodeLink::report_failure(const RemoteFailure& failure) {
  say(FailedMessage{failure});
}

void NetworkNodeLink::report_finished() {
  say(FinishedMessage{});
}

void NetworkNodeLink::rejoin(int master_port, int64_t deadline_ns) {
  if (layout_.round >= options_.max_restarts) {
    throw Error(Code::kRendezvous,
                fmt::format("the job was restarted {} times already", layout_.round),
                "raise --max-restarts on all hosts");
  }
  {
    // What is still untaken belongs to the round that failed.
    const std::lock_guard lock(mutex_);
    events_.clear();
    events_wake_.clear();
    if (state_ == State::kRunning || state_ == State::kFailed) {
      state_ = State::kJoining;
      status_ = {};
    }
  }
  say(RejoinMessage{master_port});
  await_layout(deadline_ns);
}

void NetworkNodeLink::say(const NodeMessage& message) {
  {
    const std::lock_guard lock(mutex_);
    outbox_.push_back(encode(message));
  }
  outbox_wake_.raise();
}

void NetworkNodeLink::await_layout(int64_t deadline_ns) {
  const int64_t since_ns = running_ns();
  std::unique_lock lock(mutex_);
  while (!next_layout_) {
    if (state_ == State::kRefused) throw Error(Code::kRendezvous, refusal_.why, refusal_.help);
    if (state_ == State::kFinished) {
      throw Error(Code::kRendezvous, "the job has finished: it cannot be joined again",
                  "start it again on all hosts");
    }
    if (state_ == State::kLost) {
      throw Error(
          Code::kRendezvous,
          fmt::format("the meeting at {} ended before all hosts had come: {}", place(), why_lost_),
          "look at the launcher of node 0: it gave up, failed, or was stopped", notes());
    }
    const int64_t left_ns = deadline_ns - running_ns();
    if (left_ns <= 0) throw_incomplete(since_ns);
    changed_.wait_for(lock, std::chrono::nanoseconds(std::min<int64_t>(left_ns, 1'000'000'000)));
  }
  layout_ = std::move(*next_layout_);
  next_layout_.reset();
}

std::string NetworkNodeLink::place() const {
  return endpoint_text(options_.host, options_.port);
}

std::vector<std::string> NetworkNodeLink::notes() const {
  std::vector<std::string> here;
  for (const auto& [rank, host] : status_.present) {
    here.push_back(rank < 0 ? host : fmt::format("{} (node {})", host, rank));
  }
  std::vector<std::string> all;
  if (!here.empty()) all.push_back(fmt::format("here: {}", fmt::join(here, ", ")));
  for (const auto& stranger : status_.turned_away) all.push_back("turned away: " + stranger);
  return all;
}

void NetworkNodeLink::throw_incomplete(int64_t since_ns) const {
  std::vector<int> missing;
  for (int rank = 0; rank < options_.nnodes; ++rank) missing.push_back(rank);
  bool all_numbered = true;
  for (const auto& [rank, host] : status_.present) {
    all_numbered = all_numbered && rank >= 0;
    std::erase(missing, rank);
  }
  const size_t count = static_cast<size_t>(options_.nnodes) - status_.present.size();
  const std::string who = all_numbered ? fmt::format("node {}", fmt::join(missing, ", node "))
                                       : fmt::format("{} more", count);
  throw Error(Code::kRendezvous,
              fmt::format("{} of {} hosts came to {} within {}; missing: {}",
                          status_.present.size(), options_.nnodes, place(),
                          format_seconds(static_cast<double>(running_ns() - since_ns) / 1e9), who),
              "start `lockstep run` on every host with the same --nnodes and --rdzv-endpoint, and "
              "check that no firewall is in between",
              notes());
}

void NetworkNodeLink::run() {
  try {
    talk();
  } catch (const std::exception& error) {
    const auto* known = dynamic_cast<const Error*>(&error);
    lose(known != nullptr ? known->message() : error.what());
  }
  connection_.reset();  // the coordinator waits for this when it ends
}

void NetworkNodeLink::talk() {
  int64_t next_beat_ns = running_ns() + beat_ns(options_);
  int64_t heard_ns = running_ns();
  for (;;) {
    bool stop = false;
    outbox_wake_.clear();
    {
      const std::lock_guard lock(mutex_);
      for (; !outbox_.empty(); outbox_.pop_front()) connection_->post(outbox_.front());
      stop = stop_;
    }
    if (stop) break;
    connection_->wait(Connection::Until::kInput, next_beat_ns, outbox_wake_.descriptor());
    while (const auto payload = connection_->take()) {
      heard_ns = running_ns();
      handle(decode_node_message(*payload));
    }
    if (running_ns() >= next_beat_ns) {
      connection_->post(encode(BeatMessage{}));
      next_beat_ns = running_ns() + beat_ns(options_);
    }
    // Node 0's own launcher shares the coordinator's process.
    if (!server_ && running_ns() - heard_ns > options_.lost_after_ns) {
      lose(fmt::format("nothing was heard from it for {}",
                       format_seconds(static_cast<double>(options_.lost_after_ns) / 1e9)));
      return;
    }
  }
  connection_->wait(Connection::Until::kWritten, running_ns() + kLastWordsNs);
}

void NetworkNodeLink::handle(const NodeMessage& message) {
  const std::lock_guard lock(mutex_);
  if (const auto* layout = std::get_if<LayoutMessage>(&message)) {
    take_layout(*layout);
    state_ = State::kRunning;
  } else if (const auto* status = std::get_if<StatusMessage>(&message)) {
    status_ = *status;
  } else if (const auto* failed = std::get_if<FailedMessage>(&message)) {
    if (state_ != State::kRunning) return;
    state_ = State::kFailed;
    put_event({NodeEvent::Kind::kFailed, failed->failure});
  } else if (std::holds_alternative<FinishedMessage>(message)) {
    if (state_ != State::kRunning) return;
    state_ = State::kFinished;
    put_event({NodeEvent::Kind::kFinished, std::nullopt});
  } else if (const auto* refused = std::get_if<RefusedMessage>(&message)) {
    refusal_ = *refused;
    state_ = State::kRefused;
  }
  changed_.notify_all();
}

void NetworkNodeLink::take_layout(const LayoutMessage& message) {
  JobLayout layout = message.layout;
  if (!server_) layout.master_addr = server_address_;
  layout.store = endpoint_text(layout.master_addr, message.store_port);
  next_layout_ = std::move(layout);
}

void NetworkNodeLink::put_event(NodeEvent event) {
  events_.push_back(std::move(event));
  events_wake_.raise();
}

void NetworkNodeLink::lose(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (state_ == State::kFinished || state_ == State::kRefused) return;
  if (state_ == State::kRunning) {
    put_event({NodeEvent::Kind::kFailed,
               RemoteFailure{.node_rank = 0,
                             .rank = -1,
                             .exit_code = 1,
                             .text = fmt::format("node 0's launcher was lost: {}", why)}});
  }
  why_lost_ = why;
  state_ = State::kLost;
  changed_.notify_all();
}

}  // namespace lockstep
