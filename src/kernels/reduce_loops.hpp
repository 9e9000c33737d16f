// The reduction loops, compiled once per set of instructions. reduce_plain.cpp, reduce_avx2.cpp and
// reduce_avx512.cpp include this after they set their target and define Float16. Everything is in
// an unnamed namespace and calls nothing of the standard library, so that the linker cannot take a
// function that was compiled for one target for another.
//
// A strip is the four vectors that are held in registers. Every strip is reduced by the same
// instructions, a short one at the end is padded, and products are never fused with sums. So the
// bits of a result do not depend on its index.

#include <cstdint>

#include "kernels/reduce_kernels.hpp"

namespace lockstep {
namespace {

#define LOCKSTEP_INLINE [[gnu::always_inline]] inline

constexpr int kVectorBytes = 64;
constexpr int kVectors = 4;  // per strip

template <class T>
struct VectorOf {
  using Type [[gnu::vector_size(kVectorBytes)]] = T;
};
template <class T>
using Vector = typename VectorOf<T>::Type;

// Sixteen 16-bit elements in memory: half a vector, since they are reduced in F32.
using Halves [[gnu::vector_size(kVectorBytes / 2)]] = uint16_t;
using Floats = Vector<float>;
using Bits = Vector<uint32_t>;

template <class To, class From>
LOCKSTEP_INLINE void reinterpret(To& to, const From& from) {
  static_assert(sizeof to == sizeof from);
  __builtin_memcpy(&to, &from, sizeof to);
}

// An element type: how a vector of elements is loaded and stored. Reductions are computed in
// `Accumulator`.
template <class T>
struct Plain {
  using Element = T;
  using Accumulator = T;
  static constexpr int kElements = kVectorBytes / sizeof(T);  // per vector

  LOCKSTEP_INLINE static void load(Vector<T>& to, const T* from) {
    __builtin_memcpy(&to, from, sizeof to);
  }
  LOCKSTEP_INLINE static void store(T* to, const Vector<T>& from) {
    __builtin_memcpy(to, &from, sizeof from);
  }
};

// Booleans: any byte but 0 is true.
struct Truth : Plain<uint8_t> {
  LOCKSTEP_INLINE static void load(Vector<uint8_t>& to, const uint8_t* from) {
    Plain<uint8_t>::load(to, from);
    to = to != 0 ? Vector<uint8_t>{} + 1 : Vector<uint8_t>{};
  }
};

struct BFloat16 {
  using Element = uint16_t;
  using Accumulator = float;
  static constexpr int kElements = 16;

