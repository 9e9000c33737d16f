#pragma once

#include <torch/types.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/board.hpp"
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

/// An all_reduce that was begun. Keeps its tensor alive. Destroyed before it is done, it aborts the
/// communicator.
class Work {
 public:
  struct State;
  explicit Work(std::unique_ptr<State> state);
  ~Work();
  Work(Work&&) noexcept;
  Work& operator=(Work&&) noexcept;

  /// Does what can be done without waiting; true when the tensor holds the result.
  bool advance();
  void wait();

 private:
  std::unique_ptr<State> state_;
};

/// The ranks that work together, and what they can tell each other. A handle: copies are the same
/// communicator. All ranks make the same calls in the same order; each call is compared with the
/// peers' before data moves and ends at its deadline with an Error that names who is missing.
///
/// Tensors are dense and contiguous. Those on a GPU go through the host's memory.
class Communicator {
 public:
  /// A world of one.
  static Communicator self();

  /// Ranks as threads of this process: [rank]. For tests, and to try things out.
  static std::vector<Communicator> threads(int size);

  Communicator(std::unique_ptr<Backend> backend, std::chrono::milliseconds timeout);

  int rank() const;
  int size() const;
  std::string_view backend() const;      ///< "shm"
  std::vector<int> world_ranks() const;  ///< [rank here] -> rank of the world

  /// Reduces in place; every rank gets the same bits, in every run.
  void all_reduce(const torch::Tensor& tensor, ReduceOp op = ReduceOp::kSum,
                  const CallOptions& options = {}) const;

  /// The same, begun; other calls may be made before it is waited for.
  [[nodiscard]] Work begin_all_reduce(const torch::Tensor& tensor, ReduceOp op = ReduceOp::kSum,
                                      const CallOptions& options = {}) const;

  void broadcast(const torch::Tensor& tensor, int root, const CallOptions& options = {}) const;

  /// input holds size() blocks of output's elements; rank r gets the reduction of the r-th blocks.
  void reduce_scatter(const torch::Tensor& input, const torch::Tensor& output,
                      ReduceOp op = ReduceOp::kSum, const CallOptions& options = {}) const;

  /// output holds size() blocks of input's elements, by rank.
  void all_gather(const torch::Tensor& input, const torch::Tensor& output,
                  const CallOptions& options = {}) const;

  /// A message; dtype, count and tag must be those the receiver expects.
  void send(const torch::Tensor& tensor, int to, const CallOptions& options = {}) const;
  void recv(const torch::Tensor& tensor, int from, const CallOptions& options = {}) const;

  void barrier(const CallOptions& options = {}) const;

  /// Ranks of one colour form a communicator of their own, ordered by (key, rank).
  Communicator split(int colour, int key, std::string_view name) const;

  /// A zeroed tensor in memory that peers can reach, so that collectives on it, or on parts of it,
  /// need no copy. Collective: the same count and dtype on every rank. On a GPU: ordinary memory.
  torch::Tensor allocate(int64_t count, const torch::TensorOptions& options) const;

  /// This rank gives up: peers that wait for it, now or later, fail with this reason.
  void abort(std::string_view reason) const;

  /// From now on calls are shown on this page of a board.
  void show_on(const BoardPage& page);

  /// From now on they are shown nowhere: for calls that happen behind the rank's own work.
  void hide();

  CommStats stats() const;
  std::chrono::milliseconds timeout() const;

 private:
  std::shared_ptr<CommState> state_;
};

}  // namespace lockstep
