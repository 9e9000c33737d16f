#include "cli/child.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string_view>

#include "base/file.hpp"
#include "lockstep/detail/board.hpp"

namespace lockstep::cli {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kKeptBytes = 1 << 20;
constexpr size_t kQuotedLines = 15;
constexpr int kTickMs = 200;
constexpr std::chrono::seconds kGrace{2};
constexpr std::array kStopSignals = {SIGINT, SIGTERM, SIGHUP};

sigset_t stop_signals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : kStopSignals) sigaddset(&set, signal);
  return set;
}

[[noreturn]] void fail_system(const std::string& what) {
  const int reason = errno;
  throw Error(Code::kProgramFailed, fmt::format("{}: {}", what, std::strerror(reason)),
              limit_help(reason, "see whether this machine lacks memory or processes (ulimit -u)"));
}

class Pipe {
 public:
  Pipe() {
    if (::pipe2(ends_.data(), O_CLOEXEC) != 0) fail_system("cannot make a pipe");
  }
  ~Pipe() {
    close_read();
    close_write();
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;

  int read_end() const { return ends_[0]; }
  int write_end() const { return ends_[1]; }
  void close_read() { close_end(0); }
  void close_write() { close_end(1); }

 private:
  void close_end(size_t end) {
    if (ends_[end] >= 0) ::close(ends_[end]);
    ends_[end] = -1;
  }
  std::array<int, 2> ends_{-1, -1};
};

// What the new process does between fork and exec. Only async-signal-safe calls: everything that
// allocates was done before the fork.
struct ExecPlan {
  std::vector<char*> argv;
  std::vector<std::string> variables;
  std::vector<char*> envp;  // into variables
  cpu_set_t cores;
  bool set_cores = false;
  pid_t parent = 0;

  [[noreturn]] void run(int output, int errors, int report) const {
    ::setpgid(0, 0);
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(127);  // the parent died before the line above
    const sigset_t stop = stop_signals();
    ::sigprocmask(SIG_UNBLOCK, &stop, nullptr);
    ::signal(SIGXFSZ, SIG_DFL);
    if (set_cores) ::sched_setaffinity(0, sizeof(cores), &cores);
    const int nothing = ::open("/dev/null", O_RDONLY);
    ::dup2(nothing, STDIN_FILENO);
    ::dup2(output, STDOUT_FILENO);
    ::dup2(errors, STDERR_FILENO);
    ::execve(argv[0], argv.data(), envp.data());
    const int reason = errno;
    [[maybe_unused]] const ssize_t written = ::write(report, &reason, sizeof(reason));
    ::_exit(127);
  }
};

ExecPlan make_plan(const ChildCommand& command) {
  ExecPlan plan;
  plan.argv.push_back(const_cast<char*>(command.program.c_str()));
  for (const auto& argument : command.arguments) {
    plan.argv.push_back(const_cast<char*>(argument.c_str()));
  }
  plan.argv.push_back(nullptr);
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string_view text(*variable);
    if (!command.variables.contains(std::string(text.substr(0, text.find('='))))) {
      plan.variables.emplace_back(text);
    }
  }
  for (const auto& [name, value] : command.variables) {
    plan.variables.push_back(name + "=" + value);
  }
  for (auto& variable : plan.variables) plan.envp.push_back(variable.data());
  plan.envp.push_back(nullptr);
  CPU_ZERO(&plan.cores);
  for (const int core : command.cores) CPU_SET(static_cast<size_t>(core), &plan.cores);
  plan.set_cores = !command.cores.empty();
  plan.parent = ::getpid();
  return plan;
}

