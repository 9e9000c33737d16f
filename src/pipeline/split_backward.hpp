#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/types.h>

#include <memory>
#include <vector>

namespace lockstep {

/// A backward pass in two parts: what leads to the input, then the gradients of the weights.
///
/// Note [Splitting a backward]
/// Autograd computes what is asked of it only: asked for the input's gradient it leaves out the
/// products that make weight gradients. The nodes on the way to the input that also have edges to
/// weights are the forks. A hook keeps the gradient that arrives at each; later every fork is run
/// once more, asked for its weights only. Nothing is computed twice. A graph where that would not
/// be exact is not split: a weight that two forks share, a hook of the user's on a fork (it would
/// run twice), an output that does not depend on the input. Then the first part does everything.
class SplitBackward {
 public:
  /// Runs the first part, with `gradient` at `output`. `input` may be undefined, as for the first
  /// stage: then nothing is split.
  SplitBackward(const torch::Tensor& output, const torch::Tensor& gradient,
                const torch::Tensor& input);

  /// Undefined where there is no input, or the output does not depend on it.
  const torch::Tensor& input_gradient() const { return input_gradient_; }

  /// Adds the weights' gradients. Once.
  void accumulate_weights();

 private:
  struct Fork;

  // False where the backward is not to be split.
  bool find_forks(const torch::Tensor& output, const torch::Tensor& input);

  torch::Tensor input_gradient_;
  std::vector<std::shared_ptr<Fork>> forks_;  // empty where nothing was split
};

}  // namespace lockstep
