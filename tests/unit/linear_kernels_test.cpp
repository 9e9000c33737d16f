#include "kernels/linear_kernels.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <memory>
#include <random>
#include <string_view>
#include <vector>

#include "base/machine.hpp"

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
  explicit Layer(const LinearShape& shape)
      : shape(shape),
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

}  // namespace
}  // namespace lockstep
