// What `lockstep run` promises when things go wrong: faults.md, items 1 to 5, 7 and 8.

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "launch_support.hpp"

namespace lockstep {
namespace {

using test::eventually;
using test::JobResult;
using test::LaunchTest;
using test::Texts;

class LaunchFailure : public LaunchTest {
 protected:
  // Three ranks: rank 1 does `action`, the others sleep.
  JobResult rank_1_does(const std::string& action, const Texts& flags = {}) {
    Texts words = {"-n", "3"};
    words.insert(words.end(), flags.begin(), flags.end());
    words.insert(words.end(), {worker(), "1:" + action, "sleep:100"});
    return run(words);
  }

  // The block: after the start line, at most 15 lines, with a code and a remedy.
  static void expect_block(const JobResult& result, const Texts& fragments) {
    const Texts lines = test::split_lines(result.errors);
    EXPECT_LE(lines.size(), 16U) << "one start line, and a block of at most 15\n" << result.errors;
    EXPECT_NE(result.errors.find("\nhelp: "), std::string::npos) << result.errors;
    for (const auto& fragment : fragments) {
      EXPECT_NE(result.errors.find(fragment), std::string::npos) << "no \"" << fragment << "\" in\n"
                                                                 << result.errors;
    }
  }

  // The board's name of the rank that is blamed, in the block's first line.
  static bool blames(const JobResult& result, int rank) {
    return result.errors.find("]: rank " + std::to_string(rank) + " ") != std::string::npos ||
           result.errors.find("]: rank " + std::to_string(rank) + ":") != std::string::npos;
  }
};

TEST_F(LaunchFailure, AnExitCodeIsKept) {
  const JobResult result = rank_1_does("exit:3");
  EXPECT_EQ(result.exit_code, 3);
  expect_block(result, {"error[LS0015]: rank 1 ended with exit code 3", "rank 1 of 3 on ",
                        "victims: ranks 0 and 2 stopped by lockstep", "logs of all ranks: "});
  EXPECT_TRUE(processes().empty());
  EXPECT_EQ(boards(), 0U);
  EXPECT_EQ(log_folders(), 1U) << "after a failure the logs stay";
}

TEST_F(LaunchFailure, ExceptionsSignalsAndCodesOfOurOwn) {
  const JobResult thrown = rank_1_does("throw:the tensor is too wide");
  EXPECT_EQ(thrown.exit_code, 1);
  expect_block(thrown,
               {"error[LS0015]: rank 1: the program threw std::runtime_error: the tensor is "
                "too wide"});
  const JobResult coded = rank_1_does("fail:rows do not fit");
  EXPECT_EQ(coded.exit_code, 2);
  expect_block(coded, {"error[LS0008]: rank 1: rows do not fit", "`lockstep explain LS0008`"});
  const JobResult segfault = rank_1_does("segfault");
  EXPECT_EQ(segfault.exit_code, 139);
  expect_block(segfault, {"rank 1 was killed by signal 11 (Segmentation fault)"});
  const JobResult aborted = rank_1_does("abort");
  EXPECT_EQ(aborted.exit_code, 134);
  expect_block(aborted, {"rank 1 was killed by signal 6 (Aborted)"});
  EXPECT_EQ(rank_1_does("kill:9").exit_code, 137);
  EXPECT_TRUE(processes().empty());
}

TEST_F(LaunchFailure, StepAndCollectiveComeFromTheBoard) {
  const JobResult result =
      run({"-n", "2", worker(), "1:step:17", "1:collective:52", "1:exit:4", "sleep:100"});
  expect_block(result, {"it was at step 17, in all_reduce #52 of 24.0 MiB (bucket 3), "});
}

TEST_F(LaunchFailure, TheCulpritsLastWordsAreQuotedAndNobodyElses) {
  const JobResult result = run(
      {"-n", "3", worker(), "2:warn:I am fine", "1:warn:disk is full", "1:exit:5", "sleep:100"});
  expect_block(result, {"note: it wrote: disk is full"});
  EXPECT_EQ(result.errors.find("I am fine"), std::string::npos) << "it is in rank2.err";
}

TEST_F(LaunchFailure, TheErrorIsLeftInTorchrunsFile) {
  const std::string path = file("error.json");
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::setenv("TORCHELASTIC_ERROR_FILE", path.c_str(), 1);
    ::dup2(::open("/dev/null", O_WRONLY), STDERR_FILENO);
    ::execl(worker().c_str(), "w", "fail:rows do not fit", nullptr);
    ::_exit(127);
  }
  ::waitpid(pid, nullptr, 0);
  const auto json = nlohmann::json::parse(test::read_bytes(path));
  EXPECT_EQ(json.at("message").at("message"), "rows do not fit");
  EXPECT_GT(std::stoll(json.at("message").at("extraInfo").at("timestamp").get<std::string>()), 0);
}

TEST_F(LaunchFailure, AVictimsErrorLeadsToTheStoppedRank) {
  const JobResult result =
      run({"-n", "3", worker(), "2:kill:19", "0:sleep:0.3", "0:blame:2", "sleep:100"});
  EXPECT_EQ(result.exit_code, 1) << "a rank that has not ended has no code; its victim's counts";
  EXPECT_NE(result.errors.find("error[LS0021]: rank 2 is stopped (SIGSTOP)"), std::string::npos)
      << result.errors;
  EXPECT_NE(result.errors.find("rank 0 gave up"), std::string::npos) << result.errors;
  EXPECT_TRUE(processes().empty()) << "also the stopped one";
}

TEST_F(LaunchFailure, AKilledRankInAnAllReduceIsNamedEveryTime) {
  for (int turn = 0; turn < 6; ++turn) {
    const std::string list = file("pids" + std::to_string(turn));
    const pid_t job = start({"-n", "3", "--timeout", "10", worker(), "all-reduce:" + list});
    const auto pids = pids_in(list, 3);
    std::this_thread::sleep_for(std::chrono::milliseconds(20 + 7 * turn));
    const pid_t victim = pids[static_cast<size_t>(turn) % 3];
    // Which rank it is stands in its environment.
    const std::string environment =
        test::read_bytes("/proc/" + std::to_string(victim) + "/environ");
    const size_t at = environment.find(std::string("\0RANK=", 6));
    const int rank = environment[at + 6] - '0';
    const int64_t begun = monotonic_ns();
    ::kill(victim, SIGKILL);
    const JobResult result = finish(job);
    RecordProperty("exit_ms", static_cast<int>((monotonic_ns() - begun) / 1'000'000));
    EXPECT_EQ(result.exit_code, 137) << result.errors;
    EXPECT_TRUE(blames(result, rank)) << "rank " << rank << " was killed\n" << result.errors;
    EXPECT_LT(result.seconds, 5) << "long before the deadline";
  }
  EXPECT_TRUE(processes().empty());
}

TEST_F(LaunchFailure, AStoppedRankIsNamedAtTheDeadline) {
  const std::string list = file("pids");
  const pid_t job = start({"-n", "2", "--timeout", "1", worker(), "all-reduce:" + list});
  const auto pids = pids_in(list, 2);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  ::kill(pids[0], SIGSTOP);
  const JobResult result = finish(job);
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_NE(result.errors.find("is stopped (SIGSTOP) and did not come"), std::string::npos)
      << result.errors;
  EXPECT_NE(result.errors.find("in all_reduce #"), std::string::npos) << result.errors;
  EXPECT_LT(result.seconds, 8);
  EXPECT_TRUE(processes().empty());
}

TEST_F(LaunchFailure, RanksThatIgnoreSigtermAreKilledAfterTheGracePeriod) {
  const JobResult result =
      run({"-n", "3", "--grace", "0.5", worker(), "ignore-term", "1:exit:3", "sleep:100"});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_GE(result.seconds, 0.5);
  EXPECT_LT(result.seconds, 4);
  EXPECT_TRUE(processes().empty());
}

TEST_F(LaunchFailure, NoDescendantOutlivesAFailure) {
  const std::string list = file("pids");
  const JobResult result =
      run({"-n", "2", worker(), "1:descendants:" + list, "1:kill:9", "sleep:100"});
  EXPECT_EQ(result.exit_code, 137);
  EXPECT_EQ(pids_in(list, 2).size(), 2U);
  EXPECT_TRUE(processes().empty()) << "neither in the rank's group nor in a session of its own";
}

TEST_F(LaunchFailure, NoDescendantOutlivesASuccess) {
  const std::string list = file("pids");
  EXPECT_EQ(run({"-n", "2", worker(), "1:descendants:" + list}).exit_code, 0);
  EXPECT_EQ(pids_in(list, 2).size(), 2U);
  expect_nothing_left();
}

TEST_F(LaunchFailure, AKilledLauncherTakesEverythingWithIt) {
  const std::string list = file("pids");
  const pid_t job = start({"-n", "2", worker(), "ignore-term", "1:descendants:" + list,
                           "pid:" + file("ready"), "loop"});
  pids_in(list, 2);
  pids_in(file("ready"), 2);
  EXPECT_EQ(processes().size(), 6U) << "launcher, keeper, two ranks, two descendants";
  ::kill(job, SIGKILL);
  ::waitpid(job, nullptr, 0);
  EXPECT_TRUE(eventually([&] { return processes().empty(); }));
  EXPECT_TRUE(eventually([&] { return boards() == 0 && log_folders() == 0; }));
}

TEST_F(LaunchFailure, AKilledKeeperTakesEverythingWithIt) {
  const std::string list = file("pids");
  const pid_t job =
      start({"-n", "2", worker(), "1:descendants:" + list, "pid:" + file("ready"), "loop"});
  pids_in(list, 2);
  const auto ranks = pids_in(file("ready"), 2);
  std::ifstream status("/proc/" + std::to_string(ranks[0]) + "/stat");
  pid_t keeper = 0;
  std::string skipped;
  status >> skipped >> skipped >> skipped >> keeper;
  ASSERT_NE(keeper, job);
  ::kill(keeper, SIGKILL);
  const JobResult result = finish(job);
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_NE(result.errors.find("keeper"), std::string::npos) << result.errors;
  EXPECT_TRUE(processes().empty());
}

TEST_F(LaunchFailure, CtrlCStopsALoopAndGivesItsSignalsCode) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) {
    const std::string list = file("pids" + std::to_string(signal));
    const pid_t job = start({"-n", "2", worker(), "pid:" + list, "loop"});
    pids_in(list, 2);
    ::kill(job, signal);
    const JobResult result = finish(job);
    EXPECT_EQ(result.exit_code, 128 + signal) << result.errors;
    EXPECT_LT(result.seconds, 4);
    expect_nothing_left();
  }
}

