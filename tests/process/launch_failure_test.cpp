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
                        "victims: ranks 0 and 2 stopped by lockstep",
                        "logs of all ranks, and crash.json: "});
  EXPECT_TRUE(processes().empty());
  EXPECT_EQ(boards(), 0U);
  EXPECT_EQ(log_folders(), 1U) << "after a failure the logs stay";
}

TEST_F(LaunchFailure, TheBundleHoldsNoSecretsAndIsTheUsersOwn) {
  const JobResult result =
      run({"--log-dir", file("logs"), worker(), "exit:3"}, {{"SLURM_JWT", "s3cret"},
                                                            {"NCCL_API_KEY", "s3cret"},
                                                            {"TORCH_PASSWORD", "s3cret"},
                                                            {"SLURM_JOB_NAME", "t5x"}});
  EXPECT_EQ(result.exit_code, 3) << result.errors;
  std::string bundle;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(file("logs"))) {
    if (entry.path().filename() == "crash.json") bundle = entry.path();
  }
  const std::string text = test::read_bytes(bundle);
  EXPECT_NE(text.find("t5x"), std::string::npos) << text;
  EXPECT_EQ(text.find("s3cret"), std::string::npos) << text;
  EXPECT_NE(text.find("\"kernel\": \"Linux "), std::string::npos) << text;
  EXPECT_EQ(std::filesystem::status(bundle).permissions(),
            std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
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

// The timeout is longer than this test may take.
TEST_F(LaunchFailure, AKilledRankInAnAllReduceIsNamedEveryTime) {
  for (int turn = 0; turn < 6; ++turn) {
    const std::string list = file("pids" + std::to_string(turn));
    const pid_t job = start({"-n", "3", "--timeout", "300", worker(), "all-reduce:" + list});
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
  }
  EXPECT_TRUE(processes().empty());
}

TEST_F(LaunchFailure, AStoppedRankIsNamedAtTheDeadline) {
  const std::string list = file("pids");
  const pid_t job = start({"-n", "2", "--timeout", "2", worker(), "all-reduce:" + list});
  const auto pids = pids_in(list, 2);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  ::kill(pids[0], SIGSTOP);
  const JobResult result = finish(job);
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_NE(result.errors.find("is stopped (SIGSTOP) and did not come"), std::string::npos)
      << result.errors;
  EXPECT_NE(result.errors.find("in all_reduce #"), std::string::npos) << result.errors;
  EXPECT_TRUE(processes().empty());
}

// Whom the block names must not depend on the backend, on the number of ranks, or on which rank was
// the first to notice.
class LaunchBlame : public LaunchFailure {
 protected:
  JobResult run_over(const std::string& backend, int ranks, const Texts& words,
                     const std::string& timeout = "2") {
    Texts all = {"-n", std::to_string(ranks), "--timeout", timeout, "--backend", backend, worker()};
    all.insert(all.end(), words.begin(), words.end());
    return run(all, {{"LOCKSTEP_MODULE_PATH", std::string(LOCKSTEP_BIN) + "/../lib/lockstep"}});
  }

  template <class Check>
  void everywhere(Check&& check) {
    for (const std::string backend : {"shm", "gloo"}) {
      for (const int ranks : {2, 3, 5}) {
        SCOPED_TRACE(backend + ", " + std::to_string(ranks) + " ranks");
        check(backend, ranks);
      }
    }
    EXPECT_TRUE(processes().empty());
  }

  static std::string of(int rank, const std::string& action) {
    return std::to_string(rank) + ":" + action;
  }
};

TEST_F(LaunchBlame, ARankThatNeverComesToTheRendezvousIsNamed) {
  for (const std::string backend : {"shm", "gloo"}) {
    // Over Gloo the worker's rank 0 serves the store itself.
    for (const int absent : backend == "shm" ? std::vector{0, 1, 2} : std::vector{1, 2}) {
      for (const std::string away : {"sleep:100", "kill:19"}) {
        SCOPED_TRACE(backend + ", " + of(absent, away));
        const JobResult result = run_over(backend, 3, {of(absent, away), "rendezvous", "barrier"});
        EXPECT_EQ(result.exit_code, 1);
        EXPECT_TRUE(blames(result, absent)) << result.errors;
        expect_block(result,
                     {away == "kill:19" ? "is stopped (SIGSTOP)" : "did not come to the rendezvous",
                      "error[LS0021]: rank " + std::to_string(absent), "victims: rank"});
      }
    }
  }
  EXPECT_TRUE(processes().empty());
}

// The timeout is longer than this test may take.
TEST_F(LaunchBlame, ARankThatEndsWellBeforeTheRendezvousEndsTheJobAtOnce) {
  everywhere([&](const std::string& backend, int ranks) {
    const int gone = ranks - 1;
    // The others come to the rendezvous after it has ended, or before.
    for (const std::string when : {"sleep:0", "sleep:0.2"}) {
      const JobResult result = run_over(
          backend, ranks, {of(gone, when), of(gone, "exit:0"), "rendezvous", "barrier"}, "300");
      EXPECT_EQ(result.exit_code, 1);
      expect_block(result, {"error[LS0022]: rank " + std::to_string(gone) +
                                " ended with exit code 0 and never came to the rendezvous",
                            " stopped by lockstep"});
      EXPECT_EQ(result.errors.find("gave up"), std::string::npos) << result.errors;
    }
  });
}

TEST_F(LaunchBlame, AReceiveAgainstAnAllReduceNamesBothSides) {
  everywhere([&](const std::string& backend, int ranks) {
    const int odd = ranks - 1;
    const JobResult result =
        run_over(backend, ranks, {"rendezvous", "barrier", of(odd, "recv:0"), "reduce"}, "4");
    EXPECT_EQ(result.exit_code, 1);
    expect_block(result, {"error[LS0020]: ", "made different calls and wait for each other: ",
                          "rank " + std::to_string(odd) +
                              " called recv #1: 4194304 x F32, tag 0, "
                              "from rank 0",
                          " called all_reduce #2: 4194304 x F32, sum"});
    EXPECT_EQ(blames(result, odd), ranks > 2) << "between two nobody can tell\n" << result.errors;
    EXPECT_EQ(result.errors.find("victims"),
              ranks > 2 ? result.errors.rfind("victims") : std::string::npos);
  });
}

TEST_F(LaunchBlame, ASendAgainstABroadcastNamesBothSides) {
  everywhere([&](const std::string& backend, int ranks) {
    const JobResult result =
        run_over(backend, ranks, {"rendezvous", "barrier", "0:send:1", "broadcast:0"}, "4");
    expect_block(result, {"error[LS0020]: ", "rank 0 called send #1", ", to rank 1",
                          " called broadcast #2: 4194304 x F32, root 0"});
    EXPECT_EQ(blames(result, 0), ranks > 2) << result.errors;
  });
}

TEST_F(LaunchBlame, ARankThatLeavesBetweenTwoCollectivesIsNamed) {
  everywhere([&](const std::string& backend, int ranks) {
    const int gone = ranks - 1;
    Texts returns = {"rendezvous", "barrier"};
    for (int rank = 0; rank < gone; ++rank) returns.push_back(of(rank, "barrier"));
    for (const Texts& words :
         {returns, Texts{"rendezvous", "barrier", of(gone, "exit:0"), "barrier"}}) {
      const JobResult result = run_over(backend, ranks, words, "300");
      EXPECT_EQ(result.exit_code, 1);
      expect_block(result, {"error[LS0022]: rank " + std::to_string(gone) +
                            " ended with exit code 0 while others needed it"});
    }
  });
}

TEST_F(LaunchBlame, AnExceptionBeforeTheFirstCollectiveIsTheCause) {
  everywhere([&](const std::string& backend, int ranks) {
    const int odd = ranks - 1;
    const std::string cause =
        "rank " + std::to_string(odd) + ": the program threw std::runtime_error: no such data file";
    for (const Texts& words :
         {Texts{of(odd, "throw:no such data file"), "rendezvous", "barrier"},
          Texts{"rendezvous", of(odd, "throw:no such data file"), "barrier"}}) {
      expect_block(run_over(backend, ranks, words, "300"), {cause});
    }
  });
}

// The programs of the course, as in practice.
TEST_F(LaunchBlame, ATrainingThatARankNeverJoinsNamesIt) {
  const std::string program = std::string(LOCKSTEP_BIN) + "/practical6_ddp";
  const auto start_all_but = [&](const std::string& rank, const std::string& instead,
                                 const std::string& backend, const std::string& timeout) {
    return run({"-n", "3", "--timeout", timeout, "--backend", backend, "bash", "-c",
                "[ $RANK = " + rank + " ] && " + instead + "; exec " + program + " --steps 2 # " +
                    worker()});
  };
  for (const std::string backend : {"shm", "gloo"}) {
    for (const std::string rank : {"0", "2"}) {
      SCOPED_TRACE(backend + ", rank " + rank);
      const JobResult asleep = start_all_but(rank, "exec sleep 100", backend, "5");
      expect_block(asleep,
                   {"error[LS0021]: rank " + rank + " did not come to the rendezvous", " gave up"});
      const JobResult left = start_all_but(rank, "exit 0", backend, "300");
      expect_block(left, {"error[LS0022]: rank " + rank +
                          " ended with exit code 0 and never came to the rendezvous"});
    }
  }
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
  EXPECT_EQ(processes().size(), 7U) << "launcher, guard, supervisor, two ranks, two descendants";
  ::kill(job, SIGKILL);
  ::waitpid(job, nullptr, 0);
  EXPECT_TRUE(eventually([&] { return processes().empty(); }));
  EXPECT_TRUE(eventually([&] { return boards() == 0 && log_folders() == 0; }));
}

TEST_F(LaunchFailure, AKilledSupervisorTakesEverythingWithIt) {
  const std::string list = file("pids");
  const pid_t job =
      start({"-n", "2", worker(), "1:descendants:" + list, "pid:" + file("ready"), "loop"});
  pids_in(list, 2);
  const pid_t supervisor = parent_of(pids_in(file("ready"), 2)[0]);
  ASSERT_NE(supervisor, job);
  ::kill(supervisor, SIGKILL);
  const JobResult result = finish(job);
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_NE(result.errors.find("supervisor"), std::string::npos) << result.errors;
  EXPECT_TRUE(processes().empty());
}

TEST_F(LaunchFailure, AKilledGuardIsNotMissed) {
  const std::string list = file("pids");
  const pid_t job =
      start({"-n", "2", worker(), "1:descendants:" + list, "pid:" + file("ready"), "loop"});
  pids_in(list, 2);
  const pid_t guard = parent_of(parent_of(pids_in(file("ready"), 2)[0]));
  ASSERT_EQ(parent_of(guard), job);
  ::kill(guard, SIGKILL);
  ::kill(job, SIGTERM);
  EXPECT_EQ(finish(job).exit_code, 143);
  expect_nothing_left();
}

// `pkill -9 lockstep`, or the system when memory is short.
TEST_F(LaunchFailure, KilledLauncherAndSupervisorTakeEverythingWithThem) {
  const std::string list = file("pids");
  const pid_t job =
      start({"-n", "2", worker(), "1:descendants:" + list, "pid:" + file("ready"), "loop"});
  pids_in(list, 2);
  const pid_t supervisor = parent_of(pids_in(file("ready"), 2)[0]);
  ::kill(supervisor, SIGSTOP);  // so that it cannot act when the launcher dies first
  ::kill(job, SIGKILL);
  ::waitpid(job, nullptr, 0);
  ::kill(supervisor, SIGKILL);
  EXPECT_TRUE(eventually([&] { return processes().empty(); }));
  EXPECT_TRUE(eventually([&] { return boards() == 0 && log_folders() == 0; }));
  for (const pid_t pid : processes()) ::kill(pid, SIGKILL);
}

TEST_F(LaunchFailure, AStoppedSupervisorDoesNotKeepTheLauncherFromEnding) {
  for (const bool guard_too : {false, true}) {
    const std::string list = file(guard_too ? "both" : "supervisor");
    const pid_t job = start({"-n", "2", worker(), "pid:" + list, "loop"});
    const pid_t supervisor = parent_of(pids_in(list, 2)[0]);
    ASSERT_NE(supervisor, job);
    ::kill(supervisor, SIGSTOP);
    if (guard_too) ::kill(parent_of(supervisor), SIGSTOP);
    ::kill(job, SIGINT);
    EXPECT_EQ(finish(job).exit_code, 130);
    expect_nothing_left();
  }
}

// `scontrol suspend`, Ctrl-Z: the whole tree stops, rank 0 first, while the others wait for it, and
// rank 0 is the last to run again. Only the time between counts.
TEST_F(LaunchFailure, AJobThatWasStoppedForLongerThanItsTimeoutGoesOn) {
  const std::string program = std::string(LOCKSTEP_BIN) + "/practical6_ddp";
  for (const std::string backend : {"shm", "gloo"}) {
    const pid_t job =
        start({"-n", "3", "--timeout", "4", "--backend", backend, program, "--steps", "1000000"},
              {}, "/dev/null", backend);
    const std::string output = file(backend + ".out");
    const auto trains = [&] {
      return test::read_bytes(output).find("step 1/") != std::string::npos;
    };
    ASSERT_TRUE(eventually(trains) || eventually(trains) || eventually(trains))
        << test::read_bytes(file(backend + ".err"));
    std::vector<pid_t> tree = descendants_of(job);
    const auto rank_0 = std::find_if(tree.begin(), tree.end(), [](pid_t pid) {
      const std::string variables = test::read_bytes("/proc/" + std::to_string(pid) + "/environ");
      return variables.find(std::string("\0RANK=0", 7)) != std::string::npos;
    });
    ASSERT_NE(rank_0, tree.end());
    std::iter_swap(rank_0, tree.begin());
    tree.push_back(job);
    ::kill(tree.front(), SIGSTOP);
    std::this_thread::sleep_for(std::chrono::milliseconds(500));  // the others come to wait
    for (const pid_t pid : tree) ::kill(pid, SIGSTOP);
    std::this_thread::sleep_for(std::chrono::seconds(6));
    for (size_t i = tree.size(); i-- > 1;) ::kill(tree[i], SIGCONT);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));  // the others look around
    ::kill(tree.front(), SIGCONT);
    const size_t printed = test::read_bytes(output).size();
    EXPECT_TRUE(eventually([&] {
      return test::read_bytes(output).size() > printed ||
             test::read_bytes(file(backend + ".err")).find("error[") != std::string::npos;
    })) << "it neither trains on nor fails";
    ::kill(job, SIGTERM);
    const JobResult result = finish(job, backend);
    EXPECT_EQ(result.exit_code, 143) << backend << ": nobody ran, nobody is to blame\n"
                                     << result.errors;
    EXPECT_EQ(result.errors.find("error["), std::string::npos) << result.errors;
  }
}

