// `lockstep run` where its standard streams, its disk or the limits of its shell do not fit.

#include <gtest/gtest.h>

#include "launch_support.hpp"
#include "net/socket.hpp"

namespace lockstep {
namespace {

using test::eventually;
using test::JobResult;
using test::LaunchTest;
using test::read_bytes;
using test::Texts;

class LaunchStreams : public LaunchTest {
 protected:
  // A shell's script in which "$@" is `lockstep run` with these words; it must end with exec.
  pid_t start_in_shell(const std::string& script, Texts words, const std::string& name = "job") {
    words.insert(words.begin(),
                 {"-c", script, "sh", std::string(LOCKSTEP_BIN) + "/lockstep", "run"});
    std::vector<char*> argv = {const_cast<char*>("/bin/sh")};
    for (auto& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    const std::string output = file(name + ".out");
    const std::string errors = file(name + ".err");
    const std::string temporary = file("tmp");
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::setenv("TMPDIR", temporary.c_str(), 1);
      ::setenv("LOCKSTEP_TOKEN", "0123456789abcdef", 1);
      ::dup2(::open("/dev/null", O_RDONLY), STDIN_FILENO);
      ::dup2(::open(output.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), STDOUT_FILENO);
      ::dup2(::open(errors.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), STDERR_FILENO);
      ::execv(argv[0], argv.data());
      ::_exit(127);
    }
    return pid;
  }

  JobResult run_in_shell(const std::string& script, const Texts& words) {
    return finish(start_in_shell(script, words));
  }

