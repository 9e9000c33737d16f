// `lockstep top` as a user starts it: over a real run, and on a real (pseudo) terminal.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <spawn.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <thread>

#include "cli/child.hpp"
#include "cli/nvml.hpp"
#include "lockstep/detail/board.hpp"
#include "lockstep/units.hpp"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;
using cli::ChildResult;
using nlohmann::json;

constexpr std::chrono::seconds kPatience{30};

std::string in_bin(const std::string& program) {
  return std::string(LOCKSTEP_BIN) + "/" + program;
}

ChildResult top(std::vector<std::string> arguments) {
  const cli::Interrupts interrupts;
  arguments.insert(arguments.begin(), "top");
  return cli::run_child({.program = in_bin("lockstep"), .arguments = std::move(arguments)},
                        interrupts);
}

// A program in the background, ended with the test.
class Background {
 public:
  explicit Background(std::vector<std::string> words) {
    std::vector<char*> argv;
    for (auto& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    if (::posix_spawn(&pid_, argv[0], nullptr, nullptr, argv.data(), environ) != 0) pid_ = -1;
  }
  ~Background() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    remove_stale_boards();
  }
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = -1;
};

TEST(Top, ShowsThatDeviceZeroOfDataParallelHoldsMore) {
  const Background run({in_bin("practical5_dp"), "--devices", "cpu:3", "--steps", "1000000",
                        "--batch", "30", "--dim", "64", "--hidden", "64", "--quiet"});
  ASSERT_GT(run.pid(), 0);
  const std::string name = "practical5_dp-" + std::to_string(run.pid());
  json rank;
  const auto give_up = Clock::now() + kPatience;
  while (rank.is_null() || rank.at("steps_per_s").is_null()) {
    ASSERT_LT(Clock::now(), give_up) << "no step was seen: " << rank;
    const ChildResult result = top({name, "--once", "--json", "--interval", "0.3"});
    if (result.exit_code != 0) continue;  // its board is not there yet
    const json value = json::parse(result.output);
    if (!value.at("runs").empty()) rank = value.at("runs").at(0).at("ranks").at(0);
  }
  EXPECT_EQ(rank.at("pid"), run.pid());
  EXPECT_EQ(rank.at("program"), "practical5_dp");
  EXPECT_EQ(rank.at("state"), "training");
  EXPECT_GT(rank.at("steps_per_s"), 0);
  EXPECT_GT(rank.at("step"), 0);
  EXPECT_TRUE(rank.at("loss").is_number());
  const json& devices = rank.at("devices");
  ASSERT_EQ(devices.size(), 3U);
  for (const size_t other : {1, 2}) {
    EXPECT_GT(devices[0].at("live_bytes"), devices[other].at("live_bytes"));
    EXPECT_GT(devices[0].at("peak_bytes"), devices[other].at("peak_bytes"));
  }
  for (const auto& device : devices) {
    EXPECT_GT(device.at("busy"), 0) << device;
    EXPECT_LE(device.at("busy"), 1) << device;
  }
}

// A live run that this test writes itself: rank 0 with one device, rank 1 not started.
class TopOverBoard : public testing::Test {
 protected:
  void SetUp() override {
    BoardPage page = board_.page(0);
    page.start("train");
    page.set_device(
        0, {.name = "cpu:0", .physical = "core 0", .live_bytes = 3_MiB, .peak_bytes = 4_MiB});
    page.set_phase(Phase::kTraining);
    page.set_step(42);
    page.set_loss(0.5);
  }

  std::vector<std::string> top_command() const {
    return {in_bin("lockstep"), "top", run_, "--interval", "0.1"};
  }

  std::string run_ = "top-test-" + std::to_string(::getpid());
  Board board_ = Board::create(Board::default_path(run_), 2, run_);
};

