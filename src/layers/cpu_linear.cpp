#include "layers/cpu_linear.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/torch.h>

#include <algorithm>
#include <mutex>

#include "device/parallel_ranges.hpp"
#include "device/parameter_notes.hpp"
#include "device/storage_watch.hpp"
#include "kernels/linear_bf16_kernels.hpp"
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

bool is_dense(const Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.layout() == torch::kStrided && !tensor.is_neg() &&
         !tensor._fw_grad(0).defined();
}

bool is_bf16(const Tensor& tensor) {
  return tensor.scalar_type() == torch::kBFloat16;
}

// Whether there are kernels for this dtype of x, and they take this other tensor.
bool takes(const Tensor& x, const Tensor& other) {
  if (x.scalar_type() == torch::kFloat) {
    return linear_kernels() != nullptr && other.scalar_type() == torch::kFloat;
  }
  return is_bf16(x) && linear_bf16_kernels() != nullptr &&
         (is_bf16(other) || other.scalar_type() == torch::kFloat);
}

LinearShape shape_of(const Tensor& x, const Tensor& weight) {
  return {x.numel() / weight.size(1), weight.size(1), weight.size(0)};
}

float* floats(const Tensor& tensor) {
  return tensor.data_ptr<float>();
}

uint16_t* bf16_bits(const Tensor& tensor) {
  return static_cast<uint16_t*>(tensor.data_ptr());
}

// Runs `compute(begin, end)` over a range whose parts begin at multiples of `block`.
template <class Compute>
void divide(int64_t count, int64_t block, const Compute& compute) {
  parallel_ranges((count + block - 1) / block, kGrain / block, [&](int64_t begin, int64_t end) {
    compute(begin * block, std::min(count, end * block));
  });
}

// The three products with float32 factors.
struct FloatProducts {
  static Tensor pack(const Tensor& rows, int64_t count, int64_t width) {
    Tensor packed = torch::empty({linear_kernels()->packed_size(count, width)}, torch::kFloat);
    linear_kernels()->pack(floats(rows), count, width, floats(packed));
    return packed;
  }

  static void forward(const LinearShape& shape, const Tensor& x, const Tensor& weight,
                      const Tensor& bias, const Tensor& y) {
    const Tensor packed = pack(x, shape.rows, shape.in);
    divide(shape.out, 1, [&](int64_t begin, int64_t end) {
      linear_kernels()->forward(shape, floats(packed), floats(weight),
                                bias.defined() ? floats(bias) : nullptr, floats(y), begin, end);
    });
  }

  static void input_gradient(const LinearShape& shape, const Tensor& dy, const Tensor& weight,
                             const Tensor& dx) {
    const Tensor packed = pack(dy, shape.rows, shape.out);
    const Tensor scratch =
        torch::empty({linear_kernels()->packed_size(shape.rows, shape.in)}, torch::kFloat);
    divide(shape.in, 1, [&](int64_t begin, int64_t end) {
      linear_kernels()->input_gradient(shape, floats(packed), floats(weight), floats(dx),
                                       floats(scratch), begin, end);
    });
  }

  static void weight_gradient(const LinearShape& shape, const Tensor& dy, const Tensor& x,
                              const Tensor& dweight) {
    divide(shape.out, 1, [&](int64_t begin, int64_t end) {
      linear_kernels()->weight_gradient(shape, floats(dy), floats(x), floats(dweight), begin, end);
    });
  }
};

// The same with bfloat16 factors.
struct Bf16Products {
  using Kernels = LinearBf16Kernels;

  static Tensor pack(const Tensor& rows, int64_t count, int64_t width) {
    Tensor packed = torch::empty({Kernels::packed_size(count, width)}, torch::kBFloat16);
    linear_bf16_kernels()->pack(bf16_bits(rows), count, width, bf16_bits(packed));
    return packed;
  }

  static Tensor pack_row_pairs(const Tensor& rows, int64_t count, int64_t width, int64_t block) {
    Tensor packed = torch::empty({Kernels::row_pairs_size(count, width, block)}, torch::kBFloat16);
    linear_bf16_kernels()->pack_row_pairs(bf16_bits(rows), count, width, block, bf16_bits(packed));
    return packed;
  }

  // Rounds the bias as Autocast does.
  static void forward(const LinearShape& shape, const Tensor& x, const Tensor& weight,
                      const Tensor& bias, const Tensor& y) {
    const Tensor packed = pack(x, shape.rows, shape.in);
    const Tensor rounded =
        bias.defined() ? bias.to(torch::kBFloat16).to(torch::kFloat) : torch::Tensor();
    divide(shape.out, 1, [&](int64_t begin, int64_t end) {
      linear_bf16_kernels()->forward(shape, bf16_bits(packed), weight.data_ptr(), is_bf16(weight),
                                     rounded.defined() ? floats(rounded) : nullptr, bf16_bits(y),
                                     begin, end);
    });
  }

