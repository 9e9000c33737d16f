#include "cli/top/top_terminal.hpp"

#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string_view>

#include "base/file.hpp"
#include "lockstep/clock.hpp"
#include "lockstep/table.hpp"

namespace lockstep::cli {
namespace {

// Alternate screen, cursor hidden, no wrapping at the right edge; and back.
constexpr std::string_view kEnter = "\033[?1049h\033[?25l\033[?7l\033[2J";
constexpr std::string_view kLeave = "\033[?7h\033[?25h\033[?1049l";
constexpr std::array kJobSignals = {SIGWINCH, SIGTSTP, SIGCONT};
constexpr std::array kDeadlySignals = {SIGSEGV, SIGBUS, SIGABRT, SIGILL, SIGFPE, SIGQUIT};

// What a signal handler needs to restore the terminal: plain data, since it may touch nothing else.
struct Undo {
  termios modes;  // as they were found
  volatile sig_atomic_t modes_changed;
  volatile sig_atomic_t entered;
};
Undo undo{};

bool write_all(std::string_view text) {
  while (!text.empty()) {
    const ssize_t count = ::write(STDOUT_FILENO, text.data(), text.size());
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) {
      pollfd event{STDOUT_FILENO, POLLOUT, 0};
      ::poll(&event, 1, 1000);
      continue;
    }
    if (count <= 0) return false;
    text.remove_prefix(static_cast<size_t>(count));
  }
  return true;
}

// Only calls that a signal handler may make. Best effort: the terminal may be gone.
void restore_terminal() {
  if (undo.entered != 0) {
    [[maybe_unused]] const ssize_t written = ::write(STDOUT_FILENO, kLeave.data(), kLeave.size());
  }
  if (undo.modes_changed != 0) ::tcsetattr(STDIN_FILENO, TCSADRAIN, &undo.modes);
  undo.entered = 0;
  undo.modes_changed = 0;
}

void restore_and_die(int signal) {
  restore_terminal();
  ::raise(signal);  // the handler was one-shot: now the signal takes its default action
}

void watch_deadly_signals(bool watch) {
  struct sigaction action {};
  action.sa_handler = watch ? restore_and_die : SIG_DFL;
  if (watch) action.sa_flags = SA_RESETHAND | SA_NODEFER;
  for (const int signal : kDeadlySignals) ::sigaction(signal, &action, nullptr);
}

sigset_t job_signals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : kJobSignals) sigaddset(&set, signal);
  return set;
}

size_t width_without_colours(const std::string& line) {
  std::string plain;
  for (size_t at = 0; at < line.size(); ++at) {
    if (line[at] == '\033') {
      at = std::min(line.find('m', at), line.size());
    } else {
      plain += line[at];
    }
  }
  return display_width(plain);
}

}  // namespace

Screen::Screen(const Interrupts& interrupts)
    : interrupts_(interrupts), keys_(::isatty(STDIN_FILENO) == 1) {
  const sigset_t set = job_signals();
  signals_ = ::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  if (signals_ < 0) {
    const int reason = errno;
    throw Error(Code::kProgramFailed,
                std::string("cannot watch for signals: ") + std::strerror(reason),
                limit_help(reason, "see whether this machine lacks memory"));
  }
  ::sigprocmask(SIG_BLOCK, &set, nullptr);
  if (keys_) keys_ = ::tcgetattr(STDIN_FILENO, &undo.modes) == 0;
  watch_deadly_signals(true);
  enter();
}

Screen::~Screen() {
  restore_terminal();
  watch_deadly_signals(false);
  const sigset_t set = job_signals();
  ::sigprocmask(SIG_UNBLOCK, &set, nullptr);
  ::close(signals_);
}

void Screen::enter() {
  if (keys_) {
    termios modes = undo.modes;
    modes.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);  // Ctrl-C and Ctrl-Z stay signals
    modes.c_cc[VMIN] = 0;
    modes.c_cc[VTIME] = 0;
    undo.modes_changed = 1;
    ::tcsetattr(STDIN_FILENO, TCSADRAIN, &modes);
  }
  undo.entered = 1;
  if (!write_all(kEnter)) gone_ = true;
}

// Restores the terminal and stops as Ctrl-Z does; continues when the shell says so.
void Screen::suspend() {
  restore_terminal();
  sigset_t stop;
  sigemptyset(&stop);
  sigaddset(&stop, SIGTSTP);
  ::raise(SIGTSTP);
  ::sigprocmask(SIG_UNBLOCK, &stop, nullptr);  // here it stops
  ::sigprocmask(SIG_BLOCK, &stop, nullptr);
  enter();
}

Screen::Size Screen::size() const {
  winsize window{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &window) != 0 || window.ws_col == 0 ||
      window.ws_row == 0) {
    return {80, 24};
  }
  return {window.ws_col, window.ws_row};
}

void Screen::show(const std::vector<std::string>& lines) {
  const size_t width = size().width;
  std::string text = "\033[H";
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) text += "\r\n";
    text += lines[i];
    // After a full line the cursor is still on its last character, which would be erased.
    if (width_without_colours(lines[i]) < width) text += "\033[K";
  }
  text += "\033[J";  // clears what a longer screen left below
  if (!write_all(text)) gone_ = true;
}

void Screen::read_keys() {
  std::array<char, 64> keys{};
  const ssize_t count = ::read(STDIN_FILENO, keys.data(), keys.size());
  if (count < 0 && errno != EINTR && errno != EAGAIN) gone_ = true;
  if (count > 0) typed_.append(keys.data(), static_cast<size_t>(count));
}

Wake Screen::wait_until(int64_t deadline_ns) {
  while (!gone_) {
    const int64_t left_ms = (deadline_ns - monotonic_ns() + 999'999) / 1'000'000;
    if (left_ms <= 0) return Wake::kTime;
    std::array<pollfd, 3> events = {pollfd{interrupts_.descriptor(), POLLIN, 0},
                                    pollfd{signals_, POLLIN, 0},
                                    pollfd{keys_ ? STDIN_FILENO : -1, POLLIN, 0}};
    ::poll(events.data(), events.size(), static_cast<int>(std::min<int64_t>(left_ms, 1 << 30)));
    const int signal = interrupts_.take();
    if (signal == SIGINT) return Wake::kQuit;
    if (signal != 0) throw Interrupted{signal};
    if (events[2].revents != 0) read_keys();
    if (!typed_.empty()) return Wake::kKeys;
    if ((events[2].revents & (POLLHUP | POLLERR | POLLNVAL)) != 0) break;
    signalfd_siginfo info{};
    if (::read(signals_, &info, sizeof(info)) != sizeof(info)) continue;
    if (info.ssi_signo == SIGTSTP) suspend();
    if (info.ssi_signo == SIGCONT) enter();  // the shell may have changed modes in between
    return Wake::kRedraw;
  }
  return Wake::kQuit;
}

}  // namespace lockstep::cli
