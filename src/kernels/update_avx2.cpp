#ifdef __x86_64__

#include <immintrin.h>

#include "kernels/update_kernels.hpp"

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC target("avx2")
#pragma GCC optimize("O3,fp-contract=off")
#endif

namespace lockstep {
namespace {

// The square root of every element of a vector.
template <class Vector>
[[gnu::always_inline]] inline void root_of(Vector& vector) {
  __m256 halves[2];
  static_assert(sizeof halves == sizeof vector);
  __builtin_memcpy(halves, &vector, sizeof vector);
  for (__m256& half : halves) {
    if constexpr (sizeof(vector[0]) == sizeof(float)) {
      half = _mm256_sqrt_ps(half);
    } else {
      half = _mm256_castpd_ps(_mm256_sqrt_pd(_mm256_castps_pd(half)));
    }
  }
  __builtin_memcpy(&vector, halves, sizeof vector);
}

}  // namespace
}  // namespace lockstep

#include "kernels/update_loops.hpp"

#ifdef __clang__
#pragma clang attribute pop
#endif

namespace lockstep {

const UpdateKernels& avx2_update_kernels() {
  return kKernels;
}

}  // namespace lockstep

#endif
