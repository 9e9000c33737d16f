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
  std::optional<std::chrono::milliseconds> timeout =
      {};  ///< the communicator's own where not given
};

/// What a communicator has done so far.
struct CommStats {
  int64_t calls = 0;
  int64_t all_reduces = 0;
  int64_t all_reduce_bytes = 0;  ///< of the buffers given
  int64_t sent_bytes = 0;        ///< this rank's data that others had to get
  int64_t received_bytes = 0;
  int64_t inside_ns = 0;  ///< time the calling threads spent in calls, working or waiting
};

/// A collective that was begun. Keeps its tensor alive. Destroyed before it is done, it aborts the
/// communicator.
///
/// On a GPU "done" is queued and not awaited: what the calling thread's current stream is given
/// after wait() finds the result. advance() never holds that stream back, and so is not true
/// before.
class Work {
 public:
  struct State;
  Work();  ///< done already: for hooks that have done everything themselves
  explicit Work(std::unique_ptr<State> state);
  ~Work();
  Work(Work&&) noexcept;
  Work& operator=(Work&&) noexcept;

  /// Does what can be done without waiting; true when the tensor holds the result.
  bool advance();
  void wait();

  /// When the GPU has the result, and the inputs of all_reduces that were begun by the time the
  /// peers had come. None before all that leads there is queued, nor where the host waits itself.
  std::optional<DeviceEvent> arrived() const;

  /// This work, and `next` after it: it runs once, when the tensor holds the result, in the thread
  /// that advances or waits and on its current stream. Both are done when it has run.
  [[nodiscard]] Work then(std::function<void()> next) &&;

 private:
  std::unique_ptr<State> state_;
};

/// The ranks that work together, and their collectives and messages. A handle: copies are the same
/// communicator. All ranks make the same calls in the same order; each call is compared with the
/// peers' before data moves and ends at its deadline with an Error that names who is missing.
///
/// Tensors are dense and contiguous. Those on the CPU go to the host's backend. Those on this
/// rank's GPU go to the GPU's backend, in the order of the calling thread's current stream, and
/// nothing waits for the GPU; where there is no such backend they go through the host's memory.
class Communicator {
 public:
  /// A world of one.
  static Communicator self();

  /// Ranks as threads of this process: [rank]. For tests, and to try things out. On a GPU they
  /// share it through the `ipc` backend; libtorch has one backward thread for each GPU, so that
  /// calls inside backward need torch::autograd's multithreading off in each of the ranks' threads.
  static std::vector<Communicator> threads(int size, torch::Device device = torch::kCPU);

  Communicator(std::unique_ptr<Backend> backend, std::chrono::milliseconds timeout);
  explicit Communicator(std::shared_ptr<CommState> state);  ///< of World

  int rank() const;
  int size() const;
  std::string_view backend() const;      ///< what serves this rank's device: "shm", "ipc"
  std::vector<int> world_ranks() const;  ///< [rank here] -> rank of the world

  /// Reduces in place; every rank gets the same bits, in every run.
  void all_reduce(const torch::Tensor& tensor, ReduceOp op = ReduceOp::kSum,
                  const CallOptions& options = {}) const;

  /// The same, begun; other calls may be made before it is waited for.
  [[nodiscard]] Work begin_all_reduce(const torch::Tensor& tensor, ReduceOp op = ReduceOp::kSum,
                                      const CallOptions& options = {}) const;

  void broadcast(const torch::Tensor& tensor, int root, const CallOptions& options = {}) const;

  /// As torch.distributed's reduce_scatter_tensor: input holds size() blocks of output's elements,
  /// and rank r gets the reduction of the r-th blocks.
  void reduce_scatter(const torch::Tensor& output, const torch::Tensor& input,
                      ReduceOp op = ReduceOp::kSum, const CallOptions& options = {}) const;

  /// As torch.distributed's all_gather_into_tensor: output holds size() blocks of input's elements,
  /// by rank.
  void all_gather(const torch::Tensor& output, const torch::Tensor& input,
                  const CallOptions& options = {}) const;

  /// A message; dtype, count and tag must be those the receiver expects.
  void send(const torch::Tensor& tensor, int to, const CallOptions& options = {}) const;
  void recv(const torch::Tensor& tensor, int from, const CallOptions& options = {}) const;

  void barrier(const CallOptions& options = {}) const;

  /// The stream in whose order begun calls happen on this rank's GPU; none before the first, or
  /// if they go through the host's memory.
  std::optional<c10::Stream> side_stream() const;

  /// Ranks of one color form a communicator of their own, ordered by (key, rank).
  Communicator split(int color, int key, std::string_view name) const;

  /// A zeroed tensor in memory that peers can reach, so that collectives on it, or on parts of it,
  /// need no copy. Collective: the same count and dtype on every rank. On a GPU without a backend:
  /// ordinary memory.
  torch::Tensor allocate(int64_t count, const torch::TensorOptions& options) const;

  /// This rank gives up: peers that wait for it, now or later, fail with this reason.
  void abort(std::string_view reason) const;

  /// Shows calls on this page of a board from now on.
  void show_on(const BoardPage& page);

  /// Shows calls nowhere from now on: for calls that happen behind the rank's own work.
  void hide();

  CommStats stats() const;
  std::chrono::milliseconds timeout() const;

 private:
  Work begin(const torch::Tensor& tensor, ReduceOp op, const CallOptions& options,
             bool on_side) const;

  std::shared_ptr<CommState> state_;
};

}  // namespace lockstep
