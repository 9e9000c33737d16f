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

// At least once a second, whatever this host's timeout is: another host's may be shorter.
int64_t beat_ns(const RendezvousOptions& options) {
  return std::min<int64_t>(options.lost_after_ns / 10, 1'000'000'000);
}

void check_options(const RendezvousOptions& options, const NodeOffer& offer) {
  const auto fail = [](const std::string& message, const char* help) {
    throw Error(Code::kUsage, message, help);
  };
  if (options.nnodes < 1 || options.nnodes > kMaxNodes)
    fail(fmt::format("a job of {} hosts", options.nnodes), "use --nnodes 1 to 2048");
  if (offer.node_rank >= options.nnodes) {
    fail(fmt::format("node rank {} does not exist in a job of {} hosts", offer.node_rank,
                     options.nnodes),
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
             .tick_ns = beat_ns(options),
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
  void report_finished() override;
  void rejoin(int master_port, int64_t deadline_ns) override;

 private:
  enum class State { kJoining, kRunning, kFailed, kFinished, kRefused, kLost };

  NetworkNodeLink(const RendezvousOptions& options, std::unique_ptr<CoordinatorServer> server,
                  Connection connection);

  void post(const NodeMessage& message);
  void await_layout(int64_t deadline_ns);
  [[noreturn]] void throw_incomplete(int64_t since_ns) const;
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
  post(FailedMessage{failure});
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
  await_layout(deadline_ns);
}

void NetworkNodeLink::post(const NodeMessage& message) {
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
      throw Error(Code::kRendezvous,
                  fmt::format("the rendezvous at {} ended before all hosts had joined: {}",
                              endpoint(), why_lost_),
                  "look at the launcher of node 0: it gave up, failed, or was stopped", notes());
    }
    const int64_t left_ns = deadline_ns - running_ns();
    if (left_ns <= 0) throw_incomplete(since_ns);
    changed_.wait_for(lock, std::chrono::nanoseconds(std::min<int64_t>(left_ns, 1'000'000'000)));
  }
  layout_ = std::move(*next_layout_);
  next_layout_.reset();
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
  for (const auto& who : status_.turned_away) all.push_back("turned away: " + who);
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
                          status_.present.size(), options_.nnodes, endpoint(),
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