TEST_F(TopOverBoard, OncePrintsPlainly) {
  const ChildResult result = top({run_, "--once", "--interval", "0.05"});
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_NE(result.output.find(run_ + "  2 ranks"), std::string::npos) << result.output;
  EXPECT_NE(result.output.find("rank 0  training  step 42"), std::string::npos) << result.output;
  EXPECT_NE(result.output.find("rank 1  not started"), std::string::npos) << result.output;
  EXPECT_EQ(result.output.find('\033'), std::string::npos) << "no colours into a pipe";
}

// As many lines as the driver has GPUs, so none if there is no driver.
TEST_F(TopOverBoard, ShowsEveryGpuOfTheDriver) {
  const size_t gpus = cli::Nvml().sample().size();
  const ChildResult plain = top({run_, "--once", "--interval", "0.05"});
  size_t lines = 0;
  for (size_t at = 0; at < plain.output.size(); at = plain.output.find('\n', at) + 1) {
    if (plain.output.compare(at, 4, "GPU ") == 0) ++lines;
  }
  EXPECT_EQ(lines, gpus) << plain.output;
  const ChildResult as_json = top({run_, "--once", "--json", "--interval", "0.05"});
  EXPECT_EQ(json::parse(as_json.output).at("gpus").size(), gpus) << as_json.output;
}

TEST_F(TopOverBoard, AWrongNameIsRefusedWithTheNearest) {
  const ChildResult result = top({"top-tset-" + std::to_string(::getpid())});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_NE(result.errors.find("did you mean " + run_), std::string::npos) << result.errors;
}

// A program on a pseudo terminal, as seen from the terminal's side.
class Terminal {
 public:
  Terminal(std::vector<std::string> words, winsize window, const char* term = "xterm-256color") {
    std::vector<char*> argv;
    for (auto& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    pid_ = ::forkpty(&master_, nullptr, nullptr, &window);
    if (pid_ == 0) {
      ::setenv("TERM", term, 1);
      ::setenv("LC_ALL", "C.UTF-8", 1);
      ::execv(argv[0], argv.data());
      ::_exit(127);
    }
    ::tcgetattr(master_, &before_);
  }
  ~Terminal() {
    if (!ended_) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
    ::close(master_);
  }
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  pid_t pid() const { return pid_; }
  const std::string& seen() const { return seen_; }
  void forget() { seen_.clear(); }
  void type(const std::string& keys) {
    EXPECT_EQ(::write(master_, keys.data(), keys.size()), static_cast<ssize_t>(keys.size()));
  }
  void resize(winsize window) { ::ioctl(master_, TIOCSWINSZ, &window); }

  // Reads until the text has come; false if it does not in time.
  bool expect(const std::string& text) {
    const auto give_up = Clock::now() + kPatience;
    while (seen_.find(text) == std::string::npos) {
      if (Clock::now() > give_up) return false;
      read_some();
    }
    return true;
  }

  // How it ended, as waitpid says; with WUNTRACED also how it was stopped.
  int wait(int flags = 0) {
    int status = 0;
    const auto give_up = Clock::now() + kPatience;
    while (::waitpid(pid_, &status, flags | WNOHANG) == 0) {
      if (Clock::now() > give_up) return -1;
      read_some();
    }
    ended_ = !WIFSTOPPED(status);
    read_some();
    return status;
  }

  // The cursor is back, the alternate screen is left, and the modes are those found.
  bool restored() {
    termios now{};
    ::tcgetattr(master_, &now);
    const size_t left = seen_.rfind("\033[?1049l");
    return now.c_lflag == before_.c_lflag && left != std::string::npos &&
           (seen_.rfind("\033[?1049h") == std::string::npos || seen_.rfind("\033[?1049h") < left) &&
           seen_.rfind("\033[?25h") != std::string::npos;
  }

 private:
  void read_some() {
    pollfd event{master_, POLLIN, 0};
    char buffer[4096];
    while (::poll(&event, 1, 20) > 0) {
      const ssize_t count = ::read(master_, buffer, sizeof(buffer));
      if (count <= 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));  // the other side is gone
        return;
      }
      seen_.append(buffer, static_cast<size_t>(count));
    }
  }

  pid_t pid_ = -1;
  int master_ = -1;
  termios before_{};
  std::string seen_;
  bool ended_ = false;
};