  LOCKSTEP_INLINE static void load(Floats& to, const uint16_t* from) {
    Halves halves;
    __builtin_memcpy(&halves, from, sizeof halves);
    const Bits bits = __builtin_convertvector(halves, Bits) << 16;
    reinterpret(to, bits);
  }
  // Rounds to nearest, ties to even. A NaN stays one and keeps its sign and upper bits.
  LOCKSTEP_INLINE static void store(uint16_t* to, const Floats& from) {
    Bits bits;
    reinterpret(bits, from);
    const Bits rounded = bits + 0x7fff + ((bits >> 16) & 1);
    const Bits kept = from == from ? rounded : (bits | 0x400000);
    const Halves halves = __builtin_convertvector(kept >> 16, Halves);
    __builtin_memcpy(to, &halves, sizeof halves);
  }
};

// acc op= x. For kMean, x was multiplied by its factor before.
template <ReduceOp kOp, class V>
LOCKSTEP_INLINE void combine(V& acc, const V& x) {
  if constexpr (kOp == ReduceOp::kMax) {
    acc = ((x > acc) | (x != x)) ? x : acc;
  } else if constexpr (kOp == ReduceOp::kMin) {
    acc = ((x < acc) | (x != x)) ? x : acc;
  } else {
    acc = acc + x;
  }
}

template <class Format>
struct Strip {
  Vector<typename Format::Accumulator> vectors[kVectors];
};

template <class Format, ReduceOp kOp>
LOCKSTEP_INLINE void load_strip(Strip<Format>& strip, const typename Format::Element* from,
                                double factor) {
  for (int i = 0; i < kVectors; ++i) {
    Format::load(strip.vectors[i], from + i * Format::kElements);
    if constexpr (kOp == ReduceOp::kMean) {
      strip.vectors[i] = strip.vectors[i] * static_cast<typename Format::Accumulator>(factor);
    }
  }
}

template <class Format, ReduceOp kOp>
LOCKSTEP_INLINE void combine_strip(Strip<Format>& acc, const typename Format::Element* from,
                                   double factor) {
  Strip<Format> x;
  load_strip<Format, kOp>(x, from, factor);
  for (int i = 0; i < kVectors; ++i) combine<kOp>(acc.vectors[i], x.vectors[i]);
}

template <class Format>
LOCKSTEP_INLINE void store_strip(typename Format::Element* to, const Strip<Format>& strip) {
  for (int i = 0; i < kVectors; ++i) {
    Format::store(to + i * Format::kElements, strip.vectors[i]);
  }
}

template <class Format, ReduceOp kOp>
void reduce_kernel(const void* const* inputs, const double* factors, int64_t input_count,
                   void* const* outputs, int64_t output_count, int64_t count) {
  using Element = typename Format::Element;
  constexpr int64_t kElements = kVectors * Format::kElements;
  const auto input = [&](int64_t r) { return static_cast<const Element*>(inputs[r]); };
  const auto output = [&](int64_t r) { return static_cast<Element*>(outputs[r]); };
  const auto factor = [&](int64_t r) { return kOp == ReduceOp::kMean ? factors[r] : 1.0; };
  Strip<Format> acc;
  int64_t begin = 0;
  for (; begin + kElements <= count; begin += kElements) {
    load_strip<Format, kOp>(acc, input(0) + begin, factor(0));
    for (int64_t r = 1; r < input_count; ++r) {
      combine_strip<Format, kOp>(acc, input(r) + begin, factor(r));
    }
    for (int64_t r = 0; r < output_count; ++r) store_strip<Format>(output(r) + begin, acc);
  }
  if (begin == count) return;
  const size_t rest_bytes = static_cast<size_t>(count - begin) * sizeof(Element);
  Element padded[kElements] = {};
  __builtin_memcpy(padded, input(0) + begin, rest_bytes);
  load_strip<Format, kOp>(acc, padded, factor(0));
  for (int64_t r = 1; r < input_count; ++r) {
    __builtin_memcpy(padded, input(r) + begin, rest_bytes);
    combine_strip<Format, kOp>(acc, padded, factor(r));
  }
  store_strip<Format>(padded, acc);
  for (int64_t r = 0; r < output_count; ++r) {
    __builtin_memcpy(output(r) + begin, padded, rest_bytes);
  }
}

// Signed integers are summed as unsigned ones, for which wrapping is defined.
template <class Signed, class Unsigned>
constexpr void fill_integer(ReduceKernel (&row)[4]) {
  row[static_cast<int>(ReduceOp::kSum)] = reduce_kernel<Plain<Unsigned>, ReduceOp::kSum>;
  row[static_cast<int>(ReduceOp::kMax)] = reduce_kernel<Plain<Signed>, ReduceOp::kMax>;
  row[static_cast<int>(ReduceOp::kMin)] = reduce_kernel<Plain<Signed>, ReduceOp::kMin>;
}

template <class Format>
constexpr void fill_floating(ReduceKernel (&row)[4]) {
  row[static_cast<int>(ReduceOp::kSum)] = reduce_kernel<Format, ReduceOp::kSum>;
  row[static_cast<int>(ReduceOp::kMean)] = reduce_kernel<Format, ReduceOp::kMean>;
  row[static_cast<int>(ReduceOp::kMax)] = reduce_kernel<Format, ReduceOp::kMax>;
  row[static_cast<int>(ReduceOp::kMin)] = reduce_kernel<Format, ReduceOp::kMin>;
}

constexpr ReduceKernels make_kernels() {
  ReduceKernels table = {};
  const auto row = [&table](Dtype dtype) -> ReduceKernel(&)[4] {
    return table.kernels[static_cast<int>(dtype)];
  };
  auto& truth = row(Dtype::kBool);
  truth[static_cast<int>(ReduceOp::kSum)] = reduce_kernel<Truth, ReduceOp::kMax>;
  truth[static_cast<int>(ReduceOp::kMax)] = reduce_kernel<Truth, ReduceOp::kMax>;
  truth[static_cast<int>(ReduceOp::kMin)] = reduce_kernel<Truth, ReduceOp::kMin>;
  fill_integer<uint8_t, uint8_t>(row(Dtype::kU8));
  fill_integer<int8_t, uint8_t>(row(Dtype::kI8));
  fill_integer<int16_t, uint16_t>(row(Dtype::kI16));
  fill_integer<int32_t, uint32_t>(row(Dtype::kI32));
  fill_integer<int64_t, uint64_t>(row(Dtype::kI64));
  fill_floating<Float16>(row(Dtype::kF16));
  fill_floating<BFloat16>(row(Dtype::kBF16));
  fill_floating<Plain<float>>(row(Dtype::kF32));
  fill_floating<Plain<double>>(row(Dtype::kF64));
  return table;
}

constexpr ReduceKernels kKernels = make_kernels();

}  // namespace
}  // namespace lockstep
