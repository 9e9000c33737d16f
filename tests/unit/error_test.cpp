#include "lockstep/error.hpp"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <new>
#include <set>

#include "support.hpp"

namespace lockstep::test::error_test {
namespace {

TEST(Error, BlockHoldsOneFactALine) {
  const Error error(Code::kDeviceSpec, "what happened", "what to do", {"first", "second"});
  EXPECT_EQ(error.block(),
            "error[LS0002]: what happened\nnote: first\nnote: second\nhelp: what to do");
  EXPECT_STREQ(error.what(), error.block().c_str());
  EXPECT_EQ(error.code(), Code::kDeviceSpec);
  EXPECT_EQ(error.message(), "what happened");
  EXPECT_EQ(error.help(), "what to do");
  EXPECT_EQ(error.notes(), (std::vector<std::string>{"first", "second"}));
}

TEST(Error, BlockLeavesOutWhatIsNotKnown) {
  EXPECT_EQ(Error(Code::kInternal, "only this").block(), "error[LS0000]: only this");
}

TEST(Error, EveryCodeIsExplainedOnceInAscendingOrder) {
  int expected = 0;
  for (const auto& info : all_codes()) {
    EXPECT_EQ(static_cast<int>(info.code), expected++);
    EXPECT_FALSE(info.title.empty());
    EXPECT_TRUE(info.explanation.ends_with(".")) << info.explanation;
  }
  EXPECT_EQ(expected, static_cast<int>(Code::kCheckpoint) + 1);
}

TEST(Error, CodeNamesHaveFourDigits) {
  EXPECT_EQ(code_name(Code::kInternal), "LS0000");
  EXPECT_EQ(code_name(Code::kProgramFailed), "LS0015");
}

TEST(Error, ExitCodeTellsMisuseFromFailure) {
  const std::set<Code> failures = {
      Code::kInternal,      Code::kReplicaFailed,  Code::kProgramFailed, Code::kOutOfMemory,
      Code::kCallMismatch,  Code::kRankAbsent,     Code::kRankFailed,    Code::kUnusedParameter,
      Code::kSyncMisuse,    Code::kReplicasDiffer, Code::kScalerMisuse,  Code::kStageFailed,
      Code::kStageMismatch, Code::kCapture,        Code::kNonfinite,     Code::kCheckpoint};
  for (const auto& info : all_codes()) {
    EXPECT_EQ(exit_code(info.code), failures.contains(info.code) ? 1 : 2) << code_name(info.code);
  }
}

TEST(Error, DescribeCutsTheStackTraceOfLibtorch) {
  const std::runtime_error torch(
      "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)\n"
      "Exception raised from addmm_impl_cpu_ at ../aten/src/LinearAlgebra.cpp:1234 (most recent "
      "call first):\nframe #0: c10::Error::Error(...)\n");
  EXPECT_EQ(describe(torch), "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)");
  EXPECT_EQ(describe(std::runtime_error("two\nlines")), "two\nlines");
}

TEST(Error, RunProgramTurnsErrorsIntoExitCodes) {
  EXPECT_EQ(run_program([](int argc, char**) { return argc; }, 7, nullptr), 7);

  testing::internal::CaptureStderr();
  const auto misuse = [](int, char**) -> int {
    throw Error(Code::kUsage, "no such flag", "see --help");
  };
  EXPECT_EQ(run_program(misuse, 0, nullptr), 2);
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "error[LS0001]: no such flag\nhelp: see --help\n");

