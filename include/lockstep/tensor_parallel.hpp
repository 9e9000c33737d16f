#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <string_view>

#include "lockstep/communicator.hpp"

namespace lockstep {

struct ShardAxis;

/// A layer that communicates over a tensor axis.
class OnTensorAxis {
 public:
  virtual ~OnTensorAxis() = default;
  virtual const Communicator& axis() const = 0;
  virtual void set_axis(const Communicator& axis) = 0;  ///< as set_tensor_axis

  /// The whole of a parameter that this layer divides, without history, on every rank. Collective.
  /// Undefined if all ranks have it whole.
  virtual torch::Tensor whole_of(const std::string& parameter) const = 0;
};

/// How a ColumnLinear divides and returns its output.
struct ColumnLinearOptions {
  bool gather_output = false;  ///< every rank gets all output features
  int64_t parts = 1;  ///< equal blocks of the output, each of which is divided: 3 for fused q, k, v
  int64_t unit = 1;   ///< features that stay on one rank: the width of a head
  bool sequence_parallel = false;  ///< the input is this rank's slice of the sequence
};

/// How a RowLinear takes its input.
struct RowLinearOptions {
  bool scatter_input = false;      ///< the input has all features, and every rank takes its own
  int64_t unit = 1;                ///< as that of the ColumnLinear before it
  bool sequence_parallel = false;  ///< the output is this rank's slice of the sequence
};

/// A Linear whose output features are divided over the ranks of an axis. The input is whole and the
/// same on all ranks; backward sums its gradient over them. Features that do not divide evenly are
/// divided by torch.tensor_split's rule.
///
///     torch::nn::Sequential block(lockstep::ColumnLinear(up, mesh.axis("tp")), torch::nn::GELU(),
///                                 lockstep::RowLinear(down, mesh.axis("tp")));
///
/// With sequence_parallel the input is [..., own positions, features]: forward gathers the slices
/// of all ranks, and backward reduce-scatters the gradient.
///
/// All ranks of the axis must run the same layers in the same order, and calls from several threads
/// must not overlap on one communicator (see set_tensor_axis). With one rank it is a plain Linear.
class ColumnLinearImpl : public torch::nn::Module, public OnTensorAxis {
 public:
  /// Copies this rank's slice of the weights, which must be the same on all ranks.
  ColumnLinearImpl(const torch::nn::Linear& whole, const Communicator& axis,
                   const ColumnLinearOptions& options = {});

  /// The same, given a Linear's [out, in] weight and its bias, which may be undefined.
  ColumnLinearImpl(const torch::Tensor& whole_weight, const torch::Tensor& whole_bias,
                   const Communicator& axis, const ColumnLinearOptions& options = {});
  ~ColumnLinearImpl() override;

  torch::Tensor forward(const torch::Tensor& x);

  /// The tensors of the whole Linear, without history, on every rank; undefined without a bias.
  /// Collective.
  torch::Tensor whole_weight() const;
  torch::Tensor whole_bias() const;

  const Communicator& axis() const override;
  void set_axis(const Communicator& axis) override;
  torch::Tensor whole_of(const std::string& parameter) const override;
  void pretty_print(std::ostream& stream) const override;

  torch::Tensor weight;  // [own output features, in]
  torch::Tensor bias;    // [own output features], or undefined

 private:
  ColumnLinearOptions options_;
  std::shared_ptr<const ShardAxis> shard_;
};

/// A Linear whose input features are divided over the ranks of an axis: the other half of a pair.
/// It takes the output of a ColumnLinear with as many features. Forward sums the ranks' products,
/// so the output is whole and the same on all ranks; the bias, whole on every rank, is added
/// afterwards. With sequence_parallel the sum is reduce-scattered, so that each rank gets its slice
/// of the sequence; backward gathers the gradient and sums that of the bias.
class RowLinearImpl : public torch::nn::Module, public OnTensorAxis {
 public:
  RowLinearImpl(const torch::nn::Linear& whole, const Communicator& axis,
                const RowLinearOptions& options = {});
  RowLinearImpl(const torch::Tensor& whole_weight, const torch::Tensor& whole_bias,
                const Communicator& axis, const RowLinearOptions& options = {});
  ~RowLinearImpl() override;

  torch::Tensor forward(const torch::Tensor& x);

  /// The tensors of the whole Linear, without history, on every rank; undefined without a bias.
  /// Collective.
  torch::Tensor whole_weight() const;
  torch::Tensor whole_bias() const;

  const Communicator& axis() const override;
  void set_axis(const Communicator& axis) override;
  torch::Tensor whole_of(const std::string& parameter) const override;
  void pretty_print(std::ostream& stream) const override;

  torch::Tensor weight;  // [out, own input features]
  torch::Tensor bias;    // [out], or undefined

 private:
  RowLinearOptions options_;
  std::shared_ptr<const ShardAxis> shard_;
};

/// Holder of a ColumnLinearImpl.
class ColumnLinear : public torch::nn::ModuleHolder<ColumnLinearImpl> {
 public:
  using torch::nn::ModuleHolder<ColumnLinearImpl>::ModuleHolder;
  ColumnLinear(const torch::nn::Linear& whole, const Communicator& axis,
               const ColumnLinearOptions& options)
      : ModuleHolder(std::make_shared<ColumnLinearImpl>(whole, axis, options)) {}
  ColumnLinear(const torch::Tensor& whole_weight, const torch::Tensor& whole_bias,
               const Communicator& axis, const ColumnLinearOptions& options)
      : ModuleHolder(std::make_shared<ColumnLinearImpl>(whole_weight, whole_bias, axis, options)) {}
};

/// Holder of a RowLinearImpl.
class RowLinear : public torch::nn::ModuleHolder<RowLinearImpl> {
 public:
  using torch::nn::ModuleHolder<RowLinearImpl>::ModuleHolder;
  RowLinear(const torch::nn::Linear& whole, const Communicator& axis,
            const RowLinearOptions& options)
      : ModuleHolder(std::make_shared<RowLinearImpl>(whole, axis, options)) {}
  RowLinear(const torch::Tensor& whole_weight, const torch::Tensor& whole_bias,
            const Communicator& axis, const RowLinearOptions& options)
      : ModuleHolder(std::make_shared<RowLinearImpl>(whole_weight, whole_bias, axis, options)) {}
};

/// Makes every layer of a tensor axis in `module` use this communicator, which must have the same
/// ranks in the same order. Parts of a model that run at the same time, such as the stages of a
/// pipeline inside one process, need one each: on one communicator, calls of two threads could be
/// in another order on another rank.
void set_tensor_axis(torch::nn::Module& module, const Communicator& axis);

/// Aborts the communicator of every layer of a tensor axis in `module`, so that no other rank of
/// the axis waits for this one after an error.
void abort_tensor_axes(const torch::nn::Module& module, std::string_view reason);

/// Every parameter of the module under its name, put together where it is divided over a tensor
/// axis, without history. A parameter that two modules share appears under the first name only.
/// Collective over these axes.
std::map<std::string, torch::Tensor> whole_parameters(const torch::nn::Module& module);

}  // namespace lockstep