TEST_F(LaunchFailure, CtrlCTwiceIsNow) {
  const pid_t job =
      start({"-n", "2", "--grace", "60", worker(), "ignore-term", "pid:" + file("pids"), "loop"});
  pids_in(file("pids"), 2);
  ::kill(job, SIGTERM);
  EXPECT_TRUE(eventually([&] {
    return test::read_bytes(file("job.err")).find("once more kills") != std::string::npos;
  }));
  EXPECT_FALSE(processes().empty()) << "the grace period is a minute";
  ::kill(job, SIGTERM);
  const JobResult result = finish(job);
  EXPECT_EQ(result.exit_code, 143);
  EXPECT_LT(result.seconds, 10);
  expect_nothing_left();
}

TEST_F(LaunchFailure, ASignalThatRanksAnswerWithExitCode75GivesThatCode) {
  const pid_t job = start({"-n", "2", worker(), "graceful:75", "pid:" + file("pids"), "loop"});
  pids_in(file("pids"), 2);
  ::kill(job, SIGTERM);
  EXPECT_EQ(finish(job).exit_code, 75);
  expect_nothing_left();
}

TEST_F(LaunchFailure, PreemptedRanksAreNotStoppedByEachOther) {
  const JobResult result = run({"-n", "2", worker(), "1:exit:75", "sleep:0.4", "exit:75"});
  EXPECT_EQ(result.exit_code, 75);
  EXPECT_EQ(result.errors.find("error["), std::string::npos) << result.errors;
  expect_nothing_left();
}

