#include "launch/rendezvous.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <numeric>
#include <thread>

#include "base/counted.hpp"
#include "base/process.hpp"
#include "base/running_clock.hpp"
#include "launch/coordinator.hpp"
#include "launch/rendezvous_messages.hpp"
#include "lockstep/error.hpp"
#include "lockstep/units.hpp"
#include "lockstep/version.hpp"
#include "net/connection.hpp"

namespace lockstep {
namespace {

constexpr int64_t kLastMessageNs = 1'000'000'000;
constexpr int64_t kShortestWaitNs = 1'000'000;
constexpr int64_t kLongestWaitNs = 1'000'000'000;

void check_options(const RendezvousOptions& options, const NodeOffer& offer) {
  const auto fail = [](const std::string& message, const char* help) {
    throw Error(Code::kUsage, message, help);
  };
  if (options.nnodes.least < 1 || options.nnodes.most < options.nnodes.least ||
      options.nnodes.most > kMostHosts) {
    fail(fmt::format("a job of {} hosts", options.nnodes.words()), "use --nnodes 1 to 2048");
  }
  if (offer.node_rank >= options.nnodes.most) {
    fail(fmt::format("node rank {} does not exist in a job of {} hosts", offer.node_rank,
                     options.nnodes.words()),
         "count --node-rank from 0");
  }
  if (options.serve && offer.node_rank > 0) {
    fail(fmt::format("node rank {} cannot serve the rendezvous: node 0 does", offer.node_rank),
         "start node 0 on the host that the endpoint names");
  }
  if (options.token.empty())
    fail("a job of several hosts needs a token", "set LOCKSTEP_TOKEN on all hosts");
}

std::array<Socket, 2> socket_pair() {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()) != 0) {
    throw Error(Code::kRendezvous, fmt::format("cannot create a socket: {}", std::strerror(errno)),
                "raise the limit of open files: ulimit -n");
  }
  return {Socket(ends[0]), Socket(ends[1])};
}

// What node 0 serves the rendezvous with.
struct CoordinatorServer {
  Coordinator coordinator;
  Hub hub;

  CoordinatorServer(const RendezvousOptions& options, Socket own_launcher)
      : coordinator(options),
        hub(listen_tcp({options.host, options.port}),
            {.token = options.token,
             .max_payload = kMaxNodeMessage,
             .tick_ns = options.heartbeat_ns,
             .linger_ns = kLastMessageNs},
            coordinator, [&] {
              std::vector<Socket> adopted;
              adopted.push_back(std::move(own_launcher));
              return adopted;
            }()) {}
};

// One launcher's end of the rendezvous: a connection to the coordinator, and a thread that reads it
// and sends heartbeats. Node 0's launcher has one too, over a socket pair.
class NetworkNodeLink final : public NodeLink {
 public:
  static std::unique_ptr<NodeLink> join(const RendezvousOptions& options, const NodeOffer& offer);
  ~NetworkNodeLink() override;

  const JobLayout& layout() const override { return layout_; }
  int descriptor() const override { return events_wake_.descriptor(); }
  std::optional<NodeEvent> take() override;
  void report_failure(const RemoteFailure& failure) override;
  void report_left(int rank) override;
  void report_finished() override;
  void rejoin(int master_port, int64_t deadline_ns) override;

 private:
  enum class State { kJoining, kRunning, kFailed, kFinished, kRefused, kLost };

  NetworkNodeLink(const RendezvousOptions& options, std::unique_ptr<CoordinatorServer> server,
                  Connection connection);

  void post(const NodeMessage& message);
  bool await_layout(int64_t deadline_ns);
  [[noreturn]] void throw_incomplete(int64_t since_ns) const;
  std::string waiting_for(int64_t longest_ns) const;
  std::vector<std::string> notes() const;
  std::string endpoint() const;

  // On the thread.
  void run();
  void talk();
  void handle(const NodeMessage& message);
  void take_layout(const LayoutMessage& message);
  void put_event(NodeEvent event);
  void lose(const std::string& why);

