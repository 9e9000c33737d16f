#include "launch/console.hpp"

#include <fmt/format.h>
#include <limits.h>
#include <poll.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "lockstep/clock.hpp"
#include "lockstep/table.hpp"

namespace lockstep {
namespace {

constexpr size_t kFullBytes = 1 << 20;
constexpr std::array kColours = {36, 32, 33, 35, 34, 96, 92, 95};  // ANSI; red is for errors

bool may_write(int fd, int timeout_ms) {
  pollfd event{fd, POLLOUT, 0};
  return ::poll(&event, 1, timeout_ms) > 0;
}

}  // namespace

Console::Console()
    : out_{STDOUT_FILENO, ::isatty(STDOUT_FILENO) == 1, may_style(STDOUT_FILENO)},
      err_{STDERR_FILENO, ::isatty(STDERR_FILENO) == 1, may_style(STDERR_FILENO)} {}

void Console::rank_line(int rank, Stream stream, std::string_view line, char end) {
  Sink& to = sink(stream);
  if (end == '\r' && !to.terminal) return;
  close_overwritten_line(to);
  std::string text;
  if (to.styled) {
    const int colour = kColours[static_cast<size_t>(rank) % kColours.size()];
    text = fmt::format("\x1b[{}m[rank {}]\x1b[0m {}", colour, rank, line);
  } else {
    text = fmt::format("[rank {}] {}", rank, line);
  }
  // A whole line in one go, its end included: other writers to this terminal cannot split it.
  text += end;
  overwriting_ = end == '\r';
  write(to, text);
}

void Console::message(std::string_view text) {
  close_overwritten_line(err_);
  write(err_, fmt::format("{}\n", text));
}

// The cursor stands at the start of a line that something shorter may follow.
void Console::close_overwritten_line(const Sink& next) {
  if (!overwriting_) return;
  overwriting_ = false;
  Sink& shown = next.terminal ? (next.fd == out_.fd ? out_ : err_) : (out_.terminal ? out_ : err_);
  write(shown, shown.styled ? "\x1b[K" : "\n");
}

void Console::write(Sink& to, std::string_view text) {
  if (to.broken) return;
  to.waiting.append(text);
  flush();
}

void Console::flush() {
  flush(out_);
  flush(err_);
}

// A pipe that polls writable takes PIPE_BUF bytes without waiting.
void Console::flush(Sink& to) {
  size_t done = 0;
  while (done < to.waiting.size() && may_write(to.fd, 0)) {
    const size_t piece = std::min<size_t>(PIPE_BUF, to.waiting.size() - done);
    const ssize_t count = ::write(to.fd, to.waiting.data() + done, piece);
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) break;
    if (count < 0) {
      const int reason = errno;
      to.broken = true;
      to.waiting.clear();
      // A reader that has gone wants no more; a full disk is worth a word.
      if (&to == &out_ && reason != EPIPE) {
        message(
            fmt::format("lockstep: cannot write standard output: {}; the training goes on, "
                        "what ranks print is in their log files only (--log-dir keeps them)",
                        std::strerror(reason)));
      }
      return;
    }
    done += static_cast<size_t>(count);
  }
  to.waiting.erase(0, done);
}

void Console::flush_until(int64_t deadline_ns) {
  flush();
  while (pending() && monotonic_ns() < deadline_ns) {
    may_write(out_.waiting.empty() ? err_.fd : out_.fd, 20);
    flush();
  }
}

bool Console::full() const {
  return out_.waiting.size() > kFullBytes || err_.waiting.size() > kFullBytes;
}

bool Console::pending(Stream stream) const {
  return stream == Stream::kOut ? !out_.waiting.empty() : !err_.waiting.empty();
}

}  // namespace lockstep
