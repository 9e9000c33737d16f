#include <torch/torch.h>

#include <mutex>

#include "device/dtype_map.hpp"
#include "device/storage_watch.hpp"
#include "layers/cuda/layers.hpp"
#include "layers/layer_kernels.hpp"

namespace lockstep::layers {
namespace {

// Contiguous and aligned, as the kernels read it: a gradient may be a view that begins anywhere.
Tensor as_kernels_read(const Tensor& tensor) {
  const auto result = tensor.contiguous();
  return is_aligned(result) ? result : result.clone();
}

template <class Pointer = void>
Pointer* pointer(const Tensor& tensor) {
  return tensor.defined() ? static_cast<Pointer*>(tensor.data_ptr()) : nullptr;
}

class AddLayerNormBackward : public torch::autograd::Node {
 public:
  AddLayerNormBackward(const Tensor& x, const Tensor& branch, const Tensor& weight,
                       const Tensor& bias, Tensor mean, Tensor rstd)
      : Node(torch::autograd::collect_next_edges(x, branch, weight, bias)),
        weight_(weight, /*is_output=*/false),
        mean_(std::move(mean)),
        rstd_(std::move(rstd)) {}

  /// `sum` is x + branch, or x itself where there is no branch.
  void keep_sum(const Tensor& sum, bool is_output) {
    sum_ = SavedVariable(sum, is_output);
    sum_is_output_ = is_output;
  }

  std::string name() const override { return "lockstep::AddLayerNormBackward"; }

  // `gradients` are those of the norm and, where there is a branch, of the sum.
  variable_list apply(variable_list&& gradients) override {
    require_first_derivative("add_layer_norm");
    const std::lock_guard lock(mutex_);
    variable_list result(4);
    const auto sum_gradient = gradients.size() > 1 ? gradients[1] : Tensor();
    if (!gradients[0].defined()) {  // nobody used the norm
      result[0] = result[1] = sum_gradient;
      return result;
    }
    const auto sum = sum_.unpack(sum_is_output_ ? shared_from_this() : nullptr);
    const auto weight = weight_.unpack();
    const LayerScope scope(sum);
    const auto rows = as_kernels_read(sum);
    const auto normed_gradient = as_kernels_read(gradients[0]);
    const auto other_gradient =
        sum_gradient.defined() ? as_kernels_read(sum_gradient) : sum_gradient;
    const auto scale = as_kernels_read(weight);
    const auto x_gradient = at::empty_like(rows);
    const int64_t width = rows.size(-1);
    const int64_t count = rows.numel() / width;
    Tensor partials;
    if (task_should_compute_output(2) || task_should_compute_output(3)) {
      partials = at::empty({2, layer_norm_partials(count, width), width},
                           rows.options().dtype(at::kFloat));
      result[2] = at::empty({width}, weight.options());
      result[3] = at::empty({width}, weight.options());
    }
    note_use(scale);
    layer_norm_backward({.dtype = *dtype_of(rows.scalar_type()),
                         .weight_dtype = *dtype_of(weight.scalar_type()),
                         .rows = count,
                         .width = width,
                         .sum = rows.data_ptr(),
                         .normed_gradient = normed_gradient.data_ptr(),
                         .sum_gradient = pointer(other_gradient),
                         .weight = scale.data_ptr(),
                         .mean = pointer<float>(mean_),
                         .rstd = pointer<float>(rstd_),
                         .x_gradient = x_gradient.data_ptr(),
                         .partials = pointer<float>(partials),
                         .weight_gradient = pointer(result[2]),
                         .bias_gradient = pointer(result[3])},
                        current_stream());
    result[0] = result[1] = x_gradient;
    return result;
  }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    sum_.reset_data();
    weight_.reset_data();
    mean_.reset();
    rstd_.reset();
  }

 private:
  SavedVariable sum_;
  SavedVariable weight_;
  Tensor mean_;  // [rows]
  Tensor rstd_;  // [rows]
  bool sum_is_output_ = false;
};

}  // namespace

bool cuda_layer_norm_fits(const Tensor& x, const Tensor& branch, const Tensor& weight,
                          const Tensor& bias) {
  if (!weight.defined() || !bias.defined()) return false;
  const int64_t width = x.size(-1);
  const auto dtype = weight.scalar_type();
  return width % 8 == 0 && width <= kMaxNormWidth &&
         (dtype == torch::kFloat || dtype == x.scalar_type()) && bias.scalar_type() == dtype &&
         weight.device() == x.device() && bias.device() == x.device() && is_aligned(x) &&
         is_aligned(branch) && is_aligned(weight) && is_aligned(bias);
}

std::tuple<Tensor, Tensor> cuda_add_layer_norm(const Tensor& x, const Tensor& branch,
                                               const Tensor& weight, const Tensor& bias,
                                               double eps) {
  Tensor sum;
  Tensor normed;
  Tensor mean;
  Tensor rstd;
  {
    const LayerScope scope(x);
    const auto rows = as_kernels_read(x);
    const auto more = branch.defined() ? as_kernels_read(branch) : branch;
    const auto scale = as_kernels_read(weight);
    const auto shift = as_kernels_read(bias);
    const int64_t width = rows.size(-1);
    const int64_t count = rows.numel() / width;
    if (branch.defined()) sum = at::empty_like(rows);
    normed = at::empty_like(rows);
    mean = at::empty({count}, rows.options().dtype(at::kFloat));
    rstd = at::empty_like(mean);
    note_use(scale);
    note_use(shift);
    layer_norm_forward({.dtype = *dtype_of(rows.scalar_type()),
                        .weight_dtype = *dtype_of(weight.scalar_type()),
                        .rows = count,
                        .width = width,
                        .x = rows.data_ptr(),
                        .branch = pointer(more),
                        .weight = scale.data_ptr(),
                        .bias = shift.data_ptr(),
                        .eps = static_cast<float>(eps),
                        .sum = pointer(sum),
                        .normed = normed.data_ptr(),
                        .mean = pointer<float>(mean),
                        .rstd = pointer<float>(rstd)},
                       current_stream());
  }
  if (torch::autograd::compute_requires_grad(x, branch, weight, bias)) {
    const auto node = std::make_shared<AddLayerNormBackward>(x, branch, weight, bias, mean, rstd);
    torch::autograd::set_history(normed, node);
    if (sum.defined()) torch::autograd::set_history(sum, node);
    node->keep_sum(sum.defined() ? sum : x, sum.defined());
  }
  return {sum.defined() ? sum : x, normed};
}

}  // namespace lockstep::layers