  const RendezvousOptions options_;
  std::unique_ptr<CoordinatorServer> server_;  // on node 0 only; outlives the connection
  std::optional<Connection> connection_;       // the thread's once that runs
  const std::string server_address_;           // "" on node 0
  JobLayout layout_;                           // the caller's; changed only by join and rejoin

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::kJoining;
  bool stop_ = false;
  std::deque<std::string> outbox_;
  std::deque<NodeEvent> events_;
  std::optional<JobLayout> next_layout_;
  std::string node_0_;  // its host's name, once an attempt has begun
  StatusMessage status_;
  RefusedMessage refusal_;
  std::string why_lost_;

  Wake outbox_wake_;
  Wake events_wake_;
  std::thread thread_;
};

std::unique_ptr<NodeLink> NetworkNodeLink::join(const RendezvousOptions& options,
                                                const NodeOffer& offer) {
  check_options(options, offer);
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
  link->post(JoinMessage{.version = kVersion,
                         .job_id = options.job_id,
                         .nnodes = options.nnodes,
                         .max_restarts = options.max_restarts,
                         .heartbeat_ns = options.heartbeat_ns,
                         .lost_after_ns = options.lost_after_ns,
                         .offer = offer});
  if (!link->await_layout(options.deadline_ns)) return nullptr;
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
  post(FailedMessage{failure});
}

void NetworkNodeLink::report_left(int rank) {
  post(LeftMessage{rank});
}

void NetworkNodeLink::report_finished() {
  post(FinishedMessage{});
}

void NetworkNodeLink::rejoin(int master_port, int64_t deadline_ns) {
  if (layout_.attempt >= options_.max_restarts) {
    throw Error(Code::kRendezvous,
                fmt::format("the job was already restarted {} times", layout_.attempt),
                "raise --max-restarts on all hosts");
  }
  {
    // Remaining events belong to the attempt that failed.
    const std::lock_guard lock(mutex_);
    events_.clear();
    events_wake_.clear();
    if (state_ == State::kRunning || state_ == State::kFailed) {
      state_ = State::kJoining;
      status_ = {};
    }
  }
  post(RejoinMessage{master_port});
  if (await_layout(deadline_ns)) return;
  throw Error(Code::kRendezvous, "the job has finished: it cannot be joined again",
              "start it again on all hosts");
}

void NetworkNodeLink::post(const NodeMessage& message) {
  {
    const std::lock_guard lock(mutex_);
    outbox_.push_back(encode(message));
  }
  outbox_wake_.raise();
}

// Returns false if the job finished instead.
bool NetworkNodeLink::await_layout(int64_t deadline_ns) {
  const int64_t since_ns = running_ns();
  std::string shown;
  std::unique_lock lock(mutex_);
  while (!next_layout_) {
    if (state_ == State::kRefused) throw Error(Code::kRendezvous, refusal_.why, refusal_.help);
    if (state_ == State::kFinished) return false;
    if (state_ == State::kLost) {
      throw Error(Code::kRendezvous,
                  fmt::format("the rendezvous at {} ended before enough hosts had joined: {}",
                              endpoint(), why_lost_),
                  "look at the launcher of node 0: it gave up, failed, or was stopped", notes());
    }
    const int64_t left_ns = deadline_ns - running_ns();
    // With enough hosts here an attempt is about to begin: only the last call is awaited.
    const bool enough =
        status_.running == 0 && static_cast<int>(status_.present.size()) >= options_.nnodes.least;
    if (left_ns <= 0 && !enough) throw_incomplete(since_ns);
    if (const std::string line = waiting_for(deadline_ns - since_ns); line != shown) {
      shown = line;
      lock.unlock();
      if (!line.empty()) options_.on_wait(line);
      lock.lock();
      continue;
    }
    changed_.wait_for(lock, std::chrono::nanoseconds(
                                std::clamp<int64_t>(left_ns, kShortestWaitNs, kLongestWaitNs)));
  }
  layout_ = std::move(*next_layout_);
  next_layout_.reset();
  return true;
}

// What this host waits for, in one line; "" if there is nothing to say.
std::string NetworkNodeLink::waiting_for(int64_t longest_ns) const {
  const auto here = static_cast<int>(status_.present.size());
  if (status_.running > 0) {
    return fmt::format("the job runs on {} now; this host waits for its next attempt, at most {}",
                       counted(status_.running, "host"),
                       format_seconds(static_cast<double>(longest_ns) / 1e9));
  }
  if (here == 0 || here == options_.nnodes.most) return "";
  if (!options_.nnodes.elastic() && status_.lost.empty()) return "";
  return fmt::format("{} of {} hosts are here; waiting for {}", here, options_.nnodes.words(),
                     here < options_.nnodes.least ? "more" : "others that may come");
}

