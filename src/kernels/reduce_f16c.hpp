// F16 by the F16C instructions, which AVX-512 machines have too (GCC 12's headers for the 512-bit
// ones cause warnings). reduce_avx2.cpp and reduce_avx512.cpp include this after they set their
// target.

#include <immintrin.h>

#include <cstdint>

namespace lockstep {
namespace {

struct Float16 {
  using Element = uint16_t;
  using Accumulator = float;
  static constexpr int kElements = 16;

  template <class Floats>
  [[gnu::always_inline]] static inline void load(Floats& to, const uint16_t* from) {
    __m256 halves[2];
    for (int i = 0; i < 2; ++i) {
      halves[i] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i));
    }
    __builtin_memcpy(&to, halves, sizeof to);
  }
  template <class Floats>
  [[gnu::always_inline]] static inline void store(uint16_t* to, const Floats& from) {
    __m256 halves[2];
    __builtin_memcpy(halves, &from, sizeof from);
    for (int i = 0; i < 2; ++i) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to) + i,
                       _mm256_cvtps_ph(halves[i], _MM_FROUND_TO_NEAREST_INT));
    }
  }
};

}  // namespace
}  // namespace lockstep
