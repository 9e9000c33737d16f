#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include "cli/app.hpp"
#include "cli/child.hpp"
#include "lockstep/cli_parse.hpp"
#include "lockstep/device_plan.hpp"

namespace lockstep::cli::cli_test {
namespace {

using Clock = std::chrono::steady_clock;

std::string line_of(const std::vector<const char*>& words) {
  return shell_line(static_cast<int>(words.size()), words.data());
}

// The Error that a command line of `lockstep` ends in.
Error error_of(std::vector<std::string> words) {
  words.insert(words.begin(), "lockstep");
  std::vector<char*> argv;
  for (auto& word : words) argv.push_back(word.data());
  try {
    run_command(static_cast<int>(argv.size()), argv.data());
  } catch (const Error& error) {
    return error;
  }
  return Error(Code::kInternal, "no error was thrown");
}

struct BadLine {
  std::vector<std::string> words;
  std::string message;
  std::string help;
};

TEST(CommandLine, EveryMistakeNamesTheWordAndTheRemedy) {
  const std::string see_lab = "`lockstep lab --help` lists what it takes";
  const std::vector<BadLine> lines = {
      {{"docter"}, "lockstep has no command \"docter\"", "did you mean `lockstep doctor`?"},
      {{"zzz"},
       "lockstep has no command \"zzz\"",
       "commands are: doctor, explain, lab, top, run, ckpt, slurm-script, new, compare, verify, "
       "report, help, "
       "completion"},
      {{"lba"}, "lockstep has no command \"lba\"", "did you mean `lockstep lab`?"},
      {{"help", "rnu"}, "lockstep has no command \"rnu\"", "did you mean `lockstep run`?"},
      {{"lab", "homwork2"},
       "there is no lab \"homwork2\": this version has 5, 6, 7, 10 and homework2",
       "did you mean `lockstep lab homework2`?"},
      {{"lab", "practical6"},
       "there is no lab \"practical6\": this version has 5, 6, 7, 10 and homework2",
       "did you mean `lockstep lab 6`?"},
      {{"help", "lab", "al"},
       "there is no lab \"al\": this version has 5, 6, 7, 10 and homework2",
       "did you mean `lockstep lab all`?"},
      {{"lab", "10", "--micro-batch", "3"},
       "lockstep lab has no flag --micro-batch",
       "did you mean --micro-batches?"},
      {{"lab", "5", "--micro-batch", "3"}, "lockstep lab has no flag --micro-batch", see_lab},
      {{"completion"},
       "lockstep completion needs SHELL",
       "`lockstep completion --help` lists what it takes"},
      {{"completion", "bsh"}, "there is no completion for \"bsh\"", "did you mean bash?"},
      {{"--versoin"}, "lockstep has no flag --versoin", "did you mean --version?"},
      {{"doctor", "--jsn"}, "lockstep doctor has no flag --jsn", "did you mean --json?"},
      {{"doctor", "now"},
       "lockstep doctor does not take \"now\"",
       "`lockstep doctor --help` lists what it takes"},
      {{"lab"}, "lockstep lab needs NUMBER", see_lab},
      {{"lab", "5", "--stpes", "3"}, "lockstep lab has no flag --stpes", "did you mean --steps?"},
      {{"lab", "5", "--stpes=3"}, "lockstep lab has no flag --stpes", "did you mean --steps?"},
      {{"lab", "5", "-devices", "cpu:2"},
       "lockstep lab has no flag -devices",
       "did you mean --devices?"},
      {{"lab", "5", "--steps"}, "--steps needs a value", see_lab},
      {{"lab", "5", "--steps", "ten"},
       "--steps \"ten\" is not a number from 1 to 1000000",
       see_lab},
      {{"lab", "5", "--steps", "0"}, "--steps \"0\" is not a number from 1 to 1000000", see_lab},
      {{"lab", "5", "--split-devices", "2,999"},
       "--split-devices \"999\" is not a number from 1 to 256",
       see_lab},
      {{"lab", "8"},
       "there is no lab \"8\": this version has 5, 6, 7, 10 and homework2",
       "run `lockstep lab 5`, or `lockstep lab all` for every one"},
      {{"explain", "LS0099"},
       "there is no error code \"LS0099\"",
       "did you mean LS0009? `lockstep explain` lists them all"},
  };
  for (const auto& line : lines) {
    const Error error = error_of(line.words);
    EXPECT_EQ(error.code(), Code::kUsage) << error.block();
    EXPECT_EQ(error.message(), line.message);
    EXPECT_EQ(error.help(), line.help) << error.message();
    EXPECT_EQ(exit_code(error.code()), 2);
  }
}

TEST(ParseOrThrow, SaysWhatKindOfValueAFlagTakes) {
  CLI::App app("", "program");
  int64_t steps = 1;
  double rate = 1;
  app.add_option("--steps", steps);
  app.add_option("--lr", rate);
  const auto message_of = [&app](const char* flag, const char* value) -> std::string {
    const char* argv[] = {"program", flag, value};
    try {
      parse_or_throw(app, 3, argv);
    } catch (const Error& error) {
      return error.message();
    }
    return "";
  };
  EXPECT_EQ(message_of("--steps", "ten"), "--steps \"ten\" is not a whole number");
  EXPECT_EQ(message_of("--lr", "fast"), "--lr \"fast\" is not a number");
  EXPECT_EQ(message_of("--steps", "12"), "");
  EXPECT_EQ(steps, 12);
}

TEST(ShellLine, QuotesWhatAShellWouldChange) {
  EXPECT_EQ(line_of({"lockstep", "lab", "5"}), "lockstep lab 5");
  EXPECT_EQ(line_of({"a", "--devices", "cuda:0*2", ""}), "a --devices 'cuda:0*2' ''");
  EXPECT_EQ(line_of({"it's"}), "'it'\\''s'");
}

TEST(Explain, AcceptsEverySpellingOfACode) {
  const std::string text = explain("LS0002");
  EXPECT_EQ(text.substr(0, 8), "LS0002: ");
  EXPECT_EQ(explain("ls0002"), text);
  EXPECT_EQ(explain("2"), text);
}

TEST(Explain, ListsEveryCode) {
  const std::string list = explain("");
  for (const auto& info : all_codes()) {
    EXPECT_NE(list.find(code_name(info.code) + "  " + std::string(info.title)), std::string::npos);
  }
}

ChildCommand shell(const std::string& script) {
  return {.program = "/bin/sh", .arguments = {"-c", script}};
}

TEST(RunChild, KeepsOutputErrorsAndExitCode) {
  const Interrupts interrupts;
  const ChildResult result = run_child(shell("echo out; echo err >&2; exit 3"), interrupts);
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_EQ(result.output, "out\n");
  EXPECT_EQ(result.errors, "err\n");
}

TEST(RunChild, ReadsMoreThanAPipeHolds) {
  const Interrupts interrupts;
  const auto result = run_child(shell("head -c 300000 /dev/zero | tr '\\0' x"), interrupts);
  EXPECT_EQ(result.output, std::string(300000, 'x'));
}

TEST(RunChild, GivesTheCoresAskedFor) {
  const Interrupts interrupts;
  ChildCommand command = shell("grep Cpus_allowed_list /proc/self/status | cut -f2");
  const int core = Hardware::detect(0).cores.back();
  command.cores = {core};
  EXPECT_EQ(run_child(command, interrupts).output, std::to_string(core) + "\n");
}

TEST(RunChild, NamesAProgramThatCannotStart) {
  const Interrupts interrupts;
  try {
    run_child({.program = "/no/such/program", .arguments = {}}, interrupts);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kProgramFailed);
    EXPECT_EQ(error.message(), "cannot start /no/such/program: No such file or directory");
  }
}

TEST(RunChild, FailureQuotesTheEndOfWhatTheChildSaid) {
  const Interrupts interrupts;
  try {
    run_child_or_throw(shell("seq 100 >&2; exit 2"), interrupts);
    FAIL() << "no error";
  } catch (const ChildFailed& failed) {
    EXPECT_EQ(failed.child_exit(), 2);
    EXPECT_EQ(failed.message(), "sh ended with exit code 2");
    ASSERT_EQ(failed.notes().size(), 2U);
    std::string tail = "it said:";
    for (int line = 86; line <= 100; ++line) tail += "\n" + std::to_string(line);
    EXPECT_EQ(failed.notes()[1], tail);
  }
}

TEST(RunChild, FailureNamesTheSignal) {
  const Interrupts interrupts;
  try {
    run_child_or_throw(shell("kill -9 $$"), interrupts);
    FAIL() << "no error";
  } catch (const ChildFailed& failed) {
    EXPECT_EQ(failed.message(), "sh was killed by signal 9 (Killed)");
    EXPECT_EQ(failed.child_exit(), 137);
  }
}

// The number a shell printed first.
pid_t pid_in(const std::string& path) {
  pid_t pid = 0;
  for (int tries = 0; tries < 500 && pid == 0; ++tries) {
    std::ifstream(path) >> pid;
    if (pid == 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return pid;
}

// A process that is gone, or a zombie that only its new parent has yet to reap.
bool gone(pid_t pid) {
  for (int tries = 0; tries < 500; ++tries) {
    std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
    std::string number, name, state;
    if (!(stat >> number >> name >> state) || state == "Z") return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

// A file name of this test alone, removed at its end.
class Scratch {
 public:
  Scratch() : path_(testing::TempDir() + "lockstep-cli-" + std::to_string(::getpid())) {}
  ~Scratch() { std::filesystem::remove(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST(RunChild, StopsTheWholeGroupAtTheDeadline) {
  const Interrupts interrupts;
  const Scratch scratch;
  // A grandchild that ignores SIGTERM must not survive either.
  ChildCommand command =
      shell("(trap '' TERM; sleep 60) & echo $! > " + scratch.path() + "; sleep 60");
  command.deadline = std::chrono::seconds(1);
  EXPECT_THROW(run_child(command, interrupts), Error);
  EXPECT_TRUE(gone(pid_in(scratch.path())));
}

TEST(RunChild, AnInterruptStopsTheChild) {
  const Interrupts interrupts;
  const Scratch scratch;
  const auto start = Clock::now();
  ChildCommand command = shell("echo $$ > " + scratch.path() + "; sleep 60");
  bool sent = false;
  command.tick = [&] {
    if (!sent && pid_in(scratch.path()) != 0) sent = ::kill(::getpid(), SIGINT) == 0;
  };
  try {
    run_child(command, interrupts);
    FAIL() << "no interrupt";
  } catch (const Interrupted& interrupted) {
    EXPECT_EQ(interrupted.signal, SIGINT);
  }
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(10));
  EXPECT_TRUE(gone(pid_in(scratch.path())));
}

TEST(RunChild, DiesWithItsParent) {
  const Scratch scratch;
  const pid_t parent = ::fork();
  if (parent == 0) {
    const Interrupts interrupts;
    run_child(shell("echo $$ > " + scratch.path() + "; exec sleep 60"), interrupts);
    ::_exit(0);
  }
  const pid_t child = pid_in(scratch.path());
  ASSERT_NE(child, 0);
  ::kill(parent, SIGKILL);
  ::waitpid(parent, nullptr, 0);
  EXPECT_TRUE(gone(child));
}

TEST(SiblingPath, NamesTheMissingProgramAndItsPlace) {
  try {
    sibling_path("no-such-program");
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kProgramFailed);
    EXPECT_NE(error.message().find("no-such-program"), std::string::npos);
  }
}

}  // namespace
}  // namespace lockstep::cli::cli_test
