#include <torch/torch.h>

#include <mutex>

#include "device/dtype_map.hpp"
#include "layers/cuda/layers.hpp"
#include "layers/cuda/matmul.hpp"
#include "layers/layer_kernels.hpp"

namespace lockstep::layers {
namespace {

// What a layer leaves for the derivative of its activation. In a chain the next layer reads it:
// that layer undoes the activation when it computes the gradient of its input, so the gradient that
// arrives here is already the one before the activation.
struct Activated {
  Activation activation = Activation::kNone;
  Tensor before;  // GELU's input, [rows, out]; for ReLU the output is enough
  bool bias_wanted = false;
  Tensor bias_gradient;  // of this layer, where the next one has computed it on the way
};

Tensor activation_gradient(const Tensor& gradient, const Activated& of, const Tensor& output) {
  return of.activation == Activation::kRelu ? at::threshold_backward(gradient, output, 0)
                                            : at::gelu_backward(gradient, of.before, "tanh");
}

// Turns the gradient behind the activation into the one before it, in place, and returns its sums
// over rows where wanted. This is a pass of our own because cuBLASLt's epilogues for it are second
// kernels: they take 103 instead of 30 µs for ReLU and 4096 x 4096 elements, and 635 µs for GELU
// and 32768 x 3072.
Tensor undo_in_place(Tensor gradient, Undone what, const Tensor& kept, bool sums_wanted) {
  Tensor sums;
  if (sums_wanted) sums = at::empty({gradient.size(1)}, gradient.options());
  const bool fits =
      gradient.numel() > 0 && gradient.size(1) % 8 == 0 && is_aligned(gradient) && is_aligned(kept);
  if (!fits) {
    if (what == Undone::kRelu) at::threshold_backward_out(gradient, gradient, kept, 0);
    if (what == Undone::kGeluTanh) at::gelu_backward_out(gradient, gradient, kept, "tanh");
    if (sums_wanted) at::sum_out(sums, gradient, at::IntArrayRef{0});
    return sums;
  }
  UndoActivation work{.what = what,
                      .dtype = *dtype_of(gradient.scalar_type()),
                      .rows = gradient.size(0),
                      .width = gradient.size(1),
                      .gradient = gradient.data_ptr(),
                      .kept = kept.defined() ? kept.data_ptr() : nullptr,
                      .partials = nullptr,
                      .sums = nullptr};
  Tensor partials;
  if (sums_wanted) {
    partials =
        at::empty({undo_partials(work.rows), work.width}, gradient.options().dtype(at::kFloat));
    work.partials = partials.data_ptr<float>();
    work.sums = sums.data_ptr();
  }
  undo_activation(work, current_stream());
  return sums;
}

Tensor sum_of_rows(const Tensor& matrix) {
  return undo_in_place(matrix, Undone::kNothing, {}, /*sums_wanted=*/true);
}

// x · weightᵀ + bias into `out`.
void affine(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& out) {
  Matmul work{.a = x, .b = weight, .out = out, .transpose_b = true};
  if (bias.defined()) {
    work.epilogue = CUBLASLT_EPILOGUE_BIAS;
    work.bias = bias;
    if (try_matmul(work)) return;
    work.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    work.bias = Tensor();
  }
  matmul(work);
  if (bias.defined()) out.add_(bias);
}

cublasLtEpilogue_t forward_epilogue(Activation activation, bool with_aux, bool with_bias) {
  int epilogue = activation == Activation::kRelu ? CUBLASLT_EPILOGUE_RELU : CUBLASLT_EPILOGUE_GELU;
  if (with_aux) epilogue |= CUBLASLT_EPILOGUE_RELU_AUX & ~CUBLASLT_EPILOGUE_RELU;
  if (with_bias) epilogue |= CUBLASLT_EPILOGUE_BIAS;
  return static_cast<cublasLtEpilogue_t>(epilogue);
}

// Returns the layer's output. `left` gets what the activation's derivative needs; null: there is no
// backward.
Tensor forward(const Tensor& x, const Tensor& weight, const Tensor& bias, Activation activation,
               Activated* left) {
  const auto out = at::empty({x.size(0), weight.size(0)}, x.options());
  if (activation == Activation::kNone) {
    affine(x, weight, bias, out);
    return out;
  }
  const bool relu = activation == Activation::kRelu;
  Tensor aux;
  if (left && !relu) aux = at::empty_like(out);
  const Matmul fused{.a = x,
                     .b = weight,
                     .out = out,
                     .transpose_b = true,
                     .epilogue = forward_epilogue(activation, aux.defined(), bias.defined()),
                     .bias = bias,
                     .aux = aux};
  const Matmul plain{.a = x, .b = weight, .out = relu || !left ? out : aux, .transpose_b = true};
  const bool use_fused = choose_fused(fused, plain, [&] {
    if (relu) {
      plain.out.relu_();
    } else {
      at::gelu(plain.out, "tanh");
    }
  });
  if (use_fused && try_matmul(fused)) {
    if (left) left->before = aux;
    return out;
  }
  affine(x, weight, bias, plain.out);
  if (relu) return out.relu_();
  if (left) left->before = plain.out;
  return at::gelu(plain.out, "tanh");
}

class LinearBackward : public torch::autograd::Node {
 public:
  LinearBackward(const Tensor& x, const Tensor& weight, const Tensor& bias)
      : Node(torch::autograd::collect_next_edges(x, weight, bias)),
        x_(x, /*is_output=*/false),
        weight_(weight, /*is_output=*/false) {}

