#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "launch/flags.hpp"

namespace lockstep {

/// What one host's launcher contributes to a job of several hosts.
struct NodeOffer {
  int node_rank = -1;  ///< this host's number; -1: by order of arrival
  int local_world_size = 1;
  std::string host;     ///< this host's name, for messages
  int master_port = 0;  ///< free on this host; node 0's becomes MASTER_PORT
};

struct RendezvousOptions {
  std::string host;  ///< of the endpoint: node 0's name or address
  int port = 0;
  bool serve = false;  ///< this launcher, node 0, serves the rendezvous
  std::string token;   ///< the secret that all launchers prove to know
  std::string job_id;  ///< --rdzv-id; launchers with another id are refused
  // Must be the same everywhere.
  HostCount nnodes;
  int max_restarts = 0;
  int64_t heartbeat_ns = 1'000'000'000;
  int64_t lost_after_ns = 10'000'000'000;  ///< of silence, by the running clock

  int64_t deadline_ns = 0;
  int64_t last_call_ns = 30'000'000'000;  ///< node 0's counts
  /// Called while join() and rejoin() wait, on the caller's thread: one line for the console.
  std::function<void(const std::string&)> on_wait = [](const std::string&) {};
};

/// What all launchers agreed on.
struct JobLayout {
  int node_rank = 0;
  std::vector<int> local_world_sizes;  ///< [node]
  std::vector<std::string> hosts;      ///< [node]
  std::string master_addr;             ///< as this host reaches node 0
  int master_port = 0;
  int attempt = 0;      ///< restarts so far
  std::string session;  ///< unique to this job and attempt
  std::string store;    ///< "host:port" of the store that node 0's launcher serves for the ranks

  int world_size() const;
  int first_rank() const;  ///< of this node
};

/// Whether another attempt may follow a failure.
enum class Restart {
  kMayHelp,
  kSameAgain,  ///< the ranks would end the same way again
  kImpossible  ///< the job was asked to stop, or node 0 was lost
};

/// A failure anywhere in the job, as reported to the other hosts.
struct RemoteFailure {
  int node_rank = 0;
  int rank = -1;  ///< in the world; -1: the host itself was lost, or is leaving
  int exit_code = 1;
  std::string text;  ///< one line
  Restart restart = Restart::kMayHelp;
};

/// What a launcher learns from the others.
struct NodeEvent {
  enum class Kind { kFailed, kFinished, kLeft } kind = Kind::kFinished;
  /// kFailed: the job's first failure, sent to all hosts, including the one that reported it. Every
  /// launcher stops its ranks.
  std::optional<RemoteFailure> failure;
  /// kLeft: the rank of another host that ended well and never came to a rendezvous. That is fine
  /// unless others wait for it there.
  int left_rank = -1;
};

/// The rendezvous of the launchers, and the link between them while the job runs. Every message is
/// authenticated by HMAC; sizes and times are bounded; unauthenticated peers delay nobody. A host
/// that is silent for lost_after_ns, or disconnects before all its ranks have finished, is lost.
/// Node 0 decides which hosts take part: a host that has lost node 0 ends its ranks, so that after
/// a cut of the network only node 0's side can go on.
class NodeLink {
 public:
  /// Waits until an attempt begins: with nnodes.most hosts, or with at least nnodes.least if no
  /// other came for last_call_ns. A launcher that comes while an attempt runs waits for the next
  /// one; the result is nullptr if the job finishes without it. A kRendezvous error names the
  /// hosts that came and those that did not, or says why this launcher was refused.
  static std::unique_ptr<NodeLink> join(const RendezvousOptions& options, const NodeOffer& offer);
  virtual ~NodeLink() = default;

  virtual const JobLayout& layout() const = 0;

  /// Readable when take() has something.
  virtual int descriptor() const = 0;
  virtual std::optional<NodeEvent> take() = 0;

  /// Reports that a rank of this host failed: all hosts stop.
  virtual void report_failure(const RemoteFailure& failure) = 0;

  /// Reports a rank of this host that ended well and never came to a rendezvous.
  virtual void report_left(int rank) = 0;

  /// Reports that all ranks of this host ended well. kFinished comes when those of all hosts have.
  virtual void report_finished() = 0;

  /// After a failure, when this host's ranks are gone: waits for the other hosts, as join() does,
  /// and agrees on a new attempt (new session, master port and store; other hosts and ranks if some
  /// were lost or came). Counts as one restart; more than max_restarts are an Error.
  virtual void rejoin(int master_port, int64_t deadline_ns) = 0;
};

}  // namespace lockstep
