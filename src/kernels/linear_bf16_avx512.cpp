#include "kernels/linear_bf16_kernels.hpp"

#ifdef __x86_64__

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#ifdef __clang__
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,prefer-vector-width=512")
#pragma GCC optimize("O3")
#endif

namespace lockstep {
namespace {

constexpr int64_t kPanel = LinearBf16Kernels::kPanelRows;
constexpr int64_t kWidth = 16;  // floats, or pairs, in a vector
constexpr int64_t kPairs = 16;  // of a weight's row that are rounded at a time
constexpr int kForwardOutputs = 12;
constexpr int kGradientInputs = 8;
constexpr int64_t kBlock = 128;  // outputs of input_gradient() whose weights are rounded at a time

__m512bh as_pairs(__m512i bits) {
  return reinterpret_cast<__m512bh>(bits);
}

__mmask16 first(int64_t count) {
  return static_cast<__mmask16>((1U << std::min<int64_t>(count, kWidth)) - 1);
}

// 16 values of a weight as bfloat16, in the low halves of 32 bits; those past `count` are zeros.
__m512i load_values(const float* from, int64_t count) {
  const __m512 values = _mm512_maskz_loadu_ps(first(count), from);
  return _mm512_maskz_cvtepu16_epi32(first(kWidth),
                                     reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(values)));
}
__m512i load_values(const uint16_t* from, int64_t count) {
  return _mm512_maskz_cvtepu16_epi32(first(kWidth), _mm256_maskz_loadu_epi16(first(count), from));
}

// 16 pairs of neighbours of a weight's row; those past `count` values are zeros.
__m512i load_pairs(const float* from, int64_t count) {
  const __m512 low = _mm512_maskz_loadu_ps(first(std::max<int64_t>(0, count)), from);
  const __m512 high =
      _mm512_maskz_loadu_ps(first(std::max<int64_t>(0, count - kWidth)), from + kWidth);
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}
__m512i load_pairs(const uint16_t* from, int64_t count) {
  const auto mask = count >= 2 * kWidth ? ~__mmask32{0} : (__mmask32{1} << count) - 1;
  return _mm512_maskz_loadu_epi16(mask, from);
}

void store_values(float* to, __mmask16 mask, __m512 values) {
  _mm512_mask_storeu_ps(to, mask, values);
}
void store_values(uint16_t* to, __mmask16 mask, __m512 values) {
  _mm256_mask_storeu_epi16(to, mask, reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(values)));
}

int load_pair(const uint16_t* from) {
  int pair = 0;
  std::memcpy(&pair, from, sizeof(pair));
  return pair;
}

uint16_t rounded(float value) {
  const auto bits = reinterpret_cast<__m128i>(_mm_cvtneps_pbh(_mm_set_ss(value)));
  return static_cast<uint16_t>(_mm_extract_epi16(bits, 0));
}

void pack(const uint16_t* rows, int64_t count, int64_t width, uint16_t* packed) {
  const int64_t pairs = (width + 1) / 2;
  for (int64_t start = 0; start < count; start += kPanel, packed += 2 * pairs * kPanel) {
    const int64_t here = std::min(kPanel, count - start);
    for (int64_t pair = 0; pair < pairs; ++pair) {
      uint16_t* to = packed + 2 * pair * kPanel;
      for (int64_t row = 0; row < here; ++row) {
        const uint16_t* from = rows + (start + row) * width + 2 * pair;
        to[2 * row] = from[0];
        to[2 * row + 1] = 2 * pair + 1 < width ? from[1] : uint16_t{0};
      }
      std::fill(to + 2 * here, to + 2 * kPanel, uint16_t{0});
    }
  }
}

