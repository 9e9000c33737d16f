#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <tuple>

#include "lockstep/communicator.hpp"
#include "lockstep/tensor_parallel.hpp"

// Sequence parallelism on top of tensor parallelism: what is outside a pair of ColumnLinear and
// RowLinear (norm, dropout, residual) works on this rank's slice of the sequence. A slice is
// [..., positions / ranks, features]. The number of positions must be a multiple of the ranks.

namespace lockstep {

/// This rank's slice of `whole`, which all ranks have alike; backward gathers the gradient.
torch::Tensor scatter_to_sequence(const torch::Tensor& whole, const Communicator& axis);

/// The whole sequence on every rank. What follows is computed alike on all ranks, so that backward
/// takes this rank's slice of the gradient. (A ColumnLinear with sequence_parallel gathers itself.)
torch::Tensor gather_from_sequence(const torch::Tensor& own, const Communicator& axis);

/// A LayerNorm over the last dimension, whose weights all ranks have whole. With sequence_parallel
/// each rank normalises its slice, and backward sums the weights' gradients over the axis.
class ParallelLayerNormImpl : public torch::nn::Module, public OnTensorAxis {
 public:
  /// Copies the weights, which must be the same on all ranks.
  ParallelLayerNormImpl(const torch::nn::LayerNorm& whole, const Communicator& axis,
                        bool sequence_parallel = true);

  torch::Tensor forward(const torch::Tensor& x);

  /// {x + branch, its norm}, as add_layer_norm. branch may be undefined.
  std::tuple<torch::Tensor, torch::Tensor> add(const torch::Tensor& x, const torch::Tensor& branch);

  const Communicator& axis() const override { return *axis_; }
  void set_axis(const Communicator& axis) override;
  torch::Tensor whole_of(const std::string& parameter) const override;
  void pretty_print(std::ostream& stream) const override;

  torch::Tensor weight;  // [features], or undefined
  torch::Tensor bias;    // likewise

 private:
  int64_t features_;
  double eps_;
  bool sequence_parallel_;
  std::shared_ptr<const Communicator> axis_;
};
TORCH_MODULE(ParallelLayerNorm);

/// Dropout next to layers of a tensor axis. Every rank draws the mask of the whole tensor and
/// applies its own part of it. So masks are those of one device, and what all ranks have whole
/// stays the same on all of them. For that, the ranks of the axis must draw the same random
/// numbers: seed them alike. Masks are compared in calls 1, 2, 4, 8 and so on; a difference is an
/// Error.
class ParallelDropoutImpl : public torch::nn::Module, public OnTensorAxis {
 public:
  ParallelDropoutImpl(double p, const Communicator& axis, bool sequence_parallel = false);

  /// x is whole, or with sequence_parallel this rank's slice.
  torch::Tensor forward(const torch::Tensor& x);

  /// x is the part of a larger tensor that begins at `first` along `dim`, where the larger one has
  /// `whole` elements: the heads of this rank, say.
  torch::Tensor drop_part(const torch::Tensor& x, int64_t dim, int64_t first, int64_t whole);

  const Communicator& axis() const override { return *axis_; }
  void set_axis(const Communicator& axis) override;
  torch::Tensor whole_of(const std::string&) const override { return {}; }
  void pretty_print(std::ostream& stream) const override;

 private:
  bool is_off() const { return p_ == 0 || !is_training(); }
  void compare(const torch::Tensor& mask);

  double p_;
  bool sequence_parallel_;
  std::shared_ptr<const Communicator> axis_;
  uint64_t calls_ = 0;
};
TORCH_MODULE(ParallelDropout);

}  // namespace lockstep
