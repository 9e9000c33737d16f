// What lockstep knows of processes: their entries in /proc, and the clock of all deadlines, which
// does not count the time in which this process was stopped.

#include "base/process.hpp"

#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <filesystem>
#include <thread>

#include "base/running_clock.hpp"
#include "lockstep/clock.hpp"
#include "support.hpp"

namespace lockstep::test::process_test {
namespace {

TEST(FindInPath, TakesTheFirstFolderWithAnExecutableFile) {
  const test::ScratchFolder scratch;
  for (const char* folder : {"a", "b", "c", "a/tool"}) {
    std::filesystem::create_directory(scratch.file(folder));
  }
  test::write_bytes(scratch.file("b/tool"), "not executable");
  test::write_bytes(scratch.file("c/tool"), "#!/bin/sh\n");
  ::chmod(scratch.file("c/tool").c_str(), 0755);
  const auto path = [&](const char* form) {
    std::string text = form;
    for (size_t at = text.find('@'); at != std::string::npos; at = text.find('@')) {
      text.replace(at, 1, scratch.file(""));
    }
    return text;
  };
  const auto found = [&](const char* form) { return find_in_path("tool", path(form).c_str()); };
  EXPECT_EQ(found("@a:@b:@c"), scratch.file("c/tool")) << "a folder and a plain file do not count";
  EXPECT_EQ(found("@c:/bin"), scratch.file("c/tool"));
  EXPECT_EQ(found("@a:@b"), "");
  EXPECT_EQ(found(""), "") << "an empty folder is the current one, which has no such program";
  EXPECT_TRUE(find_in_path("sh", nullptr).ends_with("bin/sh")) << "PATH may be unset";
}

TEST(ProcessStat, DescribesAProcessUntilItIsReaped) {
  const auto own = read_process_stat(::getpid());
  ASSERT_TRUE(own);
  EXPECT_EQ(own->state, 'R');
  EXPECT_EQ(own->parent, ::getppid());
  EXPECT_GT(own->start_ticks, 0);
  EXPECT_FALSE(own->has_ended());
  const pid_t child = ::fork();
  if (child == 0) ::_exit(0);
  siginfo_t info{};
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT), 0);
  const auto zombie = read_process_stat(child);
  ASSERT_TRUE(zombie);
  EXPECT_TRUE(zombie->has_ended());
  EXPECT_EQ(zombie->parent, ::getpid());
  EXPECT_GE(zombie->start_ticks, own->start_ticks);
  ::waitpid(child, nullptr, 0);
  EXPECT_FALSE(read_process_stat(child));
}

constexpr std::chrono::milliseconds kStop(2500);

TEST(RunningClock, IsTheMonotonicClockWhileTheProcessRuns) {
  const int64_t before = monotonic_ns();
  const int64_t now = running_ns();
  EXPECT_LE(now, monotonic_ns());
  EXPECT_GE(running_ns(), now);
  // This process may have been stopped earlier, but not for longer than it has lived.
  EXPECT_GT(now, 0);
  EXPECT_LE(now - before, monotonic_ns() - before);
}

// Both clocks of a child, read before and after it was stopped.
struct Readings {
  int64_t running_ns = 0;
  int64_t monotonic_ns = 0;

  static Readings now() { return {lockstep::running_ns(), lockstep::monotonic_ns()}; }
};

TEST(RunningClock, DoesNotCountTheTimeInWhichTheProcessWasStopped) {
  running_ns();  // the parent's clock ticks: the child must start its own
  std::array<int, 2> to_child{};
  std::array<int, 2> to_parent{};
  ASSERT_EQ(::pipe(to_child.data()), 0);
  ASSERT_EQ(::pipe(to_parent.data()), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    char go = 0;
    for (int turn = 0; turn < 2; ++turn) {
      const Readings readings = Readings::now();
      if (::write(to_parent[1], &readings, sizeof readings) != sizeof readings) ::_exit(1);
      if (turn == 0 && ::read(to_child[0], &go, 1) != 1) ::_exit(1);
    }
    ::_exit(0);
  }
  Readings before;
  Readings after;
  ASSERT_EQ(::read(to_parent[0], &before, sizeof before), ssize_t{sizeof before});
  ::kill(child, SIGSTOP);
  int status = 0;
  ::waitpid(child, &status, WUNTRACED);
  const int64_t stopped_at = monotonic_ns();
  std::this_thread::sleep_for(kStop);
  const int64_t stopped_ns = monotonic_ns() - stopped_at;
  ASSERT_EQ(::write(to_child[1], "x", 1), 1);  // it reads the clock as soon as it runs again
  ::kill(child, SIGCONT);
  ASSERT_EQ(::read(to_parent[0], &after, sizeof after), ssize_t{sizeof after});
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  const int64_t passed_ns = after.monotonic_ns - before.monotonic_ns;
  const int64_t counted_ns = after.running_ns - before.running_ns;
  EXPECT_GE(passed_ns, stopped_ns);
  EXPECT_GE(passed_ns - counted_ns, stopped_ns - kLongestGapNs) << "stopped time was counted";
  EXPECT_GE(counted_ns, 0) << "it never goes back";
  for (const int end : {to_child[0], to_child[1], to_parent[0], to_parent[1]}) ::close(end);
}

}  // namespace
}  // namespace lockstep::test::process_test
