#include "lockstep/sequence_parallel.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <bit>

#include "device/capture.hpp"
#include "lockstep/error.hpp"
#include "lockstep/fused_layers.hpp"
#include "parallel/tensor_axis.hpp"

namespace lockstep {
namespace {

AxisPtr shared_axis(const Communicator& axis) {
  return std::make_shared<const Communicator>(axis);
}

AxisPtr moved_axis(const Communicator& old, const Communicator& axis) {
  require_same_axis_rank(old, axis);
  return shared_axis(axis);
}

int64_t single_dimension(const std::vector<int64_t>& normalized_shape) {
  if (normalized_shape.size() == 1) return normalized_shape[0];
  throw Error(
      Code::kTensorMismatch,
      fmt::format("ParallelLayerNorm was given a norm over {} dimensions", normalized_shape.size()),
      "normalise the last dimension only");
}

}  // namespace

torch::Tensor scatter_to_sequence(const torch::Tensor& whole, const Communicator& axis) {
  if (axis.size() == 1) return whole;
  require_sequence("scatter_to_sequence", whole, axis);
  return scatter_sequence(whole, shared_axis(axis));
}

torch::Tensor gather_from_sequence(const torch::Tensor& own, const Communicator& axis) {
  if (axis.size() == 1) return own;
  return gather_sequence(own, shared_axis(axis), /*sums=*/false);
}

ParallelLayerNormImpl::ParallelLayerNormImpl(const torch::nn::LayerNorm& whole,
                                             const Communicator& axis, bool sequence_parallel)
    : features_(single_dimension(whole->options.normalized_shape())),
      eps_(whole->options.eps()),
      sequence_parallel_(sequence_parallel),
      axis_(shared_axis(axis)) {
  if (!whole->options.elementwise_affine()) return;
  weight =
      register_parameter("weight", whole->weight.detach().clone(), whole->weight.requires_grad());
  if (!whole->bias.defined()) return;
  bias = register_parameter("bias", whole->bias.detach().clone(), whole->bias.requires_grad());
}

torch::Tensor ParallelLayerNormImpl::forward(const torch::Tensor& x) {
  return std::get<1>(add(x, {}));
}

std::tuple<torch::Tensor, torch::Tensor> ParallelLayerNormImpl::add(const torch::Tensor& x,
                                                                    const torch::Tensor& branch) {
  std::vector<torch::Tensor> weights = {weight, bias};
  if (sequence_parallel_ && torch::GradMode::is_enabled()) weights = sum_gradients(weights, axis_);
  return add_layer_norm(x, branch, weights[0], weights[1], eps_);
}

void ParallelLayerNormImpl::set_axis(const Communicator& axis) {
  axis_ = moved_axis(*axis_, axis);
}

torch::Tensor ParallelLayerNormImpl::whole_of(const std::string&) const {
  return {};
}

void ParallelLayerNormImpl::pretty_print(std::ostream& stream) const {
  stream << fmt::format("lockstep::ParallelLayerNorm({}, eps={}, sequence_parallel={})", features_,
                        eps_, sequence_parallel_);
}

ParallelDropoutImpl::ParallelDropoutImpl(double p, const Communicator& axis, bool sequence_parallel)
    : p_(p), sequence_parallel_(sequence_parallel), axis_(shared_axis(axis)) {
  if (p >= 0 && p <= 1) return;
  throw Error(Code::kUsage, fmt::format("ParallelDropout was given the probability {}", p),
              "give a number from 0 to 1");
}

torch::Tensor ParallelDropoutImpl::forward(const torch::Tensor& x) {
  if (is_off()) return x;
  if (!sequence_parallel_) return drop_part(x, 0, 0, x.size(0));
  const int64_t own = x.size(-2);
  return drop_part(x, -2, own * axis_->rank(), own * axis_->size());
}

// The operations of torch::dropout, so that on the CPU a seed gives the masks of torch::dropout.
torch::Tensor ParallelDropoutImpl::drop_part(const torch::Tensor& x, int64_t dim, int64_t first,
                                             int64_t whole) {
  if (is_off()) return x;
  if (axis_->size() == 1) return torch::dropout(x, p_, /*train=*/true);
  auto sizes = x.sizes().vec();
  sizes[static_cast<size_t>(dim < 0 ? dim + x.dim() : dim)] = whole;
  auto mask = torch::empty(sizes, x.options().requires_grad(false)).bernoulli_(1 - p_);
  compare(mask);
  mask = mask.narrow(dim, first, x.size(dim));
  return p_ < 1 ? x * mask.div(1 - p_) : x * mask.clone();
}

void ParallelDropoutImpl::compare(const torch::Tensor& mask) {
  calls_ += 1;
  if (!std::has_single_bit(calls_) || Capture::current() != nullptr) return;
  const auto bytes = mask.to(torch::kCPU, torch::kUInt8).contiguous();
  const auto mine = torch::full(
      {1}, static_cast<int64_t>(XXH3_64bits(bytes.data_ptr(), bytes.nbytes()) >> 1), torch::kInt64);
  const auto all = torch::empty({axis_->size()}, torch::kInt64);
  axis_->all_gather(all, mine, {.label = "dropout's mask"});
  for (int rank = 0; rank < axis_->size(); ++rank) {
    if (torch::equal(all[rank], all[0])) continue;
    throw Error(
        Code::kTensorMismatch,
        fmt::format("ranks 0 and {} of a tensor axis draw different masks for dropout", rank),
        "seed all ranks of the tensor axis alike, such as torch::manual_seed(seed + data "
        "rank), and let none of them draw more than the others");
  }
}

void ParallelDropoutImpl::set_axis(const Communicator& axis) {
  axis_ = moved_axis(*axis_, axis);
}

void ParallelDropoutImpl::pretty_print(std::ostream& stream) const {
  stream << fmt::format("lockstep::ParallelDropout(p={}, sequence_parallel={})", p_,
                        sequence_parallel_);
}

}  // namespace lockstep
