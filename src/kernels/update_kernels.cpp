#include "kernels/update_kernels.hpp"

#include "base/machine.hpp"

namespace lockstep {
namespace {

const UpdateKernels& choose() {
#ifdef __x86_64__
  switch (best_instructions()) {
    case Instructions::kAvx512:
      return avx512_update_kernels();
    case Instructions::kAvx2:
      return avx2_update_kernels();
    case Instructions::kPlain:
      break;
  }
#endif
  return plain_update_kernels();
}

const UpdateKernels& kernels() {
  static const UpdateKernels& chosen = choose();
  return chosen;
}

}  // namespace

void update_sgd(Dtype dtype, const SgdRates& rates, const UpdatePiece& piece) {
  kernels().sgd(dtype, rates, piece);
}

void update_adam(Dtype dtype, const AdamRates& rates, const UpdatePiece& piece) {
  kernels().adam(dtype, rates, piece);
}

}  // namespace lockstep
