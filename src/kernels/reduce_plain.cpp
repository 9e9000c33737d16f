#include <cstdint>

#include "kernels/reduce_kernels.hpp"

#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("O3,fp-contract=off")
#endif

namespace lockstep {
namespace {

uint32_t float_bits(float value) {
  uint32_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

float float_of(uint32_t bits) {
  float value = 0;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

float widen(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000U) << 16;
  const uint32_t exponent = (half >> 10) & 0x1fU;
  const uint32_t mantissa = half & 0x3ffU;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24, exactly
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
    return float_of(float_bits(magnitude) | sign);
  }
  if (exponent == 0x1f) {  // a signalling NaN becomes quiet, as in hardware
    return float_of(sign | 0x7f800000U | (mantissa << 13) | (mantissa != 0 ? 0x400000U : 0U));
  }
  return float_of(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

// Rounds to nearest, ties to even.
uint16_t narrow(float value) {
  const uint32_t bits = float_bits(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000U);
  const uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude > 0x7f800000U) {
    return static_cast<uint16_t>(sign | 0x7e00U | ((magnitude >> 13) & 0x1ffU));
  }
  if (magnitude >= 0x477ff000U) return static_cast<uint16_t>(sign | 0x7c00U);  // from 65520 on
  if (magnitude < 0x38800000U) {                                               // below 2^-14
    // Adding 0.5 leaves the subnormal's ten bits, rounded, at the end of the sum's mantissa.
    const uint32_t sum = float_bits(float_of(magnitude) + 0.5F);
    return static_cast<uint16_t>(sign | (sum - float_bits(0.5F)));
  }
  const uint32_t odd = (magnitude >> 13) & 1U;
  return static_cast<uint16_t>(sign | ((magnitude - (112U << 23) + 0xfffU + odd) >> 13));
}

struct Float16 {
  using Element = uint16_t;
  using Accumulator = float;
  static constexpr int kElements = 16;

  template <class Floats>
  static void load(Floats& to, const uint16_t* from) {
    for (int i = 0; i < kElements; ++i) to[i] = widen(from[i]);
  }
  template <class Floats>
  static void store(uint16_t* to, const Floats& from) {
    for (int i = 0; i < kElements; ++i) to[i] = narrow(from[i]);
  }
};

}  // namespace
}  // namespace lockstep

#include "kernels/reduce_loops.hpp"

namespace lockstep {

const ReduceKernels& plain_reduce_kernels() {
  return kKernels;
}

}  // namespace lockstep
