#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "board_support.hpp"
#include "cli/top/top_draw.hpp"
#include "cli/top/top_sample.hpp"
#include "lockstep/units.hpp"
#include "top_support.hpp"

namespace lockstep::cli::top_test {
namespace {

using test::expect_error;
using test::rank_after;
using test::run_of;
using test::time_of;
using test::two_samples;

TEST(TopSelection, AnExactNameWinsOverABeginning) {
  const std::vector<RunReading> runs = {run_of({}, "train"), run_of({}, "train-2"),
                                        run_of({}, "other")};
  const auto chosen = [&](const std::string& selection) {
    std::vector<std::string> names;
    for (const auto& run : select_runs(runs, selection)) names.push_back(run.info.run_name);
    return names;
  };
  using Names = std::vector<std::string>;
  EXPECT_EQ(chosen("train"), (Names{"train"}));
  EXPECT_EQ(chosen("tra"), (Names{"train", "train-2"}));
  EXPECT_EQ(chosen(""), (Names{"train", "train-2", "other"}));
  EXPECT_EQ(chosen("x"), Names{});
}

TEST(TopSelection, AWrongNameGetsTheNearest) {
  const std::vector<RunReading> runs = {run_of({}, "practical5_dp-30531"), run_of({}, "abc")};
  const auto fail = [&](const std::string& name) {
    return [&runs, name] { fail_no_run(name, runs); };
  };
  expect_error(Code::kUsage, {"\"practicl5\"", "did you mean practical5_dp-30531?"},
               fail("practicl5"));
  expect_error(Code::kUsage, {"did you mean practical5_dp-30531?"}, fail("practical5_dp-30532"));
  expect_error(Code::kUsage, {"runs are: practical5_dp-30531, abc"}, fail("zzzzzz"));
  expect_error(Code::kUsage, {"no run of yours"}, [] { fail_no_run("x", {}); });
}

using TopBoards = test::BoardTest;

TEST_F(TopBoards, LiveRunsAreReadAndDamagedPagesTold) {
  const auto own = [this] { return select_runs(read_runs(), run_); };
  EXPECT_TRUE(own().empty());
  {
    const Board board = Board::create(Board::default_path(run_), 2, run_);
    board.page(0).start("train");
    board.page(0).set_step(7);
    const auto runs = own();
    ASSERT_EQ(runs.size(), 1U);
    ASSERT_EQ(runs[0].ranks.size(), 2U);
    EXPECT_EQ(runs[0].ranks[0].status.step, 7);
    EXPECT_EQ(runs[0].ranks[0].process, ProcessState::kRunning);
    EXPECT_EQ(runs[0].ranks[1].status.pid, 0);
    EXPECT_EQ(runs[0].ranks[1].process, ProcessState::kUnknown);

    board.page(1).set_phase(static_cast<Phase>(77));
    const auto damaged = own();
    EXPECT_NE(damaged.at(0).ranks[1].problem.find("phase 77"), std::string::npos);
    EXPECT_EQ(damaged[0].ranks[1].status.rank, 1);
    EXPECT_EQ(damaged[0].ranks[0].problem, "");
  }
  EXPECT_TRUE(own().empty());
}

TEST_F(TopBoards, AStoppedAndADeadRankAreTold) {
  const Board board = Board::create(Board::default_path(run_), 1, run_);
  const pid_t child = ::fork();
  if (child == 0) {
    board.page(0).start("train");
    ::raise(SIGSTOP);
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, WUNTRACED);
  ASSERT_TRUE(WIFSTOPPED(status));
  const auto state = [this] { return select_runs(read_runs(), run_).at(0).ranks.at(0).process; };
  EXPECT_EQ(state(), ProcessState::kStopped);
  ::kill(child, SIGKILL);
  ::waitpid(child, &status, 0);
  EXPECT_EQ(state(), ProcessState::kGone);
}

TEST(TopJson, HasWhatTheScreenHasAndNullForTheUnknown) {
  const auto value = top_json(two_samples([](RankReading& reading) {
    reading.status.loss = std::nan("");
    reading.status.devices[1].capacity_bytes = 0;
    reading.status.collective = {.sequence = 2, .operation = "barrier", .started_ns = time_of(20)};
    reading.status.error = FirstError{.code = Code::kRankAbsent, .message = "gone"};
  }));
  EXPECT_EQ(value.at("schema"), 1);
  const auto& run = value.at("runs").at(0);
  EXPECT_EQ(run.at("name"), "train-4711");
  EXPECT_EQ(run.at("ended"), false);
  const auto& rank = run.at("ranks").at(0);
  EXPECT_EQ(rank.at("state"), "training");
  EXPECT_EQ(rank.at("steps_per_s"), 10);
  EXPECT_EQ(rank.at("loss"), "nan");
  EXPECT_EQ(rank.at("communicating"), nullptr);
  EXPECT_EQ(rank.at("collective").at("running"), true);
  EXPECT_EQ(rank.at("collective").at("bucket"), nullptr);
  EXPECT_EQ(rank.at("error").at("code"), "LS0021");
  EXPECT_EQ(rank.at("error").at("blamed_rank"), nullptr);
  EXPECT_EQ(rank.at("devices").at(0).at("live_bytes"), 36_MiB);
  EXPECT_EQ(rank.at("devices").at(0).at("busy"), 0.8);
  EXPECT_EQ(rank.at("devices").at(1).at("capacity_bytes"), nullptr);
}

TEST(TopJson, ALossBeforeTheFirstStepIsUnknown) {
  TopRates rates;
  RankReading fresh = rank_after(0);
  fresh.status.loss = std::nan("");
  const auto value = top_json(rates.update({run_of({fresh})}, time_of(0)));
  EXPECT_EQ(value.at("runs").at(0).at("ranks").at(0).at("loss"), nullptr);
}

}  // namespace
}  // namespace lockstep::cli::top_test
