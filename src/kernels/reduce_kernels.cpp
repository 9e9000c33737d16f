#include "kernels/reduce_kernels.hpp"

#include "base/machine.hpp"

namespace lockstep {
namespace {

const ReduceKernels& choose() {
#ifdef __x86_64__
  switch (best_instructions()) {
    case Instructions::kAvx512:
      return avx512_reduce_kernels();
    case Instructions::kAvx2:
      return avx2_reduce_kernels();
    case Instructions::kPlain:
      break;
  }
#endif
  return plain_reduce_kernels();
}

const ReduceKernels& kernels() {
  static const ReduceKernels& chosen = choose();
  return chosen;
}

ReduceKernel kernel_of(Dtype dtype, ReduceOp op) {
  return kernels().kernels[static_cast<size_t>(dtype)][static_cast<size_t>(op)];
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

}  // namespace lockstep
