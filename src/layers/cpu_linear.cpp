#include "layers/cpu_linear.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/torch.h>

#include <mutex>
#include <utility>

#include "device/gradient_memory.hpp"
#include "device/parallel_ranges.hpp"
#include "kernels/linear_kernels.hpp"

namespace lockstep::layers {
namespace {

using torch::Tensor;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// Between these numbers of rows the kernels were faster than OpenBLAS for every product and size of
// weight that was tried: docs/layers.md.
constexpr int64_t kMinRows = 4;
constexpr int64_t kMaxRows = 128;

constexpr int64_t kGrain = 64;  // outputs or inputs: fewer are not worth waking another thread

bool is_dense_float(const Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.scalar_type() == torch::kFloat &&
         tensor.layout() == torch::kStrided && !tensor.is_neg() && !tensor._fw_grad(0).defined();
}

LinearShape shape_of(const Tensor& x, const Tensor& weight) {
  return {x.numel() / weight.size(1), weight.size(1), weight.size(0)};
}

Tensor pack(const Tensor& rows, int64_t count, int64_t width) {
  const LinearKernels& kernels = *linear_kernels();
  Tensor packed = torch::empty({kernels.packed_size(count, width)}, torch::kFloat);
  kernels.pack(rows.data_ptr<float>(), count, width, packed.data_ptr<float>());
  return packed;
}

Tensor forward(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const LinearShape shape = shape_of(x, weight);
  auto sizes = x.sizes().vec();
  sizes.back() = shape.out;
  Tensor y = torch::empty(sizes, torch::kFloat);
  const Tensor packed = pack(x.contiguous(), shape.rows, shape.in);
  const float* bias_values = bias.defined() ? bias.data_ptr<float>() : nullptr;
  parallel_ranges(shape.out, kGrain, [&](int64_t begin, int64_t end) {
    linear_kernels()->forward(shape, packed.data_ptr<float>(), weight.data_ptr<float>(),
                              bias_values, y.data_ptr<float>(), begin, end);
  });
  return y;
}

Tensor input_gradient(const LinearShape& shape, const Tensor& dy, const Tensor& weight,
                      at::IntArrayRef sizes) {
  Tensor dx = torch::empty(sizes, torch::kFloat);
  const Tensor packed = pack(dy, shape.rows, shape.out);
  const Tensor scratch =
      torch::empty({linear_kernels()->packed_size(shape.rows, shape.in)}, torch::kFloat);
  parallel_ranges(shape.in, kGrain, [&](int64_t begin, int64_t end) {
    linear_kernels()->input_gradient(shape, packed.data_ptr<float>(), weight.data_ptr<float>(),
                                     dx.data_ptr<float>(), scratch.data_ptr<float>(), begin, end);
  });
  return dx;
}

// `memory` is where the gradient belongs; undefined: anywhere.
Tensor weight_gradient(const LinearShape& shape, const Tensor& dy, const Tensor& x, Tensor memory) {
  if (!memory.defined() || !memory.is_contiguous()) {
    memory = torch::empty({shape.out, shape.in}, torch::kFloat);
  }
  parallel_ranges(shape.out, kGrain, [&](int64_t begin, int64_t end) {
    linear_kernels()->weight_gradient(shape, dy.data_ptr<float>(), x.data_ptr<float>(),
                                      memory.data_ptr<float>(), begin, end);
  });
  return memory;
}

class CpuLinearBackward : public torch::autograd::Node {
 public:
  CpuLinearBackward(const Tensor& x, const Tensor& weight, const Tensor& bias)
      : Node(torch::autograd::collect_next_edges(x, weight, bias)),
        x_(x, /*is_output=*/false),
        weight_(weight, /*is_output=*/false),
        gradient_memory_(gradient_memory_of(weight)) {}

  std::string name() const override { return "lockstep::CpuLinearBackward"; }

  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard lock(mutex_);
    if (!gradients[0].defined()) return variable_list(3);
    const Tensor weight = weight_.unpack();
    const Tensor x = x_.unpack();
    return torch::GradMode::is_enabled() ? recorded(gradients[0], x, weight)
                                         : computed(gradients[0], x, weight);
  }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    x_.reset_data();
    weight_.reset_data();
  }

 private:
  // With create_graph: libtorch's operations, which can be differentiated again.
  variable_list recorded(const Tensor& gradient, const Tensor& x, const Tensor& weight) {
    variable_list result(3);
    const Tensor dy = gradient.reshape({-1, weight.size(0)});
    if (task_should_compute_output(0)) result[0] = torch::matmul(gradient, weight);
    if (task_should_compute_output(1)) {
      result[1] = torch::mm(dy.t(), x.reshape({-1, weight.size(1)}));
    }
    if (task_should_compute_output(2)) result[2] = dy.sum(0);
    return result;
  }

  variable_list computed(const Tensor& gradient, const Tensor& x, const Tensor& weight) {
    variable_list result(3);
    const LinearShape shape = shape_of(x, weight);
    const Tensor dy = gradient.contiguous();
    if (task_should_compute_output(0)) result[0] = input_gradient(shape, dy, weight, x.sizes());
    if (task_should_compute_output(1)) {
      const auto claim = gradient_memory_.lock();
      result[1] = weight_gradient(shape, dy, x.contiguous(), claim ? (*claim)() : Tensor());
    }
    if (task_should_compute_output(2)) result[2] = dy.reshape({shape.rows, shape.out}).sum(0);
    return result;
  }

  SavedVariable x_;
  SavedVariable weight_;
  std::weak_ptr<const ClaimGradientMemory> gradient_memory_;
};

}  // namespace

bool cpu_linear_fits(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  if (linear_kernels() == nullptr || !is_dense_float(x) || !is_dense_float(weight)) return false;
  if (x.dim() < 1 || weight.dim() != 2 || !weight.is_contiguous() || weight.numel() == 0 ||
      x.size(-1) != weight.size(1)) {
    return false;
  }
  if (bias.defined() && (!is_dense_float(bias) || bias.dim() != 1 || !bias.is_contiguous() ||
                         bias.size(0) != weight.size(0))) {
    return false;
  }
  const int64_t rows = x.numel() / x.size(-1);
  return rows >= kMinRows && rows <= kMaxRows;
}

Tensor cpu_linear(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  Tensor y = forward(x, weight, bias);
  if (torch::autograd::compute_requires_grad(x, weight, bias)) {
    torch::autograd::set_history(y, std::make_shared<CpuLinearBackward>(x, weight, bias));
  }
  return y;
}

}  // namespace lockstep::layers
