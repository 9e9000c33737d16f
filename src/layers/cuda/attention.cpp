#include <ATen/native/transformers/cuda/sdp_utils.h>
#include <torch/torch.h>

#include <mutex>

#include "layers/cuda/layers.hpp"

namespace lockstep::layers {
namespace {

// Queries, keys and values as attention takes them, [batch, heads, positions, head width]: views of
// qkv, [batch, positions, 3 * width].
struct Parts {
  Parts(const Tensor& qkv, int64_t heads) {
    const auto all = qkv.view({qkv.size(0), qkv.size(1), 3, heads, qkv.size(2) / (3 * heads)})
                         .permute({2, 0, 3, 1, 4})
                         .unbind(0);
    q = all[0];
    k = all[1];
    v = all[2];
  }
  Tensor q;
  Tensor k;
  Tensor v;
};

// Turns [batch, heads, positions, head width] into [batch, positions, width]: a view where the
// memory allows.
Tensor side_by_side(const Tensor& heads) {
  return heads.transpose(1, 2).reshape(
      {heads.size(0), heads.size(2), heads.size(1) * heads.size(3)});
}

// Backward of cuDNN's attention; puts the three gradients side by side in one pass.
class AttentionBackward : public torch::autograd::Node {
 public:
  AttentionBackward(const Tensor& qkv, int64_t heads)
      : Node(torch::autograd::collect_next_edges(qkv)),
        qkv_(qkv, /*is_output=*/false),
        heads_(heads) {}

  /// Keeps the tensors of the forward pass that backward needs. `out` is [batch, positions, width].
  void keep(const Tensor& out, std::vector<Tensor> others) {
    out_ = SavedVariable(out, /*is_output=*/true);
    others_ = std::move(others);
  }

  std::string name() const override { return "lockstep::AttentionBackward"; }

  variable_list apply(variable_list&& gradients) override {
    require_first_derivative("causal_self_attention");
    const std::lock_guard lock(mutex_);
    if (!gradients[0].defined()) return {Tensor()};
    const auto qkv = qkv_.unpack();
    const auto out = out_.unpack(shared_from_this());
    const LayerScope scope(qkv);
    const Parts parts(qkv.contiguous(), heads_);
    const auto as_heads = [&](const Tensor& tensor) {
      return tensor.contiguous()
          .view({out.size(0), out.size(1), heads_, out.size(2) / heads_})
          .transpose(1, 2);
    };
    const auto [dq, dk, dv] = at::_scaled_dot_product_cudnn_attention_backward(
        as_heads(gradients[0]), parts.q, parts.k, parts.v, as_heads(out), others_[0], others_[1],
        others_[2], /*attn_bias=*/Tensor(), others_[3], others_[4], out.size(1), out.size(1),
        /*dropout_p=*/0.0, /*is_causal=*/true);
    const auto packed = at::stack({dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)}, 2);
    return {packed.view(qkv.sizes())};
  }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    qkv_.reset_data();
    out_.reset_data();
    others_.clear();
  }

 private:
  SavedVariable qkv_;
  SavedVariable out_;
  std::vector<Tensor> others_;  // log-sum-exp, seed, offset, starts of queries, starts of keys
  int64_t heads_;
};

// Needs tensors that autograd knows, because cuDNN's limits differ where there is a backward. That
// backward adds in any order, so cuDNN is not used where algorithms must be deterministic.
bool cudnn_fits(const Parts& parts) {
  return !at::globalContext().deterministicAlgorithms() &&
         sdp::can_use_cudnn_attention(
             {parts.q, parts.k, parts.v, std::nullopt, /*dropout=*/0.0, /*is_causal=*/true,
              /*enable_gqa=*/false},
             /*debug=*/false);
}

}  // namespace

Tensor cuda_causal_self_attention(const Tensor& qkv, int64_t heads) {
  {
    const Parts parts(qkv.contiguous(), heads);
    if (!cudnn_fits(parts)) {
      const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
      return side_by_side(at::scaled_dot_product_attention(parts.q, parts.k, parts.v,
                                                           /*attn_mask=*/std::nullopt,
                                                           /*dropout_p=*/0.0,
                                                           /*is_causal=*/true));
    }
  }
  const bool differentiated = torch::autograd::compute_requires_grad(qkv);
  Tensor out;
  std::vector<Tensor> others;
  {
    const LayerScope scope(qkv);
    const Parts parts(qkv.contiguous(), heads);
    const auto found = at::_scaled_dot_product_cudnn_attention(
        parts.q, parts.k, parts.v, /*attn_bias=*/std::nullopt,
        /*compute_log_sumexp=*/differentiated, /*dropout_p=*/0.0, /*is_causal=*/true);
    out = side_by_side(std::get<0>(found));
    others = {std::get<1>(found), std::get<6>(found), std::get<7>(found), std::get<2>(found),
              std::get<3>(found)};
  }
  if (differentiated) {
    const auto node = std::make_shared<AttentionBackward>(qkv, heads);
    torch::autograd::set_history(out, node);
    node->keep(out, std::move(others));
  }
  return out;
}

}  // namespace lockstep::layers