// SLURM's --signal=USR1@60: ranks save a checkpoint and train on.
TEST_F(LaunchFailure, ASignalThatDoesNotStopIsPassedOnAndTheJobGoesOn) {
  const std::string list = file("pids");
  const pid_t job = start({"-n", "2", "--ranks", "all", worker(), "catch:10", "pid:" + list,
                           "await:10", "print:saved"});
  pids_in(list, 2);
  ::kill(job, SIGUSR1);
  const JobResult result = finish(job);
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_NE(result.output.find("[rank 0] saved"), std::string::npos) << result.output;
  EXPECT_NE(result.output.find("[rank 1] saved"), std::string::npos) << result.output;
  EXPECT_NE(result.errors.find("SIGUSR1 was passed on to the ranks"), std::string::npos)
      << result.errors;
  expect_nothing_left();
}

TEST_F(LaunchFailure, SignalsToHandleHasAnEffect) {
  const std::string list = file("pids");
  const pid_t passing = start({"-n", "1", "--signals-to-handle", "SIGTERM,SIGWINCH", worker(),
                               "catch:28", "pid:" + list, "await:28", "exit:7"});
  pids_in(list, 1);
  ::kill(passing, SIGWINCH);
  EXPECT_EQ(finish(passing).exit_code, 7) << "passed on";
  const std::string again = file("again");
  const pid_t plain =
      start({"-n", "1", "--signals-to-handle", "SIGTERM", worker(), "pid:" + again, "loop"});
  pids_in(again, 1);
  ::kill(plain, SIGUSR1);
  EXPECT_EQ(finish(plain).exit_code, 128 + SIGUSR1) << "not in the list: as for any program";
  EXPECT_TRUE(eventually([&] { return processes().empty(); }));
}

