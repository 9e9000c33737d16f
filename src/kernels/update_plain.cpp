#include "kernels/update_kernels.hpp"

#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("O3,fp-contract=off")
#endif

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace lockstep {
namespace {

// The square root of every element of a vector. Unless told otherwise, the compiler makes a call
// for each one in order to set errno.
template <class Vector>
void root_of(Vector& vector) {
#ifdef __SSE2__
  constexpr int kQuarters = sizeof(Vector) / sizeof(__m128);
  __m128 quarters[kQuarters];
  __builtin_memcpy(quarters, &vector, sizeof vector);
  for (__m128& quarter : quarters) {
    if constexpr (sizeof(vector[0]) == sizeof(float)) {
      quarter = _mm_sqrt_ps(quarter);
    } else {
      quarter = _mm_castpd_ps(_mm_sqrt_pd(_mm_castps_pd(quarter)));
    }
  }
  __builtin_memcpy(&vector, quarters, sizeof vector);
#else
  for (unsigned int i = 0; i < sizeof(Vector) / sizeof(vector[0]); ++i) {
    if constexpr (sizeof(vector[0]) == sizeof(float)) {
      vector[i] = __builtin_sqrtf(vector[i]);
    } else {
      vector[i] = __builtin_sqrt(vector[i]);
    }
  }
#endif
}

}  // namespace
}  // namespace lockstep

#include "kernels/update_loops.hpp"

namespace lockstep {

const UpdateKernels& plain_update_kernels() {
  return kKernels;
}

}  // namespace lockstep