void pack_row_pairs(const uint16_t* rows, int64_t count, int64_t width, int64_t block,
                    uint16_t* packed) {
  const int64_t pairs = (count + 1) / 2;
  for (int64_t begin = 0; begin < width; begin += block, packed += 2 * pairs * block) {
    const int64_t here = std::min(block, width - begin);
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const uint16_t* upper = rows + 2 * pair * width + begin;
      uint16_t* to = packed + 2 * pair * block;
      for (int64_t k = 0; k < here; ++k) {
        to[2 * k] = upper[k];
        to[2 * k + 1] = 2 * pair + 1 < count ? upper[width + k] : uint16_t{0};
      }
      std::fill(to + 2 * here, to + 2 * block, uint16_t{0});
    }
  }
}

// sums[i][row] = sum over k of x[row][k] * weight[i][k], for kCount outputs of one panel.
template <int kCount, int kVectors, class Weight>
void forward_tile(int64_t in, const uint16_t* packed, const Weight* weight, float* sums) {
  __m512 total[kCount][kVectors];
  for (auto& each : total) std::fill(each, each + kVectors, _mm512_setzero_ps());
  alignas(64) uint32_t w[kCount][kPairs];
  for (int64_t k = 0; k < in; k += 2 * kPairs) {
    for (int i = 0; i < kCount; ++i) {
      _mm512_store_si512(w[i], load_pairs(weight + i * in + k, in - k));
    }
    const int64_t pairs = std::min(kPairs, (in - k + 1) / 2);
    for (int64_t pair = 0; pair < pairs; ++pair) {
      __m512bh x[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        x[v] = as_pairs(_mm512_load_si512(packed + (k + 2 * pair) * kPanel + 2 * kWidth * v));
      }
#pragma GCC unroll 16
      for (int i = 0; i < kCount; ++i) {
        const auto each = as_pairs(_mm512_set1_epi32(static_cast<int>(w[i][pair])));
        for (int v = 0; v < kVectors; ++v) total[i][v] = _mm512_dpbf16_ps(total[i][v], each, x[v]);
      }
    }
  }
  for (int i = 0; i < kCount; ++i) {
    for (int v = 0; v < kVectors; ++v) _mm512_store_ps(sums + i * kPanel + v * kWidth, total[i][v]);
  }
}

template <int kCount, class Weight>
void forward_outputs(const LinearShape& shape, const uint16_t* packed_x, const Weight* weight,
                     const float* bias, uint16_t* y, int64_t output) {
  alignas(64) float sums[kCount * kPanel];
  const int64_t width = (shape.in + 1) / 2 * 2;
  for (int64_t start = 0; start < shape.rows; start += kPanel) {
    const int64_t here = std::min(kPanel, shape.rows - start);
    if (here > kWidth) {
      forward_tile<kCount, 2>(shape.in, packed_x + start * width, weight + output * shape.in, sums);
    } else {
      forward_tile<kCount, 1>(shape.in, packed_x + start * width, weight + output * shape.in, sums);
    }
    for (int64_t row = 0; row < here; ++row) {
      uint16_t* to = y + (start + row) * shape.out + output;
      for (int i = 0; i < kCount; ++i) {
        const float sum = sums[i * kPanel + row];
        to[i] = rounded(bias == nullptr ? sum : sum + bias[output + i]);
      }
    }
  }
}

template <class Weight>
void forward_of(const LinearShape& shape, const uint16_t* packed_x, const Weight* weight,
                const float* bias, uint16_t* y, int64_t begin, int64_t end) {
  for (; begin + kForwardOutputs <= end; begin += kForwardOutputs) {
    forward_outputs<kForwardOutputs>(shape, packed_x, weight, bias, y, begin);
  }
  for (; begin < end; ++begin) forward_outputs<1>(shape, packed_x, weight, bias, y, begin);
}

