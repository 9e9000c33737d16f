#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

/// What one host's launcher contributes to a job of several hosts.
struct NodeOffer {
  int node_rank = -1;  ///< -1: assign one by order of arrival
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
  int nnodes = 1;
  int max_restarts = 0;  ///< must be the same everywhere
  int64_t deadline_ns = 0;
  int64_t lost_after_ns = 10'000'000'000;  ///< of silence, by the running clock
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

/// A failure anywhere in the job, as reported to the other hosts.
struct RemoteFailure {
  int node_rank = 0;
  int rank = -1;  ///< in the world; -1: the host itself was lost
  int exit_code = 1;
  std::string text;        ///< one line
  bool permanent = false;  ///< a restart cannot help
};

/// What a launcher learns from the others.
struct NodeEvent {
  enum class Kind { kFailed, kFinished } kind = Kind::kFinished;
  /// kFailed: the job's first failure, sent to all hosts, including the one that reported it. Every
  /// launcher stops its ranks.
  std::optional<RemoteFailure> failure;
};

/// The rendezvous of the launchers, and the link between them while the job runs. Every message is
/// authenticated by HMAC; sizes and times are bounded; unauthenticated peers delay nobody. A host
/// that is silent for lost_after_ns, or disconnects before all its ranks have finished, is lost.
class NodeLink {
 public:
  /// Waits until all nodes have joined. A kRendezvous error names who came and who did not, or says
  /// why this launcher was refused.
  static std::unique_ptr<NodeLink> join(const RendezvousOptions& options, const NodeOffer& offer);
  virtual ~NodeLink() = default;

  virtual const JobLayout& layout() const = 0;

  /// Readable when take() has something.
  virtual int descriptor() const = 0;
  virtual std::optional<NodeEvent> take() = 0;

  /// Reports that a rank of this host failed: all hosts stop.
  virtual void report_failure(const RemoteFailure& failure) = 0;

  /// Reports that all ranks of this host ended well. kFinished comes when those of all hosts have.
  virtual void report_finished() = 0;

  /// After a failure, when this host's ranks are gone: waits for the other hosts and agrees on a
  /// new attempt (new session, master port and store). Counts as one restart; more than
  /// max_restarts are an Error. A host that joins meanwhile may replace one that was lost.
  virtual void rejoin(int master_port, int64_t deadline_ns) = 0;
};

}  // namespace lockstep
