#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/torch.h>

#include <mutex>

#include "device/dtype_map.hpp"
#include "layers/activation_kernels.hpp"
#include "layers/cuda/layers.hpp"
#include "layers/cuda/scope.hpp"

namespace lockstep::layers {
namespace {

using torch::Tensor;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

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
                           gradient.data_ptr(), c10::cuda::getCurrentCUDAStream().stream());
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
                          c10::cuda::getCurrentCUDAStream().stream());
  }
  if (torch::autograd::compute_requires_grad(x)) {
    torch::autograd::set_history(loss, std::make_shared<SquaredErrorBackward>(x, target));
  }
  return loss;
}

}  // namespace lockstep::layers
