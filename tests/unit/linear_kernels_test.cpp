#include "kernels/linear_kernels.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <random>
#include <string_view>
#include <vector>

#include "base/machine.hpp"
#include "kernels/linear_bf16_kernels.hpp"

namespace lockstep {
namespace {

struct Named {
  std::string_view name;
  const LinearKernels* kernels;
};

// The kernels that this machine can run.
std::vector<Named> instruction_sets() {
  std::vector<Named> sets;
#ifdef __x86_64__
  if (best_instructions() != Instructions::kPlain) sets.push_back({"avx2", &avx2_linear_kernels()});
  if (best_instructions() == Instructions::kAvx512) {
    sets.push_back({"avx512", &avx512_linear_kernels()});
  }
#endif
  return sets;
}

std::vector<float> random_values(int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& x : values) x = uniform(random);
  return values;
}

struct Free {
  void operator()(float* memory) const { std::free(memory); }
};

std::unique_ptr<float, Free> aligned_floats(int64_t count) {
  const size_t bytes = (static_cast<size_t>(count) * sizeof(float) + 63) / 64 * 64;
  return std::unique_ptr<float, Free>(static_cast<float*>(std::aligned_alloc(64, bytes + 64)));
}

// A layer with random values, and its three products as chains of fused multiply-adds.
struct Layer {
  explicit Layer(const LinearShape& of_shape)
      : shape(of_shape),
        x(random_values(shape.rows * shape.in, 1)),
        weight(random_values(shape.out * shape.in, 2)),
        bias(random_values(shape.out, 3)),
        dy(random_values(shape.rows * shape.out, 4)) {}

  std::vector<float> forward(bool with_bias) const {
    std::vector<float> y;
    for (int64_t row = 0; row < shape.rows; ++row) {
      for (int64_t o = 0; o < shape.out; ++o) {
        float sum = 0;
        for (int64_t i = 0; i < shape.in; ++i)
          sum = std::fma(w(o, i), at(x, row, i, shape.in), sum);
        y.push_back(with_bias ? sum + bias[static_cast<size_t>(o)] : sum);
      }
    }
    return y;
  }

  std::vector<float> input_gradient() const {
    std::vector<float> dx;
    for (int64_t row = 0; row < shape.rows; ++row) {
      for (int64_t i = 0; i < shape.in; ++i) {
        float sum = 0;
        for (int64_t o = 0; o < shape.out; ++o) {
          sum = std::fma(w(o, i), at(dy, row, o, shape.out), sum);
        }
        dx.push_back(sum);
      }
    }
    return dx;
  }

  std::vector<float> weight_gradient() const {
    std::vector<float> dweight;
    for (int64_t o = 0; o < shape.out; ++o) {
      for (int64_t i = 0; i < shape.in; ++i) {
        float sum = 0;
        for (int64_t row = 0; row < shape.rows; ++row) {
          sum = std::fma(at(dy, row, o, shape.out), at(x, row, i, shape.in), sum);
        }
        dweight.push_back(sum);
      }
    }
    return dweight;
  }

  static float at(const std::vector<float>& matrix, int64_t row, int64_t column, int64_t width) {
    return matrix[static_cast<size_t>(row * width + column)];
  }
  float w(int64_t output, int64_t input) const { return at(weight, output, input, shape.in); }

