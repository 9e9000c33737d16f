#pragma once

#include <torch/types.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/detail/board.hpp"
#include "lockstep/device_event.hpp"
#include "lockstep/reduce_op.hpp"

namespace lockstep {

class Backend;
struct CommState;

/// What may accompany a call.
struct CallOptions {
  std::string_view label = {};  ///< what it is for, such as "bucket 3"; appears in errors
  int64_t bucket = -1;          ///< shown on the board; -1: not a bucket
  double weight = 1;            ///< of this rank in a mean
  int tag = 0;                  ///< of a message
  /// Default: the communicator's own.
  std::optional<std::chrono::milliseconds> timeout = {};
};

/// What a communicator has done so far.
struct CommStats {
  int64_t calls = 0;
  int64_t all_reduces = 0;
  int64_t all_reduce_bytes = 0;  ///< of the buffers given
  int64_t sent_bytes = 0;        ///< data of this rank that others needed
  int64_t received_bytes = 0;
  int64_t inside_ns = 0;  ///< time the calling threads spent in calls, working or waiting
};

/// A call that was begun. Keeps its tensors alive. Destroyed before it is done, it aborts the
/// communicator.
///
/// On a GPU "done" means queued: work that is put on the calling thread's current stream after
/// wait() sees the result. advance() never blocks that stream, and so returns false until the
/// result is there.
class Work {
 public:
  struct State;
  Work();  ///< already done: for hooks that have done everything themselves
  explicit Work(std::unique_ptr<State> state);
  ~Work();
  Work(Work&&) noexcept;
  Work& operator=(Work&&) noexcept;

  /// Does what can be done without waiting. Returns true once the tensor holds the result.
  bool advance();
  void wait();

  /// When the GPU has the result, and the inputs of calls that were begun before the peers arrived.
  /// Empty until everything that leads there is queued, and if the host itself waits.
  std::optional<DeviceEvent> arrived() const;

  /// This work, followed by `next`, which runs once when the tensor holds the result, in the thread
  /// that advances or waits and on its current stream. The returned work is done when it has run.
  [[nodiscard]] Work then(std::function<void()> next) &&;

 private:
  std::unique_ptr<State> state_;
};

/// The ranks that work together, and their collectives and messages. A handle: copies are the same
/// communicator. All ranks make the same calls in the same order; each call is compared with the
/// peers' before data moves, and ends at its deadline with an Error that names the missing ranks.
///
/// Tensors are dense and contiguous. The host backend moves tensors on the CPU. The GPU backend
/// moves tensors on this rank's GPU, in the order of the calling thread's current stream, and
/// nothing waits for the GPU; without a GPU backend they go through the host's memory.
class Communicator {
 public:
  /// A world of one.
  static Communicator self();

  /// Ranks as threads of this process: [rank]. For tests, and to try things out. On a GPU they
  /// share it through the `ipc` backend; libtorch has one backward thread for each GPU, so calls
  /// inside backward require autograd's multithreading to be off in each of the ranks' threads.
  static std::vector<Communicator> threads(int size, torch::Device device = torch::kCPU);

  Communicator(std::unique_ptr<Backend> backend, std::chrono::milliseconds timeout);
  explicit Communicator(std::shared_ptr<CommState> state);  ///< of World

  int rank() const;
  int size() const;
  std::string_view backend() const;      ///< that of this rank's device: "shm", "ipc"
  std::vector<int> world_ranks() const;  ///< [rank here] -> rank of the world

  /// Reduces in place; every rank gets the same bits, in every run.
  void all_reduce(const torch::Tensor& tensor, ReduceOp op = ReduceOp::kSum,
                  const CallOptions& options = {}) const;

  /// The same, asynchronously: other calls may be made before it is waited for. This holds for all
  /// `begin_` forms; calls happen in the order in which they were begun.
  [[nodiscard]] Work begin_all_reduce(const torch::Tensor& tensor, ReduceOp op = ReduceOp::kSum,
                                      const CallOptions& options = {}) const;

  void broadcast(const torch::Tensor& tensor, int root, const CallOptions& options = {}) const;

  /// The root's tensor holds the reduction of all ranks' tensors; the others do not change.
  void reduce(const torch::Tensor& tensor, int root, ReduceOp op = ReduceOp::kSum,
              const CallOptions& options = {}) const;

  /// As torch.distributed's reduce_scatter_tensor: input holds size() blocks of output's elements,
  /// and rank r gets the reduction of the r-th blocks.
  /// The output may be this rank's block of the input.
  void reduce_scatter(const torch::Tensor& output, const torch::Tensor& input,
                      ReduceOp op = ReduceOp::kSum, const CallOptions& options = {}) const;
  [[nodiscard]] Work begin_reduce_scatter(const torch::Tensor& output, const torch::Tensor& input,
                                          ReduceOp op = ReduceOp::kSum,
                                          const CallOptions& options = {}) const;

