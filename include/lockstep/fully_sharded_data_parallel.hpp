#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/communicator.hpp"
#include "lockstep/detail/tensor_tree.hpp"
#include "lockstep/distributed_data_parallel.hpp"
#include "lockstep/virtual_shards.hpp"

namespace lockstep {

/// What is divided over the data-parallel ranks: ZeRO's stages 1, 2 and 3.
enum class ShardStage {
  kOptimizer = 1,   ///< the optimizer's state and master weights
  kGradients = 2,   ///< also the gradients: a unit's are freed once they are averaged
  kParameters = 3,  ///< also the parameters: a unit's are gathered when they are used
};

/// How FullyShardedDataParallel divides a model.
struct ShardOptions {
  ShardStage stage = ShardStage::kParameters;

  /// Names of submodules whose parameters are gathered and averaged together; the rest of the model
  /// is one more unit. Empty: each child of a Sequential, ModuleList or ModuleDict is a unit, and
  /// so is each other child of the module; small neighbours share one.
  std::vector<std::string> units = {};
  int64_t min_unit_bytes = int64_t{1} << 20;  ///< of units that lockstep chooses

  bool prefetch = true;  ///< begin to gather the unit that followed in the first step

  /// Keeps one copy of the parameters for all ranks of a host, if the communicator can share
  /// memory. Ranks update their own part of it in place, and nothing is gathered.
  bool share_on_host = true;

  bool broadcast_buffers = true;  ///< send rank 0's buffers to all before a synchronised forward
  bool find_unused_parameters = false;  ///< the parameters in use may change from step to step

  /// Keeps the shards, and so the optimizer's state and its work, on the CPU although the model is
  /// on a GPU.
  bool offload_optimizer = false;

  /// As DdpOptions::virtual_shards and part_threads: steps are made with backward_parts().
  int64_t virtual_shards = 0;
  int part_threads = 1;
};

/// What sharding has done so far on this rank.
struct ShardStats {
  int64_t gathers = 0;          ///< of units
  int64_t gathered_bytes = 0;   ///< of whole units
  int64_t prefetched = 0;       ///< gathers that were begun before they were needed
  int64_t reduce_scatters = 0;  ///< of units
  int64_t reduced_bytes = 0;    ///< of whole units
  int64_t synchronised_backwards = 0;
};

/// A unit of a sharded model.
struct ShardUnit {
  std::string name;                     ///< of its first parameter's module
  std::vector<std::string> parameters;  ///< names
  int64_t elements = 0;                 ///< including padding to a multiple of the ranks
  torch::ScalarType dtype = torch::kFloat;
  bool shared = false;  ///< one copy for all ranks of the host
};

/// The untyped part of FullyShardedDataParallel: see docs/sharding.md.
class ShardedModel final : public Accumulating {
 public:
  ShardedModel(std::shared_ptr<torch::nn::Module> module, const Communicator& comm,
               const ShardOptions& options);
  ~ShardedModel() override;

  void before_forward();
  void after_forward(const std::vector<torch::Tensor>& outputs);
  torch::Tensor backward_parts(const PartLoss& loss_of, const PartStep& how);

  /// For a Pipeline, instead of the two above: many forwards and backwards, in any order, between
  /// two averages. begin_step() and all that follows it are called by one thread. A step ends with
  /// end_step(), which keeps the gradients for the next one, or is averaged.
  void begin_step(bool share_buffers);
  void end_action();  ///< after each forward or backward: releases what was gathered
  void end_step();
  void begin_average();
  void end_average();
  void begin_evaluation();  ///< on the thread that calls forward, without gradients
  void end_evaluation();

  /// This rank's shards, by the names of the module's parameters. A parameter with two names is
  /// listed once, under the first.
  std::vector<std::pair<std::string, torch::Tensor>> named_shards() const;

  /// The shard of one of the module's parameters; the parameter itself if it is not divided.
  torch::Tensor shard_of(const torch::Tensor& parameter) const;

  void set_weight(double weight);
  void zero_grad(bool set_to_none);

  /// See GatheredParameters. Collective.
  void gather_all();
  void release_all();

  /// Call these before and after anything but an optimizer writes to shards: other ranks may still
  /// be reading them, and must see the change afterwards. Collective.
  void begin_change() const;
  void note_changed_shards();

  ShardStats stats() const;
  std::vector<ShardUnit> units() const;
  const Communicator& comm() const;
  const std::shared_ptr<torch::nn::Module>& module() const;