  testing::internal::CaptureStderr();
  const auto foreign = [](int, char**) -> int {
    throw std::runtime_error("oops\nException raised from f at g.cpp:1");
  };
  EXPECT_EQ(run_program(foreign, 0, nullptr), 1);
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(said.substr(0, said.find('\n')),
            "error[LS0015]: the program threw std::runtime_error: oops");
  EXPECT_NE(said.find("\nhelp: the exception comes from the program"), std::string::npos) << said;
  EXPECT_EQ(said.find("report"), std::string::npos)
      << "nobody but the program's author can mend it";
}

TEST(Error, MemoryThatTheSystemDoesNotGiveIsNamedAsSuch) {
  testing::internal::CaptureStderr();
  const auto greedy = [](int, char**) -> int { throw std::bad_alloc(); };
  EXPECT_EQ(run_program(greedy, 0, nullptr), 1);
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(said.find("error[LS0016]: the system gave no memory"), 0U) << said;
}

// The exit code of a child process tells what it does with its standard streams.
int in_child_process(int (*body)()) {
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      ::_exit(body());
    } catch (...) {
      ::_exit(97);  // an exception must not run this program's other tests in the child
    }
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

int throw_usage_error(int, char**) {
  throw Error(Code::kUsage, "no such flag");
}

int print_a_line(int, char**) {
  std::printf("a line\n");
  return 0;
}

TEST(Error, AStandardErrorThatFailsDoesNotChangeTheExitCode) {
  EXPECT_EQ(in_child_process([] {
              ::dup2(::open("/dev/full", O_WRONLY), STDERR_FILENO);
              return run_program(throw_usage_error, 0, nullptr);
            }),
            2);
  EXPECT_EQ(in_child_process([] {
              ::close(STDERR_FILENO);
              return run_program(throw_usage_error, 0, nullptr);
            }),
            2);
  EXPECT_EQ(in_child_process([] {
              std::array<int, 2> ends{};
              if (::pipe(ends.data()) != 0) return 99;
              ::close(ends[0]);
              ::dup2(ends[1], STDERR_FILENO);
              return run_program(throw_usage_error, 0, nullptr);
            }),
            2)
      << "a reader that has gone";
}

TEST(Error, RunProgramFillsTheNumbersOfClosedStreams) {
  EXPECT_EQ(in_child_process([] {
              for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) ::close(fd);
              const auto open_another = [](int, char**) {
                std::array<int, 2> ends{};
                return ::pipe(ends.data()) == 0 && ends[0] > STDERR_FILENO ? 0 : 98;
              };
              return run_program(open_another, 0, nullptr);
            }),
            0);
}

TEST(Error, OutputThatCannotBeWrittenIsAnError) {
  testing::internal::CaptureStderr();
  EXPECT_EQ(in_child_process([] {
              ::dup2(::open("/dev/full", O_WRONLY), STDOUT_FILENO);
              return run_program(print_a_line, 0, nullptr);
            }),
            1);
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(said.find("error[LS0033]: "), 0U) << said;
  EXPECT_NE(said.find("standard output"), std::string::npos) << said;
}

// The lines of a process that ends without flushing, as if it were killed.
TEST(Error, RunProgramSendsEachLineIntoAPipeAtOnce) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe(ends.data()), 0);
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(ends[1], STDOUT_FILENO);
    const auto print_and_die = [](int, char**) -> int {
      std::printf("first\n");
      std::fputs("second", stdout);
      std::putchar('\n');
      ::_exit(0);
    };
    run_program(print_and_die, 0, nullptr);
  }
  ::close(ends[1]);
  ::waitpid(child, nullptr, 0);
  std::array<char, 64> text{};
  EXPECT_EQ(::read(ends[0], text.data(), text.size() - 1), 13);
  EXPECT_STREQ(text.data(), "first\nsecond\n");
  ::close(ends[0]);
}

TEST(DidYouMean, FindsTheClosest) {
  const std::vector<std::string> flags = {"--steps", "--batch", "--devices", "--hidden"};
  EXPECT_EQ(did_you_mean("--step", flags), "--steps");
  EXPECT_EQ(did_you_mean("--bacth", flags), "--batch");
  EXPECT_EQ(did_you_mean("--device", flags), "--devices");
  EXPECT_EQ(did_you_mean("--hidden", flags), "--hidden");
}

TEST(DidYouMean, IsSilentWhereNothingIsClose) {
  EXPECT_EQ(did_you_mean("--optimizer", {"--steps", "--batch"}), "");
  EXPECT_EQ(did_you_mean("abc", {"xyz"}), "");
  EXPECT_EQ(did_you_mean("anything", {}), "");
  EXPECT_EQ(did_you_mean("", {"--steps"}), "");
}

}  // namespace
}  // namespace lockstep::test::error_test
