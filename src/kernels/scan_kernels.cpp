#include "kernels/scan_kernels.hpp"

#include "base/machine.hpp"

namespace lockstep {
namespace {

const ScanKernels& choose() {
#ifdef __x86_64__
  switch (best_instructions()) {
    case Instructions::kAvx512:
      return avx512_scan_kernels();
    case Instructions::kAvx2:
      return avx2_scan_kernels();
    case Instructions::kPlain:
      break;
  }
#endif
  return plain_scan_kernels();
}

const ScanKernels& kernels() {
  static const ScanKernels& chosen = choose();
  return chosen;
}

}  // namespace

BlockScan scan_block(const float* data, int64_t count) {
  return kernels().scan_f32(data, count);
}

BlockScan scan_block(const double* data, int64_t count) {
  return kernels().scan_f64(data, count);
}

bool unscale_block(float* data, int64_t count, float inverse_scale) {
  return kernels().unscale_f32(data, count, inverse_scale);
}

bool unscale_block(double* data, int64_t count, double inverse_scale) {
  return kernels().unscale_f64(data, count, inverse_scale);
}

}  // namespace lockstep
