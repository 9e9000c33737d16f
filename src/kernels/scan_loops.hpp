// The loops over gradients, compiled once per set of instructions. scan_plain.cpp, scan_avx2.cpp
// and scan_avx512.cpp include this after they set their target. Everything is in an unnamed
// namespace and calls nothing of the standard library, so that the linker cannot take a function
// that was compiled for one target for another.
//
// A strip has kStrip elements. The sum of squares has one lane per element of a strip, in double,
// and the lanes are added in order at the end. The square of a float is exact in double and cannot
// overflow, so that the sum is finite if and only if every float is.

#include <cstdint>

#include "kernels/scan_kernels.hpp"

namespace lockstep {
namespace {

constexpr int kStrip = 32;

template <class T, int kElements>
struct VectorOf {
  using Type [[gnu::vector_size(kElements * sizeof(T))]] = T;
};
using Floats = VectorOf<float, 8>::Type;
using Doubles = VectorOf<double, 8>::Type;
constexpr int kLanes = 8;
constexpr int kVectors = kStrip / kLanes;

inline bool is_finite(double value) {
  return value - value == 0;
}

[[gnu::always_inline]] inline void load(Doubles& to, const float* from) {
  Floats floats;
  __builtin_memcpy(&floats, from, sizeof floats);
  to = __builtin_convertvector(floats, Doubles);
}

[[gnu::always_inline]] inline void load(Doubles& to, const double* from) {
  __builtin_memcpy(&to, from, sizeof to);
}

template <class T>
[[gnu::always_inline]] inline void add_squares(Doubles (&sums)[kVectors], const T* strip) {
  for (int i = 0; i < kVectors; ++i) {
    Doubles x;
    load(x, strip + i * kLanes);
    sums[i] = sums[i] + x * x;
  }
}

template <class T>
double sum_of_squares(const T* data, int64_t count) {
  Doubles sums[kVectors] = {};
  int64_t begin = 0;
  for (; begin + kStrip <= count; begin += kStrip) add_squares(sums, data + begin);
  if (begin < count) {
    T padded[kStrip] = {};
    __builtin_memcpy(padded, data + begin, static_cast<size_t>(count - begin) * sizeof(T));
    add_squares(sums, padded);
  }
  double sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < kVectors; ++i) sum += sums[i][lane];
  }
  return sum;
}

BlockScan scan_floats(const float* data, int64_t count) {
  const double sum = sum_of_squares(data, count);
  return {is_finite(sum), sum};
}

// Squares of large doubles may overflow; then the elements decide.
BlockScan scan_doubles(const double* data, int64_t count) {
  const double sum = sum_of_squares(data, count);
  if (is_finite(sum)) return {true, sum};
  bool finite = true;
  for (int64_t i = 0; i < count; ++i) finite = finite && is_finite(data[i]);
  return {finite, sum};
}

// x - x is 0 for finite x and NaN otherwise, and so is a sum of such differences.
template <class T>
bool unscale(T* data, int64_t count, T inverse_scale) {
  using Elements = typename VectorOf<T, kStrip>::Type;
  Elements differences = {};
  int64_t begin = 0;
  for (; begin + kStrip <= count; begin += kStrip) {
    Elements x;
    __builtin_memcpy(&x, data + begin, sizeof x);
    differences = differences + (x - x);
    x = x * inverse_scale;
    __builtin_memcpy(data + begin, &x, sizeof x);
  }
  T difference = 0;
  for (; begin < count; ++begin) {
    difference += data[begin] - data[begin];
    data[begin] *= inverse_scale;
  }
  for (int lane = 0; lane < kStrip; ++lane) difference += differences[lane];
  return difference == 0;
}

constexpr ScanKernels kKernels = {scan_floats, scan_doubles, unscale<float>, unscale<double>};

}  // namespace
}  // namespace lockstep
