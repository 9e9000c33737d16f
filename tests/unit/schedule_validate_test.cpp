#include <algorithm>

#include "lockstep/schedule.hpp"
#include "support.hpp"

namespace lockstep::test::schedule_validate_test {
namespace {

constexpr ActionKind F = ActionKind::kForward;
constexpr ActionKind B = ActionKind::kBackward;
constexpr ActionKind I = ActionKind::kBackwardInput;
constexpr ActionKind W = ActionKind::kBackwardWeight;

void refuse(const Schedule& schedule, std::initializer_list<std::string> parts) {
  test::expect_error(Code::kSchedule, parts, [&] { validate(schedule); });
  // What cannot run is not simulated either, and so never printed.
  const std::vector<StageTimes> times(schedule.rank_of_stage.size());
  test::expect_error(Code::kSchedule, parts, [&] { simulate(schedule, times); });
}

// Two stages and two micro-batches by hand: each test breaks it in one spot.
Schedule by_hand() {
  return {.name = "mine",
          .micro_batches = 2,
          .rank_of_stage = {0, 1},
          .actions = {{{F, 0, 0}, {F, 0, 1}, {B, 0, 0}, {B, 0, 1}},
                      {{F, 1, 0}, {B, 1, 0}, {F, 1, 1}, {I, 1, 1}, {W, 1, 1}}}};
}

TEST(Validate, TakesAListWrittenByHand) {
  EXPECT_NO_THROW(validate(by_hand()));
}

TEST(Validate, RefusesAMissingAction) {
  Schedule schedule = by_hand();
  schedule.actions[1].pop_back();
  refuse(schedule, {"schedule \"mine\"", "rank 1 never runs W of micro-batch 1 in stage 1"});
  schedule = by_hand();
  schedule.actions[0].pop_back();
  refuse(schedule, {"rank 0 never runs B of micro-batch 1 in stage 0"});
  schedule = by_hand();
  schedule.actions[1].erase(schedule.actions[1].begin(), schedule.actions[1].begin() + 2);
  refuse(schedule, {"rank 1 never runs F of micro-batch 0 in stage 1"});
  schedule.actions[1].clear();
  refuse(schedule, {"rank 1 never runs F of micro-batch 0 in stage 1"});
}

TEST(Validate, RefusesADuplicate) {
  for (const Action again : {Action{F, 0, 1}, Action{B, 0, 0}}) {
    Schedule schedule = by_hand();
    schedule.actions[0].push_back(again);
    refuse(schedule, {"rank 0 runs", "twice"});
  }
  Schedule schedule = by_hand();
  schedule.actions[1].push_back({W, 1, 1});
  refuse(schedule, {"rank 1 runs W of micro-batch 1 in stage 1 twice"});
}

TEST(Validate, RefusesAnotherStagesRank) {
  Schedule schedule = by_hand();
  std::swap(schedule.actions[0][1], schedule.actions[1][2]);
  refuse(schedule,
         {"rank 0 runs F of micro-batch 1 in stage 1, which is on rank 1", "its own rank"});
}

TEST(Validate, RefusesNumbersOutOfRange) {
  for (const auto& [action, part] : {std::pair{Action{F, 2, 0}, "stages are 0 to 1"},
                                     {Action{F, -1, 0}, "stages are 0 to 1"},
                                     {Action{F, 0, 2}, "micro-batches are 0 to 1"},
                                     {Action{B, 0, -1}, "micro-batches are 0 to 1"}}) {
    Schedule schedule = by_hand();
    schedule.actions[0].push_back(action);
    refuse(schedule, {"rank 0 runs", part});
  }
}

TEST(Validate, RefusesBackwardBeforeForward) {
  Schedule schedule = by_hand();
  std::swap(schedule.actions[1][0], schedule.actions[1][1]);
  refuse(schedule, {"rank 1 runs B of micro-batch 0 in stage 1 before its F"});
  schedule = by_hand();
  std::swap(schedule.actions[1][2], schedule.actions[1][3]);
  refuse(schedule, {"rank 1 runs I of micro-batch 1 in stage 1 before its F"});
}

TEST(Validate, RefusesWeightGradientBeforeInputGradient) {
  Schedule schedule = by_hand();
  std::swap(schedule.actions[1][3], schedule.actions[1][4]);
  refuse(schedule, {"rank 1 runs W of micro-batch 1 in stage 1 before its I"});
}

TEST(Validate, RefusesABackwardThatIsWholeAndSplit) {
  Schedule schedule = by_hand();
  schedule.actions[1].push_back({B, 1, 1});
  refuse(schedule, {"rank 1 runs B of micro-batch 1 in stage 1 whole and split"});
  schedule = by_hand();
  schedule.actions[0].push_back({I, 0, 0});
  refuse(schedule, {"rank 0 runs I of micro-batch 0 in stage 0 whole and split"});
  schedule = by_hand();
  schedule.actions[0].push_back({W, 0, 1});
  refuse(schedule, {"rank 0 runs W of micro-batch 1 in stage 0 whole and split"});
}

TEST(Validate, RefusesRanksWithoutStagesAndStagesWithoutRanks) {
  Schedule schedule = by_hand();
  schedule.actions.emplace_back();
  refuse(schedule, {"rank 2 has no stage"});
  schedule = by_hand();
  schedule.rank_of_stage[1] = 2;
  refuse(schedule, {"stage 1 is on rank 2, but there are lists for 2 ranks"});
  schedule.rank_of_stage[1] = -1;
  refuse(schedule, {"stage 1 is on rank -1"});
  refuse(Schedule{}, {"0 stages"});
  schedule = by_hand();
  schedule.micro_batches = 0;
  refuse(schedule, {"0 micro-batches"});
  schedule.micro_batches = 2147483647;
  refuse(schedule, {"too large"});
}

TEST(Validate, FindsRanksThatWaitForEachOther) {
  // Rank 0 wants the backward of micro-batch 0 before it sends micro-batch 1; rank 1 wants both
  // forwards first.
  const Schedule schedule{.name = "crossed",
                          .micro_batches = 2,
                          .rank_of_stage = {0, 1},
                          .actions = {{{F, 0, 0}, {B, 0, 0}, {F, 0, 1}, {B, 0, 1}},
                                      {{F, 1, 0}, {F, 1, 1}, {B, 1, 0}, {B, 1, 1}}}};
  refuse(schedule, {"rank 0 waits for B of micro-batch 0 in stage 1 before B of micro-batch 0 in "
                    "stage 0, in a cycle of 2 ranks",
                    "note: rank 1 waits for F of micro-batch 1 in stage 0 before F of "
                    "micro-batch 1 in stage 1"});
}

TEST(Validate, NamesOnlyTheCycle) {
  // Rank 0 waits too, but for the two that wait for each other.
  const Schedule schedule{.name = "crossed",
                          .micro_batches = 2,
                          .rank_of_stage = {0, 1, 2},
                          .actions = {{{F, 0, 0}, {F, 0, 1}, {B, 0, 0}, {B, 0, 1}},
                                      {{F, 1, 0}, {B, 1, 0}, {F, 1, 1}, {B, 1, 1}},
                                      {{F, 2, 0}, {F, 2, 1}, {I, 2, 0}, {W, 2, 0}, {B, 2, 1}}}};
  refuse(schedule, {"\": rank 1 waits for I of micro-batch 0 in stage 2 before B of micro-batch 0",
                    "cycle of 2 ranks", "note: rank 2 waits for F of micro-batch 1 in stage 1"});
}

TEST(Validate, FindsARankThatWaitsForItself) {
  const Schedule schedule{.name = "mine",
                          .micro_batches = 1,
                          .rank_of_stage = {0, 0},
                          .actions = {{{F, 1, 0}, {F, 0, 0}, {B, 1, 0}, {B, 0, 0}}}};
  refuse(schedule,
         {"rank 0 waits for F of micro-batch 0 in stage 0 before F of micro-batch 0 in stage 1",
          "its own list", "put an action after those it needs"});
}

TEST(OnRanks, KeepsEachStagesOrderAndCanRun) {
  for (const std::string& name : schedule_names()) {
    for (const std::vector<int>& ranks :
         {std::vector<int>{0, 0, 0, 0}, {0, 0, 1, 1}, {0, 1, 0, 1}, {2, 1, 0, 0}, {3, 2, 1, 0}}) {
      SCOPED_TRACE(name);
      const Schedule before = make_schedule(name, 4, 6);
      const Schedule after = on_ranks(before, ranks);
      ASSERT_NO_THROW(validate(after));
      EXPECT_EQ(after.name, name);
      EXPECT_EQ(after.rank_of_stage, ranks);
      for (int stage = 0; stage < 4; ++stage) {
        const auto of_stage = [&](const Schedule& schedule) {
          const int rank = schedule.rank_of_stage[static_cast<size_t>(stage)];
          std::vector<Action> actions = schedule.actions[static_cast<size_t>(rank)];
          std::erase_if(actions, [&](const Action& action) { return action.stage != stage; });
          return actions;
        };
        EXPECT_EQ(of_stage(after), of_stage(before));
      }
      // So each stage holds as many micro-batches as before.
      const std::vector<StageTimes> times(4);
      EXPECT_EQ(simulate(after, times).peak_micro_batches,
                simulate(before, times).peak_micro_batches);
    }
  }
}

TEST(OnRanks, MergesInTheOrderOfBeginnings) {
  const Schedule merged = on_ranks(one_f_one_b(2, 2), std::vector<int>{0, 0});
  EXPECT_EQ(merged.actions, (std::vector<std::vector<Action>>{{{F, 0, 0},
                                                               {F, 0, 1},
                                                               {F, 1, 0},
                                                               {B, 1, 0},
                                                               {B, 0, 0},
                                                               {F, 1, 1},
                                                               {B, 1, 1},
                                                               {B, 0, 1}}}));
}

TEST(OnRanks, RefusesNumbersThatDoNotFit) {
  const auto refuse_ranks = [](const std::vector<int>& ranks, const char* part) {
    test::expect_error(Code::kSchedule, {part}, [&] { on_ranks(gpipe(3, 2), ranks); });
  };
  refuse_ranks({0, 1}, "has 3 stages, but ranks were given for 2");
  refuse_ranks({0, 2, 2}, "no stage is on rank 1");
  refuse_ranks({1, 1, 1}, "no stage is on rank 0");
  refuse_ranks({0, 1, 3}, "stage 2 cannot be on rank 3");
  refuse_ranks({0, -1, 1}, "stage 1 cannot be on rank -1");
}

}  // namespace
}  // namespace lockstep::test::schedule_validate_test
