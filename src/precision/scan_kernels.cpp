#include "precision/scan_kernels.hpp"

namespace lockstep {
namespace {

struct Choice {
  const ScanKernels* kernels;
  std::string_view name;
};

Choice choose() {
#ifdef __x86_64__
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return {&avx512_scan_kernels(), "avx512"};
  }
  if (__builtin_cpu_supports("avx2")) return {&avx2_scan_kernels(), "avx2"};
#endif
  return {&plain_scan_kernels(), "plain"};
}

const Choice& choice() {
  static const Choice chosen = choose();
  return chosen;
}

}  // namespace

BlockScan scan_block(const float* data, int64_t count) {
  return choice().kernels->scan_f32(data, count);
}

BlockScan scan_block(const double* data, int64_t count) {
  return choice().kernels->scan_f64(data, count);
}

bool unscale_block(float* data, int64_t count, float inverse_scale) {
  return choice().kernels->unscale_f32(data, count, inverse_scale);
}

bool unscale_block(double* data, int64_t count, double inverse_scale) {
  return choice().kernels->unscale_f64(data, count, inverse_scale);
}

std::string_view scan_instructions() {
  return choice().name;
}

}  // namespace lockstep
