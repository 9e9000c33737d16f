#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "report/axis.hpp"

namespace lockstep {
namespace {

std::vector<std::string> labels_of(const Axis& axis) {
  std::vector<std::string> labels;
  for (const auto& tick : axis.ticks) labels.push_back(tick.label);
  return labels;
}

using Labels = std::vector<std::string>;

TEST(ReportAxis, StepsAreRound) {
  EXPECT_EQ(labels_of(linear_axis(0, 37, Unit::kNumber, 4)), (Labels{"0", "10", "20", "30", "40"}));
  EXPECT_EQ(labels_of(linear_axis(-3, 4, Unit::kNumber, 4)), (Labels{"-4", "-2", "0", "2", "4"}));
  EXPECT_EQ(labels_of(linear_axis(0, 0.3, Unit::kNumber, 3)), (Labels{"0", "0.1", "0.2", "0.3"}));
}

TEST(ReportAxis, OneUnitForAllTicks) {
  EXPECT_EQ(labels_of(linear_axis(0, 1900, Unit::kMilliseconds, 4)),
            (Labels{"0", "0.5 s", "1 s", "1.5 s", "2 s"}));
  EXPECT_EQ(labels_of(linear_axis(0, 0.09, Unit::kMilliseconds, 2)),
            (Labels{"0", "50 µs", "100 µs"}));
  EXPECT_EQ(labels_of(linear_axis(0, 30.0 * (1 << 20), Unit::kBytes, 4)),
            (Labels{"0", "8 MiB", "16 MiB", "24 MiB", "32 MiB"}));
  EXPECT_EQ(labels_of(linear_axis(0, 100, Unit::kPercent, 2)), (Labels{"0", "50 %", "100 %"}));
}

TEST(ReportAxis, PlacesValuesBetweenItsEnds) {
  const Axis axis = linear_axis(0, 40, Unit::kNumber, 4);
  EXPECT_DOUBLE_EQ(axis.place(0), 0);
  EXPECT_DOUBLE_EQ(axis.place(10), 0.25);
  EXPECT_DOUBLE_EQ(axis.place(1000), 1) << "outside is drawn at the edge";
  const Axis log = point_axis({1, 2, 4, 8, 16}, true, Unit::kNumber);
  EXPECT_DOUBLE_EQ(log.place(4), 0.5);
}

TEST(ReportAxis, PowersOfTheBase) {
  EXPECT_EQ(labels_of(log_axis(1, 64, 2, Unit::kNumber)),
            (Labels{"1", "2", "4", "8", "16", "32", "64"}));
  EXPECT_EQ(labels_of(log_axis(0.004, 20, 10, Unit::kNumber)), (Labels{"0.01", "0.1", "1", "10"}));
  EXPECT_LE(log_axis(1e-200, 1e200, 10, Unit::kNumber).ticks.size(), 8U);
  EXPECT_GE(log_axis(3, 4, 10, Unit::kNumber).ticks.size(), 2U) << "round numbers between powers";
}

TEST(ReportAxis, OddRangesStillHaveTicks) {
  constexpr double kTiny = std::numeric_limits<double>::denorm_min();
  const std::vector<std::pair<double, double>> ranges = {
      {0, 0},          {5, 5},          {-5, -5},          {0, kTiny},
      {0, 1e289},      {-1e289, 1e289}, {1e9, 1e9 + 1e-7}, {1, 1 + 1e-12},
      {1e-280, 2e-280}};
  for (const auto& [low, high] : ranges) {
    for (const Unit unit : {Unit::kNumber, Unit::kMilliseconds, Unit::kBytes, Unit::kPercent}) {
      const Axis axis = linear_axis(low, high, unit, 4);
      EXPECT_FALSE(axis.ticks.empty()) << low << " " << high;
      EXPECT_LT(axis.low, axis.high) << low << " " << high;
      EXPECT_LE(axis.low, low);
      EXPECT_GE(axis.high, high);
    }
  }
}

TEST(ReportAxis, ValuesAreWrittenInTheirUnit) {
  EXPECT_EQ(format_value(Unit::kMilliseconds, 12.34), "12.3 ms");
  EXPECT_EQ(format_value(Unit::kMilliseconds, 0), "0 ms");
  EXPECT_EQ(format_value(Unit::kBytes, 24.0 * (1 << 20)), "24.0 MiB");
  EXPECT_EQ(format_value(Unit::kPercent, 45), "45 %");
  EXPECT_EQ(format_value(Unit::kNumber, 65536), "65536");
  EXPECT_EQ(format_value(Unit::kNumber, 0.03125), "0.03125");
  EXPECT_EQ(format_value(Unit::kNumber, std::nan("")), "nan");
  EXPECT_EQ(format_value(Unit::kBytes, 1e200), "1e+200 B") << "more than any integer holds";
}

}  // namespace
}  // namespace lockstep
