#ifdef __x86_64__

#include <immintrin.h>

#include "kernels/reduce_kernels.hpp"

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC target("avx2,f16c")
#pragma GCC optimize("O3,fp-contract=off")
#endif

#include "kernels/reduce_f16c.hpp"
//
#include "kernels/reduce_loops.hpp"

#ifdef __clang__
#pragma clang attribute pop
#endif

namespace lockstep {

const ReduceKernels& avx2_reduce_kernels() {
  return kKernels;
}

}  // namespace lockstep

#endif
