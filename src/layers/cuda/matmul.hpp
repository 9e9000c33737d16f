#pragma once

#include <cublasLt.h>
#include <torch/types.h>

#include <functional>

namespace lockstep::layers {

/// One matrix product through cuBLASLt, of contiguous row-major matrices on one GPU, on that GPU's
/// current stream: out = alpha · (a · b) + beta · out, summed in float32, then an epilogue.
struct Matmul {
  torch::Tensor a;    ///< [M, K], or [K, M] where transpose_a
  torch::Tensor b;    ///< [K, N], or [N, K] where transpose_b
  torch::Tensor out;  ///< [M, N]
  bool transpose_a = false;
  bool transpose_b = false;
  float alpha = 1;
  float beta = 0;

  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  torch::Tensor bias = {};  ///< [N], for epilogues with _BIAS
  torch::Tensor aux = {};   ///< [M, N], written by epilogues with _AUX
};

/// Queues the product. Returns false, and does nothing, if cuBLASLt has no algorithm for it.
bool try_matmul(const Matmul& work);

/// Queues the product. Throws if cuBLASLt has no algorithm for it.
void matmul(const Matmul& work);

/// Returns whether `fused` should be used rather than `plain` followed by `rest`, which gives the
/// same result. Where tune_layers() is on and this shape is new, both run many times; otherwise the
/// answer is whether cuBLASLt has `fused`.
bool choose_fused(const Matmul& fused, const Matmul& plain, const std::function<void()>& rest);

}  // namespace lockstep::layers
