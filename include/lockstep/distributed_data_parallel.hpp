#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/communicator.hpp"
#include "lockstep/moment.hpp"
#include "lockstep/tensor_tree.hpp"

namespace lockstep {

class Trace;
class NoSync;

/// Gradients that are averaged together.
struct GradientBucket {
  int64_t index = 0;                    ///< in the order of launch
  torch::Tensor gradients;              ///< one flat tensor; the parameters' grads are views of it
  std::vector<std::string> parameters;  ///< their names, in the order they lie in it
  int64_t micro_steps = 1;  ///< backward passes since the last average, this one included
};

/// A bucket on its way through the ranks.
class BucketWork {
 public:
  virtual ~BucketWork() = default;
  virtual bool advance() = 0;  ///< does what needs no waiting; true when done
  virtual void wait() = 0;     ///< afterwards the bucket holds the averaged gradients

  /// That of its Work, on a GPU. Without it the bucket counts as under way, and those behind it
  /// move on, only when it is waited for.
  virtual std::optional<Moment> arrived() const { return std::nullopt; }
};

/// Replaces the averaging of buckets. `weight` is this rank's in the mean.
using CommHook = std::function<std::unique_ptr<BucketWork>(
    const Communicator& comm, const GradientBucket& bucket, double weight)>;

/// Sends gradients in half the bytes: rounded to bf16 or fp16, averaged, widened again.
CommHook compress_gradients(torch::ScalarType dtype);

/// What to do when this rank's gradients are infinite or not a number, which the mean would pass on
/// to all ranks. Nothing is done while an enabled GradScaler is there: it skips such steps.
enum class Nonfinite {
  kIgnore,
  kWarn,  ///< names rank, step and parameter on standard error
  kStop,  ///< ends the step on all ranks with kNonfinite; on a GPU a few steps later
};

struct DdpOptions {
  int64_t first_bucket_bytes = int64_t{1} << 20;
  int64_t bucket_cap_bytes = int64_t{25} << 20;
  bool broadcast_buffers = true;  ///< rank 0's buffers to all before each synchronised forward
  bool find_unused_parameters = false;  ///< parameters in use may change from step to step
  bool static_graph = false;            ///< what the first step did, every step does
  int64_t check_replicas_every = 0;     ///< steps between comparisons of all weights; 0: never

  /// Weights that change after micro-steps inside NoSync are LS0024, unless the gradients of these
  /// were dropped and the ranks' weights agree in the step after. False: nothing is checked.
  bool check_unaveraged_updates = true;

  CommHook hook = {};  ///< empty: the communicator's mean
  Nonfinite nonfinite = Nonfinite::kWarn;
};

/// When a bucket travelled in the last synchronised step. Times are monotonic_ns(); on a GPU those
/// at which its streams got there. A bucket that peers join only after this rank has launched the
/// next one counts as under way until that one's gradients are there.
struct BucketTiming {
  int64_t index = 0;
  int64_t bytes = 0;
  int64_t parameters = 0;
  int64_t launched_ns = 0;
  int64_t finished_ns = 0;
};

/// What synchronisation cost so far; on a GPU in times of its streams.
struct DdpStats {
  int64_t synchronised_backwards = 0;
  int64_t all_reduces = 0;           ///< of buckets
  int64_t bytes = 0;                 ///< of buckets
  int64_t travelling_ns = 0;         ///< in which at least one bucket was between launch and finish
  int64_t exposed_ns = 0;            ///< which the training thread, or stream, spent on it
  int64_t backward_started_ns = 0;   ///< of the last synchronised step
  int64_t backward_finished_ns = 0;  ///< when its last gradient was there
  std::vector<BucketTiming> last_step;

  /// Synchronised steps in which this rank's own gradients were found to be infinite or not a
  /// number, and the first of them, counted from 1. Nothing is found where Nonfinite is kIgnore.
  int64_t nonfinite_steps = 0;
  int64_t first_nonfinite_step = 0;
  std::string first_nonfinite_parameter = {};
};

struct JoinOptions {
  /// Divide by all ranks, also by those without data; false: by the ranks that still have some.
  bool divide_by_initial_world_size = true;
  /// All ranks stop with an Error as soon as one has no more data.
  bool throw_on_early_termination = false;
};

/// The untyped part of DistributedDataParallel: see docs/parallel.md.
class GradientSync {
 public:
  GradientSync(std::shared_ptr<torch::nn::Module> module, const Communicator& comm,
               const DdpOptions& options);
  ~GradientSync();
  GradientSync(const GradientSync&) = delete;
  GradientSync& operator=(const GradientSync&) = delete;

