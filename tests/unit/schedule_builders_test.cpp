#include <algorithm>
#include <sstream>

#include "lockstep/schedule.hpp"
#include "support.hpp"

namespace lockstep::test::schedule_builders_test {
namespace {

// "F0 F1 B0 B1" for one rank; with the stage where it has several: "F2.0".
std::string text(const Schedule& schedule, int rank) {
  std::ostringstream out;
  for (const Action& action : schedule.actions.at(static_cast<size_t>(rank))) {
    if (out.tellp() > 0) out << ' ';
    out << letter(action.kind);
    if (schedule.ranks() < schedule.stages()) out << action.stage << '.';
    out << action.micro_batch;
  }
  return out.str();
}

TEST(ScheduleBuilders, WriteTheKnownLists) {
  const Schedule one_by_one = sequential(2, 2);
  EXPECT_EQ(text(one_by_one, 0), "F0 B0 F1 B1");
  EXPECT_EQ(text(one_by_one, 1), "F0 B0 F1 B1");
  const Schedule all_first = gpipe(2, 3);
  EXPECT_EQ(text(all_first, 0), "F0 F1 F2 B0 B1 B2");
  EXPECT_EQ(text(all_first, 1), "F0 F1 F2 B0 B1 B2");
  const Schedule alternating = one_f_one_b(3, 4);
  EXPECT_EQ(text(alternating, 0), "F0 F1 F2 B0 F3 B1 B2 B3");
  EXPECT_EQ(text(alternating, 1), "F0 F1 B0 F2 B1 F3 B2 B3");
  EXPECT_EQ(text(alternating, 2), "F0 B0 F1 B1 F2 B2 F3 B3");
  const Schedule split = zero_bubble(3, 3);
  EXPECT_EQ(text(split, 0), "F0 F1 F2 I0 W0 I1 W1 I2 W2");
  EXPECT_EQ(text(split, 1), "F0 F1 I0 F2 I1 W0 I2 W1 W2");
  EXPECT_EQ(text(split, 2), "F0 I0 F1 I1 F2 I2 W0 W1 W2");
  const Schedule chunks = interleaved(2, 2, 2);
  EXPECT_EQ(chunks.rank_of_stage, (std::vector<int>{0, 1, 0, 1}));
  EXPECT_EQ(text(chunks, 0), "F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1");
  EXPECT_EQ(text(chunks, 1), "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1");
}

TEST(ScheduleBuilders, FewerMicroBatchesThanStages) {
  EXPECT_EQ(text(one_f_one_b(4, 1), 0), "F0 B0");
  EXPECT_EQ(text(one_f_one_b(4, 2), 0), "F0 F1 B0 B1");
  EXPECT_EQ(text(zero_bubble(4, 1), 3), "F0 I0 W0");
  EXPECT_EQ(text(interleaved(3, 1, 2), 2), "F2.0 F5.0 B5.0 B2.0");
}

TEST(ScheduleBuilders, EveryResultIsValid) {
  for (int stages = 1; stages <= 9; ++stages) {
    for (int micro_batches = 1; micro_batches <= 20; ++micro_batches) {
      for (const std::string& name : schedule_names()) {
        if (name == "interleaved") continue;
        SCOPED_TRACE(testing::Message() << name << ' ' << stages << ' ' << micro_batches);
        const Schedule schedule = make_schedule(name, stages, micro_batches);
        EXPECT_EQ(schedule.name, name);
        EXPECT_EQ(schedule.stages(), stages);
        EXPECT_EQ(schedule.ranks(), stages);
        ASSERT_NO_THROW(validate(schedule));
      }
    }
  }
}

TEST(ScheduleBuilders, InterleavedIsValidWhereItFits) {
  int refused = 0;
  for (int ranks = 1; ranks <= 6; ++ranks) {
    for (int chunks = 1; chunks <= 4; ++chunks) {
      for (int micro_batches = 1; micro_batches <= 20; ++micro_batches) {
        SCOPED_TRACE(testing::Message() << ranks << ' ' << micro_batches << ' ' << chunks);
        const int rounds = std::max(1, micro_batches / ranks);
        if (micro_batches % rounds != 0) {
          ++refused;
          EXPECT_THROW(interleaved(ranks, micro_batches, chunks), Error);
          continue;
        }
        const Schedule schedule = interleaved(ranks, micro_batches, chunks);
        EXPECT_EQ(schedule.stages(), ranks * chunks);
        EXPECT_EQ(schedule.ranks(), ranks);
        ASSERT_NO_THROW(validate(schedule));
        // The warm-up: forwards before the first backward, one of which belongs to the pair.
        for (int rank = 0; rank < ranks; ++rank) {
          const auto& list = schedule.actions[static_cast<size_t>(rank)];
          const auto first = std::find_if(list.begin(), list.end(), [](const Action& action) {
            return action.kind == ActionKind::kBackward;
          });
          const int warm_up = (chunks - 1) * micro_batches / rounds + 2 * (ranks - 1 - rank);
          EXPECT_EQ(first - list.begin(), std::min(warm_up + 1, micro_batches * chunks));
        }
      }
    }
  }
  EXPECT_GT(refused, 0);
}

TEST(ScheduleBuilders, OneChunkIsAPlainPipeline) {
  const Schedule schedule = interleaved(4, 8, 1);
  EXPECT_EQ(schedule.rank_of_stage, (std::vector<int>{0, 1, 2, 3}));
  const std::vector<StageTimes> times(4);
  EXPECT_EQ(simulate(schedule, times).makespan, simulate(gpipe(4, 8), times).makespan);
}

TEST(MakeSchedule, PutsInterleavedStagesOnFewerRanks) {
  const Schedule schedule = make_schedule("interleaved", 4, 6, 2);
  EXPECT_EQ(schedule.ranks(), 2);
  EXPECT_EQ(schedule.rank_of_stage, (std::vector<int>{0, 1, 0, 1}));
  EXPECT_EQ(make_schedule("1f1b", 4, 6, 2).ranks(), 4);
}

TEST(MakeSchedule, RefusesWhatDoesNotFit) {
  const auto refuse = [](std::initializer_list<std::string> parts, auto&& make) {
    test::expect_error(Code::kSchedule, parts, make);
  };
  refuse({"no schedule \"1f1d\"", "did you mean 1f1b?", "sequential, gpipe, 1f1b"},
         [] { make_schedule("1f1d", 2, 2); });
  refuse({"did you mean zero-bubble?"}, [] { make_schedule("zero_bubble", 2, 2); });
  refuse({"no schedule \"x\"", "use one of"}, [] { make_schedule("x", 2, 2); });
  refuse({"5 stages cannot be put on ranks with 2 stages each", "use 4 or 6 stages"},
         [] { make_schedule("interleaved", 5, 2, 2); });
  refuse({"1 stage cannot", "use 3 stages"}, [] { make_schedule("interleaved", 1, 2, 3); });
  refuse({"0 chunks", "1 or more"}, [] { make_schedule("interleaved", 4, 2, 0); });
  refuse({"9 micro-batches", "4 rounds of 2 ranks", "use 8 or 10 micro-batches"},
         [] { interleaved(2, 9, 2); });
  refuse({"11 micro-batches", "use 10 or 12 micro-batches"}, [] { interleaved(5, 11, 2); });
  refuse({"0 stages"}, [] { gpipe(0, 2); });
  refuse({"-1 micro-batches"}, [] { one_f_one_b(2, -1); });
  refuse({"0 ranks"}, [] { interleaved(0, 2, 2); });
  refuse({"5000 stages", "at most 4096"}, [] { sequential(5000, 1); });
  refuse({"4096 stages and 65 micro-batches", "at most 64 micro-batches with 4096 stages"},
         [] { zero_bubble(4096, 65); });
  refuse({"too large"}, [] { interleaved(1 << 20, 1 << 20, 1 << 20); });
  refuse({"1 stage and 2147483647", "with 1 stage"}, [] { gpipe(1, 2147483647); });
}

TEST(ScheduleNames, TellWhatAnActionIs) {
  EXPECT_EQ(letter(ActionKind::kForward), 'F');
  EXPECT_EQ(letter(ActionKind::kBackward), 'B');
  EXPECT_EQ(letter(ActionKind::kBackwardInput), 'I');
  EXPECT_EQ(letter(ActionKind::kBackwardWeight), 'W');
  EXPECT_EQ(action_name(ActionKind::kForward), "forward");
  EXPECT_EQ(action_name(ActionKind::kBackward), "backward");
  EXPECT_EQ(action_name(ActionKind::kBackwardInput), "input gradient");
  EXPECT_EQ(action_name(ActionKind::kBackwardWeight), "weight gradient");
}

}  // namespace
}  // namespace lockstep::test::schedule_builders_test