// A running child and the streams it writes. Its whole group is dead and reaped when this ends.
class Running {
 public:
  explicit Running(const ChildCommand& command) {
    const ExecPlan plan = make_plan(command);
    Pipe report;
    pid_ = ::fork();
    if (pid_ < 0) fail_system("cannot start a process");
    if (pid_ == 0) plan.run(output_.write_end(), errors_.write_end(), report.write_end());
    ::setpgid(pid_, pid_);  // both sides do it, so that it holds whoever runs first
    output_.close_write();
    errors_.close_write();
    report.close_write();
    int reason = 0;
    if (::read(report.read_end(), &reason, sizeof(reason)) == sizeof(reason)) {
      ::waitpid(pid_, nullptr, 0);
      throw Error(Code::kProgramFailed,
                  fmt::format("cannot start {}: {}", command.program, std::strerror(reason)),
                  "build and install lockstep's programs together");
    }
    end_event_ = static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0));
  }

  ~Running() {
    if (!reaped_) kill_and_reap();
    if (end_event_ >= 0) ::close(end_event_);
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

  // Waits a moment for output, the end or an interrupt.
  void wait(int interrupts) {
    std::array<pollfd, 4> events = {pollfd{interrupts, POLLIN, 0}, pollfd{end_event_, POLLIN, 0},
                                    pollfd{output_.read_end(), POLLIN, 0},
                                    pollfd{errors_.read_end(), POLLIN, 0}};
    ::poll(events.data(), events.size(), kTickMs);
    drain(output_, output_text_);
    drain(errors_, errors_text_);
  }

  // Returns true once the child has ended and all that it wrote has been read.
  bool ended() {
    siginfo_t info{};
    if (!reaped_ &&
        ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
        info.si_pid == pid_) {
      kill_and_reap();
      while (drain(output_, output_text_) || drain(errors_, errors_text_)) {
      }
    }
    return reaped_;
  }

  // Sends SIGTERM and waits for a grace period that a second interrupt cuts short; the destructor
  // sends SIGKILL.
  void stop(const Interrupts& interrupts) {
    ::kill(-pid_, SIGTERM);
    const auto give_up = Clock::now() + kGrace;
    while (!ended() && Clock::now() < give_up && interrupts.take() == 0) {
      wait(interrupts.descriptor());
    }
  }

  ChildResult result(double seconds) {
    const int code = WIFSIGNALED(status_) ? 128 + WTERMSIG(status_) : WEXITSTATUS(status_);
    return {code, std::move(output_text_), std::move(errors_text_), seconds};
  }

 private:
  // Kills the group before its leader is reaped: until then its number cannot belong to
  // anyone else.
  void kill_and_reap() {
    ::kill(-pid_, SIGKILL);
    ::waitpid(pid_, &status_, 0);
    reaped_ = true;
    // A program that a signal ended could not remove its board itself.
    if (WIFSIGNALED(status_)) remove_stale_boards();
  }

  // Returns true if something was read. Never blocks; closes a stream that has ended.
  static bool drain(Pipe& pipe, std::string& text) {
    pollfd event{pipe.read_end(), POLLIN, 0};
    if (pipe.read_end() < 0 || ::poll(&event, 1, 0) <= 0) return false;
    std::array<char, 1 << 14> buffer;
    const ssize_t count = ::read(pipe.read_end(), buffer.data(), buffer.size());
    if (count <= 0) {
      pipe.close_read();
      return false;
    }
    text.append(buffer.data(), static_cast<size_t>(count));
    if (text.size() > 2 * kKeptBytes) text.erase(0, text.size() - kKeptBytes);
    return true;
  }

  Pipe output_;
  Pipe errors_;
  std::string output_text_;
  std::string errors_text_;
  pid_t pid_ = -1;
  int end_event_ = -1;  // readable when the child has ended
  int status_ = 0;
  bool reaped_ = false;
};

std::string last_lines(const std::string& text, size_t count) {
  const size_t end = text.find_last_not_of("\n ") + 1;
  size_t begin = end;
  while (begin > 0 && (text[begin - 1] != '\n' || --count > 0)) --begin;
  return text.substr(begin, end - begin);
}

}  // namespace

Interrupts::Interrupts() {
  const sigset_t set = stop_signals();
  ::sigprocmask(SIG_BLOCK, &set, nullptr);
  descriptor_ = ::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  if (descriptor_ < 0) fail_system("cannot watch for signals");
}

Interrupts::~Interrupts() {
  ::close(descriptor_);
  const sigset_t set = stop_signals();
  ::sigprocmask(SIG_UNBLOCK, &set, nullptr);
}

int Interrupts::take() const {
  signalfd_siginfo info;
  return ::read(descriptor_, &info, sizeof(info)) == sizeof(info) ? static_cast<int>(info.ssi_signo)
                                                                  : 0;
}

ChildResult run_child(const ChildCommand& command, const Interrupts& interrupts) {
  if (const int signal = interrupts.take(); signal != 0) throw Interrupted{signal};
  const auto start = Clock::now();
  Running child(command);
  while (!child.ended()) {
    child.wait(interrupts.descriptor());
    command.tick();
    if (const int signal = interrupts.take(); signal != 0) {
      child.stop(interrupts);
      throw Interrupted{signal};
    }
    if (Clock::now() - start > command.deadline) {
      child.stop(interrupts);
      throw Error(Code::kProgramFailed,
                  fmt::format("{} did not end within {} s and was stopped", command.program,
                              command.deadline.count()),
                  "make the sizes smaller, or see whether the machine is overloaded");
    }
  }
  return child.result(std::chrono::duration<double>(Clock::now() - start).count());
}

ChildResult run_child_or_throw(const ChildCommand& command, const Interrupts& interrupts) {
  ChildResult result = run_child(command, interrupts);
  if (result.exit_code == 0) return result;
  const std::string name = std::filesystem::path(command.program).filename().string();
  const std::string how = result.exit_code > 128
                              ? fmt::format("was killed by signal {} ({})", result.exit_code - 128,
                                            ::strsignal(result.exit_code - 128))
                              : fmt::format("ended with exit code {}", result.exit_code);
  std::string line = name;
  for (const auto& argument : command.arguments) line += " " + argument;
  std::string said = last_lines(result.errors, kQuotedLines);
  if (said.empty()) said = last_lines(result.output, kQuotedLines);
  throw ChildFailed(
      fmt::format("{} {}", name, how), "run that command by itself to see more",
      {"the command was: " + line, said.empty() ? "it wrote nothing" : "it said:\n" + said},
      result.exit_code);
}

std::vector<std::string> program_folders() {
  const auto folder = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  return {folder.string(), (folder / LOCKSTEP_PROGRAMS_FROM_BIN).lexically_normal().string()};
}

std::string sibling_path(const std::string& name) {
  const auto folders = program_folders();
  for (const auto& folder : folders) {
    const std::string path = folder + "/" + name;
    if (::access(path.c_str(), X_OK) == 0) return path;
  }
  throw Error(Code::kProgramFailed,
              fmt::format("there is no program {} in {}", name, fmt::join(folders, " or ")),
              "build and install lockstep's programs together");
}

}  // namespace lockstep::cli
