// The loops of linear_kernels.hpp, compiled once for each instruction set. The including file
// defines `Lanes`: a vector of floats and its operations, and how many accumulators fit the
// registers. It also includes what these need, before it chooses the instructions.

namespace lockstep {
namespace {

constexpr int64_t kPanel = 2 * Lanes::kWidth;  // rows packed together: two vectors

void pack_rows(const float* rows, int64_t count, int64_t width, float* packed) {
  constexpr int64_t kBlock = 16;  // columns at a time, so that both sides stay in the cache
  for (int64_t first = 0; first < count; first += kPanel, packed += kPanel * width) {
    const int64_t here = std::min(kPanel, count - first);
    for (int64_t begin = 0; begin < width; begin += kBlock) {
      const int64_t end = std::min(width, begin + kBlock);
      for (int64_t row = 0; row < here; ++row) {
        const float* source = rows + (first + row) * width;
        for (int64_t k = begin; k < end; ++k) packed[k * kPanel + row] = source[k];
      }
      for (int64_t k = begin; k < end; ++k) {
        std::fill(packed + k * kPanel + here, packed + (k + 1) * kPanel, 0.0F);
      }
    }
  }
}

// sums[i][row] = sum over k of packed[k][row] * weight[i][k], for kOutputs outputs.
template <int kOutputs, int kVectors>
void forward_tile(int64_t in, const float* packed, const float* weight, float* sums) {
  Lanes::Vector total[kOutputs][kVectors];
  for (auto& each : total) std::fill(each, each + kVectors, Lanes::zero());
  for (int64_t k = 0; k < in; ++k) {
    Lanes::Vector x[kVectors];
    for (int v = 0; v < kVectors; ++v) x[v] = Lanes::load(packed + k * kPanel + v * Lanes::kWidth);
#pragma GCC unroll 16
    for (int i = 0; i < kOutputs; ++i) {
      const auto w = Lanes::broadcast(weight[i * in + k]);
      for (int v = 0; v < kVectors; ++v) total[i][v] = Lanes::fma(w, x[v], total[i][v]);
    }
  }
  for (int i = 0; i < kOutputs; ++i) {
    for (int v = 0; v < kVectors; ++v) {
      Lanes::store(sums + i * kPanel + v * Lanes::kWidth, total[i][v]);
    }
  }
}

template <int kOutputs>
void forward_outputs(const LinearShape& shape, const float* packed_x, const float* weight,
                     const float* bias, float* y, int64_t output) {
  alignas(64) float sums[kOutputs * kPanel];
  for (int64_t first = 0; first < shape.rows; first += kPanel) {
    const int64_t here = std::min(kPanel, shape.rows - first);
    const float* packed = packed_x + first * shape.in;
    if (here > Lanes::kWidth) {
      forward_tile<kOutputs, 2>(shape.in, packed, weight + output * shape.in, sums);
    } else {
      forward_tile<kOutputs, 1>(shape.in, packed, weight + output * shape.in, sums);
    }
    for (int64_t row = 0; row < here; ++row) {
      float* to = y + (first + row) * shape.out + output;
      for (int i = 0; i < kOutputs; ++i) {
        to[i] =
            bias == nullptr ? sums[i * kPanel + row] : sums[i * kPanel + row] + bias[output + i];
      }
    }
  }
}

void forward(const LinearShape& shape, const float* packed_x, const float* weight,
             const float* bias, float* y, int64_t begin, int64_t end) {
  constexpr int kTile = Lanes::kForwardOutputs;
  for (; begin + kTile <= end; begin += kTile) {
    forward_outputs<kTile>(shape, packed_x, weight, bias, y, begin);
  }
  for (; begin + 4 <= end; begin += 4) {
    forward_outputs<4>(shape, packed_x, weight, bias, y, begin);
  }
  for (; begin < end; ++begin) forward_outputs<1>(shape, packed_x, weight, bias, y, begin);
}

// packed_dx[i][row] += sum over outputs from `begin` to `end` of packed_dy[output][row] *
// weight[output][i], for kInputs inputs. The first outputs begin with zero.
template <int kInputs, int kVectors>
void input_gradient_tile(int64_t in, const float* packed_dy, const float* weight, float* packed_dx,
                         int64_t begin, int64_t end) {
  Lanes::Vector total[kInputs][kVectors];
  for (int i = 0; i < kInputs; ++i) {
    for (int v = 0; v < kVectors; ++v) {
      total[i][v] =
          begin == 0 ? Lanes::zero() : Lanes::load(packed_dx + i * kPanel + v * Lanes::kWidth);
    }
  }
  for (int64_t output = begin; output < end; ++output) {
    const float* w = weight + output * in;
    __builtin_prefetch(w + kInputs + 16);  // rows are too far apart for the machine to do it
    Lanes::Vector dy[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      dy[v] = Lanes::load(packed_dy + output * kPanel + v * Lanes::kWidth);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kInputs; ++i) {
      const auto each = Lanes::broadcast(w[i]);
      for (int v = 0; v < kVectors; ++v) total[i][v] = Lanes::fma(each, dy[v], total[i][v]);
    }
  }
  for (int i = 0; i < kInputs; ++i) {
    for (int v = 0; v < kVectors; ++v) {
      Lanes::store(packed_dx + i * kPanel + v * Lanes::kWidth, total[i][v]);
    }
  }
}

template <int kInputs>
void input_gradients(const LinearShape& shape, const float* packed_dy, const float* weight,
                     float* packed_dx, int64_t input, int64_t begin, int64_t end) {
  for (int64_t first = 0; first < shape.rows; first += kPanel) {
    const float* dy = packed_dy + first * shape.out;
    float* dx = packed_dx + first * shape.in + input * kPanel;
    if (shape.rows - first > Lanes::kWidth) {
      input_gradient_tile<kInputs, 2>(shape.in, dy, weight + input, dx, begin, end);
    } else {
      input_gradient_tile<kInputs, 1>(shape.in, dy, weight + input, dx, begin, end);
    }
  }
}

void input_gradient(const LinearShape& shape, const float* packed_dy, const float* weight,
                    float* dx, float* scratch, int64_t begin, int64_t end) {
  constexpr int kTile = Lanes::kGradientInputs;
  constexpr int64_t kOutputs = 128;  // whose weights stay in the cache while their lines are read
  for (int64_t output = 0; output < shape.out; output += kOutputs) {
    const int64_t last = std::min(shape.out, output + kOutputs);
    int64_t input = begin;
    for (; input + kTile <= end; input += kTile) {
      input_gradients<kTile>(shape, packed_dy, weight, scratch, input, output, last);
    }
    for (; input < end; ++input) {
      input_gradients<1>(shape, packed_dy, weight, scratch, input, output, last);
    }
  }
  for (int64_t row = 0; row < shape.rows; ++row) {
    const float* packed = scratch + row / kPanel * kPanel * shape.in + row % kPanel;
    for (int64_t input = begin; input < end; ++input) {
      dx[row * shape.in + input] = shape.out == 0 ? 0.0F : packed[input * kPanel];
    }
  }
}

// dweight[i][...] = sum over rows of dy[row][i] * x[row][...], for kOutputs outputs and kVectors
// vectors of inputs.
template <int kOutputs, int kVectors>
void weight_gradient_tile(const LinearShape& shape, const float* dy, const float* x,
                          float* dweight) {
  Lanes::Vector total[kOutputs][kVectors];
  for (auto& each : total) std::fill(each, each + kVectors, Lanes::zero());
  for (int64_t row = 0; row < shape.rows; ++row) {
    Lanes::Vector each[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      each[v] = Lanes::load_unaligned(x + row * shape.in + v * Lanes::kWidth);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kOutputs; ++i) {
      const auto gradient = Lanes::broadcast(dy[row * shape.out + i]);
      for (int v = 0; v < kVectors; ++v) {
        total[i][v] = Lanes::fma(gradient, each[v], total[i][v]);
      }
    }
  }
  for (int i = 0; i < kOutputs; ++i) {
    for (int v = 0; v < kVectors; ++v) {
      Lanes::store_unaligned(dweight + i * shape.in + v * Lanes::kWidth, total[i][v]);
    }
  }
}

// The same for the last `count` inputs, fewer than a vector has.
template <int kOutputs>
void last_weight_gradients(const LinearShape& shape, const float* dy, const float* x,
                           float* dweight, int64_t count) {
  const auto mask = Lanes::first(count);
  Lanes::Vector total[kOutputs];
  std::fill(total, total + kOutputs, Lanes::zero());
  for (int64_t row = 0; row < shape.rows; ++row) {
    const auto each = Lanes::load_masked(x + row * shape.in, mask);
    for (int i = 0; i < kOutputs; ++i) {
      total[i] = Lanes::fma(Lanes::broadcast(dy[row * shape.out + i]), each, total[i]);
    }
  }
  for (int i = 0; i < kOutputs; ++i) Lanes::store_masked(dweight + i * shape.in, mask, total[i]);
}

template <int kOutputs>
void weight_gradients(const LinearShape& shape, const float* dy, const float* x, float* dweight,
                      int64_t output) {
  dy += output;
  dweight += output * shape.in;
  int64_t input = 0;
  for (; input + kPanel <= shape.in; input += kPanel) {
    weight_gradient_tile<kOutputs, 2>(shape, dy, x + input, dweight + input);
  }
  for (; input + Lanes::kWidth <= shape.in; input += Lanes::kWidth) {
    weight_gradient_tile<kOutputs, 1>(shape, dy, x + input, dweight + input);
  }
  if (input < shape.in) {
    last_weight_gradients<kOutputs>(shape, dy, x + input, dweight + input, shape.in - input);
  }
}

void weight_gradient(const LinearShape& shape, const float* dy, const float* x, float* dweight,
                     int64_t begin, int64_t end) {
  constexpr int kTile = Lanes::kGradientOutputs;
  for (; begin + kTile <= end; begin += kTile) {
    weight_gradients<kTile>(shape, dy, x, dweight, begin);
  }
  for (; begin < end; ++begin) weight_gradients<1>(shape, dy, x, dweight, begin);
}

constexpr LinearKernels kKernels = {kPanel, pack_rows, forward, input_gradient, weight_gradient};

}  // namespace
}  // namespace lockstep
