#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "launch/rendezvous_coordinator.hpp"
#include "launch/rendezvous_messages.hpp"
#include "net/connection.hpp"
#include "net/wake.hpp"

namespace lockstep {

/// What node 0 serves the meeting with.
struct CoordinatorServer {
  Coordinator coordinator;
  Hub hub;

  CoordinatorServer(const RendezvousOptions& options, Socket own_launcher);
};

/// One launcher's end of the meeting: a connection to the coordinator, and a thread that listens to
/// it and gives signs of life. Node 0's launcher has one too, over a socket pair.
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

  void say(const NodeMessage& message);
  void await_layout(int64_t deadline_ns);
  [[noreturn]] void throw_incomplete(int64_t since_ns) const;
  std::vector<std::string> notes() const;
  std::string place() const;

  // The thread's.
  void run();
  void talk();
  void handle(const NodeMessage& message);
  void take_layout(const LayoutMessage& message);
  void put_event(NodeEvent event);
  void lose(const std::string& why);

  const RendezvousOptions options_;
  std::unique_ptr<CoordinatorServer> server_;  // node 0's only; outlives the connection
  std::optional<Connection> connection_;       // the thread's, once it runs
  const std::string server_address_;           // "" on node 0
  JobLayout layout_;                           // the caller's: changed by join and rejoin only

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

}  // namespace lockstep
