#include "kernels/reduce_kernels.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/machine.hpp"

namespace lockstep::test::reduce_kernels_test {
namespace {

using Bytes = std::vector<uint8_t>;

struct Named {
  std::string_view name;
  const ReduceKernels* kernels;
};

// The kernels that this machine can run.
std::vector<Named> instruction_sets() {
  std::vector<Named> sets = {{"plain", &plain_reduce_kernels()}};
#ifdef __x86_64__
  if (best_instructions() != Instructions::kPlain) sets.push_back({"avx2", &avx2_reduce_kernels()});
  if (best_instructions() == Instructions::kAvx512)
    sets.push_back({"avx512", &avx512_reduce_kernels()});
#endif
  return sets;
}

void run(const Named& set, Dtype dtype, ReduceOp op, const std::vector<const void*>& inputs,
         const std::vector<double>& factors, const std::vector<void*>& outputs, int64_t count) {
  set.kernels->kernels[static_cast<size_t>(dtype)][static_cast<size_t>(op)](
      inputs.data(), factors.data(), static_cast<int64_t>(inputs.size()), outputs.data(),
      static_cast<int64_t>(outputs.size()), count);
}

template <class T>
std::vector<T> reduced(const Named& set, Dtype dtype, ReduceOp op,
                       const std::vector<std::vector<T>>& inputs, std::vector<double> factors) {
  std::vector<const void*> addresses;
  for (const auto& input : inputs) addresses.push_back(input.data());
  std::vector<T> result(inputs[0].size());
  run(set, dtype, op, addresses, factors, {result.data()}, static_cast<int64_t>(result.size()));
  return result;
}

uint16_t bf16(float value) {
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);  // of exact values only
}

const float kNan = std::numeric_limits<float>::quiet_NaN();
const float kInfinity = std::numeric_limits<float>::infinity();

TEST(ReduceKernels, FloatsInOrderAndNeverFused) {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> uniform(-1, 1);
  for (const Named& set : instruction_sets()) {
    for (const size_t count : {1U, 63U, 64U, 65U, 1000U}) {
      std::vector<std::vector<float>> inputs(3, std::vector<float>(count));
      for (auto& input : inputs) {
        for (float& x : input) x = uniform(random);
      }
      const std::vector<double> factors = {0.1, 0.7, 0.2};
      const auto sum = reduced(set, Dtype::kF32, ReduceOp::kSum, inputs, {});
      const auto mean = reduced(set, Dtype::kF32, ReduceOp::kMean, inputs, factors);
      for (size_t i = 0; i < count; ++i) {
        ASSERT_EQ(sum[i], (inputs[0][i] + inputs[1][i]) + inputs[2][i]) << set.name << ' ' << i;
        float expected = 0;
        for (size_t r = 0; r < 3; ++r) {
          volatile float product = inputs[r][i] * static_cast<float>(factors[r]);
          expected = r == 0 ? product : expected + product;
        }
        ASSERT_EQ(mean[i], expected) << set.name << ' ' << i;
      }
    }
  }
}

TEST(ReduceKernels, EveryOutputGetsTheResultAndMayBeAnInput) {
  for (const Named& set : instruction_sets()) {
    std::vector<double> a(77, 1.5);
    std::vector<double> b(77, 2.25);
    std::vector<double> c(78, -1.0);
    run(set, Dtype::kF64, ReduceOp::kMean, {a.data(), b.data()}, {1.0 / 3, 2.0 / 3},
        {a.data(), b.data(), c.data()}, 77);
    const double expected = 1.5 * (1.0 / 3) + 2.25 * (2.0 / 3);
    EXPECT_EQ(a, std::vector<double>(77, expected)) << set.name;
    EXPECT_EQ(b, a) << set.name;
    EXPECT_EQ(c.back(), -1.0) << set.name << " wrote past the end";
    c.pop_back();
    EXPECT_EQ(c, a) << set.name;
  }
}

TEST(ReduceKernels, NanWinsMaximumAndMinimum) {
  for (const Named& set : instruction_sets()) {
    const std::vector<std::vector<float>> inputs = {{1, kNan, 3, -kInfinity}, {2, 1, kNan, 5}};
    const auto most = reduced(set, Dtype::kF32, ReduceOp::kMax, inputs, {});
    const auto least = reduced(set, Dtype::kF32, ReduceOp::kMin, inputs, {});
    EXPECT_EQ(most[0], 2) << set.name;
    EXPECT_TRUE(std::isnan(most[1]) && std::isnan(most[2])) << set.name;
    EXPECT_EQ(most[3], 5) << set.name;
    EXPECT_EQ(least[0], 1) << set.name;
    EXPECT_TRUE(std::isnan(least[1]) && std::isnan(least[2])) << set.name;
    EXPECT_EQ(least[3], -kInfinity) << set.name;
  }
}

TEST(ReduceKernels, BFloat16RoundsOnceToNearestEven) {
  for (const Named& set : instruction_sets()) {
    // 256 + 1 + 1: the two ones are lost if each addition rounds to eight bits.
    const auto sum =
        reduced<uint16_t>(set, Dtype::kBF16, ReduceOp::kSum,
                          {{bf16(256), bf16(256), bf16(258), bf16(kNan), bf16(kInfinity)},
                           {bf16(1), bf16(1), bf16(1), bf16(1), bf16(1)},
                           {bf16(1), bf16(0), bf16(0), bf16(0), bf16(0)}},
                          {});
    EXPECT_EQ(sum[0], bf16(258)) << set.name;
    EXPECT_EQ(sum[1], bf16(256)) << set.name << ": 257 is a tie, 256 is even";
    EXPECT_EQ(sum[2], bf16(260)) << set.name << ": 259 is a tie, 260 is even";
    EXPECT_EQ(sum[3] & 0x7fc0, 0x7fc0) << set.name << " lost a NaN";
    EXPECT_EQ(sum[4], bf16(kInfinity)) << set.name;
  }
  const uint16_t low_nan = 0x7f81;  // all of its payload in bits that rounding could clear
  for (const Named& set : instruction_sets()) {
    const auto sum = reduced<uint16_t>(set, Dtype::kBF16, ReduceOp::kMax, {{low_nan}}, {});
    EXPECT_TRUE((sum[0] & 0x7f80) == 0x7f80 && (sum[0] & 0x7f) != 0) << set.name;
  }
}

TEST(ReduceKernels, EveryHalfSurvivesAndAllInstructionsAgree) {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  std::mt19937 random(2);
  std::vector<uint16_t> other(all.size());
  for (auto& half : other) half = static_cast<uint16_t>(random());
  const Named plain = instruction_sets()[0];
  const auto expected =
      reduced<uint16_t>(plain, Dtype::kF16, ReduceOp::kMean, {all, other}, {0.3, 0.7});
  for (const Named& set : instruction_sets()) {
    const auto same = reduced<uint16_t>(set, Dtype::kF16, ReduceOp::kSum, {all}, {});
    for (size_t i = 0; i < all.size(); ++i) {
      const bool nan = (i & 0x7c00) == 0x7c00 && (i & 0x3ff) != 0;
      ASSERT_EQ(same[i], nan ? i | 0x200 : i) << set.name;
    }
    const auto mean =
        reduced<uint16_t>(set, Dtype::kF16, ReduceOp::kMean, {all, other}, {0.3, 0.7});
    for (size_t i = 0; i < all.size(); ++i) {
      const bool nan = (mean[i] & 0x7fff) > 0x7c00;
      if (nan) {  // which of two NaNs is kept is the hardware's choice
        ASSERT_GT(expected[i] & 0x7fff, 0x7c00) << set.name << ' ' << i;
      } else {
        ASSERT_EQ(mean[i], expected[i]) << set.name << ' ' << i << ' ' << other[i];
      }
    }
  }
}

TEST(ReduceKernels, HalfRoundsToNearestEven) {
  // 2048 + 1 is a tie between 2048 and 2050; 2050 + 1 between 2050 and 2052.
  const uint16_t h2048 = 0x6800;
  const uint16_t h2050 = 0x6801;
  const uint16_t one = 0x3c00;
  const uint16_t most = 0x7bff;  // 65504
  for (const Named& set : instruction_sets()) {
    const auto sum =
        reduced<uint16_t>(set, Dtype::kF16, ReduceOp::kSum,
                          {{h2048, h2050, h2048, most}, {one, one, one, most}, {0, 0, one, 0}}, {});
    EXPECT_EQ(sum, (std::vector<uint16_t>{h2048, 0x6802, h2050, 0x7c00})) << set.name;
  }
}

template <class T>
void check_integers(Dtype dtype) {
  constexpr T kMost = std::numeric_limits<T>::max();
  constexpr T kLeast = std::numeric_limits<T>::min();
  std::vector<std::vector<T>> inputs(2);
  for (int i = 0; i < 150; ++i) {
    inputs[0].push_back(i % 3 == 0 ? kMost : static_cast<T>(i));
    inputs[1].push_back(i % 3 == 0 ? T{1} : static_cast<T>(100 - i));
  }
  for (const Named& set : instruction_sets()) {
    const auto sum = reduced(set, dtype, ReduceOp::kSum, inputs, {});
    const auto most = reduced(set, dtype, ReduceOp::kMax, inputs, {});
    const auto least = reduced(set, dtype, ReduceOp::kMin, inputs, {});
    for (size_t i = 0; i < sum.size(); ++i) {
      const T a = inputs[0][i];
      const T b = inputs[1][i];
      ASSERT_EQ(sum[i], i % 3 == 0 ? kLeast : static_cast<T>(a + b)) << set.name << ' ' << i;
      ASSERT_EQ(most[i], std::max(a, b)) << set.name << ' ' << i;
      ASSERT_EQ(least[i], std::min(a, b)) << set.name << ' ' << i;
    }
  }
}

TEST(ReduceKernels, IntegersWrap) {
  check_integers<uint8_t>(Dtype::kU8);
  check_integers<int8_t>(Dtype::kI8);
  check_integers<int16_t>(Dtype::kI16);
  check_integers<int32_t>(Dtype::kI32);
  check_integers<int64_t>(Dtype::kI64);
}

TEST(ReduceKernels, TruthValues) {
  const std::vector<Bytes> inputs = {{0, 1, 0, 7}, {0, 0, 1, 1}};
  for (const Named& set : instruction_sets()) {
    EXPECT_EQ(reduced(set, Dtype::kBool, ReduceOp::kSum, inputs, {}), (Bytes{0, 1, 1, 1}));
    EXPECT_EQ(reduced(set, Dtype::kBool, ReduceOp::kMax, inputs, {}), (Bytes{0, 1, 1, 1}));
    EXPECT_EQ(reduced(set, Dtype::kBool, ReduceOp::kMin, inputs, {}), (Bytes{0, 0, 0, 1}));
  }
}

TEST(ReduceKernels, OnlyFloatingPointHasAMean) {
  for (const Dtype dtype : {Dtype::kF16, Dtype::kBF16, Dtype::kF32, Dtype::kF64}) {
    EXPECT_TRUE(reduces(dtype, ReduceOp::kMean)) << dtype_name(dtype);
  }
  for (const Dtype dtype :
       {Dtype::kBool, Dtype::kU8, Dtype::kI8, Dtype::kI16, Dtype::kI32, Dtype::kI64}) {
    EXPECT_FALSE(reduces(dtype, ReduceOp::kMean)) << dtype_name(dtype);
    EXPECT_TRUE(reduces(dtype, ReduceOp::kSum)) << dtype_name(dtype);
  }
}

TEST(ReduceKernels, BitsDoNotDependOnPlaceOrAlignment) {
  std::mt19937 random(3);
  Bytes a(4096);
  Bytes b(4096);
  for (size_t i = 0; i < a.size(); ++i) {
    a[i] = static_cast<uint8_t>(random() & 0x3f);  // no NaN in any format
    b[i] = static_cast<uint8_t>(random() & 0x3f);
  }
  const std::vector<double> factors = {1.0 / 3, 2.0 / 3};
  for (const Dtype dtype : {Dtype::kF16, Dtype::kBF16, Dtype::kF32, Dtype::kF64}) {
    const int64_t width = dtype_bytes(dtype);
    const int64_t count = 4096 / width;
    Bytes whole(4096);
    const void* both[2] = {a.data(), b.data()};
    void* out[1] = {whole.data()};
    reduce(dtype, ReduceOp::kMean, both, factors, out, count);
    for (const int64_t begin : {1, 3, 64, 130}) {
      const int64_t part = 97;
      Bytes cut(static_cast<size_t>(part * width));
      const void* from[2] = {a.data() + begin * width, b.data() + begin * width};
      void* to[1] = {cut.data()};
      reduce(dtype, ReduceOp::kMean, from, factors, to, part);
      EXPECT_EQ(std::memcmp(cut.data(), whole.data() + begin * width, cut.size()), 0)
          << dtype_name(dtype) << " from " << begin;
    }
  }
}

}  // namespace
}  // namespace lockstep::test::reduce_kernels_test