  static void input_gradient(const LinearShape& shape, const Tensor& dy, const Tensor& weight,
                             const Tensor& dx) {
    const Tensor packed = pack(dy, shape.rows, shape.out);
    const Tensor scratch =
        torch::empty({Kernels::scratch_size(shape.rows, shape.in)}, torch::kFloat);
    divide(shape.in, Kernels::kInputBlock, [&](int64_t begin, int64_t end) {
      linear_bf16_kernels()->input_gradient(shape, bf16_bits(packed), weight.data_ptr(),
                                            is_bf16(weight), bf16_bits(dx), floats(scratch), begin,
                                            end);
    });
  }

  static void weight_gradient(const LinearShape& shape, const Tensor& dy, const Tensor& x,
                              const Tensor& dweight) {
    const Tensor x_pairs = pack_row_pairs(x, shape.rows, shape.in, Kernels::kPairBlock);
    const Tensor dy_pairs = pack_row_pairs(dy, shape.rows, shape.out, Kernels::kOutputBlock);
    divide(shape.out, Kernels::kOutputBlock, [&](int64_t begin, int64_t end) {
      linear_bf16_kernels()->weight_gradient(shape, bf16_bits(dy_pairs), bf16_bits(x_pairs),
                                             dweight.data_ptr(), is_bf16(dweight), begin, end);
    });
  }
};

class CpuLinearBackward : public torch::autograd::Node {
 public:
  CpuLinearBackward(const Tensor& x, const Tensor& weight, const Tensor& bias)
      : Node(torch::autograd::collect_next_edges(x, weight, bias)),
        x_(x, /*is_output=*/false),
        weight_(weight, /*is_output=*/false),
        bias_dtype_(bias.defined() ? bias.scalar_type() : torch::kFloat),
        gradient_memory_(gradient_memory_of(weight)) {}

  std::string name() const override { return "lockstep::CpuLinearBackward"; }

  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard lock(mutex_);
    if (!gradients[0].defined()) return variable_list(3);
    const Tensor weight = weight_.unpack();
    const Tensor x = x_.unpack();
    if (torch::GradMode::is_enabled()) return recorded(gradients[0], x, weight);
    return is_bf16(x) ? computed<Bf16Products>(gradients[0], x, weight)
                      : computed<FloatProducts>(gradients[0], x, weight);
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
    if (task_should_compute_output(0)) {
      result[0] = torch::matmul(gradient, weight.to(x.scalar_type()));
    }
    if (task_should_compute_output(1)) {
      result[1] = torch::mm(dy.t(), x.reshape({-1, weight.size(1)})).to(weight.scalar_type());
    }
    if (task_should_compute_output(2)) result[2] = dy.sum(0).to(bias_dtype_);
    return result;
  }

  template <class Products>
  variable_list computed(const Tensor& gradient, const Tensor& x, const Tensor& weight) {
    variable_list result(3);
    const LinearShape shape = shape_of(x, weight);
    const Tensor dy = gradient.contiguous();
    if (task_should_compute_output(0)) {
      note_use(weight);
      result[0] = torch::empty(x.sizes(), x.options());
      Products::input_gradient(shape, dy, weight, result[0]);
    }
    if (task_should_compute_output(1)) {
      const auto claim = gradient_memory_.lock();
      if (claim) result[1] = (*claim)();
      if (!result[1].defined() || !result[1].is_contiguous()) {
        result[1] = torch::empty(weight.sizes(), weight.options());
      }
      Products::weight_gradient(shape, dy, x.contiguous(), result[1]);
    }
    if (task_should_compute_output(2)) {
      result[2] = dy.view({shape.rows, shape.out}).sum(0, /*keepdim=*/false, bias_dtype_);
    }
    return result;
  }

  SavedVariable x_;
  SavedVariable weight_;
  torch::ScalarType bias_dtype_;
  std::weak_ptr<const ClaimGradientMemory> gradient_memory_;
};

}  // namespace

bool cpu_linear_fits(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  if (!is_dense(x) || !is_dense(weight) || !takes(x, weight)) return false;
  if (x.dim() < 1 || weight.dim() != 2 || !weight.is_contiguous() || weight.numel() == 0 ||
      x.size(-1) != weight.size(1)) {
    return false;
  }
  if (bias.defined() && (!is_dense(bias) || !takes(x, bias) || bias.dim() != 1 ||
                         !bias.is_contiguous() || bias.size(0) != weight.size(0))) {
    return false;
  }
  const int64_t rows = x.numel() / x.size(-1);
  return rows >= kMinRows && rows <= kMaxRows;
}

Tensor cpu_linear(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  Tensor y;
  {
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    auto sizes = x.sizes().vec();
    sizes.back() = weight.size(0);
    y = torch::empty(sizes, x.options());
    const LinearShape shape = shape_of(x, weight);
    note_use(weight);
    if (bias.defined()) note_use(bias);
    if (is_bf16(x)) {
      Bf16Products::forward(shape, x.contiguous(), weight, bias, y);
    } else {
      FloatProducts::forward(shape, x.contiguous(), weight, bias, y);
    }
  }
  if (torch::autograd::compute_requires_grad(x, weight, bias)) {
    torch::autograd::set_history(y, std::make_shared<CpuLinearBackward>(x, weight, bias));
  }
  return y;
}

}  // namespace lockstep::layers