  LinearShape shape;
  std::vector<float> x, weight, bias, dy;
};

// Calls `run(begin, end)` for the range as a whole, or in two unequal parts.
template <class Run>
void in_parts(int64_t count, bool divided, Run&& run) {
  const int64_t middle = divided ? count / 3 : 0;
  run(0, middle);
  run(middle, count);
}

// Every tile, and what remains beside it: rows over several panels, widths that are no multiples.
const LinearShape kShapes[] = {{1, 1, 1},    {1, 40, 13},  {2, 16, 12},  {7, 33, 25},
                               {8, 8, 6},    {15, 100, 9}, {16, 64, 48}, {17, 31, 1},
                               {32, 96, 40}, {33, 7, 130}, {48, 50, 37}, {65, 129, 260}};

TEST(LinearKernels, EveryProductIsAChainOfFusedMultiplyAdds) {
  for (const auto& [name, kernels] : instruction_sets()) {
    for (const auto& shape : kShapes) {
      const Layer layer(shape);
      for (const bool divided : {false, true}) {
        SCOPED_TRACE(testing::Message() << name << ", " << shape.rows << " x " << shape.in << " x "
                                        << shape.out << (divided ? ", in two parts" : ""));
        const auto packed_x = aligned_floats(kernels->packed_size(shape.rows, shape.in));
        const auto packed_dy = aligned_floats(kernels->packed_size(shape.rows, shape.out));
        const auto scratch = aligned_floats(kernels->packed_size(shape.rows, shape.in));
        kernels->pack(layer.x.data(), shape.rows, shape.in, packed_x.get());
        kernels->pack(layer.dy.data(), shape.rows, shape.out, packed_dy.get());

        std::vector<float> y(layer.dy.size(), NAN);
        for (const bool with_bias : {true, false}) {
          in_parts(shape.out, divided, [&](int64_t begin, int64_t end) {
            kernels->forward(shape, packed_x.get(), layer.weight.data(),
                             with_bias ? layer.bias.data() : nullptr, y.data(), begin, end);
          });
          EXPECT_EQ(y, layer.forward(with_bias));
        }

        std::vector<float> dx(layer.x.size(), NAN);
        in_parts(shape.in, divided, [&](int64_t begin, int64_t end) {
          kernels->input_gradient(shape, packed_dy.get(), layer.weight.data(), dx.data(),
                                  scratch.get(), begin, end);
        });
        EXPECT_EQ(dx, layer.input_gradient());

        std::vector<float> dweight(layer.weight.size(), NAN);
        in_parts(shape.out, divided, [&](int64_t begin, int64_t end) {
          kernels->weight_gradient(shape, layer.dy.data(), layer.x.data(), dweight.data(), begin,
                                   end);
        });
        EXPECT_EQ(dweight, layer.weight_gradient());
      }
    }
  }
}

TEST(LinearKernels, InfinitiesAndNansReachOnlyTheirOwnRows) {
  for (const auto& [name, kernels] : instruction_sets()) {
    SCOPED_TRACE(name);
    const LinearShape shape{3, 5, 4};
    Layer layer(shape);
    layer.x[static_cast<size_t>(shape.in)] = INFINITY;  // row 1
    const auto packed = aligned_floats(kernels->packed_size(shape.rows, shape.in));
    kernels->pack(layer.x.data(), shape.rows, shape.in, packed.get());
    std::vector<float> y(layer.dy.size());
    kernels->forward(shape, packed.get(), layer.weight.data(), nullptr, y.data(), 0, shape.out);
    for (size_t i = 0; i < y.size(); ++i) EXPECT_EQ(std::isfinite(y[i]), i / 4 != 1) << i;
  }
}

// Rounds to the nearest bfloat16, ties to even.
uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}
float from_bf16(uint16_t value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value) << 16);
}
std::vector<uint16_t> to_bf16(const std::vector<float>& values) {
  std::vector<uint16_t> rounded;
  for (const float x : values) rounded.push_back(to_bf16(x));
  return rounded;
}
std::vector<float> through_bf16(const std::vector<float>& values) {
  std::vector<float> rounded;
  for (const float x : values) rounded.push_back(from_bf16(to_bf16(x)));
  return rounded;
}

// Expects values within `relative` of those of float32, whose sums have up to 260 terms below 1.
void expect_near(const std::vector<float>& actual, const std::vector<float>& expected,
                 float relative) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_NEAR(actual[i], expected[i], relative * std::fabs(expected[i]) + 3e-5F) << i;
  }
}
std::vector<float> from_bf16(const std::vector<uint16_t>& values) {
  std::vector<float> wide;
  for (const uint16_t x : values) wide.push_back(from_bf16(x));
  return wide;
}

