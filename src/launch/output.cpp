#include "launch/output.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "base/counted.hpp"
#include "base/file.hpp"
#include "lockstep/clock.hpp"
#include "lockstep/error.hpp"
#include "lockstep/table.hpp"
#include "lockstep/units.hpp"

namespace lockstep {
namespace {

constexpr size_t kFullBytes = 1 << 20;
constexpr std::array kColors = {36, 32, 33, 35, 34, 96, 92, 95};  // ANSI; red is for errors

bool may_write(int fd, int timeout_ms) {
  pollfd event{fd, POLLOUT, 0};
  return ::poll(&event, 1, timeout_ms) > 0;
}

void make_folder(const std::string& path) {
  if (::mkdir(path.c_str(), 0700) == 0) return;
  throw Error(Code::kFileWrite,
              fmt::format("cannot create the log folder {}: {}", path, std::strerror(errno)),
              "name another one with --log-dir, or set TMPDIR");
}

// Long enough for a failing rank's last lines and its exit to arrive together: Python with libtorch
// takes half a second to exit.
constexpr int64_t kHoldNs = 1'000'000'000;
constexpr size_t kLastLines = 6;
constexpr size_t kMostHeld = 10'000;

constexpr size_t kReadBytes = 1 << 16;
constexpr int kFilesOfRank = 6;  // two log files, two pipes of two ends
constexpr int kFilesOfLauncher = 32;

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
    const int color = kColors[static_cast<size_t>(rank) % kColors.size()];
    text = fmt::format("\x1b[{}m[rank {}]\x1b[0m {}", color, rank, line);
  } else {
    text = fmt::format("[rank {}] {}", rank, line);
  }
  // One write for the whole line including its end: other writers to this terminal cannot split it.
  text += end;
  overwriting_ = end == '\r';
  write(to, text);
}

void Console::message(std::string_view text) {
  close_overwritten_line(err_);
  write(err_, fmt::format("{}\n", text));
}

// The cursor is at the start of a line that something shorter may follow.
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

