#include "kernels/linear_kernels.hpp"

#include "base/machine.hpp"

namespace lockstep {

const LinearKernels* linear_kernels() {
#ifdef __x86_64__
  switch (best_instructions()) {
    case Instructions::kAvx512:
      return &avx512_linear_kernels();
    case Instructions::kAvx2:
      return &avx2_linear_kernels();
    case Instructions::kPlain:
      break;
  }
#endif
  return nullptr;
}

}  // namespace lockstep
