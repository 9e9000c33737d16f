#include <fmt/format.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>

#include "layers/layer_inputs.hpp"
#include "lockstep/error.hpp"
#include "lockstep/fused_layers.hpp"
#if LOCKSTEP_CUDA
#include "layers/cuda/layers.hpp"
#endif

namespace lockstep {

torch::Tensor causal_self_attention(const torch::Tensor& qkv, int64_t heads) {
  if (qkv.dim() != 3 || heads < 1 || qkv.size(2) % (3 * heads) != 0) {
    throw Error(Code::kTensorMismatch,
                fmt::format("causal_self_attention: {} cannot be queries, keys and values of {} "
                            "heads",
                            layers::shape_text(qkv), heads),
                "pass [batch, positions, 3 * width] with a width that the heads divide");
  }
#if LOCKSTEP_CUDA
  const auto cast = layers::autocast(qkv);
  if (layers::fit_kernels({cast})) return layers::cuda_causal_self_attention(cast, heads);
#endif
  const int64_t positions = qkv.size(1);
  const int64_t head_width = qkv.size(2) / (3 * heads);
  // [3][batch, heads, positions, head_width]
  const auto parts =
      qkv.view({qkv.size(0), positions, 3, heads, head_width}).permute({2, 0, 3, 1, 4}).unbind(0);
  const auto scores = torch::matmul(parts[0] * (1.0 / std::sqrt(static_cast<double>(head_width))),
                                    parts[1].transpose(2, 3));
  const auto later =
      torch::ones({positions, positions}, torch::device(qkv.device()).dtype(torch::kBool)).triu(1);
  const auto weights =
      torch::softmax(scores.masked_fill(later, -std::numeric_limits<double>::infinity()), -1);
  return torch::matmul(weights.to(parts[2].scalar_type()), parts[2])
      .transpose(1, 2)
      .reshape({qkv.size(0), positions, heads * head_width});
}

}  // namespace lockstep
