#include "base/instructions.hpp"

#ifdef __x86_64__
#include <cpuid.h>
#endif

namespace lockstep {
namespace {

#ifdef __x86_64__
bool has_f16c() {  // clang 14's __builtin_cpu_supports does not know it
  unsigned int a = 0;
  unsigned int b = 0;
  unsigned int c = 0;
  unsigned int d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

Instructions detect() {
#ifdef __x86_64__
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && has_f16c()) {
    return has_avx512() ? Instructions::kAvx512 : Instructions::kAvx2;
  }
#endif
  return Instructions::kPlain;
}

}  // namespace

Instructions best_instructions() {
  static const Instructions best = detect();
  return best;
}

}  // namespace lockstep