  /// Sets the layer before this one in the chain; null: this is the first that is differentiated.
  void follow(std::shared_ptr<Activated> before) { before_ = std::move(before); }

  /// Sets what this layer leaves. `chained`: the next layer undoes the activation.
  void leave(std::shared_ptr<Activated> own, bool chained, const Tensor& output) {
    own_ = std::move(own);
    chained_ = chained;
    if (own_->activation == Activation::kRelu && !chained) {
      output_ = SavedVariable(output, /*is_output=*/true);
    }
  }

  std::string name() const override { return "lockstep::LinearBackward"; }

  variable_list apply(variable_list&& gradients) override {
    require_first_derivative("linear");
    const std::lock_guard lock(mutex_);
    variable_list result(3);
    if (!gradients[0].defined()) return result;
    const auto weight = weight_.unpack();
    const auto x = x_.unpack();
    const LayerScope scope(weight);
    const auto rows = x.contiguous();
    auto gradient = std::move(gradients[0]).contiguous();
    if (own_->activation != Activation::kNone && !chained_) {
      const auto output =
          own_->activation == Activation::kRelu ? output_.unpack(shared_from_this()) : Tensor();
      gradient = activation_gradient(gradient, *own_, output);
    }
    auto handed_down = std::exchange(own_->bias_gradient, Tensor());
    if (task_should_compute_output(2)) {
      result[2] = handed_down.defined() ? std::move(handed_down) : sum_of_rows(gradient);
    }
    if (task_should_compute_output(1)) {
      result[1] = at::empty({gradient.size(1), rows.size(1)}, rows.options());
      matmul({.a = gradient, .b = rows, .out = result[1], .transpose_a = true});
    }
    if (task_should_compute_output(0)) {
      result[0] = input_gradient(gradient, weight.contiguous(), rows);
    }
    return result;
  }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    x_.reset_data();
    weight_.reset_data();
    output_.reset_data();
    if (before_) before_->before.reset();
    if (!chained_) own_->before.reset();
  }

 private:
  // gradient: [rows, out], weight: [out, in], x: [rows, in] is the output of the layer before.
  Tensor input_gradient(const Tensor& gradient, const Tensor& weight, const Tensor& x) const {
    const auto out = at::empty({gradient.size(0), weight.size(1)}, gradient.options());
    matmul({.a = gradient, .b = weight, .out = out});
    if (!before_ || before_->activation == Activation::kNone) return out;
    const bool relu = before_->activation == Activation::kRelu;
    before_->bias_gradient = undo_in_place(out, relu ? Undone::kRelu : Undone::kGeluTanh,
                                           relu ? x : before_->before, before_->bias_wanted);
    return out;
  }

  SavedVariable x_;
  SavedVariable weight_;
  SavedVariable output_;
  std::shared_ptr<Activated> before_;
  std::shared_ptr<Activated> own_;
  bool chained_ = false;
};

}  // namespace

torch::Tensor cuda_linear_chain(const Tensor& x, const std::vector<Tensor>& weights,
                                const std::vector<Tensor>& biases, Activation between,
                                Activation after) {
  Tensor value = x;
  std::shared_ptr<Activated> before;
  for (size_t i = 0; i < weights.size(); ++i) {
    const bool chained = i + 1 < weights.size();
    const auto& [weight, bias] = std::tie(weights[i], biases[i]);
    const bool differentiated = torch::autograd::compute_requires_grad(value, weight, bias);
    auto own = std::make_shared<Activated>();
    own->activation = chained ? between : after;
    own->bias_wanted = bias.defined() && bias.requires_grad();
    Tensor out;
    {
      const LayerScope scope(value);
      out = forward(value.contiguous(), weight.contiguous(),
                    bias.defined() ? bias.contiguous() : bias, own->activation,
                    differentiated ? own.get() : nullptr);
    }
    if (differentiated) {
      const auto node = std::make_shared<LinearBackward>(value, weight, bias);
      node->follow(std::exchange(before, own));
      torch::autograd::set_history(out, node);
      node->leave(std::move(own), chained, out);
    }
    value = out;
  }
  return value;
}

}  // namespace lockstep::layers