constexpr winsize kWindow = {.ws_row = 24, .ws_col = 100, .ws_xpixel = 0, .ws_ypixel = 0};

TEST_F(TopOverBoard, TheScreenIsRestoredHoweverItEnds) {
  struct Ending {
    const char* name;
    const char* keys;
    int signal;
    int status;  // as waitpid gives it
  };
  for (const Ending& ending : {Ending{"q", "q", 0, 0}, Ending{"Ctrl-C", "\x03", 0, 0},
                               Ending{"SIGTERM", "", SIGTERM, (128 + SIGTERM) << 8},
                               Ending{"SIGHUP", "", SIGHUP, (128 + SIGHUP) << 8},
                               Ending{"SIGSEGV", "", SIGSEGV, SIGSEGV}}) {
    SCOPED_TRACE(ending.name);
    Terminal terminal(top_command(), kWindow);
    ASSERT_TRUE(terminal.expect("step 42")) << terminal.seen();
    EXPECT_TRUE(terminal.seen().starts_with("\033[?1049h")) << "the alternate screen";
    EXPECT_FALSE(terminal.restored());
    if (ending.signal != 0) ::kill(terminal.pid(), ending.signal);
    terminal.type(ending.keys);
    EXPECT_EQ(terminal.wait() & ~0x80, ending.status) << "but for the flag of a core dump";
    EXPECT_TRUE(terminal.restored()) << terminal.seen();
  }
}

// Under a shell with job control: without one, nobody could bring it back.
TEST_F(TopOverBoard, CtrlZGivesTheTerminalBackAndForegroundTakesItAgain) {
  Terminal terminal({"/bin/bash", "--norc", "--noprofile", "-i"}, kWindow);
  terminal.type(in_bin("lockstep") + " top " + run_ + " --interval 0.1\n");
  ASSERT_TRUE(terminal.expect("step 42")) << terminal.seen();
  terminal.type("\x1a");
  ASSERT_TRUE(terminal.expect("Stopped")) << terminal.seen();
  EXPECT_LT(terminal.seen().rfind("\033[?1049h"), terminal.seen().rfind("\033[?1049l"));
  EXPECT_LT(terminal.seen().rfind("\033[?1049l"), terminal.seen().find("Stopped"));
  terminal.forget();
  terminal.type("fg\n");
  ASSERT_TRUE(terminal.expect("step 42")) << "drawn anew";
  EXPECT_NE(terminal.seen().find("\033[?1049h"), std::string::npos);
  terminal.forget();
  terminal.type("q");
  ASSERT_TRUE(terminal.expect("\033[?1049l"));
  terminal.type("stty -a\n");
  ASSERT_TRUE(terminal.expect(" echo ")) << "the modes are back: " << terminal.seen();
  EXPECT_NE(terminal.seen().find(" icanon "), std::string::npos) << terminal.seen();
  terminal.type("exit 7\n");
  EXPECT_EQ(WEXITSTATUS(terminal.wait()), 7);
}

TEST_F(TopOverBoard, AStopItCannotSeeComingIsSurvived) {
  Terminal terminal(top_command(), kWindow);
  ASSERT_TRUE(terminal.expect("step 42"));
  ::kill(terminal.pid(), SIGSTOP);
  ASSERT_TRUE(WIFSTOPPED(terminal.wait(WUNTRACED)));
  terminal.forget();
  ::kill(terminal.pid(), SIGCONT);
  ASSERT_TRUE(terminal.expect("step 42")) << "drawn anew";
  EXPECT_NE(terminal.seen().find("\033[?1049h"), std::string::npos);
  terminal.type("q");
  EXPECT_EQ(terminal.wait(), 0);
  EXPECT_TRUE(terminal.restored());
}