  /// As torch.distributed's all_gather_into_tensor: output holds size() blocks of input's elements,
  /// by rank. The input may be this rank's block of the output.
  void all_gather(const torch::Tensor& output, const torch::Tensor& input,
                  const CallOptions& options = {}) const;
  [[nodiscard]] Work begin_all_gather(const torch::Tensor& output, const torch::Tensor& input,
                                      const CallOptions& options = {}) const;

  /// The tensors of all ranks, whose shapes may differ, by rank. The dtype is the same everywhere.
  std::vector<torch::Tensor> all_gather(const torch::Tensor& input,
                                        const CallOptions& options = {}) const;

  /// The root's output holds size() blocks of input's elements, by rank. The others' output is
  /// ignored, and may be undefined.
  void gather(const torch::Tensor& output, const torch::Tensor& input, int root,
              const CallOptions& options = {}) const;

  /// The root's input holds size() blocks of output's elements; rank r gets the r-th. The others'
  /// input is ignored, and may be undefined.
  void scatter(const torch::Tensor& output, const torch::Tensor& input, int root,
               const CallOptions& options = {}) const;

  /// As torch.distributed's all_to_all_single: both hold size() blocks. Block r of the input goes
  /// to rank r, whose block is block r of the output.
  void all_to_all(const torch::Tensor& output, const torch::Tensor& input,
                  const CallOptions& options = {}) const;

  /// The same with sizes per peer: of the input's rows (dimension 0), in order, input_rows[r] go to
  /// rank r; output_rows[r] come from it.
  void all_to_all(const torch::Tensor& output, const torch::Tensor& input,
                  const std::vector<int64_t>& output_rows, const std::vector<int64_t>& input_rows,
                  const CallOptions& options = {}) const;

  /// A message; dtype, count and tag must be those the receiver expects. Messages of a pair of
  /// ranks arrive in the order in which they were sent, and are outside the order of collectives.
  void send(const torch::Tensor& tensor, int to, const CallOptions& options = {}) const;
  void recv(const torch::Tensor& tensor, int from, const CallOptions& options = {}) const;
  [[nodiscard]] Work begin_send(const torch::Tensor& tensor, int to,
                                const CallOptions& options = {}) const;
  [[nodiscard]] Work begin_recv(const torch::Tensor& tensor, int from,
                                const CallOptions& options = {}) const;

  /// The root's bytes on every rank. What the others give is not looked at.
  std::string broadcast_text(std::string_view text, int root = 0,
                             const CallOptions& options = {}) const;

  /// The bytes of all ranks, of any length: [rank].
  std::vector<std::string> all_gather_text(std::string_view text,
                                           const CallOptions& options = {}) const;

  /// The same on the root, and nothing on the others.
  std::vector<std::string> gather_text(std::string_view text, int root = 0,
                                       const CallOptions& options = {}) const;

  /// Returns when all ranks have arrived. All ranks then see what any rank wrote before it to
  /// shared memory (release and acquire). The same holds for every collective that a rank has
  /// waited for.
  void barrier(const CallOptions& options = {}) const;

  /// The stream on which begun calls happen on this rank's GPU; empty before the first call, or if
  /// calls go through the host's memory.
  std::optional<c10::Stream> side_stream() const;

  /// Ranks with the same color form a communicator, ordered by (key, rank).
  Communicator split(int color, int key, std::string_view name) const;

  /// A zeroed tensor in memory that peers can reach, so that collectives on it, or on parts of it,
  /// need no copy. Collective: the same count and dtype on every rank. On a GPU without a backend:
  /// ordinary memory.
  torch::Tensor allocate(int64_t count, const torch::TensorOptions& options) const;

  /// Whether allocate_shared() works: the ranks share the memory of one host, or there is only one.
  bool can_share() const;

  /// One zeroed CPU tensor shared by all ranks: the same memory, mapped by each of them.
  /// Collective: the same count and dtype on every rank. For data that a host needs only once, such
  /// as the weights of a model. kBackend if ranks do not share memory, or for a GPU.
  ///
  /// Only barrier() and other collectives order the ranks' reads and writes. Each rank's memory
  /// account is charged its share, bytes / size(), so the shares add up to the memory used. The
  /// memory is freed when no rank has a tensor of it any more.
  torch::Tensor allocate_shared(int64_t count, const torch::TensorOptions& options) const;

  /// Gives up on behalf of this rank: peers that wait for it, now or later, fail with this reason.
  void abort(std::string_view reason) const;

  /// Shows calls on this page of a board from now on.
  void show_on(const BoardPage& page);

  /// Shows calls nowhere from now on: for calls that happen in the background.
  void hide();

  CommStats stats() const;
  std::chrono::milliseconds timeout() const;

 private:
  std::shared_ptr<CommState> state_;
};

}  // namespace lockstep
