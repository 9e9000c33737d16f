#pragma once

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <optional>
#include <type_traits>
#include <vector>

#include "lockstep/communicator.hpp"
#include "lockstep/fused_optimizer.hpp"
#include "lockstep/master_weights.hpp"

namespace lockstep {

class GpuSlots;
class StepItems;

/// Scales gradients down to `max_norm` if their norm is larger, as
/// torch::nn::utils::clip_grad_norm_ does, where that norm is the whole model's: each weight counts
/// once, whether it is whole here, a shard of FullyShardedDataParallel, a slice of a tensor
/// parallel layer or in a stage of a Pipeline over ranks. Returns the norm before, a double scalar.
/// Collective over those ranks and over `model_parallel`.
torch::Tensor clip_grad_norm_(const std::vector<torch::Tensor>& parameters, double max_norm,
                              const std::optional<Communicator>& model_parallel = {});

/// The options of torch::optim::SGD, and master weights.
struct SgdOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;

  /// The module's master weights, which are updated in float32 and rounded to its parameters.
  std::optional<MasterWeights> masters = {};
};

/// The options of torch::optim::Adam, and master weights.
struct AdamOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;  ///< times the weight, is added to the gradient

  /// The module's master weights, which are updated in float32 and rounded to its parameters.
  std::optional<MasterWeights> masters = {};
};

/// The options of torch::optim::AdamW, and master weights.
struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;  ///< is applied to the weight itself

  /// The module's master weights, which are updated in float32 and rounded to its parameters.
  std::optional<MasterWeights> masters = {};
};

// Note [Fused optimizers] Sgd, Adam and AdamW are torch::optim's with an update that is one pass
// over memory. Everything else is inherited: groups, schedulers, and a state that either optimizer
// can save and the other load. Weights are float32 or float64; half types need MasterWeights or a
// GPU. What they cannot do is an Error that names torch::optim. A parameter that is listed twice,
// as parameters() lists a shared one, is updated once.

/// torch::optim::SGD in one pass. See Note [Fused optimizers].
class Sgd final : public torch::optim::SGD, public FusedOptimizer {
 public:
  explicit Sgd(std::vector<torch::Tensor> parameters, const SgdOptions& options = {});
  Sgd(std::vector<torch::optim::OptimizerParamGroup> groups, const SgdOptions& defaults);

  torch::Tensor step(LossClosure closure = nullptr) override;
  torch::Tensor step(const StepExtras& extras);  ///< returns what step_fused() does
  torch::Tensor step_fused(const ScaledGradients& gradients, const StepExtras& extras) override;
  bool has_master(const torch::Tensor& parameter) const override;
  void collect_state() const override;
  void note_loaded_state() override;

  /// Drops the gradients, which costs nothing; set_to_none = false fills them with zeros.
  void zero_grad(bool set_to_none = true);

  /// The archive includes the master weights, so that training resumes with the same bits.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  torch::Tensor step_on_cpu(const StepItems& items, const ScaledGradients& gradients,
                            const StepExtras& extras);
  torch::Tensor step_on_cuda(const StepItems& items, const ScaledGradients& gradients,
                             const StepExtras& extras);

  std::optional<MasterWeights> masters_;
  std::shared_ptr<GpuSlots> slots_;  // made by the first step on a GPU
};

/// torch::optim::Adam or AdamW in one pass. See Note [Fused optimizers].
template <class TorchAdam>
class FusedAdam final : public TorchAdam, public FusedOptimizer {
 public:
  using Options =
      std::conditional_t<std::is_same_v<TorchAdam, torch::optim::Adam>, AdamOptions, AdamWOptions>;
  using LossClosure = torch::optim::Optimizer::LossClosure;

  explicit FusedAdam(std::vector<torch::Tensor> parameters, const Options& options = {});
  FusedAdam(std::vector<torch::optim::OptimizerParamGroup> groups, const Options& defaults);

  torch::Tensor step(LossClosure closure = nullptr) override;
  torch::Tensor step(const StepExtras& extras);  ///< returns what step_fused() does
  torch::Tensor step_fused(const ScaledGradients& gradients, const StepExtras& extras) override;
  bool has_master(const torch::Tensor& parameter) const override;
  void collect_state() const override;
  void note_loaded_state() override;

  /// Drops the gradients, which costs nothing; set_to_none = false fills them with zeros.
  void zero_grad(bool set_to_none = true);

  /// The archive includes the master weights, so that training resumes with the same bits. A GPU
  /// counts the steps itself, so save() waits for it and updates state().
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  torch::Tensor step_on_cpu(const StepItems& items, const ScaledGradients& gradients,
                            const StepExtras& extras);
  torch::Tensor step_on_cuda(const StepItems& items, const ScaledGradients& gradients,
                             const StepExtras& extras);
  void store_gpu_steps() const;

  std::optional<MasterWeights> masters_;
  std::shared_ptr<GpuSlots> slots_;  // made by the first step on a GPU
};

extern template class FusedAdam<torch::optim::Adam>;
extern template class FusedAdam<torch::optim::AdamW>;

/// Adam adds its weight decay to the gradient; AdamW applies it to the weight.
using Adam = FusedAdam<torch::optim::Adam>;
using AdamW = FusedAdam<torch::optim::AdamW>;

}  // namespace lockstep
