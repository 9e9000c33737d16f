#include <algorithm>
#include <cmath>
#include <sstream>

#include "lockstep/schedule.hpp"
#include "support.hpp"

namespace lockstep::test::schedule_grid_test {
namespace {

constexpr ActionKind F = ActionKind::kForward;
constexpr ActionKind B = ActionKind::kBackward;

std::string grid(const Schedule& schedule, const StageTimes& each,
                 const GridOptions& options = {}) {
  const std::vector<StageTimes> times(schedule.rank_of_stage.size(), each);
  return format_grid(schedule, simulate(schedule, times), options);
}

size_t longest_line(const std::string& text) {
  std::istringstream in(text);
  size_t longest = 0;
  for (std::string line; std::getline(in, line);) longest = std::max(longest, line.size());
  return longest;
}

TEST(FormatGrid, ShowsRanksAndTime) {
  EXPECT_EQ(grid(one_f_one_b(2, 3), {}),
            "rank 0 | F0 F1 .. .. B0--- F2 B1--- .. B2---\n"
            "rank 1 | .. F0 B0--- F1 B1--- F2 B2--- .. ..\n"
            "F forward, B backward, .. wait; F0 is the forward of micro-batch 0; a column is 1, "
            "bubble 25.0 %\n");
}

TEST(FormatGrid, ShowsSplitBackwardsAndNames) {
  EXPECT_EQ(grid(zero_bubble(2, 2), {}, {.rank_names = {"cpu:0", "cuda:0#1"}, .width = 0}),
            "cpu:0    | F0 F1 .. I0 W0 I1 W1\n"
            "cuda:0#1 | .. F0 I0 F1 I1 W0 W1\n"
            "F forward, I input gradient, W weight gradient, .. wait; F0 is the forward of "
            "micro-batch 0; a column is 1, bubble 14.3 %\n");
}

TEST(FormatGrid, NamesStagesWhereARankHasSeveral) {
  EXPECT_EQ(grid(interleaved(2, 1, 2), {1, 0.5, 0.5}),
            "rank 0 | F0.0 .... F2.0 .... .... B2.0 .... B0.0\n"
            "rank 1 | .... F1.0 .... F3.0 B3.0 .... B1.0 ....\n"
            "F forward, B backward, .... wait; F1.0 is the forward of micro-batch 0 in stage 1; "
            "a column is 1, bubble 50.0 %\n");
}

TEST(FormatGrid, PointsOutAnActionWithoutMovingOthers) {
  const std::string text = grid(one_f_one_b(2, 3), {}, {.marked = Action{B, 1, 1}});
  EXPECT_NE(text.find("rank 0 | F0 F1 .. .. B0--- F2 B1--- .. B2---\n"), std::string::npos);
  EXPECT_NE(text.find("rank 1 | .. F0 B0--- F1<B1>-- F2 B2--- .. ..  <-- here\n"),
            std::string::npos);
  EXPECT_NE(grid(gpipe(1, 1), {}, {.marked = Action{F, 0, 0}}).find("|<F0>B0---  <-- here\n"),
            std::string::npos);
  EXPECT_NE(
      grid(gpipe(1, 1), {1, 0.5, 0.5}, {.marked = Action{B, 0, 0}}).find("| F0<B0>  <-- here\n"),
      std::string::npos);
}

TEST(FormatGrid, CutsWhatIsTooWide) {
  const Schedule schedule = gpipe(2, 100);
  const std::string text = grid(schedule, {});
  EXPECT_NE(text.find("rank 0 | F0  F1  F2 "), std::string::npos);
  EXPECT_NE(text.find("columns 0 to 26 of 303; the others are left out\n"), std::string::npos);
  EXPECT_LE(longest_line(text), 120U);
  EXPECT_LE(longest_line(grid(schedule, {}, {.width = 100})), 100U);
  const std::string whole = grid(schedule, {}, {.width = 0});
  EXPECT_EQ(whole.find("left out"), std::string::npos);
  EXPECT_NE(whole.find("B99"), std::string::npos);
  // A row too narrow for anything still shows a column.
  EXPECT_NE(grid(schedule, {}, {.width = 1}).find("columns 0 to 0 of 303"), std::string::npos);
}

TEST(FormatGrid, TheCutShowsTheMarkedAction) {
  for (const Action marked : {Action{F, 0, 0}, {F, 1, 60}, {B, 0, 50}, {B, 0, 99}}) {
    const std::string text = grid(gpipe(2, 100), {}, {.marked = marked});
    EXPECT_NE(text.find("<" + std::string(1, letter(marked.kind)) +
                        std::to_string(marked.micro_batch) + ">"),
              std::string::npos)
        << text;
    EXPECT_NE(text.find("<-- here"), std::string::npos);
  }
}

TEST(FormatGrid, MeasuredActionsAreAsWideAsTheyLast) {
  const Schedule schedule = gpipe(1, 2);
  Simulation measured;
  measured.timeline = {{{{F, 0, 0}, 0.02, 1.04},
                        {{F, 0, 1}, 1.05, 1.98},
                        {{B, 0, 0}, 4.1, 5.9},
                        {{B, 0, 1}, 5.95, 8.97}}};
  measured.makespan = 8.97;
  EXPECT_NE(
      format_grid(schedule, measured, {.tick = 1}).find("rank 0 | F0 F1 .. .. B0--- B1------\n"),
      std::string::npos);
  // A step that failed has a shorter timeline.
  measured.timeline[0].resize(3);
  EXPECT_NE(format_grid(schedule, measured, {.tick = 1}).find("| F0 F1 .. .. B0---\n"),
            std::string::npos);
  measured.timeline[0].clear();
  EXPECT_NE(format_grid(schedule, measured).find("rank 0 |\n"), std::string::npos);
}

TEST(FormatGrid, AnOutlierDoesNotStretchTheGrid) {
  const Schedule schedule = gpipe(1, 2);
  Simulation measured;
  measured.timeline = {
      {{{F, 0, 0}, 0, 1}, {{F, 0, 1}, 1, 1 + 1e-12}, {{B, 0, 0}, 2, 3}, {{B, 0, 1}, 3, 4}}};
  const std::string text = format_grid(schedule, measured);
  EXPECT_LE(longest_line(text), 120U);
  EXPECT_EQ(text.find("left out"), std::string::npos) << text;
  for (const char* cell : {"F0", "F1", "B0", "B1"}) {
    EXPECT_NE(text.find(cell), std::string::npos) << text;
  }
  // Nor does an absurdly small tick.
  EXPECT_NE(format_grid(schedule, measured, {.tick = 1e-300}).find("left out"), std::string::npos);
}

TEST(FormatGrid, ActionsWithoutTimeTakeAColumn) {
  EXPECT_NE(grid(gpipe(1, 2), {0, 0, 0}).find("rank 0 | F0 F1 B0 B1\n"), std::string::npos);
}

TEST(FormatGrid, RefusesWhatDoesNotFitTogether) {
  const Schedule schedule = gpipe(2, 2);
  const std::vector<StageTimes> times(2);
  const Simulation simulation = simulate(schedule, times);
  const auto refuse = [&](const char* part, const Simulation& each, const GridOptions& options) {
    test::expect_error(Code::kSchedule, {part}, [&] { format_grid(schedule, each, options); });
  };
  refuse("3 names for 2 ranks", simulation, {.rank_names = {"a", "b", "c"}});
  refuse("a timeline of 1 rank does", simulate(gpipe(1, 2), std::vector<StageTimes>(1)), {});
  refuse("a tick of -1", simulation, {.tick = -1});
  refuse("a tick of nan", simulation, {.tick = std::nan("")});
  Simulation backwards = simulation;
  backwards.timeline[0][0].begin = 5;
  refuse("an action lasts from 5 to 1", backwards, {});
  backwards.timeline[0][0].begin = std::nan("");
  refuse("an action lasts from nan", backwards, {});
}

}  // namespace
}  // namespace lockstep::test::schedule_grid_test
