#include "kernels/scan_kernels.hpp"

#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("O3,fp-contract=off")
#endif

#include "kernels/scan_loops.hpp"

namespace lockstep {

const ScanKernels& plain_scan_kernels() {
  return kKernels;
}

}  // namespace lockstep
