#ifdef __x86_64__

#include <immintrin.h>

#include "kernels/update_kernels.hpp"

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

// The square root of every element of a vector. Masked, because GCC 12's headers for the unmasked
// ones cause warnings.
template <class Vector>
[[gnu::always_inline]] inline void root_of(Vector& vector) {
  static_assert(sizeof(__m512) == sizeof vector);
  if constexpr (sizeof(vector[0]) == sizeof(float)) {
    __m512 floats;
    __builtin_memcpy(&floats, &vector, sizeof vector);
    floats = _mm512_mask_sqrt_ps(floats, 0xffff, floats);
    __builtin_memcpy(&vector, &floats, sizeof vector);
  } else {
    __m512d doubles;
    __builtin_memcpy(&doubles, &vector, sizeof vector);
    doubles = _mm512_mask_sqrt_pd(doubles, 0xff, doubles);
    __builtin_memcpy(&vector, &doubles, sizeof vector);
  }
}

}  // namespace
}  // namespace lockstep

#include "kernels/update_loops.hpp"

#ifdef __clang__
#pragma clang attribute pop
#endif

namespace lockstep {

const UpdateKernels& avx512_update_kernels() {
  return kKernels;
}

}  // namespace lockstep

#endif