  void before_forward();
  void after_forward(const std::vector<torch::Tensor>& outputs);

  void set_weight(double weight);
  void check_replicas();
  void run_joined(const std::function<void()>& loop, const JoinOptions& options);
  DdpStats stats() const;  ///< on a GPU: waits for what was queued
  std::vector<GradientBucket> buckets() const;
  void record_to(Trace* trace, int rank, int row);
  const Communicator& comm() const;

 private:
  friend class NoSync;
  friend class JoinProtocol;
  struct State;
  std::unique_ptr<State> state_;
};

/// Trains one module on many ranks, as torch.nn.parallel.DistributedDataParallel does.
///
///     auto world = lockstep::World::from_env();
///     Net net;
///     net->to(world.device().torch_device());
///     lockstep::DistributedDataParallel ddp(net, world.comm());
///     auto loss = torch::mse_loss(ddp(x), y);   // x: this rank's rows
///     loss.backward();                          // gradients are averaged over the ranks meanwhile
///
/// Construction, synchronised forwards and backwards are collective. Rank 0's weights and buffers
/// go to all ranks at construction.
template <class Module>
class DistributedDataParallel {
 public:
  DistributedDataParallel(std::shared_ptr<Module> module, const Communicator& comm,
                          const DdpOptions& options = {})
      : module_(std::move(module)), sync_(std::make_unique<GradientSync>(module_, comm, options)) {}
  DistributedDataParallel(const torch::nn::ModuleHolder<Module>& module, const Communicator& comm,
                          const DdpOptions& options = {})
      : DistributedDataParallel(module.ptr(), comm, options) {}

  template <class... Arguments>
  auto forward(Arguments&&... arguments) {
    sync_->before_forward();
    auto result = module_->forward(std::forward<Arguments>(arguments)...);
    sync_->after_forward(tensors_of(result));
    return result;
  }

  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    return forward(std::forward<Arguments>(arguments)...);
  }

  /// The module that is trained. Evaluate with it: forward through DDP is collective.
  const std::shared_ptr<Module>& module() const { return module_; }
  std::vector<torch::Tensor> parameters() const { return module_->parameters(); }
  auto named_parameters() const { return module_->named_parameters(); }

  /// The module's own.
  void train(bool on = true) { module_->train(on); }
  void eval() { module_->eval(); }
  bool is_training() const { return module_->is_training(); }

  /// Drops the gradients, which costs nothing: the next backward writes instead of adding. False:
  /// fills them with zeros.
  void zero_grad(bool set_to_none = true) { module_->zero_grad(set_to_none); }

  /// From now on this rank counts with that weight in the mean, for example its number of rows:
  /// then uneven batches give the gradient of one large batch. The same or not on each rank;
  /// default 1.
  void set_weight(double weight) { sync_->set_weight(weight); }

  /// Compares the trained parameters of all ranks by hash; kReplicasDiffer names the first that
  /// differs. Collective.
  void check_replicas() { sync_->check_replicas(); }

  DdpStats stats() const { return sync_->stats(); }
  std::vector<GradientBucket> buckets() const { return sync_->buckets(); }

  /// Buckets appear in this timeline from now on, as row `row` of `rank`.
  void record_to(Trace* trace, int rank, int row) { sync_->record_to(trace, rank, row); }

  GradientSync& sync() { return *sync_; }

 private:
  std::shared_ptr<Module> module_;
  std::unique_ptr<GradientSync> sync_;
};

template <class Module>
DistributedDataParallel(const torch::nn::ModuleHolder<Module>&, const Communicator&)
    -> DistributedDataParallel<Module>;
template <class Module>
DistributedDataParallel(const torch::nn::ModuleHolder<Module>&, const Communicator&,
                        const DdpOptions&) -> DistributedDataParallel<Module>;

/// Guard: gradients only accumulate on this rank, nothing is sent. The next step outside adds its
/// own and averages the sum. Nests; a forward and its backward must both be inside. All ranks
/// accumulate over the same number of micro-steps, and weights are updated after an average only.
class NoSync {
 public:
  explicit NoSync(GradientSync& sync);
  template <class Module>
  explicit NoSync(DistributedDataParallel<Module>& ddp) : NoSync(ddp.sync()) {}
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  GradientSync& sync_;
};

/// Runs `loop` on ranks that have different numbers of steps. A rank whose loop has ended takes
/// part in the others' collectives until all have ended; then the weights of a rank that was last
/// go to all. Collective.
template <class Module>
void join(DistributedDataParallel<Module>& ddp, const std::function<void()>& loop,
          const JoinOptions& options = {}) {
  ddp.sync().run_joined(loop, options);
}

}  // namespace lockstep
