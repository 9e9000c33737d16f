#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "cli/top/top_sample.hpp"
#include "lockstep/units.hpp"
#include "top_support.hpp"

namespace lockstep::cli::top_rates_test {
namespace {

using test::first_rank;
using test::kSecond;
using test::rank_after;
using test::run_of;
using test::time_of;
using test::two_samples;

TEST(TopRates, OneReadingHasNoRates) {
  TopRates rates;
  const TopView view = rates.update({run_of({rank_after(10)})}, time_of(10));
  EXPECT_TRUE(std::isnan(first_rank(view).steps_per_s));
  EXPECT_TRUE(std::isnan(first_rank(view).devices.at(0).busy));
  EXPECT_TRUE(first_rank(view).devices.at(0).recent.empty());
  EXPECT_EQ(first_rank(view).devices.at(0).status.live_bytes, 36_MiB);
}

TEST(TopRates, TwoReadingsHaveRates) {
  const TopView view = two_samples();
  const RankView& rank = first_rank(view);
  EXPECT_DOUBLE_EQ(rank.steps_per_s, 10);
  EXPECT_DOUBLE_EQ(rank.devices[0].busy, 0.8);
  EXPECT_DOUBLE_EQ(rank.devices[1].busy, 0.7);
  EXPECT_DOUBLE_EQ(rank.busy, 0.75) << "no clocks of its own: the mean of its devices";
  EXPECT_TRUE(std::isnan(rank.communicating));
  EXPECT_DOUBLE_EQ(rank.idle, 0.25);
  EXPECT_EQ(rank.devices[0].recent, std::vector<double>{0.8});
  EXPECT_DOUBLE_EQ(view.runs[0].age_s, 3);
}

TEST(TopRates, TheRanksOwnClocksCount) {
  const TopView view = two_samples([](RankReading& reading) {
    reading.status.busy_ns = 6 * kSecond / 10;
    reading.status.communicating_ns = 3 * kSecond / 10;
    reading.status.idle_ns = kSecond / 10;
  });
  EXPECT_DOUBLE_EQ(first_rank(view).busy, 0.6);
  EXPECT_DOUBLE_EQ(first_rank(view).communicating, 0.3);
  EXPECT_NEAR(first_rank(view).idle, 0.1, 1e-12);
}

TEST(TopRates, RatesAreOverTheTimeTheRankNotedNotOverTheSamples) {
  TopRates rates;
  rates.update({run_of({rank_after(10)})}, time_of(10) + kSecond / 20);
  const TopView view = rates.update({run_of({rank_after(11)})}, time_of(20));
  EXPECT_DOUBLE_EQ(first_rank(view).steps_per_s, 10);
}

TEST(TopRates, ASlowStepKeepsTheRateUntilItIsTooLate) {
  TopRates rates;
  rates.update({run_of({rank_after(10)})}, time_of(10));
  rates.update({run_of({rank_after(20)})}, time_of(20));
  const auto after = [&](double seconds) {
    const int64_t now = time_of(20) + static_cast<int64_t>(seconds * 1e9);
    return rates.update({run_of({rank_after(20)})}, now);
  };
  const TopView soon = after(2);
  EXPECT_DOUBLE_EQ(first_rank(soon).steps_per_s, 10);
  EXPECT_DOUBLE_EQ(first_rank(soon).quiet_s, 2);
  EXPECT_FALSE(first_rank(soon).troubled);
  const TopView late = after(4);
  EXPECT_EQ(first_rank(late).steps_per_s, 0);
  EXPECT_TRUE(std::isnan(first_rank(late).busy));
  EXPECT_EQ(first_rank(late).devices[0].recent.back(), 0);
  const TopView silent = after(11);
  EXPECT_TRUE(first_rank(silent).troubled);
  TopView again = rates.update({run_of({rank_after(140)})}, time_of(140));
  EXPECT_DOUBLE_EQ(first_rank(again).steps_per_s, 10) << "the hang is over";
  EXPECT_FALSE(first_rank(again).troubled);
}

TEST(TopRates, StartUpIsNoStepTime) {
  TopRates rates;
  rates.update({run_of({rank_after(0)})}, time_of(0));
  EXPECT_TRUE(
      std::isnan(first_rank(rates.update({run_of({rank_after(2)})}, time_of(2))).steps_per_s));
  EXPECT_DOUBLE_EQ(first_rank(rates.update({run_of({rank_after(3)})}, time_of(3))).steps_per_s, 10);
}

TEST(TopRates, ARestartedRankBeginsAnew) {
  TopRates rates;
  rates.update({run_of({rank_after(50)})}, time_of(50));
  RankReading other = rank_after(60);
  other.status.pid = 999;
  EXPECT_TRUE(std::isnan(first_rank(rates.update({run_of({other})}, time_of(60))).steps_per_s));
  other.status.step = 5;
  EXPECT_TRUE(std::isnan(first_rank(rates.update({run_of({other})}, time_of(61))).steps_per_s));
}

TEST(TopRates, HistoryIsBounded) {
  TopRates rates;
  TopView view;
  for (int64_t step = 1; step < 200; ++step)
    view = rates.update({run_of({rank_after(step)})}, time_of(step));
  EXPECT_EQ(first_rank(view).devices[0].recent.size(), kRecentSamples);
}

TEST(TopRates, ARunThatEndsStaysForAWhile) {
  TopRates rates;
  rates.update({run_of({rank_after(10)})}, time_of(10));
  const TopView ended = rates.update({}, time_of(11));
  ASSERT_EQ(ended.runs.size(), 1U);
  EXPECT_TRUE(ended.runs[0].ended);
  EXPECT_EQ(first_rank(ended).status.step, 10);
  EXPECT_EQ(rates.update({}, time_of(11) + 9 * kSecond).runs.size(), 1U);
  EXPECT_EQ(rates.update({}, time_of(11) + 11 * kSecond).runs.size(), 0U);
}

TEST(TopRates, ANameUsedAgainIsAnotherRun) {
  TopRates rates;
  rates.update({run_of({rank_after(10)})}, time_of(10));
  RunReading second = run_of({rank_after(20)});
  second.info.started_ns += kSecond;
  const TopView view = rates.update({second}, time_of(20));
  ASSERT_EQ(view.runs.size(), 2U);
  EXPECT_TRUE(view.runs[0].ended);
  EXPECT_TRUE(std::isnan(view.runs[1].ranks[0].steps_per_s)) << "nothing of the old run's steps";
}

TEST(TopRates, StatesNameWhatIsWrong) {
  const auto state_of = [](const std::function<void(RankReading&)>& change) {
    const TopView view = two_samples(change);
    return first_rank(view).state + (first_rank(view).troubled ? "!" : "");
  };
  EXPECT_EQ(state_of([](auto&) {}), "training");
  EXPECT_EQ(state_of([](auto& r) { r.status.pid = 0; }), "not started");
  EXPECT_EQ(state_of([](auto& r) { r.process = ProcessState::kGone; }), "died!");
  EXPECT_EQ(state_of([](auto& r) { r.process = ProcessState::kStopped; }), "stopped!");
  EXPECT_EQ(state_of([](auto& r) { r.process = ProcessState::kUnknown; }), "training");
  EXPECT_EQ(state_of([](auto& r) { r.status.phase = Phase::kFailed; }), "failed!");
  EXPECT_EQ(state_of([](auto& r) { r.problem = "damaged"; }), "unreadable!");
  EXPECT_EQ(state_of([](auto& r) {
              r.process = ProcessState::kGone;
              r.status.phase = Phase::kFinished;
            }),
            "finished");
}

TEST(TopRates, ACollectiveRunsUntilItHasFinished) {
  const auto seconds_of = [](int64_t finished_ns) {
    const TopView view = two_samples([finished_ns](RankReading& reading) {
      reading.status.collective = {.sequence = 3,
                                   .operation = "all_reduce",
                                   .started_ns = time_of(15),
                                   .finished_ns = finished_ns};
    });
    return first_rank(view).collective_s;
  };
  EXPECT_DOUBLE_EQ(seconds_of(0), 0.5);
  EXPECT_DOUBLE_EQ(seconds_of(time_of(15) + kSecond / 100), 0.01);
}

}  // namespace
}  // namespace lockstep::cli::top_rates_test