TEST_F(LaunchFailure, RanksThatAllLoopOutsideOfCollectivesAreNamed) {
  const JobResult result =
      run({"-n", "2", "--step-timeout", "2", worker(), "0:step:7", "1:step:6", "loop"});
  EXPECT_EQ(result.exit_code, 1) << result.errors;
  for (const char* part : {"error[LS0021]: ranks 0 and 1 made no step and no collective for 2.00 s",
                           "rank 1 of 2", "it was at step 6", "rank 0 was at step 7"}) {
    EXPECT_NE(result.errors.find(part), std::string::npos) << part << "\nin\n" << result.errors;
  }
  EXPECT_TRUE(processes().empty());
}

TEST_F(LaunchFailure, ASignalThatComesBeforeTheRanksKillsNobody) {
  const pid_t job = start({"--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint",
                           "127.0.0.1:" + std::to_string(20000 + ::getpid() % 10000), "--rdzv-conf",
                           "join_timeout=2", worker()},
                          {{"LOCKSTEP_TOKEN", std::string(64, 'a')}});
  const std::string signals = "/proc/" + std::to_string(job) + "/status";
  EXPECT_TRUE(eventually([&] {  // blocked: SIGUSR1 is bit 9
    const std::string text = test::read_bytes(signals);
    const size_t at = text.find("SigBlk:");
    return at != std::string::npos && (std::stoull(text.substr(at + 8, 16), nullptr, 16) & 0x200);
  }));
  ::kill(job, SIGUSR1);
  const JobResult result = finish(job);
  EXPECT_EQ(result.exit_code, 2) << result.errors;
  EXPECT_NE(result.errors.find("LS0019"), std::string::npos) << result.errors;
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

TEST_F(LaunchFailure, RanksHaveTimeToSaveWhenTheLauncherIsAskedToStop) {
  const std::string list = file("pids");
  for (const auto& [signal, grace, flags] : {std::tuple{SIGTERM, " 25 s;", test::Texts{}},
                                             {SIGINT, " 5 s;", {}},
                                             {SIGTERM, " 7.5 s;", {"--grace", "7.5"}}}) {
    std::filesystem::remove(list);
    test::Texts arguments = flags;
    for (const auto& each : {std::string("-n"), std::string("1"), worker(),
                             std::string("pid:") + list, std::string("loop")}) {
      arguments.push_back(each);
    }
    const pid_t job = start(arguments);
    pids_in(list, 1);
    ::kill(job, signal);
    const JobResult result = finish(job);
    EXPECT_NE(result.errors.find(std::string("stopping all ranks, which have") + grace),
              std::string::npos)
        << result.errors;
  }
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

TEST_F(LaunchFailure, ErrorsThatCannotChangeAreNotRetried) {
  for (const auto& [action, code] :
       {std::pair{"1:fail:rows do not fit", 2}, {"1:exit:2", 2}, {"1:exit:127", 127}}) {
    const JobResult result = run({"-n", "2", "--max-restarts", "3", worker(), action, "sleep:100"});
    EXPECT_EQ(result.exit_code, code) << result.errors;
    EXPECT_EQ(result.errors.find("restart 1 of 3"), std::string::npos) << result.errors;
    EXPECT_NE(result.errors.find("no restart: "), std::string::npos) << result.errors;
  }
}

TEST_F(LaunchFailure, RestartsStartAllRanksAgain) {
  const JobResult again =
      run({"-n", "2", "--max-restarts", "2", "--ranks", "all", worker(), "env:LOCKSTEP_SESSION",
           "env:TORCHELASTIC_RESTART_COUNT", "1:exit-first-attempt:3", "0:sleep:0.2"});
  EXPECT_EQ(again.exit_code, 0) << again.errors;
  EXPECT_NE(again.errors.find("rank 1 ended with exit code 3; restart 1 of 2; logs in " +
                              file("tmp") + "/lockstep-"),
            std::string::npos)
      << again.errors;
  const test::Texts lines = test::split_lines(again.output);
  std::map<std::string, int> seen;
  for (const auto& line : lines) ++seen[line.substr(line.find("] ") + 2)];
  EXPECT_EQ(seen["TORCHELASTIC_RESTART_COUNT=0"], 2) << again.output;
  EXPECT_EQ(seen["TORCHELASTIC_RESTART_COUNT=1"], 2) << again.output;
  EXPECT_EQ(seen.size(), 4U) << "two counts, and one session per attempt\n" << again.output;

  const JobResult in_vain =
      run({"-n", "2", "--max-restarts", "1", worker(), "1:exit:6", "sleep:9"});
  EXPECT_EQ(in_vain.exit_code, 6);
  EXPECT_NE(in_vain.errors.find("restart 1 of 1"), std::string::npos);
  EXPECT_NE(in_vain.errors.find("error[LS0015]: rank 1 ended"), std::string::npos);
  EXPECT_TRUE(processes().empty());
}

}  // namespace
}  // namespace lockstep