// packed_dx[i][row] += sum over the pairs of dy[row][...] * weight[...][i], for kGradientInputs
// inputs of one panel. w: [pair][16], of which this tile takes kGradientInputs.
template <int kVectors>
void input_gradient_tile(int64_t pairs, const uint16_t* packed_dy, const uint32_t* w,
                         float* packed_dx, bool is_first) {
  __m512 total[kGradientInputs][kVectors];
  for (int i = 0; i < kGradientInputs; ++i) {
    for (int v = 0; v < kVectors; ++v) {
      total[i][v] =
          is_first ? _mm512_setzero_ps() : _mm512_load_ps(packed_dx + i * kPanel + v * kWidth);
    }
  }
  for (int64_t pair = 0; pair < pairs; ++pair) {
    __m512bh dy[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      dy[v] = as_pairs(_mm512_load_si512(packed_dy + 2 * pair * kPanel + 2 * kWidth * v));
    }
#pragma GCC unroll 16
    for (int i = 0; i < kGradientInputs; ++i) {
      const auto each = as_pairs(_mm512_set1_epi32(static_cast<int>(w[pair * kWidth + i])));
      for (int v = 0; v < kVectors; ++v) total[i][v] = _mm512_dpbf16_ps(total[i][v], each, dy[v]);
    }
  }
  for (int i = 0; i < kGradientInputs; ++i) {
    for (int v = 0; v < kVectors; ++v) {
      _mm512_store_ps(packed_dx + i * kPanel + v * kWidth, total[i][v]);
    }
  }
}

template <class Weight>
void input_gradient_of(const LinearShape& shape, const uint16_t* packed_dy, const Weight* weight,
                       uint16_t* dx, float* scratch, int64_t begin, int64_t end) {
  const int64_t width = (shape.out + 1) / 2 * 2;
  const int64_t padded = LinearBf16Kernels::padded_inputs(shape.in);
  alignas(64) uint32_t w[kBlock / 2 * kWidth];
  for (int64_t output = 0; output < shape.out; output += kBlock) {
    const int64_t here = std::min(kBlock, shape.out - output);
    const int64_t pairs = (here + 1) / 2;
    for (int64_t input = begin; input < end; input += kWidth) {
      for (int64_t pair = 0; pair < pairs; ++pair) {
        const Weight* from = weight + (output + 2 * pair) * shape.in + input;
        const bool has_both = 2 * pair + 1 < here;
        __builtin_prefetch(from + kWidth);
        __builtin_prefetch(from + shape.in + kWidth);
        const __m512i low = load_values(from, shape.in - input);
        const __m512i high =
            has_both ? load_values(from + shape.in, shape.in - input) : _mm512_setzero_si512();
        _mm512_store_si512(w + pair * kWidth,
                           _mm512_or_si512(low, _mm512_maskz_slli_epi32(first(kWidth), high, 16)));
      }
      for (int64_t start = 0; start < shape.rows; start += kPanel) {
        const uint16_t* dy = packed_dy + start * width + output * kPanel;
        for (int64_t i = 0; i < kWidth; i += kGradientInputs) {
          float* sums = scratch + start * padded + (input + i) * kPanel;
          if (shape.rows - start > kWidth) {
            input_gradient_tile<2>(pairs, dy, w + i, sums, output == 0);
          } else {
            input_gradient_tile<1>(pairs, dy, w + i, sums, output == 0);
          }
        }
      }
    }
  }
  for (int64_t row = 0; row < shape.rows; ++row) {
    const float* sums = scratch + row / kPanel * kPanel * padded + row % kPanel;
    for (int64_t input = begin; input < end; ++input) {
      dx[row * shape.in + input] = rounded(sums[input * kPanel]);
    }
  }
}

