#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

struct MasterWeightsOptions {
  /// torch::kHalf or torch::kBFloat16.
  torch::ScalarType dtype = torch::kBFloat16;

  /// Which parameters become low precision; by default those of modules that own one of two or more
  /// dimensions (linear, convolution, embedding), not those of norms.
  std::function<bool(const std::string& name, const torch::Tensor& parameter)> which = {};
};

/// Mixed precision without autocast's copies: the module's parameters are low precision, and the
/// float32 weights they are rounded from are kept here, for the optimizer to update. Autocast then
/// finds nothing to cast, gradients are half as large, and the update writes both.
///
///     lockstep::MasterWeights masters(*net, {.dtype = torch::kHalf});
///     lockstep::Sgd optimizer(net->parameters(), {.lr = 1e-2, .masters = masters});
///
/// A handle: copies share the weights. Make it before DistributedDataParallel and the optimizer.
class MasterWeights {
 public:
  explicit MasterWeights(torch::nn::Module& module, const MasterWeightsOptions& options = {});

  /// The MasterWeights of this process that hold the parameter, if any do. Whoever writes a whole
  /// model, as DistributedDataParallel's broadcast does, must write the float32 weights too.
  static std::optional<MasterWeights> holding(const torch::Tensor& parameter);

  /// The float32 weight of a parameter, on its device; the parameter itself where that was left as
  /// it is. Elements of the parameter that somebody has changed since it was last rounded (a load,
  /// Embedding's max_norm) are taken over first.
  torch::Tensor of(const torch::Tensor& parameter) const;
  bool holds(const torch::Tensor& parameter) const;

  /// The parameter becomes its float32 weight, rounded.
  void round(const torch::Tensor& parameter) const;

  /// Somebody has just written the rounded weight into the parameter, as the optimizers do.
  void note_rounded(const torch::Tensor& parameter) const;

  int64_t bytes() const;  ///< of the float32 weights

  /// Puts the float32 weights back into the module, as before: for saving, or to go on in float32.
  /// The optimizer must be made anew afterwards.
  void restore(torch::nn::Module& module) const;

  /// All masters are taken from the parameters. Needed only after parameters were changed behind
  /// autograd's back, through data(): other changes are noticed.
  void take_from_parameters();

 private:
  struct State;
  explicit MasterWeights(std::shared_ptr<State> state) : state_(std::move(state)) {}

  std::shared_ptr<State> state_;
};

}  // namespace lockstep
