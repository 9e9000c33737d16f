#pragma once

#include <torch/nn/module.h>
#include <torch/nn/options/batchnorm.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <ostream>

#include "lockstep/communicator.hpp"

namespace lockstep {

/// A batch norm whose statistics are those of all ranks' rows, so that N ranks with B / N rows each
/// normalise as one process with B rows does. For inputs [rows, features, ...] of 2 to 5
/// dimensions, in place of torch::nn::BatchNorm1d, 2d and 3d; weights and running statistics have
/// the same names.
///
///     lockstep::SyncBatchNorm norm(torch::nn::BatchNormOptions(64), comm.split(0, 0, "bn"));
///
/// While it trains, forward and backward are one collective each, and so all ranks must make the
/// same calls in the same order. Ranks may have different numbers of rows, also none, but then
/// forward and backward must be called all the same. In evaluation it is a plain batch norm.
///
/// Its calls come between those of DistributedDataParallel: give it a communicator of its own, such
/// as a split, which all SyncBatchNorms of a model share.
class SyncBatchNormImpl : public torch::nn::Module {
 public:
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, const Communicator& ranks);

  torch::Tensor forward(const torch::Tensor& input);

  void reset_running_stats();

  /// This rank's weight in the mean of the gradients. Through the statistics a rank's loss reaches
  /// the other ranks' rows, and counts there by this weight. set_weight() of a wrapper sets it.
  void set_gradient_weight(double of_rank) { *gradient_weight_ = of_rank; }
  void pretty_print(std::ostream& stream) const override;

  torch::nn::BatchNormOptions options;
  torch::Tensor weight;               // [features], undefined without affine
  torch::Tensor bias;                 // [features], undefined without affine
  torch::Tensor running_mean;         // [features], undefined without track_running_stats
  torch::Tensor running_var;          // [features], likewise
  torch::Tensor num_batches_tracked;  // a number, likewise

 private:
  friend class BatchNormConversion;
  struct Tensors {
    torch::Tensor weight;
    torch::Tensor bias;
    torch::Tensor running_mean;
    torch::Tensor running_var;
    torch::Tensor num_batches_tracked;
  };
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, const Communicator& ranks,
                    const Tensors& tensors);
  static Tensors make_tensors(const torch::nn::BatchNormOptions& options);
  void require_input(const torch::Tensor& input) const;
  double next_factor();

  std::shared_ptr<const Communicator> ranks_;
  std::shared_ptr<double> gradient_weight_ = std::make_shared<double>(1);  // at backward
};
TORCH_MODULE(SyncBatchNorm);

/// Sets the gradient weight of every SyncBatchNorm of `module`.
void set_gradient_weight(const torch::nn::Module& module, double weight);

/// Replaces every BatchNorm1d, 2d and 3d inside the Sequentials of `module` by a SyncBatchNorm with
/// the same weights, statistics and mode: an optimizer that holds the weights keeps them.
/// Collective: makes one communicator for all of them.
///
/// A batch norm that is a member of a class cannot be replaced, since the class calls it by its
/// type: kReplicate names it, and nothing is replaced. Declare such a member as SyncBatchNorm.
void convert_sync_batchnorm(torch::nn::Module& module, const Communicator& ranks);

}  // namespace lockstep
