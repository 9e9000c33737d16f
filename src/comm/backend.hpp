#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/cuda_stream.hpp"
#include "comm/fingerprint.hpp"

namespace lockstep {

class Store;
struct AbortRecord;

/// Elements that a call may write.
struct Buffer {
  void* data = nullptr;
  int64_t count = 0;
  Dtype dtype = Dtype::kF32;

  int64_t bytes() const { return count * dtype_bytes(dtype); }
};

/// Elements that a call only reads.
struct ConstBuffer {
  const void* data = nullptr;
  int64_t count = 0;
  Dtype dtype = Dtype::kF32;

  int64_t bytes() const { return count * dtype_bytes(dtype); }
};

/// What a rank gives to and takes from every rank, itself included. The blocks that it takes follow
/// each other in its output; so do those that it gives in its input, unless each peer gets the same
/// one. Gathers, scatters and exchanges are all of this kind and differ in their counts.
struct BlockExchange {
  Operation operation = Operation::kAllToAll;  ///< as errors call it; kAllGather: the same for all
  int root = -1;
  int64_t count = Fingerprint::kOwnCounts;  ///< of a block, if it is the same between all
  std::vector<int64_t> given;               ///< [group rank], elements
  std::vector<int64_t> taken;               ///< [group rank], elements

  bool same_for_all() const { return operation == Operation::kAllGather; }
  int64_t given_offset(int peer) const;  ///< in the input, elements
  int64_t taken_offset(int peer) const;  ///< in the output, elements
  int64_t given_count() const;           ///< that the input holds
  int64_t taken_count() const;           ///< that the output holds

  static BlockExchange all_to_all(std::vector<int64_t> given, std::vector<int64_t> taken);
  static BlockExchange all_to_all(const Group& group, int64_t count);
  static BlockExchange gather(const Group& group, int64_t count, int root);
  static BlockExchange scatter(const Group& group, int64_t count, int root);
  /// The exchange of ranks whose inputs have these counts.
  static BlockExchange all_gather(const Group& group, std::vector<int64_t> counts);
};

/// What accompanies every call.
struct CallContext {
  int64_t deadline_ns = 0;      ///< running_ns() at which waiting ends in an Error
  std::string_view label = {};  ///< what the call is for; appears in messages
  CudaStream stream = nullptr;  ///< of a GPU backend: in whose order the call happens
  /// The call that this one is a part of: errors speak of that one. It outlives this call.
  const Fingerprint* part_of = nullptr;
  /// The caller waits as soon as the call is begun: no other thread needs to begin with it.
  bool waits_at_once = false;
};

/// Memory that peers of the communicator can reach; freed with the last handle.
class RegisteredMemory {
 public:
  virtual ~RegisteredMemory() = default;
  virtual void* data() const = 0;
  virtual int64_t bytes() const = 0;
};

/// A way to move bytes between the ranks of one group. It knows no torch: `Communicator` is the
/// same thing for tensors.
///
/// All ranks make the same collective calls in the same order, each from one thread at a time.
/// Every backend compares the ranks' fingerprints before data moves, and ends every wait at the
/// deadline: see failure.hpp for the errors. After an error the communicator is of no more use:
/// every later call throws that error again.
///
/// A GPU backend moves a GPU's memory. Its calls are compared and awaited on the host as all are,
/// but only queue the movement: "done" means that work queued afterwards on the call's stream finds
/// the result there, and that what was queued before on it was waited for.
class Backend {
 public:
  /// A call that was begun. Its buffers must stay until it is done. Destroyed before that, it
  /// aborts its communicator.
  class Work {
   public:
    virtual ~Work() = default;

    /// Does what can be done without waiting; true when the call is done.
    virtual bool advance() = 0;

    /// Waits until the call is done.
    virtual void wait() = 0;

    /// Another deadline for what is left of a message; shm only.
    virtual void set_deadline(int64_t /*deadline_ns*/) {}
  };

  virtual ~Backend() = default;

  virtual std::string_view name() const = 0;  ///< "shm"
  virtual bool on_gpu() const { return false; }
  virtual const Group& group() const = 0;
  int rank() const { return group().rank; }
  int size() const { return group().size(); }

  // Collectives that move elements return when they have begun. Several may be in flight, and other
  // calls may be made meanwhile; they happen in the order in which they were begun. `weight` counts
  // for kMean only.

  /// Reduces in place; every rank gets the same bits.
  [[nodiscard]] virtual std::unique_ptr<Work> all_reduce(const Buffer& buffer, ReduceOp op,
                                                         double weight,
                                                         const CallContext& context) = 0;

  [[nodiscard]] virtual std::unique_ptr<Work> broadcast(const Buffer& buffer, int root,
                                                        const CallContext& context) = 0;

  /// input holds size() blocks of output.count; rank r's output is the reduction of all r-th
  /// blocks. The output may be the r-th block of the input, and nothing else of it.
  [[nodiscard]] virtual std::unique_ptr<Work> reduce_scatter(const ConstBuffer& input,
                                                             const Buffer& output, ReduceOp op,
                                                             double weight,
                                                             const CallContext& context) = 0;

