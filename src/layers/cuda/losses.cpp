#include <torch/torch.h>

#include <array>
#include <mutex>

#include "device/dtype_map.hpp"
#include "layers/cuda/layers.hpp"
#include "layers/cuda/matmul.hpp"
#include "layers/layer_kernels.hpp"

namespace lockstep::layers {
namespace {

SquaredError work_of(const Tensor& x, const Tensor& target) {
  return {.dtype = *dtype_of(x.scalar_type()),
          .target_dtype = *dtype_of(target.scalar_type()),
          .count = x.numel(),
          .x = x.data_ptr(),
          .target = target.data_ptr()};
}

class SquaredErrorBackward : public torch::autograd::Node {
 public:
  SquaredErrorBackward(const Tensor& x, const Tensor& target)
      : Node(torch::autograd::collect_next_edges(x)),
        x_(x, /*is_output=*/false),
        target_(target, /*is_output=*/false) {}

  std::string name() const override { return "lockstep::MeanSquaredErrorBackward"; }

  variable_list apply(variable_list&& arriving) override {
    require_first_derivative("mean_squared_error");
    const std::lock_guard lock(mutex_);
    if (!arriving[0].defined() || !task_should_compute_output(0)) return {Tensor()};
    const auto x = x_.unpack();
    const LayerScope scope(x);
    const auto factor = arriving[0].to(at::kFloat).contiguous();
    auto gradient = at::empty_like(x);
    squared_error_backward(work_of(x, target_.unpack()), factor.data_ptr<float>(),
                           gradient.data_ptr(), current_stream());
    return {gradient};
  }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    x_.reset_data();
    target_.reset_data();
  }

 private:
  SavedVariable x_;
  SavedVariable target_;
};

constexpr int64_t kMaxLogitBytes = int64_t{1} << 30;
constexpr int64_t kRowMultiple = 128;  // of rows in a piece, for whole tiles of matrix products

// As few pieces as the limit allows, as equal as tiles allow.
int64_t rows_of_a_piece(int64_t rows, int64_t row_bytes) {
  const int64_t pieces = (rows * row_bytes + kMaxLogitBytes - 1) / kMaxLogitBytes;
  const int64_t each = (rows + pieces - 1) / pieces;
  return std::min(rows, (each + kRowMultiple - 1) / kRowMultiple * kRowMultiple);
}

// The forward pass has computed the gradients of the sum over rows; backward only scales them.
class CrossEntropyBackward : public torch::autograd::Node {
 public:
  CrossEntropyBackward(const Tensor& x, const Tensor& weight, Tensor x_gradient,
                       Tensor weight_gradient)
      : Node(torch::autograd::collect_next_edges(x, weight)),
        gradients_{std::move(x_gradient), std::move(weight_gradient)},
        dtype_(x.scalar_type()),
        rows_(x.size(0)) {}

  std::string name() const override { return "lockstep::LinearCrossEntropyBackward"; }

  variable_list apply(variable_list&& arriving) override {
    require_first_derivative("linear_cross_entropy");
    const std::lock_guard lock(mutex_);
    if (released_) {
      throw Error(Code::kEngine,
                  "backward ran a second time through the same lockstep::linear_cross_entropy",
                  "pass retain_graph = true to the first backward");
    }
    variable_list result(2);
    if (!arriving[0].defined()) return result;
    const LayerScope scope(arriving[0]);
    const auto factor = arriving[0].to(at::kFloat).contiguous();
    for (size_t i = 0; i < result.size(); ++i) {
      if (!gradients_[i].defined() || !task_should_compute_output(i)) continue;
      result[i] = at::empty_like(gradients_[i], gradients_[i].options().dtype(dtype_));
      scale_into({.dtype = *dtype_of(dtype_),
                  .in_dtype = *dtype_of(gradients_[i].scalar_type()),
                  .in = gradients_[i].data_ptr(),
                  .out = result[i].data_ptr(),
                  .count = gradients_[i].numel(),
                  .factor = factor.data_ptr<float>(),
                  .constant = 1.0F / static_cast<float>(rows_)},
                 current_stream());
    }
    return result;
  }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    for (auto& gradient : gradients_) gradient.reset();
    released_ = true;
  }

