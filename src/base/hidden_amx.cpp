#include "base/hidden_amx.hpp"

#include <cstdlib>
#include <mutex>

#ifdef __x86_64__
#include <cpuid.h>
#endif

namespace lockstep {
namespace {

AmxFacts facts_of_this_machine() {
  AmxFacts facts;
#ifdef __x86_64__
  constexpr unsigned kAmxTile = 1U << 24;  // leaf 7, edx
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  facts.highest_leaf = __get_cpuid_max(0, nullptr);
  facts.announced = __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kAmxTile) != 0;
  if (__get_cpuid_count(0x1d, 0, &a, &b, &c, &d) != 0) facts.most_palettes = a;
#endif
  return facts;
}

}  // namespace

void avoid_hidden_amx() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (hides_amx(facts_of_this_machine())) {
      ::setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16", /*overwrite=*/0);
    }
  });
}

}  // namespace lockstep
