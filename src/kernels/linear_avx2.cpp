#ifdef __x86_64__

#include <immintrin.h>

#include <algorithm>

#include "kernels/linear_kernels.hpp"

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC target("avx2,fma")
#pragma GCC optimize("O3,fp-contract=off")
#endif

namespace lockstep {
namespace {

struct Lanes {
  using Vector = __m256;
  static constexpr int64_t kWidth = 8;
  static constexpr int kForwardOutputs = 6;
  static constexpr int kGradientInputs = 6;
  static constexpr int kGradientOutputs = 6;

  static Vector zero() { return _mm256_setzero_ps(); }
  static Vector broadcast(float value) { return _mm256_set1_ps(value); }
  static Vector load(const float* from) { return _mm256_load_ps(from); }
  static Vector load_unaligned(const float* from) { return _mm256_loadu_ps(from); }
  static void store(float* to, Vector values) { _mm256_store_ps(to, values); }
  static void store_unaligned(float* to, Vector values) { _mm256_storeu_ps(to, values); }

  using Mask = __m256i;
  static Mask first(int64_t count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static Vector load_masked(const float* from, Mask mask) { return _mm256_maskload_ps(from, mask); }
  static void store_masked(float* to, Mask mask, Vector values) {
    _mm256_maskstore_ps(to, mask, values);
  }

  static Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
};

}  // namespace
}  // namespace lockstep

#include "kernels/linear_loops.hpp"

#ifdef __clang__
#pragma clang attribute pop
#endif

namespace lockstep {

const LinearKernels& avx2_linear_kernels() {
  return kKernels;
}

}  // namespace lockstep

#endif
