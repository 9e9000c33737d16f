#ifdef __x86_64__

#include <immintrin.h>

#include <algorithm>

#include "kernels/linear_kernels.hpp"

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512vl"))), \
                             apply_to = function)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC target("avx512f,avx512dq,avx512vl,prefer-vector-width=512")
#pragma GCC optimize("O3,fp-contract=off")
#endif

namespace lockstep {
namespace {

struct Lanes {
  using Vector = __m512;
  static constexpr int64_t kWidth = 16;
  static constexpr int kForwardOutputs = 12;
  static constexpr int kGradientInputs = 8;
  static constexpr int kGradientOutputs = 8;

  static Vector zero() { return _mm512_setzero_ps(); }
  static Vector broadcast(float value) { return _mm512_set1_ps(value); }
  static Vector load(const float* from) { return _mm512_load_ps(from); }
  static Vector load_unaligned(const float* from) { return _mm512_loadu_ps(from); }
  static void store(float* to, Vector values) { _mm512_store_ps(to, values); }
  static void store_unaligned(float* to, Vector values) { _mm512_storeu_ps(to, values); }

  using Mask = __mmask16;
  static Mask first(int64_t count) { return static_cast<Mask>((1U << count) - 1); }
  static Vector load_masked(const float* from, Mask mask) {
    return _mm512_maskz_loadu_ps(mask, from);
  }
  static void store_masked(float* to, Mask mask, Vector values) {
    _mm512_mask_storeu_ps(to, mask, values);
  }

  static Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
};

}  // namespace
}  // namespace lockstep

#include "kernels/linear_loops.hpp"

#ifdef __clang__
#pragma clang attribute pop
#endif

namespace lockstep {

const LinearKernels& avx512_linear_kernels() {
  return kKernels;
}

}  // namespace lockstep

#endif