  /// output holds size() blocks of input.count, by rank. The input of rank r may be the r-th block
  /// of the output, and nothing else of it.
  [[nodiscard]] virtual std::unique_ptr<Work> all_gather(const ConstBuffer& input,
                                                         const Buffer& output,
                                                         const CallContext& context) = 0;

  /// Reduces into the root's buffer; the others' stay as they are.
  [[nodiscard]] virtual std::unique_ptr<Work> reduce(const Buffer& buffer, int root, ReduceOp op,
                                                     double weight, const CallContext& context) = 0;

  /// Every rank gives blocks and takes blocks: gathers, scatters and all_to_all. What a rank gives
  /// to a peer must be what the peer takes from it: kCallMismatch, before data moves.
  [[nodiscard]] virtual std::unique_ptr<Work> exchange(const ConstBuffer& input,
                                                       const Buffer& output,
                                                       const BlockExchange& blocks,
                                                       const CallContext& context) = 0;

  /// Messages between two ranks arrive in the order they were sent; tag, dtype and count must be
  /// those the receiver expects. A send may be done before the receiver has come. Messages have no
  /// order with collectives.
  [[nodiscard]] virtual std::unique_ptr<Work> send(const ConstBuffer& buffer, int to, int tag,
                                                   const CallContext& context) = 0;
  [[nodiscard]] virtual std::unique_ptr<Work> recv(const Buffer& buffer, int from, int tag,
                                                   const CallContext& context) = 0;

  /// Moves messages that were begun, as far as they go without waiting; true where some are left.
  /// An error is kept for the next call.
  virtual bool progress() noexcept { return false; }

  /// What also goes on while this rank waits in here: progress() of a backend on top of this one.
  virtual void while_waiting(std::function<bool()> /*progress*/) {}

  virtual void barrier(const CallContext& context) = 0;

  /// Ranks of one color form a new group, ordered by (key, rank); its name appears in messages.
  virtual std::unique_ptr<Backend> split(int color, int key, std::string_view group_name,
                                         const CallContext& context) = 0;

  /// Collective: the same size on every rank. Zeroed, aligned to a page.
  virtual std::shared_ptr<RegisteredMemory> allocate(int64_t bytes, const CallContext& context) = 0;

  /// Whether ranks can have one piece of memory in common. A rank alone can.
  virtual bool can_share() const { return size() == 1; }

  /// Collective: as allocate(), but all ranks get the same memory. Where can_share() only.
  virtual std::shared_ptr<RegisteredMemory> allocate_shared(int64_t bytes,
                                                            const CallContext& context) {
    return allocate(bytes, context);
  }

  /// This rank gives up: peers that wait for it, now or later, fail as the record says.
  virtual void abort(const AbortRecord& record) noexcept = 0;

  /// The same by this rank's own decision: peers get kRankFailed with this reason.
  void abort(std::string_view reason) noexcept;
};

/// The work of a call that is done.
std::unique_ptr<Backend::Work> make_done_work();

// Every backend there is, and how each is made.

/// One rank: every operation is the identity.
std::unique_ptr<Backend> make_self_backend();

/// Ranks of one host that share memory. `session` is the same text on all ranks of a job and on no
/// others of this user.
struct ShmOptions {
  std::string session;
  int rank = 0;
  int size = 1;
  int64_t deadline_ns = 0;          ///< of the rendezvous
  std::optional<Group> group = {};  ///< as messages speak of these ranks; none: they are the world
};
std::unique_ptr<Backend> make_shm_backend(const ShmOptions& options);

/// The same between threads of this process: [rank].
std::vector<std::unique_ptr<Backend>> make_shm_thread_backends(int size);

/// Ranks on any hosts. They agree on their calls over TCP, and the module of the named backend
/// moves their data: "gloo"; or "mpi", for ranks that MPI started (RankEnvironment::under_mpi).
struct NetworkOptions {
  std::shared_ptr<Store> store;  ///< through which the ranks exchange addresses
  int rank = 0;
  int size = 1;
  std::string address;      ///< this host's address that the others can reach
  int64_t deadline_ns = 0;  ///< of the rendezvous
};
std::unique_ptr<Backend> make_network_backend(std::string_view name, const NetworkOptions& options);

/// Ranks on several hosts, of which some have several: data moves through shared memory inside a
/// host, and by Gloo between hosts, once for all of its ranks.
struct TwoLevelOptions {
  NetworkOptions network;
  std::string host;  ///< where this rank is; ranks that give the same text share memory
};
std::unique_ptr<Backend> make_two_level_backend(const TwoLevelOptions& options);

// GPU backends, of builds with CUDA only. Each stands on a host backend of the same ranks, over
// which fingerprints are compared, and which must outlive it. Collective.
struct GpuBackendOptions {
  Backend* host = nullptr;
  int gpu = 0;              ///< of this rank, as CUDA counts
  int64_t deadline_ns = 0;  ///< of the rendezvous
};

/// Ranks of one host, on one GPU or on GPUs that reach each other's memory: CUDA IPC memory and
/// events.
std::unique_ptr<Backend> make_ipc_backend(const GpuBackendOptions& options);

/// Ranks with a GPU each, on any hosts.
std::unique_ptr<Backend> make_nccl_backend(const GpuBackendOptions& options);

/// Whether this build has NCCL; without it make_nccl_backend() is an Error (kBackend).
bool nccl_is_built();

}  // namespace lockstep
