#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "lockstep/schedule.hpp"
#include "support.hpp"

namespace lockstep::test::schedule_cuts_test {
namespace {

using Layers = std::vector<int64_t>;

double peak_of(const std::vector<double>& cost, const Layers& sizes) {
  double peak = 0;
  auto from = cost.begin();
  for (const int64_t size : sizes) {
    peak = std::max(peak, std::accumulate(from, from + size, 0.0));
    from += size;
  }
  return peak;
}

// The least peak over every way to cut, by trying all.
double least_peak(const std::vector<double>& cost, size_t from, int64_t stages) {
  if (stages == 1) {
    return std::accumulate(cost.begin() + static_cast<std::ptrdiff_t>(from), cost.end(), 0.0);
  }
  double best = std::numeric_limits<double>::infinity();
  double first = 0;
  for (size_t end = from + 1; end + static_cast<size_t>(stages) - 1 <= cost.size(); ++end) {
    first += cost[end - 1];
    best = std::min(best, std::max(first, least_peak(cost, end, stages - 1)));
  }
  return best;
}

TEST(CutByCount, FirstStagesGetTheRest) {
  EXPECT_EQ(cut_by_count(8, 4), (Layers{2, 2, 2, 2}));
  EXPECT_EQ(cut_by_count(10, 4), (Layers{3, 3, 2, 2}));
  EXPECT_EQ(cut_by_count(3, 3), (Layers{1, 1, 1}));
  EXPECT_EQ(cut_by_count(5, 1), (Layers{5}));
}

TEST(CutByCost, PutsACostlyLayerAlone) {
  EXPECT_EQ(cut_by_cost(std::vector<double>{1, 1, 1, 1, 4}, 2), (Layers{4, 1}));
  EXPECT_EQ(cut_by_cost(std::vector<double>{4, 1, 1, 1, 1}, 2), (Layers{1, 4}));
  EXPECT_EQ(cut_by_cost(std::vector<double>{1, 9, 1}, 3), (Layers{1, 1, 1}));
  EXPECT_EQ(cut_by_cost(std::vector<double>{2, 3}, 1), (Layers{2}));
}

TEST(CutByCost, SharesTheRestEvenly) {
  // The costly layer sets the peak; the others are divided as well as if it were not there.
  EXPECT_EQ(cut_by_cost(std::vector<double>{9, 1, 1, 1, 1, 1, 1}, 3), (Layers{1, 3, 3}));
  EXPECT_EQ(cut_by_cost(std::vector<double>{1, 1, 1, 1, 1, 1}, 3), (Layers{2, 2, 2}));
  EXPECT_EQ(cut_by_cost(std::vector<double>{1, 1, 1, 1, 1}, 3), (Layers{2, 2, 1}));
}

TEST(CutByCost, IsAsGoodAsTryingAllCuts) {
  std::mt19937 random(7);
  // Few different costs make ties, zeros among them; whole numbers make sums exact.
  std::uniform_int_distribution<int> cost_of(0, 6);
  for (size_t layers = 1; layers <= 10; ++layers) {
    for (int64_t stages = 1; stages <= static_cast<int64_t>(layers); ++stages) {
      for (int trial = 0; trial < 40; ++trial) {
        std::vector<double> cost(layers);
        std::generate(cost.begin(), cost.end(), [&] { return cost_of(random); });
        SCOPED_TRACE(testing::Message() << testing::PrintToString(cost) << " over " << stages);
        const Layers sizes = cut_by_cost(cost, stages);
        ASSERT_EQ(static_cast<int64_t>(sizes.size()), stages);
        ASSERT_GE(*std::min_element(sizes.begin(), sizes.end()), 1);
        ASSERT_EQ(std::accumulate(sizes.begin(), sizes.end(), int64_t{0}),
                  static_cast<int64_t>(layers));
        ASSERT_EQ(peak_of(cost, sizes), least_peak(cost, 0, stages));
      }
    }
  }
}

TEST(CutByCost, MeasuredTimesOfManyLayers) {
  std::mt19937 random(11);
  std::uniform_real_distribution<double> cost_of(0.001, 0.01);
  std::vector<double> cost(4096);
  std::generate(cost.begin(), cost.end(), [&] { return cost_of(random); });
  for (const int64_t stages : {1, 2, 7, 64, 4096}) {
    const Layers sizes = cut_by_cost(cost, stages);
    ASSERT_EQ(std::accumulate(sizes.begin(), sizes.end(), int64_t{0}), 4096);
    ASSERT_GE(*std::min_element(sizes.begin(), sizes.end()), 1);
    // No cut beats the even share, and the best misses it by less than the costliest layer.
    const double share = std::accumulate(cost.begin(), cost.end(), 0.0) / double(stages);
    ASSERT_LT(peak_of(cost, sizes), share + 0.01);
  }
}

TEST(Cuts, RefuseWhatCannotBeCut) {
  const auto refuse = [](std::initializer_list<std::string> parts, auto&& cut) {
    test::expect_error(Code::kSchedule, parts, cut);
  };
  refuse({"3 layers cannot be cut into 5 stages", "1 to 3"}, [] { cut_by_count(3, 5); });
  refuse({"3 layers cannot be cut into 0 stages"}, [] { cut_by_count(3, 0); });
  refuse({"1 layer cannot be cut into 2 stages", "use 1 stage"}, [] { cut_by_count(1, 2); });
  refuse({"0 layers", "a layer for each stage"}, [] { cut_by_count(0, 1); });
  refuse({"5000 stages are too many"}, [] { cut_by_count(9000, 5000); });
  refuse({"2 layers cannot be cut into 3 stages"}, [] {
    cut_by_cost(std::vector<double>{1, 2}, 3);
  });
  refuse({"layer 1 costs -2", "0 or more"}, [] { cut_by_cost(std::vector<double>{1, -2}, 2); });
  refuse({"layer 0 costs nan"}, [] { cut_by_cost(std::vector<double>{std::nan(""), 2}, 2); });
  refuse({"5000 layers", "at most 4096"}, [] { cut_by_cost(std::vector<double>(5000, 1.0), 2); });
}

}  // namespace
}  // namespace lockstep::test::schedule_cuts_test
