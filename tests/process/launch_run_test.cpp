// `lockstep run` when all goes well: the contract with programs, output, logs, and refusals.

#include <gtest/gtest.h>

#include <set>

#include "launch_support.hpp"

namespace lockstep {
namespace {

using test::eventually;
using test::JobResult;
using test::LaunchTest;
using test::read_bytes;
using test::Texts;

class LaunchRun : public LaunchTest {
 protected:
  // Exit 2, a code, a remedy, and nothing started.
  void expect_refusal(const Texts& words, const std::string& code, const std::string& part) {
    const JobResult result = run(words);
    EXPECT_EQ(result.exit_code, 2) << result.errors;
    EXPECT_EQ(result.output, "");
    EXPECT_NE(result.errors.find("error[" + code + "]"), std::string::npos) << result.errors;
    EXPECT_NE(result.errors.find(part), std::string::npos) << part << "\nin\n" << result.errors;
    EXPECT_NE(result.errors.find("help: "), std::string::npos) << result.errors;
    expect_nothing_left();
  }

  std::string only_log(const std::string& folder, const std::string& name) {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
      if (entry.path().filename() == name) return read_bytes(entry.path());
    }
    return "no file " + name;
  }
};

TEST_F(LaunchRun, OneStartLineAndNothingElse) {
  const JobResult result = run({"-n", "2", worker(), "print:hello"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.output, "[rank 0] hello\n") << "rank 0 by default";
  const Texts lines = test::split_lines(result.errors);
  ASSERT_EQ(lines.size(), 1U) << result.errors;
  EXPECT_EQ(lines[0].substr(0, 9), "lockstep ");
  EXPECT_NE(lines[0].find(": 2 ranks, "), std::string::npos);
  expect_nothing_left();
  EXPECT_EQ(run({"-n", "2", "--quiet", worker()}).errors, "");
}

constexpr const char* kContract = R"(
import os, re, sys
e = os.environ
rank, n = int(e["RANK"]), int(e["WORLD_SIZE"])
assert n == 3 and int(e["LOCAL_WORLD_SIZE"]) == 3, (n, e["LOCAL_WORLD_SIZE"])
assert int(e["LOCAL_RANK"]) == int(e["ROLE_RANK"]) == rank
assert e["GROUP_RANK"] == "0" and e["GROUP_WORLD_SIZE"] == "1" and e["ROLE_WORLD_SIZE"] == "3"
assert e["ROLE_NAME"] == "default" and e["TORCHELASTIC_RUN_ID"] == "none"
assert e["MASTER_ADDR"] == "127.0.0.1" and 1024 < int(e["MASTER_PORT"]) < 65536
assert e["TORCHELASTIC_RESTART_COUNT"] == e["TORCHELASTIC_MAX_RESTARTS"] == "0"
assert e["TORCHELASTIC_USE_AGENT_STORE"] == "False"
assert os.path.isdir(os.path.dirname(e["TORCHELASTIC_ERROR_FILE"]))
assert e["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == e["NCCL_ASYNC_ERROR_HANDLING"] == "1"
assert int(e["OMP_NUM_THREADS"]) >= 1
assert os.path.exists(e["LOCKSTEP_BOARD"]) and e["LOCKSTEP_RUN"].startswith("contract-")
assert re.fullmatch("[0-9a-f]{32}", e["LOCKSTEP_SESSION"])
assert e["LOCKSTEP_TIMEOUT_S"] == "7" and e["LOCKSTEP_BACKEND"] == "gloo"
assert sys.argv[1:] == ["--flag", "a b"], sys.argv
if rank == 0:
    import socket
    with socket.create_server(("127.0.0.1", int(e["MASTER_PORT"]))):
        print("contract holds")
)";

TEST_F(LaunchRun, TheEnvironmentIsTorchruns) {
  test::write_bytes(file("contract.py"), kContract);
  const JobResult result = run({"--nproc_per_node=3", "--timeout", "7", "--backend=gloo",
                                file("contract.py"), "--flag", "a b"});
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_EQ(result.output, "[rank 0] contract holds\n");
}

TEST_F(LaunchRun, ThreadsAndCoresAreShared) {
  const std::vector<int> cores = [] {
    cpu_set_t allowed;
    ::sched_getaffinity(0, sizeof(allowed), &allowed);
    std::vector<int> list;
    for (int core = 0; core < CPU_SETSIZE; ++core) {
      if (CPU_ISSET(static_cast<size_t>(core), &allowed)) list.push_back(core);
    }
    return list;
  }();
  const JobResult alone = run({"-n", "1", worker(), "env:OMP_NUM_THREADS"});
  EXPECT_EQ(alone.output, "[rank 0] OMP_NUM_THREADS=" + std::to_string(cores.size()) + "\n");
  const JobResult each = run({"-n", "cpu", "--ranks", "all", worker(), "cores"});
  for (size_t rank = 0; rank < cores.size(); ++rank) {
    const std::string line =
        "[rank " + std::to_string(rank) + "] cores " + std::to_string(cores[rank]) + "\n";
    EXPECT_NE(each.output.find(line), std::string::npos) << each.output;
  }
  const JobResult user =
      run({"-n", "2", worker(), "env:OMP_NUM_THREADS"}, {{"OMP_NUM_THREADS", "7"}});
  EXPECT_EQ(user.output, "[rank 0] OMP_NUM_THREADS=7\n");
}

TEST_F(LaunchRun, LinesAreWholeAndPrefixedWhoeverWrites) {
  const JobResult result = run({"-n", "3", "--ranks", "all", worker(), "lines:2000"});
  std::map<std::string, int> counts;  // prefix -> lines
  for (const auto& line : test::split_lines(result.output)) {
    const std::string rank = line.substr(0, 9);
    const std::string expected =
        rank + "line " + std::to_string(counts[rank]++) + " of rank " + rank.substr(6, 1);
    ASSERT_EQ(line, expected);
  }
  for (const char* rank : {"[rank 0] ", "[rank 1] ", "[rank 2] "}) EXPECT_EQ(counts[rank], 2000);
}

TEST_F(LaunchRun, ErrorsOfAllRanksAreShownAndOutputOfRankZero) {
  const JobResult result =
      run({"-n", "2", "--quiet", worker(), "print:out", "1:warn:low memory", "sleep:0.5"});
  EXPECT_EQ(result.output, "[rank 0] out\n");
  EXPECT_EQ(result.errors, "[rank 1] low memory\n");
}

TEST_F(LaunchRun, TeeRedirectsAndFilters) {
  const Texts actions = {worker(), "print:out", "warn:err"};
  const auto shown = [&](Texts flags) {
    flags.insert(flags.begin(), {"-n", "2", "--quiet"});
    flags.insert(flags.end(), actions.begin(), actions.end());
    const JobResult result = run(flags);
    Texts lines = test::split_lines(result.output + result.errors);
    std::sort(lines.begin(), lines.end());
    return lines;
  };
  EXPECT_EQ(shown({"--ranks", "1"}), (Texts{"[rank 0] err", "[rank 1] err", "[rank 1] out"}));
  EXPECT_EQ(shown({"-r", "3"}), Texts{});
  EXPECT_EQ(shown({"-r3", "-t", "1:1"}), Texts{"[rank 1] out"});
  EXPECT_EQ(shown({"--redirects", "0:1"}), (Texts{"[rank 0] err", "[rank 1] err"}));
  EXPECT_EQ(shown({"--tee=3"}),
            (Texts{"[rank 0] err", "[rank 0] out", "[rank 1] err", "[rank 1] out"}));
  EXPECT_EQ(shown({"--local-ranks-filter", "1"}), (Texts{"[rank 1] err", "[rank 1] out"}));
}

TEST_F(LaunchRun, LogsKeepEveryByte) {
  const std::string logs = file("logs/deep");
  const JobResult result = run(
      {"-n", "2", "--log-dir", logs, worker(), "1:long:70000", "1:warn:careful", "partial:no end"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.output, "[rank 0] no end\n") << "a last line without an end is shown";
  EXPECT_EQ(only_log(logs, "rank0.out"), "no end");
  EXPECT_EQ(only_log(logs, "rank1.out"), std::string(70000, 'x') + "\nno end");
  EXPECT_EQ(only_log(logs, "rank1.err"), "careful\n");
  EXPECT_EQ(log_folders(), 0U);
}

TEST_F(LaunchRun, RankZeroReadsTheInput) {
  test::write_bytes(file("input"), "from the user\n");
  const JobResult result =
      finish(start({"-n", "2", "--ranks", "all", worker(), "echo"}, {}, file("input")));
  EXPECT_EQ(result.output, "[rank 0] from the user\n");
}

TEST_F(LaunchRun, AReaderThatGoesAwayDoesNotEndTheTraining) {
  const std::string command = std::string(LOCKSTEP_BIN) + "/lockstep run -n 2 --log-dir " +
                              file("logs") + " " + worker() + " lines:20000 print:done 2>/dev/null";
  EXPECT_EQ(std::system(("set -o pipefail; exec 2>/dev/null; " + command + " | head -1 >/dev/null")
                            .insert(0, "bash -c '")
                            .append("'")
                            .c_str()),
            0);
  const std::string log = only_log(file("logs"), "rank0.out");
  EXPECT_EQ(log.substr(log.size() - 5), "done\n");
}

TEST_F(LaunchRun, TwoJobsAtOnceStayApart) {
  const Texts words = {
      "-n",       "2", worker(), "env:MASTER_PORT", "env:LOCKSTEP_SESSION", "env:LOCKSTEP_BOARD",
      "sleep:0.5"};
  const pid_t first = start(words, {}, "/dev/null", "first");
  const pid_t second = start(words, {}, "/dev/null", "second");
  const Texts one = test::split_lines(finish(first, "first").output);
  const Texts two = test::split_lines(finish(second, "second").output);
  ASSERT_EQ(one.size(), 3U);
  ASSERT_EQ(two.size(), 3U);
  for (size_t i = 0; i < 3; ++i) EXPECT_NE(one[i], two[i]);
  expect_nothing_left();
}

TEST_F(LaunchRun, TwoJobsOfAllReducesAtOnce) {
  const auto job = [&](const std::string& name) {
    return start({"-n", "2", worker(), "all-reduce:" + file(name)}, {}, "/dev/null", name + "-job");
  };
  const pid_t first = job("a");
  const pid_t second = job("b");
  pids_in(file("a"), 2);
  pids_in(file("b"), 2);
  ::kill(first, SIGTERM);
  EXPECT_EQ(finish(first, "a-job").exit_code, 143);
  EXPECT_EQ(::waitpid(second, nullptr, WNOHANG), 0) << "the other job goes on";
  ::kill(second, SIGTERM);
  EXPECT_EQ(finish(second, "b-job").exit_code, 143);
  expect_nothing_left();
}

TEST_F(LaunchRun, FiftyQuickJobsLeaveNothing) {
  for (int job = 0; job < 50; ++job) {
    ASSERT_EQ(run({"-n", "2", "--quiet", worker(), "print:x"}).exit_code, 0);
  }
  expect_nothing_left();
}

TEST_F(LaunchRun, DryRunStartsNothingAndSaysWhy) {
  const JobResult result =
      run({"-n", "2", "--dry-run", worker(), "pid:" + file("pids")}, {{"PET_MAX_RESTARTS", "3"}});
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  for (const char* part : {"--nproc-per-node", "PET_MAX_RESTARTS", "a free port", "default"}) {
    EXPECT_NE(result.output.find(part), std::string::npos) << part << "\nin\n" << result.output;
  }
  EXPECT_FALSE(std::filesystem::exists(file("pids")));
  expect_nothing_left();
}

TEST_F(LaunchRun, AFailureStopsAllOfSeveralHosts) {
  const std::map<std::string, std::string> token = {{"LOCKSTEP_TOKEN", std::string(64, 'a')}};
  const auto node = [&](const std::string& rank, const std::string& port, const Texts& actions) {
    Texts words = {"-n",
                   "2",
                   "--nnodes",
                   "2",
                   "--rdzv-endpoint",
                   "127.0.0.1:" + port,
                   "--node-rank",
                   rank,
                   "--rdzv-conf",
                   "join_timeout=20",
                   "--ranks",
                   "all",
                   worker()};
    words.insert(words.end(), actions.begin(), actions.end());
    return start(words, token, "/dev/null", "node" + rank);
  };
  const std::string port = std::to_string(20000 + ::getpid() % 10000);
  {
    const Texts actions = {"env:RANK", "env:WORLD_SIZE", "env:GROUP_RANK"};
    const pid_t one = node("1", port, actions);
    const pid_t zero = node("0", port, actions);
    const JobResult first = finish(zero, "node0");
    const JobResult second = finish(one, "node1");
    EXPECT_EQ(first.exit_code, 0) << first.errors;
    EXPECT_EQ(second.exit_code, 0) << second.errors;
    EXPECT_NE(first.output.find("[rank 1] RANK=1"), std::string::npos) << first.output;
    EXPECT_NE(second.output.find("[rank 3] RANK=3"), std::string::npos) << second.output;
    EXPECT_NE(second.output.find("[rank 2] WORLD_SIZE=4"), std::string::npos) << second.output;
    EXPECT_NE(second.output.find("[rank 2] GROUP_RANK=1"), std::string::npos) << second.output;
  }
  const Texts actions = {"3:sleep:0.3", "3:exit:9", "sleep:100"};
  const pid_t zero = node("0", port, actions);
  const pid_t one = node("1", port, actions);
  const JobResult far = finish(zero, "node0");
  const JobResult near = finish(one, "node1");
  EXPECT_EQ(near.exit_code, 9) << near.errors;
  EXPECT_EQ(far.exit_code, 9) << far.errors;
  EXPECT_NE(near.errors.find("rank 3 ended with exit code 9"), std::string::npos) << near.errors;
  EXPECT_NE(far.errors.find("rank 3 ended with exit code 9"), std::string::npos) << far.errors;
  EXPECT_TRUE(processes().empty());
}

TEST_F(LaunchRun, LaunchersOnOneHostNeedNoNodeRank) {
  const std::map<std::string, std::string> token = {{"LOCKSTEP_TOKEN", std::string(64, 'a')}};
  const std::string port = std::to_string(20000 + ::getpid() % 10000);
  const Texts words = {
      "--nnodes", "3",   "--rdzv-endpoint", "127.0.0.1:" + port, "--rdzv-conf", "join_timeout=20",
      "--ranks",  "all", worker(),          "env:WORLD_SIZE"};
  std::vector<pid_t> launchers;
  for (const char* name : {"a", "b", "c"}) {
    launchers.push_back(start(words, token, "/dev/null", name));
  }
  std::string output;
  for (size_t i = 0; i < launchers.size(); ++i) {
    const JobResult result = finish(launchers[i], std::string(1, static_cast<char>('a' + i)));
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    output += result.output;
  }
  for (const char* line : {"[rank 0] WORLD_SIZE=3", "[rank 1] WORLD_SIZE=3", "[rank 2]"}) {
    EXPECT_NE(output.find(line), std::string::npos) << output;
  }
}

// `salloc -N 1 lockstep run` on a login node.
TEST_F(LaunchRun, AnAllocationOfAnotherHostBecomesAnSrun) {
  const std::map<std::string, std::string> salloc = {{"SLURM_JOB_ID", "42"},
                                                     {"SLURM_JOB_NODELIST", "no-such-node7"},
                                                     {"SLURM_JOB_NUM_NODES", "1"},
                                                     {"SLURM_TASKS_PER_NODE", "1"}};
  const JobResult result = run({"-n", "2", "--dry-run", worker(), "print:x"}, salloc);
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_EQ(result.output.substr(0, 14), "srun --nodes=1") << result.output;
  const JobResult alone = run({"-n", "2", "--standalone", worker(), "print:x"}, salloc);
  EXPECT_EQ(alone.exit_code, 0) << alone.errors;
  EXPECT_NE(
      alone.errors.find("42.batch has no-such-node7, but --standalone runs the ranks on this host"),
      std::string::npos)
      << alone.errors;
}

TEST_F(LaunchRun, AnAllocationOfSeveralHostsBecomesAnSrun) {
  const JobResult result =
      run({"--dry-run", worker(), "print:x"}, {{"SLURM_JOB_ID", "42"},
                                               {"SLURM_JOB_NODELIST", "n[1-2]"},
                                               {"SLURM_JOB_NUM_NODES", "2"},
                                               {"SLURM_TASKS_PER_NODE", "4(x2)"}});
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_EQ(result.output.substr(0, 14), "srun --nodes=2") << result.output;
  EXPECT_NE(result.output.find("run --nproc-per-node=4 --dry-run " + worker() + " print:x"),
            std::string::npos)
      << result.output;
}

TEST_F(LaunchRun, RefusesBadFlags) {
  expect_refusal({"--nproc-per-nod", "2", worker()}, "LS0001", "did you mean --nproc-per-node?");
  expect_refusal({"-n", "many", worker()}, "LS0001", "\"many\"");
  expect_refusal({"--nnodes", "2:1", worker()}, "LS0001", "--nnodes 1:3");
  expect_refusal({"--grace"}, "LS0001", "--grace");
  expect_refusal({"-n", "2"}, "LS0001", "needs a program");
  expect_refusal({"--ranks", "0,9", "-n", "2", worker()}, "LS0001", "rank 9");
}

TEST_F(LaunchRun, RefusesProgramsThatCannotStart) {
  expect_refusal({"-n", "2", "./no-such-program"}, "LS0026", "no program ./no-such-program");
  expect_refusal({"-n", "2", "no-such-program"}, "LS0026", "in PATH");
  expect_refusal({"-n", "2", file("tmp")}, "LS0026", "is a folder");
  expect_refusal({"-n", "2", file("none.py")}, "LS0026", "none.py");
  test::write_bytes(file("plain"), "no program\n");
  expect_refusal({"-n", "2", file("plain")}, "LS0026", "may not be executed");
  std::filesystem::permissions(file("plain"), std::filesystem::perms::owner_all);
  expect_refusal({"-n", "2", file("plain")}, "LS0026", "neither a program for this machine");
  test::write_bytes(file("script"), "#!/no/such/shell\n");
  std::filesystem::permissions(file("script"), std::filesystem::perms::owner_all);
  expect_refusal({"-n", "2", file("script")}, "LS0026", "interpreter");
}

TEST_F(LaunchRun, RefusesAHostThatDoesNotExistAndAFolderThatCannotBeMade) {
  expect_refusal({"--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint",
                  "no-such-host.invalid:29400", "--rdzv-conf", "join_timeout=5", worker()},
                 "LS0019", "no-such-host.invalid");
  expect_refusal({"--log-dir", "/proc/nowhere", worker()}, "LS0007", "/proc/nowhere");
}

}  // namespace
}  // namespace lockstep