std::string NetworkNodeLink::endpoint() const {
  return endpoint_text(options_.host, options_.port);
}

std::vector<std::string> NetworkNodeLink::notes() const {
  std::vector<std::string> here;
  for (const auto& [rank, host] : status_.present) {
    here.push_back(rank < 0 ? host : fmt::format("{} (node {})", host, rank));
  }
  std::vector<std::string> all;
  if (!here.empty()) all.push_back(fmt::format("here: {}", fmt::join(here, ", ")));
  for (const auto& who : status_.lost) all.push_back("lost: " + who);
  for (const auto& who : status_.turned_away) all.push_back("turned away: " + who);
  return all;
}

void NetworkNodeLink::throw_incomplete(int64_t since_ns) const {
  const std::string waited = format_seconds(static_cast<double>(running_ns() - since_ns) / 1e9);
  if (status_.running > 0) {
    throw Error(Code::kRendezvous,
                fmt::format("the job at {} needed no further host within {}: it runs on {}",
                            endpoint(), waited, status_.running),
                "start this host again to wait again, or with a longer --join-timeout", notes());
  }
  std::vector<int> missing;
  for (int rank = 0; rank < options_.nnodes.most; ++rank) missing.push_back(rank);
  bool all_numbered = !options_.nnodes.elastic();
  for (const auto& [rank, host] : status_.present) {
    all_numbered = all_numbered && rank >= 0;
    std::erase(missing, rank);
  }
  const int here = static_cast<int>(status_.present.size());
  const std::string who = all_numbered ? fmt::format("node {}", fmt::join(missing, ", node "))
                                       : fmt::format("{} more", options_.nnodes.least - here);
  throw Error(
      Code::kRendezvous,
      fmt::format("{} of {} hosts came to {} within {}; missing: {}", here,
                  options_.nnodes.elastic() ? fmt::format("at least {}", options_.nnodes.least)
                                            : options_.nnodes.text(),
                  endpoint(), waited, who),
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
  int64_t next_beat_ns = running_ns() + options_.heartbeat_ns;
  int64_t last_message_ns = running_ns();
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
      last_message_ns = running_ns();
      handle(decode_node_message(*payload));
    }
    if (running_ns() >= next_beat_ns) {
      connection_->post(encode(BeatMessage{}));
      next_beat_ns = running_ns() + options_.heartbeat_ns;
    }
    // Node 0's own launcher shares the coordinator's process.
    if (!server_ && running_ns() - last_message_ns > options_.lost_after_ns) {
      lose(fmt::format("it was silent for {}",
                       format_seconds(static_cast<double>(options_.lost_after_ns) / 1e9)));
      return;
    }
  }
  connection_->wait(Connection::Until::kWritten, running_ns() + kLastMessageNs);
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
    put_event({NodeEvent::Kind::kFailed, failed->failure, -1});
  } else if (const auto* left = std::get_if<LeftMessage>(&message)) {
    if (state_ == State::kRunning) put_event({NodeEvent::Kind::kLeft, std::nullopt, left->rank});
  } else if (std::holds_alternative<FinishedMessage>(message)) {
    if (state_ == State::kRunning) put_event({NodeEvent::Kind::kFinished, std::nullopt, -1});
    if (state_ != State::kRunning && state_ != State::kJoining) return;
    state_ = State::kFinished;
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
  node_0_ = layout.hosts[0];
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
    put_event({NodeEvent::Kind::kFailed, loss_of_node_0(node_0_, why), -1});
  }
  why_lost_ = why;
  state_ = State::kLost;
  changed_.notify_all();
}

}  // namespace

int JobLayout::world_size() const {
  return std::accumulate(local_world_sizes.begin(), local_world_sizes.end(), 0);
}

int JobLayout::first_rank() const {
  return std::accumulate(local_world_sizes.begin(), local_world_sizes.begin() + node_rank, 0);
}

std::unique_ptr<NodeLink> NodeLink::join(const RendezvousOptions& options, const NodeOffer& offer) {
  return NetworkNodeLink::join(options, offer);
}

}  // namespace lockstep