// dweight[i][...] = sum over rows of dy[row][i] * x[row][...], for the first `outputs` and `inputs`
// of a block. dy_block: [pair][8][2], x_block: [pair][32][2].
template <class Weight>
void weight_gradient_block(int64_t pairs, const uint16_t* dy_block, const uint16_t* x_block,
                           Weight* dweight, int64_t stride, int64_t outputs, int64_t inputs) {
  constexpr int kCount = LinearBf16Kernels::kOutputBlock;
  __m512 total[kCount][2];
  for (auto& each : total) each[0] = each[1] = _mm512_setzero_ps();
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const auto low = as_pairs(_mm512_load_si512(x_block + pair * 4 * kWidth));
    const auto high = as_pairs(_mm512_load_si512(x_block + pair * 4 * kWidth + 2 * kWidth));
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) {
      const auto dy = as_pairs(_mm512_set1_epi32(load_pair(dy_block + 2 * (pair * kCount + i))));
      total[i][0] = _mm512_dpbf16_ps(total[i][0], dy, low);
      total[i][1] = _mm512_dpbf16_ps(total[i][1], dy, high);
    }
  }
  const __mmask16 low_mask = first(inputs);
  const __mmask16 high_mask = first(std::max<int64_t>(0, inputs - kWidth));
  for (int64_t i = 0; i < outputs; ++i) {
    store_values(dweight + i * stride, low_mask, total[i][0]);
    store_values(dweight + i * stride + kWidth, high_mask, total[i][1]);
  }
}

template <class Weight>
void weight_gradient_of(const LinearShape& shape, const uint16_t* dy_pairs, const uint16_t* x_pairs,
                        Weight* dweight, int64_t begin, int64_t end) {
  constexpr int64_t kOutputs = LinearBf16Kernels::kOutputBlock;
  constexpr int64_t kInputs = LinearBf16Kernels::kPairBlock;
  const int64_t pairs = (shape.rows + 1) / 2;
  for (int64_t output = begin; output < end; output += kOutputs) {
    for (int64_t input = 0; input < shape.in; input += kInputs) {
      weight_gradient_block(pairs, dy_pairs + 2 * pairs * output, x_pairs + 2 * pairs * input,
                            dweight + output * shape.in + input, shape.in,
                            std::min(kOutputs, end - output), std::min(kInputs, shape.in - input));
    }
  }
}

void forward(const LinearShape& shape, const uint16_t* packed_x, const void* weight,
             bool weight_is_bf16, const float* bias, uint16_t* y, int64_t begin, int64_t end) {
  if (weight_is_bf16) {
    forward_of(shape, packed_x, static_cast<const uint16_t*>(weight), bias, y, begin, end);
  } else {
    forward_of(shape, packed_x, static_cast<const float*>(weight), bias, y, begin, end);
  }
}

void input_gradient(const LinearShape& shape, const uint16_t* packed_dy, const void* weight,
                    bool weight_is_bf16, uint16_t* dx, float* scratch, int64_t begin, int64_t end) {
  if (weight_is_bf16) {
    input_gradient_of(shape, packed_dy, static_cast<const uint16_t*>(weight), dx, scratch, begin,
                      end);
  } else {
    input_gradient_of(shape, packed_dy, static_cast<const float*>(weight), dx, scratch, begin, end);
  }
}

void weight_gradient(const LinearShape& shape, const uint16_t* dy_pairs, const uint16_t* x_pairs,
                     void* dweight, bool weight_is_bf16, int64_t begin, int64_t end) {
  if (weight_is_bf16) {
    weight_gradient_of(shape, dy_pairs, x_pairs, static_cast<uint16_t*>(dweight), begin, end);
  } else {
    weight_gradient_of(shape, dy_pairs, x_pairs, static_cast<float*>(dweight), begin, end);
  }
}

constexpr LinearBf16Kernels kKernels = {pack, pack_row_pairs, forward, input_gradient,
                                        weight_gradient};

}  // namespace

#ifdef __clang__
#pragma clang attribute pop
#endif

const LinearBf16Kernels* linear_bf16_kernels() {
  __builtin_cpu_init();
  static const bool has_bf16 =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512bf16");
  return has_bf16 ? &kKernels : nullptr;
}

}  // namespace lockstep

#else

namespace lockstep {

const LinearBf16Kernels* linear_bf16_kernels() {
  return nullptr;
}

}  // namespace lockstep

#endif