// A pipe that polls writable takes PIPE_BUF bytes without blocking.
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
      // A reader that left wants no more; a full disk is worth a message.
      if (&to == &out_ && reason != EPIPE) {
        message(
            fmt::format("lockstep: cannot write standard output: {}; the training goes on, "
                        "the ranks' output is only in their log files (--log-dir keeps them)",
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

void LineSplitter::add(std::string_view bytes, const Sink& sink) {
  while (!bytes.empty()) {
    if (returned_) {
      const bool both = bytes.front() == '\n';
      sink(line_, both ? '\n' : '\r');
      line_.clear();
      returned_ = false;
      if (both) bytes.remove_prefix(1);
      continue;
    }
    const size_t end = bytes.find_first_of("\n\r");
    const size_t take = std::min({end, bytes.size(), kLongestLine - line_.size()});
    line_.append(bytes.substr(0, take));
    bytes.remove_prefix(take);
    if (!bytes.empty() && bytes.front() == '\r') {
      returned_ = true;
      bytes.remove_prefix(1);
    } else if (!bytes.empty() && bytes.front() == '\n') {
      sink(line_, '\n');
      line_.clear();
      bytes.remove_prefix(1);
    } else if (!bytes.empty()) {  // the line is full, and goes on
      sink(line_, '\n');
      line_.clear();
    }
  }
}

void LineSplitter::finish(const Sink& sink) {
  if (!line_.empty()) sink(line_, '\n');
  line_.clear();
  returned_ = false;
}

LogFolder::LogFolder(std::string path, bool keep) : path_(std::move(path)), keep_(keep) {
  const auto above = std::filesystem::path(path_).parent_path();
  std::error_code failed;  // make_folder below reports the reason
  if (keep_ && !above.empty()) std::filesystem::create_directories(above, failed);
  make_folder(path_);
}

LogFolder::~LogFolder() {
  std::error_code ignored;
  if (!keep_) std::filesystem::remove_all(path_, ignored);
}

std::string LogFolder::attempt_folder(int attempt) const {
  const std::string folder = fmt::format("{}/{}", path_, attempt);
  if (!std::filesystem::is_directory(folder)) make_folder(folder);
  return folder;
}

int files_for_ranks(int ranks) {
  return kFilesOfRank * ranks + kFilesOfLauncher;
}

OutputRouter::OutputRouter(Console& console, const ConsolePlan& plan, std::string folder, int ranks)
    : console_(console),
      plan_(plan),
      folder_(std::move(folder)),
      ranks_(ranks),
      buffer_(kReadBytes) {}

std::string log_file(const std::string& attempt_folder, int rank, Stream stream) {
  return fmt::format("{}/rank{}.{}", attempt_folder, rank, stream == Stream::kOut ? "out" : "err");
}

OutputRouter::~OutputRouter() {
  for (const Pipe& pipe : pipes_) {
    if (pipe.fd >= 0) ::close(pipe.fd);
    ::close(pipe.file);
  }
}

OutputEnds OutputRouter::open(int rank, int local_rank) {
  const int output = open_pipe(rank, local_rank, Stream::kOut);
  return {output, open_pipe(rank, local_rank, Stream::kErr)};
}

int OutputRouter::open_pipe(int rank, int local_rank, Stream stream) {
  const std::string path = log_file(folder_, rank, stream);
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (file < 0) {
    const int reason = errno;
    throw Error(Code::kFileWrite, fmt::format("cannot write {}: {}", path, std::strerror(reason)),
                limit_help(reason, "name another folder with --log-dir", files_for_ranks(ranks_)));
  }
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
    const int reason = errno;
    ::close(file);
    throw Error(
        Code::kLaunch, fmt::format("cannot create a pipe: {}", std::strerror(reason)),
        limit_help(reason, "check whether this machine is out of memory", files_for_ranks(ranks_)));
  }
  ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
  pipes_.push_back({rank, local_rank, stream, decide_shown(plan_, rank, local_rank, stream),
                    ends[0], file, path});
  return ends[1];
}

void OutputRouter::add_to(std::vector<pollfd>& events) const {
  if (console_.full()) return;
  for (const Pipe& pipe : pipes_) {
    if (pipe.fd >= 0) events.push_back({pipe.fd, POLLIN, 0});
  }
}

void OutputRouter::read_available() {
  for (Pipe& pipe : pipes_) {
    // One turn each, so that a rank that writes a lot cannot starve the others.
    if (pipe.fd >= 0 && !console_.full()) read_some(pipe);
  }
}

bool OutputRouter::read_some(Pipe& pipe) {
  const ssize_t count = ::read(pipe.fd, buffer_.data(), buffer_.size());
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (count <= 0) {
    ::close(pipe.fd);
    pipe.fd = -1;
    return false;
  }
  const std::string_view bytes(buffer_.data(), static_cast<size_t>(count));
  write_log(pipe, bytes);
  pipe.lines.add(bytes, [&](std::string_view line, char end) { take_line(pipe, line, end); });
  return true;
}

// A full disk must not end the training: bytes that the file does not take are counted, and the
// next write tries again.
void OutputRouter::write_log(Pipe& pipe, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::write(pipe.file, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    bytes.remove_prefix(static_cast<size_t>(count));
  }
  if (bytes.empty()) return;
  const int reason = errno;
  pipe.lost_bytes += static_cast<int64_t>(bytes.size());
  pipe.lost_lines += std::count(bytes.begin(), bytes.end(), '\n');
  if (loss_reported_) return;
  loss_reported_ = true;
  console_.message(fmt::format(
      "lockstep: cannot write {}: {}; the log files will be incomplete, the training goes on",
      pipe.path, std::strerror(reason)));
}

void OutputRouter::report_lost() const {
  int64_t bytes = 0;
  int64_t lines = 0;
  int files = 0;
  for (const Pipe& pipe : pipes_) {
    bytes += pipe.lost_bytes;
    lines += pipe.lost_lines;
    files += pipe.lost_bytes > 0 ? 1 : 0;
  }
  if (files == 0) return;
  console_.message(fmt::format("lockstep: {} in {} lack{} {} ({})", counted(files, "log file"),
                               folder_, files == 1 ? "s" : "", counted(lines, "line"),
                               format_bytes(bytes)));
}

void OutputRouter::take_line(Pipe& pipe, std::string_view line, char end) {
  if (pipe.shown == Shown::kLive) {
    console_.rank_line(pipe.rank, pipe.stream, line, end);
    return;
  }
  if (pipe.stream == Stream::kOut || end == '\r') return;
  pipe.last.emplace_back(line);
  if (pipe.last.size() > kLastLines) pipe.last.pop_front();
  ++pipe.unshown;
  if (pipe.shown == Shown::kHidden || silenced_) return;
  if (held_.size() == kMostHeld) release_held(held_.front().due_ns);
  const auto index = static_cast<size_t>(&pipe - pipes_.data());
  held_.push_back({monotonic_ns() + kHoldNs, index, std::string(line)});
}

void OutputRouter::release_held(int64_t now_ns) {
  while (!held_.empty() && held_.front().due_ns <= now_ns) {
    Pipe& pipe = pipes_[held_.front().pipe];
    console_.rank_line(pipe.rank, Stream::kErr, held_.front().text, '\n');
    --pipe.unshown;
    held_.pop_front();
  }
}

void OutputRouter::silence_others() {
  silenced_ = true;
  held_.clear();
}

void OutputRouter::finish() {
  for (Pipe& pipe : pipes_) {
    while (pipe.fd >= 0 && read_some(pipe)) {
    }
    pipe.lines.finish([&](std::string_view line, char end) { take_line(pipe, line, end); });
  }
  report_lost();
}

std::vector<std::string> OutputRouter::last_errors(int local_rank) const {
  const auto pipe = std::find_if(pipes_.begin(), pipes_.end(), [&](const Pipe& candidate) {
    return candidate.local_rank == local_rank && candidate.stream == Stream::kErr;
  });
  const size_t count = std::min(pipe->unshown, pipe->last.size());
  return {pipe->last.end() - static_cast<long>(count), pipe->last.end()};
}

}  // namespace lockstep
