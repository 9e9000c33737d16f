#include "kernels/scan_kernels.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "base/machine.hpp"

namespace lockstep::test::scan_kernels_test {
namespace {

struct Named {
  std::string_view name;
  const ScanKernels* kernels;

  BlockScan scan(const std::vector<float>& x) const {
    return kernels->scan_f32(x.data(), static_cast<int64_t>(x.size()));
  }
  BlockScan scan(const std::vector<double>& x) const {
    return kernels->scan_f64(x.data(), static_cast<int64_t>(x.size()));
  }
  bool unscale(std::vector<float>& x, float by) const {
    return kernels->unscale_f32(x.data(), static_cast<int64_t>(x.size()), by);
  }
  bool unscale(std::vector<double>& x, float by) const {
    return kernels->unscale_f64(x.data(), static_cast<int64_t>(x.size()), by);
  }
};

// The kernels that this machine can run.
std::vector<Named> instruction_sets() {
  std::vector<Named> sets = {{"plain", &plain_scan_kernels()}};
#ifdef __x86_64__
  if (best_instructions() != Instructions::kPlain) sets.push_back({"avx2", &avx2_scan_kernels()});
  if (best_instructions() == Instructions::kAvx512)
    sets.push_back({"avx512", &avx512_scan_kernels()});
#endif
  return sets;
}

template <class T>
std::vector<T> random_values(size_t count) {
  std::mt19937 random(static_cast<unsigned>(count));
  std::uniform_real_distribution<T> uniform(-3, 3);
  std::vector<T> values(count);
  for (T& x : values) x = uniform(random);
  return values;
}

template <class T>
class ScanKernelsOf : public testing::Test {};
using Types = testing::Types<float, double>;
TYPED_TEST_SUITE(ScanKernelsOf, Types);

constexpr size_t kCounts[] = {0, 1, 7, 31, 32, 33, 64, 65, 1000, 4095, kScanBlock};

TYPED_TEST(ScanKernelsOf, SumsSquaresWithTheSameBitsForAllInstructions) {
  for (const size_t count : kCounts) {
    const auto values = random_values<TypeParam>(count);
    long double expected = 0;
    for (const TypeParam x : values) expected += static_cast<long double>(x) * x;
    const BlockScan plain = instruction_sets()[0].scan(values);
    EXPECT_TRUE(plain.finite) << count;
    EXPECT_NEAR(plain.sum_of_squares, static_cast<double>(expected), 1e-12 * (1 + count * 9.0));
    for (const Named& set : instruction_sets()) {
      EXPECT_EQ(std::bit_cast<uint64_t>(set.scan(values).sum_of_squares),
                std::bit_cast<uint64_t>(plain.sum_of_squares))
          << set.name << ' ' << count;
    }
  }
}

TYPED_TEST(ScanKernelsOf, FindsEveryNonFiniteElementWhereverItIs) {
  using Limits = std::numeric_limits<TypeParam>;
  for (const Named& set : instruction_sets()) {
    for (const TypeParam bad : {Limits::infinity(), -Limits::infinity(), Limits::quiet_NaN()}) {
      for (size_t at = 0; at < 101; ++at) {
        auto values = random_values<TypeParam>(101);
        values[at] = bad;
        EXPECT_FALSE(set.scan(values).finite) << set.name << ' ' << bad << " at " << at;
        EXPECT_FALSE(set.unscale(values, 0.5F)) << set.name << ' ' << bad << " at " << at;
      }
    }
  }
}

TYPED_TEST(ScanKernelsOf, TheLargestAndSmallestNumbersAreFinite) {
  using Limits = std::numeric_limits<TypeParam>;
  for (const Named& set : instruction_sets()) {
    std::vector<TypeParam> values(kScanBlock, Limits::max());
    values[5] = Limits::lowest();
    values[7] = Limits::denorm_min();
    EXPECT_TRUE(set.scan(values).finite) << set.name;
    EXPECT_TRUE(set.unscale(values, 0.5F)) << set.name;
    EXPECT_EQ(values[5], Limits::lowest() / 2) << set.name;
  }
}

TYPED_TEST(ScanKernelsOf, UnscalesEachElementOnce) {
  for (const Named& set : instruction_sets()) {
    for (const size_t count : kCounts) {
      const auto before = random_values<TypeParam>(count);
      auto values = before;
      EXPECT_TRUE(set.unscale(values, 0.3F)) << set.name << ' ' << count;
      for (size_t i = 0; i < count; ++i) {
        ASSERT_EQ(values[i], before[i] * static_cast<TypeParam>(0.3F)) << set.name << ' ' << i;
      }
    }
  }
}

TEST(ScanKernels, SquaresOfLargeFloatsDoNotOverflow) {
  const std::vector<float> values(kScanBlock, 1e30F);
  const double expected = static_cast<double>(kScanBlock) * 1e30F * 1e30F;
  EXPECT_NEAR(scan_block(values.data(), kScanBlock).sum_of_squares / expected, 1, 1e-12);
}

TEST(ScanKernels, AValueThatWasFiniteMayOverflowWhenUnscaledByMoreThanOne) {
  std::vector<float> values(40, 1e38F);
  EXPECT_TRUE(unscale_block(values.data(), 40, 100.0F));  // PyTorch looks before it multiplies
  EXPECT_TRUE(std::isinf(values[0]));
}

}  // namespace
}  // namespace lockstep::test::scan_kernels_test
