#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/types.h>

#include <memory>
#include <vector>

namespace lockstep {

/// A backward pass in two parts: first the gradient of the input, then those of the weights.
///
/// Note [Splitting a backward]
/// Autograd computes only what it is asked for: asked for the input's gradient, it leaves out the
/// products that make weight gradients. The forks are the nodes on the path to the input that also
/// have edges to weights. A hook keeps the gradient that arrives at each fork; later every fork is
/// run again, asked for its weights only. Nothing is computed twice. Where that would not be exact
/// the graph is not split, and the first part does everything: if two forks share a weight, if the
/// user has a hook on a fork (it would run twice), or if the output does not depend on the input.
class SplitBackward {
 public:
  /// Runs the first part, from `output` with `gradient`. Nothing is split if `input` is undefined,
  /// as in the first stage.
  SplitBackward(const torch::Tensor& output, const torch::Tensor& gradient,
                const torch::Tensor& input);

  /// Undefined if there is no input or the output does not depend on it.
  const torch::Tensor& input_gradient() const { return input_gradient_; }

  /// False: the first part has done everything.
  bool is_split() const { return !forks_.empty(); }

  /// Adds the weights' gradients. Called once.
  void accumulate_weights();

 private:
  struct Fork;

  // Returns false if the backward cannot be split.
  bool find_forks(const torch::Tensor& output, const torch::Tensor& input);

  torch::Tensor input_gradient_;
  std::vector<std::shared_ptr<Fork>> forks_;  // empty if nothing was split
};

}  // namespace lockstep