 private:
  std::array<Tensor, 2> gradients_;  // of x, in its dtype, and of the weight, in float32
  torch::ScalarType dtype_;
  int64_t rows_;
  bool released_ = false;
};

}  // namespace

bool cuda_squared_error_fits(const Tensor& x, const Tensor& target) {
  const bool known =
      target.scalar_type() == x.scalar_type() || target.scalar_type() == torch::kFloat32;
  return known && target.device() == x.device() && !target.requires_grad() && x.is_contiguous() &&
         target.is_contiguous() && x.numel() % 8 == 0 && is_aligned(x) && is_aligned(target);
}

Tensor cuda_mean_squared_error(const Tensor& x, const Tensor& target) {
  Tensor loss;
  {
    const LayerScope scope(x);
    loss = at::empty({}, x.options().dtype(at::kFloat));
    const auto partials = at::empty({squared_error_partials()}, x.options().dtype(at::kDouble));
    squared_error_forward(work_of(x, target), partials.data_ptr<double>(), loss.data_ptr<float>(),
                          current_stream());
  }
  if (torch::autograd::compute_requires_grad(x)) {
    torch::autograd::set_history(loss, std::make_shared<SquaredErrorBackward>(x, target));
  }
  return loss;
}

bool cuda_cross_entropy_fits(const Tensor& weight) {
  return weight.size(0) % 8 == 0;
}

Tensor cuda_linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& targets,
                                 int64_t valid_classes) {
  const bool recording = torch::GradMode::is_enabled();
  Tensor loss;
  Tensor x_gradient;
  Tensor weight_gradient;
  {
    const LayerScope scope(x);
    const auto rows = x.contiguous();
    const auto matrix = weight.contiguous();
    const auto wanted = targets.contiguous();
    const auto in_float = x.options().dtype(at::kFloat);
    const int64_t classes = weight.size(0);
    const int64_t piece = rows_of_a_piece(x.size(0), classes * x.element_size());
    const auto losses = at::empty({x.size(0)}, in_float);
    const auto buffer = at::empty({piece, classes}, x.options());
    if (recording && x.requires_grad()) x_gradient = at::empty_like(rows);
    if (recording && weight.requires_grad()) {
      // The pieces are summed in float32, because half precision would lose small ones.
      weight_gradient = at::empty(weight.sizes(), in_float);
    }
    for (int64_t begin = 0; begin < x.size(0); begin += piece) {
      const int64_t count = std::min(piece, x.size(0) - begin);
      const auto part = rows.narrow(0, begin, count);
      const auto logits = buffer.narrow(0, 0, count);
      matmul({.a = part, .b = matrix, .out = logits, .transpose_b = true});
      cross_entropy({.dtype = *dtype_of(x.scalar_type()),
                     .logits = logits.data_ptr(),
                     .rows = count,
                     .classes = classes,
                     .valid_classes = valid_classes,
                     .targets = wanted.data_ptr<int64_t>() + begin,
                     .losses = losses.data_ptr<float>() + begin,
                     .with_gradient = x_gradient.defined() || weight_gradient.defined()},
                    current_stream());
      if (x_gradient.defined()) {
        matmul({.a = logits,
                .b = matrix,
                .out = x_gradient.narrow(0, begin, count),
                .alpha = 1 / kLogitGradientScale});
      }
      if (weight_gradient.defined()) {
        matmul({.a = logits,
                .b = part,
                .out = weight_gradient,
                .transpose_a = true,
                .alpha = 1 / kLogitGradientScale,
                .beta = begin == 0 ? 0.0F : 1.0F});
      }
    }
    loss = losses.mean();
  }
  if (torch::autograd::compute_requires_grad(x, weight)) {
    torch::autograd::set_history(
        loss, std::make_shared<CrossEntropyBackward>(x, weight, x_gradient, weight_gradient));
  }
  return loss;
}

}  // namespace lockstep::layers
