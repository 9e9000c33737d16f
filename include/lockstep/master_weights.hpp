#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

/// The low precision of the parameters, and which of them get it.
struct MasterWeightsOptions {
  /// torch::kHalf or torch::kBFloat16.
  torch::ScalarType dtype = torch::kBFloat16;

  /// Which parameters become low precision. By default all parameters of modules that own one with
  /// two or more dimensions (linear, convolution, embedding), so not those of norms.
  std::function<bool(const std::string& name, const torch::Tensor& parameter)> which = {};
};

/// Mixed precision without autocast's copies: the module's parameters are low precision, and this
/// keeps the float32 weights that they are rounded from, for the optimizer to update. Autocast then
/// has nothing to cast, gradients take half the memory, and the update writes both weights.
///
///     lockstep::MasterWeights masters(*net, {.dtype = torch::kHalf});
///     lockstep::Sgd optimizer(net->parameters(), {.lr = 1e-2, .masters = masters});
///
/// This is a handle: copies share the weights. Make it before DistributedDataParallel and the
/// optimizer.
class MasterWeights {
 public:
  explicit MasterWeights(torch::nn::Module& module, const MasterWeightsOptions& options = {});

  /// Returns the MasterWeights of this process that hold the parameter, if any. Code that writes a
  /// whole model, as DistributedDataParallel's broadcast does, must write the float32 weights too.
  static std::optional<MasterWeights> holding(const torch::Tensor& parameter);

  /// Returns the float32 weight of a parameter, on its device; the parameter itself if it is not
  /// held. First takes over elements of the parameter that were changed since it was last rounded
  /// (by a load, or by Embedding's max_norm).
  torch::Tensor of(const torch::Tensor& parameter) const;
  bool holds(const torch::Tensor& parameter) const;

  /// Rounds the float32 weight to the parameter.
  void round(const torch::Tensor& parameter) const;

  /// Notes that the caller has just written the rounded weight to the parameter.
  void note_rounded(const torch::Tensor& parameter) const;

  int64_t bytes() const;  ///< of the float32 weights

  /// From now on holds `shard`, with this float32 weight, instead of `parameter`: for wrappers that
  /// divide a parameter over ranks and keep one part of it.
  void replace(const torch::Tensor& parameter, const torch::Tensor& shard,
               const torch::Tensor& master) const;

  /// Puts the float32 weights back into the module, to save it or to continue in float32. Then
  /// make a new optimizer.
  void restore(torch::nn::Module& module) const;

  /// Sets all masters from the parameters. Needed after changes that autograd does not see, through
  /// data(), and after changes between two calls of a captured step; other changes are noticed.
  void take_from_parameters();

 private:
  struct State;
  explicit MasterWeights(std::shared_ptr<State> state) : state_(std::move(state)) {}

  std::shared_ptr<State> state_;
};

}  // namespace lockstep
