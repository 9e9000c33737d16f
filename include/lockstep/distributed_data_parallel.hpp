#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "lockstep/communicator.hpp"
#include "lockstep/detail/tensor_tree.hpp"
#include "lockstep/gradients.hpp"
#include "lockstep/verify.hpp"
#include "lockstep/virtual_shards.hpp"

namespace lockstep {

class Trace;
template <class Module>
class FullyShardedDataParallel;

/// How join() treats ranks that have run out of data.
struct JoinOptions {
  /// True: divide by the number of all ranks. False: divide by the number of ranks that still have
  /// data.
  bool divide_by_initial_world_size = true;
  /// All ranks stop with an Error as soon as one rank runs out of data.
  bool throw_on_early_termination = false;
};

/// A wrapper that NoSync works with: it averages gradients, or accumulates them inside NoSync.
class Accumulating {
 public:
  virtual ~Accumulating() = default;
  Accumulating() = default;
  Accumulating(const Accumulating&) = delete;
  Accumulating& operator=(const Accumulating&) = delete;

  virtual void enter_no_sync() = 0;
  virtual void leave_no_sync() = 0;
};

/// The untyped part of DistributedDataParallel: see docs/parallel.md.
class GradientSync final : public Accumulating {
 public:
  GradientSync(std::shared_ptr<torch::nn::Module> module, const Communicator& comm,
               const DdpOptions& options);
  ~GradientSync() override;

  void before_forward();
  void after_forward(const std::vector<torch::Tensor>& outputs);

  torch::Tensor backward_parts(const PartLoss& loss_of, const PartStep& how);

  void set_weight(double weight);
  void check_replicas();
  void run_joined(const std::function<void()>& loop, const JoinOptions& options);
  DdpStats stats() const;  ///< waits for a GPU's queued work
  std::vector<GradientBucket> buckets() const;
  void record_to(Trace* trace, int rank, int row);
  const Communicator& comm() const;
  std::vector<torch::Tensor> parameters() const;

  void enter_no_sync() override;
  void leave_no_sync() override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

namespace detail {

/// Whether this thread runs a loop of join() over several ranks, some of which may make fewer steps
/// than others: no collective that all ranks have to call may be made there.
bool inside_join();

}  // namespace detail

/// Trains one module on many ranks, as torch.nn.parallel.DistributedDataParallel does.
///
///     auto world = lockstep::World::from_env();
///     Net net;
///     net->to(world.device().torch_device());
///     lockstep::DistributedDataParallel ddp(net, world.comm());
///     auto loss = torch::mse_loss(ddp(x), y);   // x: this rank's rows
///     loss.backward();                          // averages gradients over the ranks meanwhile
///
/// Construction, synchronised forwards and synchronised backwards are collective. Construction
/// sends rank 0's weights and buffers to all ranks.
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
    if (detail::is_verified()) detail::verify_rows(tensors_of(std::tie(arguments...)));
    sync_->before_forward();
    auto result = module_->forward(std::forward<Arguments>(arguments)...);
    sync_->after_forward(tensors_of(result));
    return result;
  }

  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    return forward(std::forward<Arguments>(arguments)...);
  }

  /// With DdpOptions::virtual_shards: forward and backward of this rank's parts, one after the
  /// other. `loss_of(part)` computes a part's loss with a forward through this wrapper. Returns the
  /// mean loss of all parts; the gradients are those of the global batch. Collective.
  torch::Tensor backward_parts(const PartLoss& loss_of, const PartStep& how = {}) {
    return sync_->backward_parts(loss_of, how);
  }

  /// The same for this rank's rows of a batch: `loss_of(x, y)` gets the rows of one part.
  template <class LossOfRows>
  torch::Tensor backward_parts(const torch::Tensor& x, const torch::Tensor& y, LossOfRows loss_of,
                               const PartStep& how = {}) {
    return sync_->backward_parts(loss_of_rows(x, y, std::move(loss_of)), how);
  }

  /// The trained module. Use it to evaluate: forward through DDP is collective.
  const std::shared_ptr<Module>& module() const { return module_; }
  /// The module's parameters, each listed once: libtorch lists a shared parameter once per owner,
  /// and torch::optim would update it as often.
  std::vector<torch::Tensor> parameters() const { return sync_->parameters(); }
  auto named_parameters() const { return module_->named_parameters(); }

  /// Call the module's own.
  void train(bool on = true) { module_->train(on); }
  void eval() { module_->eval(); }
  bool is_training() const { return module_->is_training(); }

  /// Drops the gradients, so that the next backward writes instead of adding. With set_to_none =
  /// false it fills them with zeros.
  void zero_grad(bool set_to_none = true) { module_->zero_grad(set_to_none); }

  /// Sets this rank's weight in the mean from now on; the default is 1. With its number of rows as
  /// the weight, uneven batches give the gradient of one large batch. Ranks may differ. With
  /// virtual shards, call it inside backward_parts(): it is the weight of the current part.
  void set_weight(double weight) { sync_->set_weight(weight); }

  /// Compares the trained parameters of all ranks by hash; throws kReplicasDiffer, which names the
  /// first that differs. Collective.
  void check_replicas() { sync_->check_replicas(); }

  DdpStats stats() const { return sync_->stats(); }
  std::vector<GradientBucket> buckets() const { return sync_->buckets(); }

  /// Draws buckets in this timeline from now on, in row `row` of `rank`.
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

/// Guard: while it lives, gradients accumulate on this rank and nothing is sent. The next step
/// outside adds its own gradients and averages the sum. Guards nest; a forward and its backward
/// must both be inside. All ranks must accumulate over the same number of micro-steps, and weights
/// may be updated only after an average.
class NoSync {
 public:
  explicit NoSync(Accumulating& wrapper) : wrapper_(wrapper) { wrapper_.enter_no_sync(); }
  template <class Module>
  explicit NoSync(DistributedDataParallel<Module>& ddp) : NoSync(ddp.sync()) {}
  template <class Module>
  explicit NoSync(FullyShardedDataParallel<Module>& fsdp) : NoSync(fsdp.sharded()) {}
  ~NoSync() { wrapper_.leave_no_sync(); }
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  Accumulating& wrapper_;
};

/// Runs `loop` on ranks that have different numbers of steps. A rank whose loop has ended takes
/// part in the others' collectives until all loops have ended. Then the weights of a rank that
/// trained longest are sent to all, but not the state of its optimizer: if the weights differ in
/// later steps for that reason, they are refused (kReplicasDiffer). Every forward through the
/// wrapper with gradients enabled needs a backward of its own. Collective.
template <class Module>
void join(DistributedDataParallel<Module>& ddp, const std::function<void()>& loop,
          const JoinOptions& options = {}) {
  ddp.sync().run_joined(loop, options);
}

}  // namespace lockstep
