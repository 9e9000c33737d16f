#pragma once

#include <torch/types.h>

#include <memory>
#include <span>
#include <vector>

#include "parallel/gradient_buckets.hpp"

namespace torch::autograd {
struct Node;
}

namespace lockstep {

/// Who is told about gradients during backward. Called by autograd's threads, one at a time for the
/// parameters of one device.
class GradientListener {
 public:
  virtual ~GradientListener() = default;

  /// Backward has computed a gradient; what is returned is accumulated in its stead.
  virtual torch::Tensor gradient_computed(size_t parameter, const torch::Tensor& gradient) = 0;

  /// A backward pass goes through an output that is watched; it may not reach any parameter.
  virtual void output_reached() = 0;

  /// The parameter's grad is complete for this backward.
  virtual void gradient_accumulated(size_t parameter) = 0;
};

/// Guard: listens to the gradients of these parameters as long as it lives.
class GradientHooks {
 public:
  GradientHooks(std::span<const TrainedParameter> parameters, GradientListener& listener);
  ~GradientHooks();
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

  /// Listens to the parameters' accumulators where these are other ones than before: libtorch may
  /// make a new one when a parameter's data is replaced, as by torch::load.
  void follow(std::span<const TrainedParameter> parameters);

  /// From now on a backward pass through these is told of. Returns false if none can be watched:
  /// leaves cannot, since a hook on a parameter would stay there for ever.
  bool watch(const std::vector<torch::Tensor>& outputs) const;

  /// For each parameter, whether these outputs depend on it.
  std::vector<bool> reachable_from(const std::vector<torch::Tensor>& outputs) const;

 private:
  void listen(size_t parameter, const torch::Tensor& tensor);

  struct Target;
  class BeforeAccumulation;
  class AfterAccumulation;

  std::shared_ptr<Target>
      target_;  // shared with the hooks, which may outlive this guard in a graph
  std::vector<std::shared_ptr<torch::autograd::Node>> accumulators_;  // [parameter]
};

/// Runs `callback` when the backward pass that is running now has ended.
void at_end_of_backward(std::function<void()> callback);

}  // namespace lockstep