  void enter_no_sync() override;
  void leave_no_sync() override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Trains one module on many ranks, each of which keeps and updates one part of it: ZeRO, as
/// torch.distributed.fsdp.FullyShardedDataParallel and ZeroRedundancyOptimizer do.
///
///     lockstep::FullyShardedDataParallel fsdp(net, world.comm());
///     lockstep::AdamW optimizer(fsdp.parameters());     // has state for this rank's shards only
///     auto loss = torch::mse_loss(fsdp(x), y);          // gathers parameters as they are used
///     loss.backward();                                  // leaves the shards' averaged gradients
///     optimizer.step();
///
/// Construction, forward and synchronised backward are collective. Any module works, without hooks
/// or wrappers inside it: parameters are gathered when an operation is about to use them.
template <class Module>
class FullyShardedDataParallel {
 public:
  FullyShardedDataParallel(std::shared_ptr<Module> module, const Communicator& comm,
                           const ShardOptions& options = {})
      : module_(std::move(module)),
        sharded_(std::make_unique<ShardedModel>(module_, comm, options)) {}
  FullyShardedDataParallel(const torch::nn::ModuleHolder<Module>& module, const Communicator& comm,
                           const ShardOptions& options = {})
      : FullyShardedDataParallel(module.ptr(), comm, options) {}

  template <class... Arguments>
  auto forward(Arguments&&... arguments) {
    if (detail::is_verified()) detail::verify_rows(tensors_of(std::tie(arguments...)));
    sharded_->before_forward();
    auto result = module_->forward(std::forward<Arguments>(arguments)...);
    sharded_->after_forward(tensors_of(result));
    return result;
  }

  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    return forward(std::forward<Arguments>(arguments)...);
  }

  /// With ShardOptions::virtual_shards, as DistributedDataParallel's: forward and backward of this
  /// rank's parts of the batch. Returns the mean loss of all parts. Collective.
  torch::Tensor backward_parts(const PartLoss& loss_of, const PartStep& how = {}) {
    return sharded_->backward_parts(loss_of, how);
  }
  template <class LossOfRows>
  torch::Tensor backward_parts(const torch::Tensor& x, const torch::Tensor& y, LossOfRows loss_of,
                               const PartStep& how = {}) {
    return sharded_->backward_parts(loss_of_rows(x, y, std::move(loss_of)), how);
  }

  /// The trained module. Its parameters are whole only while GatheredParameters live; elsewhere
  /// their use is collective.
  const std::shared_ptr<Module>& module() const { return module_; }

  /// This rank's shards: flat leaf tensors, one for each parameter, for an optimizer that treats
  /// each element alone. A shard may be empty.
  std::vector<torch::Tensor> parameters() const {
    std::vector<torch::Tensor> shards;
    for (const auto& [name, shard] : sharded_->named_shards()) shards.push_back(shard);
    return shards;
  }
  auto named_parameters() const { return sharded_->named_shards(); }

  /// Call the module's own.
  void train(bool on = true) { module_->train(on); }
  void eval() { module_->eval(); }
  bool is_training() const { return module_->is_training(); }

  /// Drops the gradients of the shards and those that accumulate inside NoSync.
  void zero_grad(bool set_to_none = true) { sharded_->zero_grad(set_to_none); }

  /// Sets this rank's weight in the mean from now on, or a part's, as DistributedDataParallel's.
  void set_weight(double weight) { sharded_->set_weight(weight); }

  ShardStats stats() const { return sharded_->stats(); }
  std::vector<ShardUnit> units() const { return sharded_->units(); }
  ShardedModel& sharded() { return *sharded_; }
  const ShardedModel& sharded() const { return *sharded_; }

 private:
  std::shared_ptr<Module> module_;
  std::unique_ptr<ShardedModel> sharded_;
};

template <class Module>
FullyShardedDataParallel(const torch::nn::ModuleHolder<Module>&, const Communicator&)
    -> FullyShardedDataParallel<Module>;
template <class Module>
FullyShardedDataParallel(const torch::nn::ModuleHolder<Module>&, const Communicator&,
                         const ShardOptions&) -> FullyShardedDataParallel<Module>;

/// Guard: the module's parameters are whole on every rank, to evaluate, save or change them, as in
/// FSDP's summon_full_params. When it ends, each rank keeps its own part of their values.
/// Construction is collective.
class GatheredParameters {
 public:
  explicit GatheredParameters(ShardedModel& model) : model_(model) { model_.gather_all(); }
  template <class Module>
  explicit GatheredParameters(FullyShardedDataParallel<Module>& fsdp)
      : GatheredParameters(fsdp.sharded()) {}
  ~GatheredParameters() { model_.release_all(); }
  GatheredParameters(const GatheredParameters&) = delete;
  GatheredParameters& operator=(const GatheredParameters&) = delete;

 private:
  ShardedModel& model_;
};

}  // namespace lockstep
