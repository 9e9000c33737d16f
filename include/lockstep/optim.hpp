#pragma once

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <optional>
#include <type_traits>
#include <vector>

#include "lockstep/communicator.hpp"
#include "lockstep/master_weights.hpp"

namespace lockstep {

class GpuSlots;
class StepItems;

/// What a step does besides updating the weights.
struct StepExtras {
  /// Gradients whose norm is larger are scaled down to this norm. Where the model is divided over
  /// ranks (tensor parallel layers, a Pipeline over ranks), the norm is that of the whole model,
  /// and the step is collective over those ranks.
  std::optional<double> max_norm = {};

  bool zero_grad = false;  ///< drops the gradients afterwards

  /// Ranks that hold other parts of the model, where lockstep did not divide it itself.
  std::optional<Communicator> model_parallel = {};
};

/// Gradients as a GradScaler hands them to an optimizer.
struct ScaledGradients {
  /// Factor that the gradients must still be multiplied by; 1 if they are already unscaled.
  double inverse_scale = 1;

  /// The scale where only a GPU knows it: a float scalar to divide by. Undefined: inverse_scale is
  /// used.
  torch::Tensor scale = {};

  /// The sum of squares of all gradients of the model as they are now: a double scalar on their
  /// device, or undefined if unknown.
  torch::Tensor sum_of_squares = {};

  /// A float scalar on the gradients' device: where it is not 0, nothing may change. Undefined: all
  /// gradients are finite. On a GPU the optimizer does not read it on the host.
  torch::Tensor found_inf = {};
};

/// Scales gradients down to `max_norm` if their norm is larger, as
/// torch::nn::utils::clip_grad_norm_ does, where that norm is the whole model's: each weight counts
/// once, whether it is whole here, a shard of FullyShardedDataParallel, a slice of a tensor
/// parallel layer or in a stage of a Pipeline over ranks. Returns the norm before, a double scalar.
/// Collective over those ranks and over `model_parallel`.
torch::Tensor clip_grad_norm_(const std::vector<torch::Tensor>& parameters, double max_norm,
                              const std::optional<Communicator>& model_parallel = {});

/// An optimizer that unscales, clips and clears gradients while it updates the weights.
class FusedOptimizer {
 public:
  virtual ~FusedOptimizer() = default;

  /// Returns the norm of the unscaled gradients before clipping, a double scalar on their device;
  /// undefined without max_norm.
  virtual torch::Tensor step_fused(const ScaledGradients& gradients, const StepExtras& extras) = 0;

  /// Whether this parameter is a rounded copy of a float32 weight (MasterWeights). Its gradients
  /// are then multiplied in float32.
  virtual bool has_master(const torch::Tensor& parameter) const = 0;

  /// Brings what only GPUs know, such as how many steps they did, into state(). Waits for them.
  virtual void collect_state() const = 0;

  /// Call it after writing state(): the next step continues from there.
  virtual void note_loaded_state() = 0;
};

/// Those of torch::optim::SGD, and master weights.
struct SgdOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;

  /// The module's master weights, which are updated in float32 and rounded to its parameters.
  std::optional<MasterWeights> masters = {};
};

/// Those of torch::optim::Adam, and master weights.
struct AdamOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;  ///< times the weight, is added to the gradient

  /// The module's master weights, which are updated in float32 and rounded to its parameters.
  std::optional<MasterWeights> masters = {};
};

/// Those of torch::optim::AdamW, and master weights.
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