TEST_F(LaunchFailure, RestartsStartAllRanksAgain) {
  const JobResult again =
      run({"-n", "2", "--max-restarts", "2", "--ranks", "all", worker(), "env:LOCKSTEP_SESSION",
           "env:TORCHELASTIC_RESTART_COUNT", "1:exit-first-round:3", "0:sleep:0.2"});
  EXPECT_EQ(again.exit_code, 0) << again.errors;
  EXPECT_NE(again.errors.find("rank 1 ended with exit code 3; restart 1 of 2"), std::string::npos)
      << again.errors;
  const test::Texts lines = test::split_lines(again.output);
  std::map<std::string, int> seen;
  for (const auto& line : lines) ++seen[line.substr(line.find("] ") + 2)];
  EXPECT_EQ(seen["TORCHELASTIC_RESTART_COUNT=0"], 2) << again.output;
  EXPECT_EQ(seen["TORCHELASTIC_RESTART_COUNT=1"], 2) << again.output;
  EXPECT_EQ(seen.size(), 4U) << "two counts, and one session per round\n" << again.output;

  const JobResult in_vain =
      run({"-n", "2", "--max-restarts", "1", worker(), "1:exit:6", "sleep:9"});
  EXPECT_EQ(in_vain.exit_code, 6);
  EXPECT_NE(in_vain.errors.find("restart 1 of 1"), std::string::npos);
  EXPECT_NE(in_vain.errors.find("error[LS0015]: rank 1 ended"), std::string::npos);
  EXPECT_TRUE(processes().empty());
}

}  // namespace
}  // namespace lockstep