  // A job of two launchers, both on this host.
  std::vector<JobResult> run_on_two_hosts(const std::string& script, const Texts& program) {
    const int port = PortHold(0, true).port();
    std::vector<pid_t> launchers;
    for (const char* node : {"0", "1"}) {
      Texts words = {"--nnodes",
                     "2",
                     "--node-rank",
                     node,
                     "--rdzv-endpoint",
                     "127.0.0.1:" + std::to_string(port),
                     "-n",
                     "1"};
      words.insert(words.end(), program.begin(), program.end());
      launchers.push_back(start_in_shell(script, words, node));
    }
    return {finish(launchers[0], "0"), finish(launchers[1], "1")};
  }
};

// The launchers' sockets must not get the numbers of the closed streams.
TEST_F(LaunchStreams, SeveralHostsNeedNoStreams) {
  for (const char* closed : {">&- 2>&-", "<&- >&- 2>&-", "2>&-", "<&-"}) {
    SCOPED_TRACE(closed);
    for (const JobResult& result :
         run_on_two_hosts(std::string("exec \"$@\" ") + closed,
                          {"--ranks", "all", worker(), "lines:200", "warn:careful"})) {
      EXPECT_EQ(result.exit_code, 0) << result.errors;
    }
  }
  expect_nothing_left();
}

TEST_F(LaunchStreams, AnErrorKeepsItsExitCodeWhereStandardErrorFails) {
  for (const char* broken : {"2>/dev/full", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"}) {
    SCOPED_TRACE(broken);
    const std::string script = std::string("exec \"$@\" ") + broken;
    EXPECT_EQ(run_in_shell(script, {"--no-such-flag", worker()}).exit_code, 2);
    EXPECT_EQ(run_in_shell(script, {"-n", "2", worker(), "1:exit:7", "sleep:100"}).exit_code, 7);
    EXPECT_EQ(run_in_shell(script, {"-n", "2", worker(), "warn:careful"}).exit_code, 0);
  }
}

// A limit of 1 MiB for a file: the board fits, what the rank prints does not.
TEST_F(LaunchStreams, AFileSizeLimitCostsOutputAndNotTheTraining) {
  const JobResult result =
      run_in_shell("ulimit -f 2048; exec \"$@\"", {"-n", "1", worker(), "lines:100000"});
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_EQ(result.output.size(), size_t{1} << 20);
  const auto expect_said = [&](const std::string& part) {
    EXPECT_NE(result.errors.find(part), std::string::npos) << part << "\nin\n" << result.errors;
  };
  expect_said("lockstep: cannot write standard output: File too large");
  expect_said("/rank0.out: File too large; the log files will be incomplete");
  expect_said("lockstep: 1 log file in ");
  expect_said(" lacks ");
  // "line 12345 of rank 0": of 100,000 lines of 21 to 22 bytes the file took 1 MiB.
  const size_t lacks = result.errors.find(" lacks ") + 7;
  const int64_t lost = std::stoll(result.errors.substr(lacks));
  EXPECT_GT(lost, 40'000);
  EXPECT_LT(lost, 60'000);
  expect_nothing_left();
}

TEST_F(LaunchStreams, ALimitTooSmallForTheBoardIsNamed) {
  const JobResult result = run_in_shell("ulimit -f 2; exec \"$@\"", {"-n", "2", worker()});
  EXPECT_EQ(result.exit_code, 2) << result.errors;
  EXPECT_NE(result.errors.find("error[LS0013]"), std::string::npos) << result.errors;
  EXPECT_NE(result.errors.find("ulimit -f"), std::string::npos) << result.errors;
}

TEST_F(LaunchStreams, ASmallStackIsEnough) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers' frames do not fit a small stack";
#endif
  const std::string script = "ulimit -s 64; exec \"$@\"";
  const JobResult one = run_in_shell(script, {"-n", "3", worker(), "print:hello"});
  EXPECT_EQ(one.exit_code, 0) << one.errors;
  EXPECT_EQ(one.output, "[rank 0] hello\n");
  for (const JobResult& each : run_on_two_hosts(script, {worker(), "lines:3000"})) {
    EXPECT_EQ(each.exit_code, 0) << each.errors;
  }
}

TEST_F(LaunchStreams, TooFewOpenFilesNameHowManyAreNeeded) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "UndefinedBehaviorSanitizer opens a pipe to check an object's type";
#endif
  for (const int limit : {12, 20, 40}) {
    const JobResult result = run_in_shell("ulimit -n " + std::to_string(limit) + "; exec \"$@\"",
                                          {"-n", "8", worker(), "print:x"});
    EXPECT_EQ(result.exit_code, 2) << result.errors;
    EXPECT_NE(result.errors.find("the limit is " + std::to_string(limit)), std::string::npos)
        << result.errors;
    EXPECT_NE(result.errors.find("ulimit -n 80"), std::string::npos) << result.errors;
    EXPECT_EQ(result.errors.find("--log-dir"), std::string::npos) << result.errors;
  }
  expect_nothing_left();
}

// Neither rank flushes: one runs on, one is killed.
TEST_F(LaunchStreams, LinesAreShownWhenTheyArePrinted) {
  const pid_t job = start({"-n", "1", worker(), "print:step 1", "loop"});
  EXPECT_TRUE(eventually([&] { return read_bytes(file("job.out")) == "[rank 0] step 1\n"; }));
  ::kill(job, SIGTERM);
  finish(job);
  const JobResult killed = run({"-n", "1", worker(), "print:step 1", "kill:9"});
  EXPECT_EQ(killed.exit_code, 137);
  EXPECT_EQ(killed.output, "[rank 0] step 1\n");
}

TEST_F(LaunchStreams, LinesOfPythonToo) {
  ::unsetenv("PYTHONUNBUFFERED");  // of this test's own environment
  test::write_bytes(file("train.py"), "import os\nprint('step 1')\nos.kill(os.getpid(), 9)\n");
  for (const Texts& program : {Texts{file("train.py")}, Texts{"python3", file("train.py")}}) {
    Texts words = {"-n", "1"};
    words.insert(words.end(), program.begin(), program.end());
    const JobResult result = run(words);
    EXPECT_EQ(result.exit_code, 137);
    EXPECT_EQ(result.output, "[rank 0] step 1\n");
  }
}

}  // namespace
}  // namespace lockstep
