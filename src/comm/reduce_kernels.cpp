#include "comm/reduce_kernels.hpp"

#ifdef __x86_64__
#include <cpuid.h>
#endif

namespace lockstep {
namespace {

struct Choice {
  const ReduceKernels* kernels;
  std::string_view name;
};

#ifdef __x86_64__
bool has_f16c() {  // clang 14's __builtin_cpu_supports does not know it
  unsigned int a = 0;
  unsigned int b = 0;
  unsigned int c = 0;
  unsigned int d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

Choice choose() {
#ifdef __x86_64__
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && has_f16c()) {
    return {&avx512_reduce_kernels(), "avx512"};
  }
  if (__builtin_cpu_supports("avx2") && has_f16c()) {
    return {&avx2_reduce_kernels(), "avx2"};
  }
#endif
  return {&plain_reduce_kernels(), "plain"};
}

const Choice& choice() {
  static const Choice chosen = choose();
  return chosen;
}

ReduceKernel kernel_of(Dtype dtype, ReduceOp op) {
  return choice().kernels->kernels[static_cast<size_t>(dtype)][static_cast<size_t>(op)];
}

}  // namespace

void reduce(Dtype dtype, ReduceOp op, std::span<const void* const> inputs,
            std::span<const double> factors, std::span<void* const> outputs, int64_t count) {
  kernel_of(dtype, op)(inputs.data(), factors.data(), static_cast<int64_t>(inputs.size()),
                       outputs.data(), static_cast<int64_t>(outputs.size()), count);
}

bool reduces(Dtype dtype, ReduceOp op) {
  return kernel_of(dtype, op) != nullptr;
}

std::string_view reduce_instructions() {
  return choice().name;
}

}  // namespace lockstep