TEST(LinearKernels, ProductsOfBfloat16AreThoseOfTheRoundedFactors) {
  using Kernels = LinearBf16Kernels;
  const Kernels* kernels = linear_bf16_kernels();
  if (kernels == nullptr) GTEST_SKIP() << "this machine has no AVX512_BF16";
  constexpr float kBf16 = 1.0F / 256;  // rounding of a result
  for (const auto& shape : kShapes) {
    Layer layer(shape);
    const auto unrounded = layer.weight;
    layer.x = through_bf16(layer.x);
    layer.dy = through_bf16(layer.dy);
    layer.weight = through_bf16(layer.weight);
    const auto x = to_bf16(layer.x);
    const auto dy = to_bf16(layer.dy);
    const auto low_weight = to_bf16(layer.weight);
    const auto bf16_memory = [](int64_t count) { return aligned_floats(count / 2 + 1); };
    const auto packed_x = bf16_memory(Kernels::packed_size(shape.rows, shape.in));
    const auto packed_dy = bf16_memory(Kernels::packed_size(shape.rows, shape.out));
    const auto x_pairs =
        bf16_memory(Kernels::row_pairs_size(shape.rows, shape.in, Kernels::kPairBlock));
    const auto dy_pairs =
        bf16_memory(Kernels::row_pairs_size(shape.rows, shape.out, Kernels::kOutputBlock));
    const auto scratch = aligned_floats(Kernels::scratch_size(shape.rows, shape.in));
    const auto bits = [](const auto& memory) { return reinterpret_cast<uint16_t*>(memory.get()); };
    kernels->pack(x.data(), shape.rows, shape.in, bits(packed_x));
    kernels->pack(dy.data(), shape.rows, shape.out, bits(packed_dy));
    kernels->pack_row_pairs(x.data(), shape.rows, shape.in, Kernels::kPairBlock, bits(x_pairs));
    kernels->pack_row_pairs(dy.data(), shape.rows, shape.out, Kernels::kOutputBlock,
                            bits(dy_pairs));
    for (const bool low : {false, true}) {
      SCOPED_TRACE(testing::Message() << shape.rows << " x " << shape.in << " x " << shape.out
                                      << (low ? ", bfloat16 weights" : ""));
      const void* weight = low ? static_cast<const void*>(low_weight.data()) : unrounded.data();
      std::vector<uint16_t> y(layer.dy.size());
      in_parts(shape.out, true, [&](int64_t begin, int64_t end) {
        kernels->forward(shape, bits(packed_x), weight, low, layer.bias.data(), y.data(), begin,
                         end);
      });
      expect_near(from_bf16(y), layer.forward(true), kBf16);

      std::vector<uint16_t> dx(layer.x.size());
      const int64_t middle = shape.in / 32 * 16;
      kernels->input_gradient(shape, bits(packed_dy), weight, low, dx.data(), scratch.get(), 0,
                              middle);
      kernels->input_gradient(shape, bits(packed_dy), weight, low, dx.data(), scratch.get(), middle,
                              shape.in);
      expect_near(from_bf16(dx), layer.input_gradient(), kBf16);

      std::vector<float> dweight(layer.weight.size(), NAN);
      std::vector<uint16_t> low_dweight(layer.weight.size());
      void* gradient = low ? static_cast<void*>(low_dweight.data()) : dweight.data();
      const int64_t half = shape.out / 16 * 8;
      kernels->weight_gradient(shape, bits(dy_pairs), bits(x_pairs), gradient, low, 0, half);
      kernels->weight_gradient(shape, bits(dy_pairs), bits(x_pairs), gradient, low, half,
                               shape.out);
      expect_near(low ? from_bf16(low_dweight) : dweight, layer.weight_gradient(),
                  low ? kBf16 : 1e-5F);
    }
  }
}

}  // namespace
}  // namespace lockstep