TEST_F(TopOverBoard, FollowsTheWindowAndTheRun) {
  Terminal terminal(top_command(), kWindow);
  ASSERT_TRUE(terminal.expect("rank 0"));
  terminal.resize({.ws_row = 4, .ws_col = 40, .ws_xpixel = 0, .ws_ypixel = 0});
  ASSERT_TRUE(terminal.expect("1-2 of ")) << "four rows are too few";
  terminal.type(" ");
  ASSERT_TRUE(terminal.expect("2-3 of ")) << "the space bar scrolls";
  terminal.resize(kWindow);
  board_.page(0).set_step(43);
  ASSERT_TRUE(terminal.expect("step 43"));
  board_.page(0).set_phase(static_cast<Phase>(99));
  ASSERT_TRUE(terminal.expect("unreadable"));
  board_.page(0).set_phase(Phase::kTraining);
  ::unlink(board_.path().c_str());
  ASSERT_TRUE(terminal.expect("ended"));
  terminal.type("q");
  EXPECT_EQ(terminal.wait(), 0);
}

TEST(Top, ManyRunsFoldScrollAndAreFoundByName) {
  const std::string prefix = "many-" + std::to_string(::getpid()) + "-";
  std::vector<Board> boards;
  for (int run = 100; run < 150; ++run) {
    const std::string name = prefix + std::to_string(run);
    boards.push_back(Board::create(Board::default_path(name), 8, name));
    for (int rank = 0; rank < 8; ++rank) {
      BoardPage page = boards.back().page(rank);
      page.start("train");
      page.set_phase(Phase::kTraining);
      page.set_step(run);
    }
  }
  Terminal terminal({in_bin("lockstep"), "top", prefix, "--interval", "0.1"},
                    {.ws_row = 24, .ws_col = 80, .ws_xpixel = 0, .ws_ypixel = 0});
  ASSERT_TRUE(terminal.expect("50 runs")) << terminal.seen();
  ASSERT_TRUE(terminal.expect("1-22 of 50")) << terminal.seen();
  ASSERT_TRUE(terminal.expect("step 121")) << "a line for each run: " << terminal.seen();
  EXPECT_EQ(terminal.seen().find("rank 0"), std::string::npos);
  EXPECT_EQ(terminal.seen().find("step 122"), std::string::npos) << "below the screen";
  terminal.type("\033[F");  // End
  ASSERT_TRUE(terminal.expect("29-50 of 50")) << terminal.seen();
  terminal.type("\r");
  ASSERT_TRUE(terminal.expect("rank 7")) << "unfolded: " << terminal.seen();
  terminal.forget();
  terminal.type("/" + std::to_string(::getpid()) + "-133\r");
  ASSERT_TRUE(terminal.expect("1 of 50 runs")) << terminal.seen();
  ASSERT_TRUE(terminal.expect("step 133")) << terminal.seen();
  terminal.type("q");
  EXPECT_EQ(terminal.wait(), 0);
  EXPECT_TRUE(terminal.restored());
  const ChildResult once = top({prefix, "--once", "--interval", "0.05"});
  for (int run = 100; run < 150; ++run) {
    EXPECT_NE(once.output.find(prefix + std::to_string(run)), std::string::npos) << "prints all";
  }
}

TEST_F(TopOverBoard, ADumbTerminalGetsLines) {
  Terminal terminal(top_command(), kWindow, "dumb");
  ASSERT_TRUE(terminal.expect("rank 0  training  step 42"));
  terminal.type("\x03");
  EXPECT_EQ(terminal.wait(), 0);
  EXPECT_EQ(terminal.seen().find('\033'), std::string::npos);
}

}  // namespace
}  // namespace lockstep
