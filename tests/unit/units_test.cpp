#include "lockstep/units.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace lockstep::test::units_test {
namespace {

TEST(Units, LiteralsArePowersOfTwo) {
  static_assert(1_KiB == 1024 && 3_MiB == 3 * 1024 * 1024 && 2_GiB == 2'147'483'648);
}

TEST(Units, BytesHaveThreeSignificantDigits) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1), "1 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1024), "1.00 KiB");
  EXPECT_EQ(format_bytes(1536), "1.50 KiB");
  EXPECT_EQ(format_bytes(24_MiB), "24.0 MiB");
  EXPECT_EQ(format_bytes(512_MiB), "512 MiB");
  EXPECT_EQ(format_bytes(2_GiB + 256_MiB), "2.25 GiB");
  EXPECT_EQ(format_bytes(5000_GiB), "4.88 TiB");
}

TEST(Units, BytesChangeUnitBeforeRoundingWouldShow1024) {
  EXPECT_EQ(format_bytes(1_MiB - 1), "1.00 MiB");
  EXPECT_EQ(format_bytes(1_GiB - 1), "1.00 GiB");
  EXPECT_EQ(format_bytes(1023_KiB), "1023 KiB");
}

TEST(Units, BytesOfAnySign) {
  EXPECT_EQ(format_bytes(-1536), "-1.50 KiB");
  EXPECT_EQ(format_bytes(std::numeric_limits<int64_t>::max()), "8388608 TiB");
  EXPECT_EQ(format_bytes(std::numeric_limits<int64_t>::min()), "-8388608 TiB");
}

TEST(Units, SecondsPickTheirUnit) {
  EXPECT_EQ(format_seconds(0), "0 ns");
  EXPECT_EQ(format_seconds(950e-9), "950 ns");
  EXPECT_EQ(format_seconds(12.3e-6), "12.3 µs");
  EXPECT_EQ(format_seconds(4.56e-3), "4.56 ms");
  EXPECT_EQ(format_seconds(7.89), "7.89 s");
  EXPECT_EQ(format_seconds(60), "60.0 s");
  EXPECT_EQ(format_seconds(125), "2 min 05 s");
  EXPECT_EQ(format_seconds(3600), "60 min 00 s");
}

TEST(Units, SecondsChangeUnitBeforeRoundingWouldShow1000) {
  EXPECT_EQ(format_seconds(999.6e-9), "1.00 µs");
  EXPECT_EQ(format_seconds(999.6e-6), "1.00 ms");
  EXPECT_EQ(format_seconds(999.6e-3), "1.00 s");
  EXPECT_EQ(format_seconds(99.96), "1 min 40 s");
  EXPECT_EQ(format_seconds(119.7), "2 min 00 s");
}

TEST(Units, SecondsOfAnySignAndNonFinite) {
  EXPECT_EQ(format_seconds(-4.56e-3), "-4.56 ms");
  EXPECT_EQ(format_seconds(INFINITY), "inf s");
  EXPECT_EQ(format_seconds(-INFINITY), "-inf s");
  EXPECT_EQ(format_seconds(std::nan("")), "nan s");
}

}  // namespace
}  // namespace lockstep::test::units_test
