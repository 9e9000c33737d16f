#pragma once

#include <cublasLt.h>
#include <torch/types.h>

#include <functional>

namespace lockstep::layers {

/// One matrix product through cuBLASLt, of contiguous row-major matrices on one GPU, queued on that
/// GPU's current stream: out = alpha · (a · b) + beta · out, summed in float32, and an epilogue.
struct Matmul {
  torch::Tensor a;    ///< [M, K], or [K, M] where transpose_a
  torch::Tensor b;    ///< [K, N], or [N, K] where transpose_b
  torch::Tensor out;  ///< [M, N]
  bool transpose_a = false;
  bool transpose_b = false;
  float alpha = 1;
  float beta = 0;

  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  torch::Tensor bias = {};  ///< of epilogues with _BIAS: [N]
  torch::Tensor aux = {};   ///< written by epilogues with _AUX: a matrix like out
};

/// Queues it. False, and nothing was done: cuBLASLt has no algorithm for this epilogue here.
bool try_matmul(const Matmul& work);

/// Queues it; without an algorithm it is an Error.
void matmul(const Matmul& work);

/// Of two ways to the same result, whether `fused` should be taken rather than `plain` followed by
/// `rest`. Both run, perhaps often, where tune_layers() is on and this shape is new; else the
/// answer is whether cuBLASLt has `fused`.
bool choose_fused(const Matmul& fused, const Matmul& plain, const std::function<void()>& rest);

}  // namespace lockstep::layers
