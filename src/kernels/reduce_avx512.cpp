#ifdef __x86_64__

#include <immintrin.h>

#include "kernels/reduce_kernels.hpp"

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c"))), \
                             apply_to = function)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c,prefer-vector-width=512")
#pragma GCC optimize("O3,fp-contract=off")
#endif

#include "kernels/reduce_f16c.hpp"
//
#include "kernels/reduce_loops.hpp"

#ifdef __clang__
#pragma clang attribute pop
#endif

namespace lockstep {

const ReduceKernels& avx512_reduce_kernels() {
  return kKernels;
}

}  // namespace lockstep

#endif
