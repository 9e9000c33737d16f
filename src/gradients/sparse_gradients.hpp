#pragma once

#include <torch/nn/module.h>

#include <span>
#include <vector>

#include "gradients/trained_parameters.hpp"
#include "lockstep/communicator.hpp"

namespace lockstep {

/// The trained parameters whose gradients are dense, and those of Embedding and EmbeddingBag with
/// sparse gradients, which are not put into buckets.
struct ParametersByGradient {
  std::vector<TrainedParameter> dense;
  std::vector<TrainedParameter> sparse;
};

ParametersByGradient by_gradient(const torch::nn::Module& module,
                                 const std::vector<TrainedParameter>& trained);

/// Averages sparse gradients over the ranks: every rank gets the rows of all, and adds those of the
/// same index. A rank may have any number of rows, and none.
class SparseGradients {
 public:
  SparseGradients(std::span<const TrainedParameter> parameters, const Communicator& comm)
      : parameters_(parameters), comm_(comm) {}

  bool empty() const { return parameters_.empty(); }

  /// When backward has ended, on all ranks. Afterwards every rank has the same gradients,
  /// coalesced; one that no rank has stays undefined. `weight` is this rank's in the mean.
  /// Collective.
  void average(double weight) const;

 private:
  void average(const TrainedParameter& parameter, double factor) const;

  std::span<const TrainedParameter> parameters_;
  const Communicator& comm_;
};

}  // namespace lockstep
