#include "optim/update_kernels.hpp"

namespace lockstep {
namespace {

struct Choice {
  const UpdateKernels* kernels;
  std::string_view name;
};

Choice choose() {
#ifdef __x86_64__
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return {&avx512_update_kernels(), "avx512"};
  }
  if (__builtin_cpu_supports("avx2")) return {&avx2_update_kernels(), "avx2"};
#endif
  return {&plain_update_kernels(), "plain"};
}

const Choice& choice() {
  static const Choice chosen = choose();
  return chosen;
}

}  // namespace

void update_sgd(Dtype dtype, const SgdRates& rates, const UpdatePiece& piece) {
  choice().kernels->sgd(dtype, rates, piece);
}

void update_adamw(Dtype dtype, const AdamWRates& rates, const UpdatePiece& piece) {
  choice().kernels->adamw(dtype, rates, piece);
}

std::string_view update_instructions() {
  return choice().name;
}

}  // namespace lockstep
