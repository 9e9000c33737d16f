#ifdef __x86_64__

#include "kernels/scan_kernels.hpp"

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512vl"))), \
                             apply_to = function)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC target("avx512f,avx512dq,avx512vl,prefer-vector-width=512")
#pragma GCC optimize("O3,fp-contract=off")
#endif

#include "kernels/scan_loops.hpp"

#ifdef __clang__
#pragma clang attribute pop
#endif

namespace lockstep {

const ScanKernels& avx512_scan_kernels() {
  return kKernels;
}

}  // namespace lockstep

#endif
