#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>

#include "lockstep/communicator.hpp"

namespace lockstep {

/// A weight that two stages of a pipeline over ranks share, such as a language model's token
/// embedding in the first stage and the output layer in the last. Each stage has a copy. The copies
/// stay the same to the bit if their gradients are summed before each update:
///
///     lockstep::TiedWeight tied(mesh.axis("pp"), 0, stages - 1, copy);   // undefined in between
///     pipeline.step(x, y);
///     tied.sum_gradients();
///     optimizer.step({.max_norm = 1.0});                                 // counts it once
///
/// Gradients that accumulate over several calls of step() are summed once, after the last.
class TiedWeight {
 public:
  /// Gives the copy of `second` the values of that of `first`, which are ranks of `axis`. The other
  /// ranks pass an undefined tensor. Collective.
  TiedWeight(const Communicator& axis, int first, int second, const torch::Tensor& copy);

  /// Gives both copies the sum of their gradients. A copy without one counts as zeros; if neither
  /// has one, nothing happens. The copies are compared in calls 1, 2, 4, 8 and so on, and refused
  /// if they differ (kReplicasDiffer). Collective over the two ranks; does nothing on the others.
  void sum_gradients() const;

 private:
  void compare_if_due() const;

  std::shared_ptr<const Communicator> pair_;  // none on other ranks
  std::shared_ptr<uint64_t> calls_;           // of sum_gradients()
  torch::Tensor copy_;
};

}  // namespace lockstep
