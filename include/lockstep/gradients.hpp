#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/communicator.hpp"
#include "lockstep/device_event.hpp"

namespace lockstep {

/// Gradients that are averaged together.
struct GradientBucket {
  int64_t index = 0;                    ///< in launch order
  torch::Tensor gradients;              ///< one flat tensor; the parameters' grads are views of it
  std::vector<std::string> parameters;  ///< their names, in the order of their gradients in memory
  int64_t micro_steps = 1;  ///< backward passes since the last average, including this one
};

/// Replaces the averaging of buckets. `weight` is this rank's weight in the mean. When the Work is
/// done, the bucket must hold the averaged gradients: Work::then() adds what follows a collective,
/// and Work() says that the hook has done everything itself.
using CommHook =
    std::function<Work(const Communicator& comm, const GradientBucket& bucket, double weight)>;

/// A hook that sends half the bytes: it rounds gradients to bf16 or fp16, averages them and widens
/// the result.
CommHook compress_gradients(torch::ScalarType dtype);

/// What to do when this rank's gradients are infinite or NaN, which the mean would pass on to all
/// ranks. Nothing is checked while an enabled GradScaler exists: it skips such steps.
enum class Nonfinite {
  kIgnore,
  kWarn,  ///< names rank, step and parameter on standard error
  kStop,  ///< ends the step on all ranks with kNonfinite; on a GPU a few steps later
};

/// How DistributedDataParallel averages gradients.
struct DdpOptions {
  int64_t first_bucket_bytes = int64_t{1} << 20;
  int64_t bucket_cap_bytes = int64_t{25} << 20;
  bool broadcast_buffers = true;  ///< send rank 0's buffers to all before a synchronised forward
  bool find_unused_parameters = false;  ///< the parameters in use may change from step to step
  bool static_graph = false;            ///< every step does what the first one did
  int64_t check_replicas_every = 0;     ///< steps between comparisons of all weights; 0: never.
                                        ///< They are made before forwards in training mode

  /// Weights that change after micro-steps inside NoSync raise LS0024, unless the gradients of
  /// those micro-steps were dropped and the ranks' weights agree one step later. False disables
  /// the check.
  bool check_unaveraged_updates = true;

  CommHook hook = {};  ///< empty: the communicator's mean
  Nonfinite nonfinite = Nonfinite::kWarn;

  /// Cuts every global batch into this many parts, a multiple of the number of ranks. Steps are
  /// then made with backward_parts(), and the weights are the same bits on every number of ranks
  /// that divides it: see docs/same_bits.md. 0: off.
  int64_t virtual_shards = 0;
  int part_threads = 1;  ///< threads that compute a part; the same in all runs that are compared
};

/// When a bucket was in flight in the last synchronised step. Times are monotonic_ns(); on a GPU
/// they are those at which its streams got there. A bucket that peers join only after this rank has
/// launched the next one counts as in flight until the next one's gradients are ready.
struct BucketTiming {
  int64_t index = 0;
  int64_t bytes = 0;
  int64_t parameters = 0;
  int64_t launched_ns = 0;
  int64_t finished_ns = 0;
};

/// What synchronisation has cost so far. On a GPU times are those of its streams.
struct DdpStats {
  int64_t synchronised_backwards = 0;
  int64_t all_reduces = 0;           ///< of buckets
  int64_t bytes = 0;                 ///< of buckets
  int64_t communication_ns = 0;      ///< time in which at least one bucket was in flight
  int64_t exposed_ns = 0;            ///< the part for which the training thread or stream waited
  int64_t backward_started_ns = 0;   ///< of the last synchronised step
  int64_t backward_finished_ns = 0;  ///< when the last gradient of that step was ready
  std::vector<BucketTiming> last_step;

  /// Synchronised steps in which this rank's own gradients were infinite or NaN, and the first such
  /// step, counted from 1. All stay 0 with Nonfinite::kIgnore.
  int64_t nonfinite_steps = 0;
  int64_t first_nonfinite_step = 0;
  std::string first_nonfinite_parameter = {};
};

}  // namespace lockstep
