#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "lockstep/schedule.hpp"
#include "support.hpp"

namespace lockstep::test::schedule_simulate_test {
namespace {

// Multiples of 1/8: sums of them are exact, so closed forms must hold to the last bit.
const std::vector<StageTimes> kEqualTimes = {{1, 1, 1},   {1, 1, 0.5},      {2, 2.5, 1},
                                             {1, 2, 1},   {1, 1.25, 1.125}, {1, 1, 1.5},
                                             {1, 0.5, 1}, {3, 1, 2},        {0.125, 0.25, 0.375}};

double sum(const StageTimes& t) {
  return t.forward + t.backward_input + t.backward_weight;
}

int most(const std::vector<int>& values) {
  return *std::max_element(values.begin(), values.end());
}

// Calls `check` for many sizes, few micro-batches and one stage among them.
void for_sizes(const std::function<void(int stages, int micro_batches, const StageTimes&)>& check) {
  for (int stages = 1; stages <= 8; ++stages) {
    for (int micro_batches = 1; micro_batches <= 17; ++micro_batches) {
      for (const StageTimes& each : kEqualTimes) {
        SCOPED_TRACE(testing::Message()
                     << stages << " stages, " << micro_batches << " micro-batches, " << each.forward
                     << ' ' << each.backward_input << ' ' << each.backward_weight);
        check(stages, micro_batches, each);
      }
    }
  }
}

std::vector<StageTimes> all(int stages, const StageTimes& each) {
  return std::vector<StageTimes>(static_cast<size_t>(stages), each);
}

TEST(Simulate, SequentialOverlapsNothing) {
  for_sizes([](int stages, int micro_batches, const StageTimes& each) {
    const auto result = simulate(sequential(stages, micro_batches), all(stages, each));
    EXPECT_EQ(result.makespan, stages * micro_batches * sum(each));
    EXPECT_DOUBLE_EQ(result.bubble, 1 - 1.0 / stages);
    EXPECT_EQ(result.peak_micro_batches, std::vector<int>(static_cast<size_t>(stages), 1));
  });
}

TEST(Simulate, GpipeWaitsForTheOtherStagesOnce) {
  for_sizes([](int stages, int micro_batches, const StageTimes& each) {
    const auto result = simulate(gpipe(stages, micro_batches), all(stages, each));
    EXPECT_EQ(result.makespan, (micro_batches + stages - 1) * sum(each));
    EXPECT_NEAR(result.bubble, (stages - 1.0) / (micro_batches + stages - 1), 1e-12);
    EXPECT_EQ(result.peak_micro_batches,
              std::vector<int>(static_cast<size_t>(stages), micro_batches));
  });
}

TEST(Simulate, OneFOneBTakesGpipesTimeAndHoldsLess) {
  for_sizes([](int stages, int micro_batches, const StageTimes& each) {
    const auto result = simulate(one_f_one_b(stages, micro_batches), all(stages, each));
    EXPECT_EQ(result.makespan, (micro_batches + stages - 1) * sum(each));
    for (int stage = 0; stage < stages; ++stage) {
      EXPECT_EQ(result.peak_micro_batches[static_cast<size_t>(stage)],
                std::min(micro_batches, stages - stage));
    }
  });
}

TEST(Simulate, ZeroBubbleWaitsLess) {
  for_sizes([](int stages, int micro_batches, const StageTimes& each) {
    const auto result = simulate(zero_bubble(stages, micro_batches), all(stages, each));
    const auto plain = simulate(one_f_one_b(stages, micro_batches), all(stages, each));
    EXPECT_LE(result.makespan, plain.makespan);
    EXPECT_LE(most(result.peak_micro_batches), most(plain.peak_micro_batches));
    if (micro_batches < stages) return;
    // A weight gradient that takes longer than a forward or an input gradient hides no more.
    const double idle = std::max({each.forward, each.backward_input,
                                  each.forward + each.backward_input - each.backward_weight});
    EXPECT_EQ(result.makespan, micro_batches * sum(each) + (stages - 1) * idle);
  });
}

TEST(Simulate, ZeroBubbleWithFewMicroBatches) {
  for (int stages = 1; stages <= 9; ++stages) {
    for (int micro_batches = 1; micro_batches <= stages; ++micro_batches) {
      const auto result = simulate(zero_bubble(stages, micro_batches), all(stages, {}));
      EXPECT_EQ(result.makespan, 2 * stages + 2 * micro_batches - 1);
    }
  }
}

TEST(Simulate, InterleavedDividesTheWaitByTheChunks) {
  for (const int chunks : {1, 2, 3}) {
    for_sizes([&](int ranks, int micro_batches, const StageTimes& each) {
      if (micro_batches % std::max(1, micro_batches / ranks) != 0) return;
      const auto result =
          simulate(interleaved(ranks, micro_batches, chunks), all(ranks * chunks, each));
      // Fewer micro-batches than ranks: each pass over the ranks leaves the rest of them idle.
      const int missing = std::max(0, ranks - micro_batches);
      EXPECT_EQ(result.makespan,
                (micro_batches * chunks + ranks - 1 + (chunks - 1) * missing) * sum(each));
    });
  }
}

TEST(Simulate, InterleavedHoldsItsWarmUpAndOneMore) {
  for (const int ranks : {1, 2, 3, 4}) {
    for (const int chunks : {1, 2, 3}) {
      for (const int micro_batches : {1, 2 * ranks, 4 * ranks}) {
        const Schedule schedule = interleaved(ranks, micro_batches, chunks);
        const auto result = simulate(schedule, all(ranks * chunks, {}));
        const int per_round = std::min(micro_batches, ranks);
        for (int rank = 0; rank < ranks; ++rank) {
          int held = 0;
          int peak = 0;
          for (const auto& each : result.timeline[static_cast<size_t>(rank)]) {
            held += each.action.kind == ActionKind::kForward ? 1 : -1;
            peak = std::max(peak, held);
          }
          const int warm_up = (chunks - 1) * per_round + 2 * (ranks - 1 - rank);
          EXPECT_EQ(peak, std::min(warm_up + 1, micro_batches * chunks));
          // Its stages need not hold their most at the same time.
          int sum_of_peaks = 0;
          for (int chunk = 0; chunk < chunks; ++chunk) {
            sum_of_peaks += result.peak_micro_batches[static_cast<size_t>(chunk * ranks + rank)];
          }
          EXPECT_GE(sum_of_peaks, peak);
        }
      }
    }
  }
}

TEST(Simulate, TheSlowestStageSetsThePace) {
  // A pipeline of unequal stages: the sum of all plus, for every further micro-batch, the slowest.
  for (int slow = 0; slow < 4; ++slow) {
    for (int micro_batches = 1; micro_batches <= 12; ++micro_batches) {
      std::vector<StageTimes> times(4);
      times[static_cast<size_t>(slow)] = {3, 3, 3};
      const auto result = simulate(gpipe(4, micro_batches), times);
      EXPECT_EQ(result.makespan, (3 * 3 + 9) + (micro_batches - 1) * 9);
      EXPECT_NEAR(result.bubble, 1 - micro_batches * (3 * 3 + 9.0) / (4 * result.makespan), 1e-12);
    }
  }
  // One micro-batch gains from no schedule.
  const std::vector<StageTimes> times = {{1, 2, 3}, {4, 5, 6}, {7, 8, 9}};
  for (const char* name : {"sequential", "gpipe", "1f1b"}) {
    EXPECT_EQ(simulate(make_schedule(name, 3, 1), times).makespan, 45);
  }
}

TEST(Simulate, EveryActionBeginsAsSoonAsItCan) {
  const std::vector<StageTimes> times = {
      {1, 2, 0.5, 0.25, 0}, {3, 1, 1, 0.5, 0.75}, {0.5, 2, 2, 0, 0.125}, {2, 1, 0.25, 0, 2}};
  for (const std::string& name : schedule_names()) {
    const Schedule schedule = make_schedule(name, 4, 6);
    const Simulation result = simulate(schedule, times);
    // When each part of a stage's work on a micro-batch ends; B and I both count as part 1.
    std::vector<double> ends(3 * 4 * 6, -1);
    const auto end_of = [&](int part, int stage, int micro_batch) -> double& {
      return ends[static_cast<size_t>((part * 4 + stage) * 6 + micro_batch)];
    };
    const auto part = [](ActionKind kind) {
      return kind == ActionKind::kForward ? 0 : kind == ActionKind::kBackwardWeight ? 2 : 1;
    };
    for (const auto& rank : result.timeline) {
      for (const auto& each : rank) {
        end_of(part(each.action.kind), each.action.stage, each.action.micro_batch) = each.end;
      }
    }
    for (size_t rank = 0; rank < result.timeline.size(); ++rank) {
      ASSERT_EQ(result.timeline[rank].size(), schedule.actions[rank].size());
      double free = 0;
      for (size_t i = 0; i < result.timeline[rank].size(); ++i) {
        const PlannedAction& each = result.timeline[rank][i];
        const auto [kind, stage, micro_batch] = each.action;
        const StageTimes& own = times[static_cast<size_t>(stage)];
        EXPECT_EQ(each.action, schedule.actions[rank][i]);
        double ready = free;
        double lasts = own.forward;
        if (kind == ActionKind::kForward && stage > 0) {
          ready = std::max(ready, end_of(0, stage - 1, micro_batch) +
                                      times[static_cast<size_t>(stage - 1)].send_forward);
        }
        if (part(kind) == 1) {
          lasts = own.backward_input + (kind == ActionKind::kBackward ? own.backward_weight : 0);
          ready = std::max(ready, end_of(0, stage, micro_batch));
          if (stage < 3) {
            ready = std::max(ready, end_of(1, stage + 1, micro_batch) +
                                        times[static_cast<size_t>(stage + 1)].send_backward);
          }
        }
        if (part(kind) == 2) {
          lasts = own.backward_weight;
          ready = std::max(ready, end_of(1, stage, micro_batch));
        }
        EXPECT_EQ(each.begin, ready) << name;
        EXPECT_EQ(each.end, each.begin + lasts) << name;
        free = each.end;
      }
    }
  }
}

TEST(Simulate, MessagesCostOnlyBetweenRanks) {
  const StageTimes each{1, 1, 1, 0.5, 0.25};
  EXPECT_EQ(simulate(gpipe(2, 1), all(2, each)).makespan, 6.75);
  const Schedule same = on_ranks(gpipe(2, 1), std::vector<int>{0, 0});
  const auto result = simulate(same, all(2, each));
  EXPECT_EQ(result.makespan, 6);
  EXPECT_EQ(result.bubble, 0);
}

TEST(Simulate, AMessageDoesNotKeepItsSenderBusy) {
  // Three forwards in a row on rank 0 although each message takes as long as ten of them.
  const auto result = simulate(gpipe(2, 3), all(2, {1, 1, 1, 10, 0}));
  EXPECT_EQ(result.timeline[0][2].end, 3);
  EXPECT_EQ(result.timeline[1][0].begin, 11);
}

TEST(Simulate, WorkWithoutTimeHasNoBubble) {
  const auto result = simulate(gpipe(2, 2), all(2, {0, 0, 0}));
  EXPECT_EQ(result.makespan, 0);
  EXPECT_EQ(result.bubble, 0);
}

TEST(Simulate, RefusesTimesThatDoNotFit) {
  const auto refuse = [](const std::vector<StageTimes>& times, std::vector<std::string> parts) {
    for (const auto& part : parts) {
      test::expect_error(Code::kSchedule, {part}, [&] { simulate(gpipe(2, 2), times); });
    }
  };
  refuse(all(3, {}), {"has 2 stages, but times were given for 3", "one StageTimes for each stage"});
  refuse({{}, {1, -1, 1}}, {"stage 1 takes a time of -1", "0 or more"});
  refuse({{std::nan(""), 1, 1}, {}}, {"stage 0 takes a time of nan"});
  refuse({{1, 1, 1, std::numeric_limits<double>::infinity(), 0}, {}}, {"a time of inf"});
}

// docs/schedule.md shows these figures.
TEST(Simulate, TheDocumentedTable) {
  const auto expect = [](const Schedule& schedule, double unit, double makespan,
                         const std::vector<int>& peaks) {
    const auto result = simulate(schedule, all(schedule.stages(), {unit, unit, unit}));
    EXPECT_EQ(result.makespan, makespan) << schedule.name;
    EXPECT_NEAR(result.bubble, 1 - 24 / makespan, 1e-12) << schedule.name;
    EXPECT_EQ(result.peak_micro_batches, peaks) << schedule.name;
  };
  expect(sequential(4, 8), 1, 96, {1, 1, 1, 1});
  expect(gpipe(4, 8), 1, 33, {8, 8, 8, 8});
  expect(one_f_one_b(4, 8), 1, 33, {4, 3, 2, 1});
  expect(interleaved(4, 8, 2), 0.5, 28.5, {8, 8, 7, 5, 4, 4, 3, 1});
  expect(zero_bubble(4, 8), 1, 27, {4, 4, 4, 4});
}

TEST(Simulate, LargeSchedulesAreQuick) {
  // The largest allowed of each shape; a quadratic simulator would never finish.
  EXPECT_EQ(simulate(zero_bubble(4096, 64), all(4096, {})).makespan, 2 * 4096 + 2 * 64 - 1);
  EXPECT_EQ(simulate(one_f_one_b(2, 1 << 17), all(2, {})).makespan, 3 * ((1 << 17) + 1));
}

}  // namespace
}  // namespace lockstep::test::schedule_simulate_test
