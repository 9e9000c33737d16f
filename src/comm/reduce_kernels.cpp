#include "comm/reduce_kernels.hpp"

namespace lockstep {
namespace {

struct Choice {
  const ReduceKernels* kernels;
  std::string_view name;
};

Choice choose() {
#ifdef __x86_64__
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return {&avx512_reduce_kernels(), "avx512"};
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
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
