#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "buckets/part_tree.hpp"
#include "gradients/part_sums.hpp"
#include "gradients/trained_parameters.hpp"
#include "lockstep/communicator.hpp"

namespace lockstep {

/// The gradients of a model's parameters, part by part: takes those of each part away, adds them up
/// in the order of the tree, and puts back their mean. A gradient that a parameter had before a
/// step is kept meanwhile, and the mean is added to it.
class PartGradients {
 public:
  /// `parameters` and `tree` must outlive this object.
  PartGradients(std::span<const TrainedParameter> parameters, const PartTree& tree,
                const Communicator& comm, int64_t chunk_bytes);

  /// Lays aside what was accumulated.
  void begin_step();

  /// The step has ended with an error: parameters have again what begin_step() laid aside.
  void give_back();

  /// Takes the gradients of a part, each multiplied by `weight`. Parts may come in any order. A
  /// parameter without one counts as zeros.
  void take(int64_t part, double weight);

  /// [parameter] whether a part of this rank gave it a gradient.
  const std::vector<bool>& used() const { return used_; }

  /// The parameters that got no gradient in the last part.
  std::vector<size_t> missing() const;

  /// Puts back the sum of all parts, divided by `divisor`, to the parameters that are `given` one;
  /// the others keep what they had. Collective.
  void average(double divisor, const std::vector<bool>& given);

  /// Whether any gradient that is not zero was there before the step.
  bool has_accumulated() const;

  /// The collectives of the last step.
  std::vector<SumExchange> exchanges() const;

 private:
  // Gradients of one dtype on one device.
  struct Group {
    torch::TensorOptions options;
    int64_t elements = 0;
    std::vector<size_t> parameters;
    std::vector<GradientPiece> pieces = {};  // [in the order of parameters]
    std::unique_ptr<PartSums> sums = nullptr;
  };

  void put(size_t parameter, const torch::Tensor& mean);

  std::span<const TrainedParameter> parameters_;
  const int64_t chunk_bytes_;
  std::vector<Group> groups_;
  std::vector<bool> used_;                  // [parameter]
  std::vector<torch::Tensor> accumulated_;  // [parameter] before the step
  std::vector<torch::Tensor> taken_;        // [parameter] of the last part: memory for the mean
};

}  // namespace lockstep
