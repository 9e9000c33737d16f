#include "launch/output.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "base/limits.hpp"
#include "launch/log_folder.hpp"
#include "lockstep/clock.hpp"
#include "lockstep/error.hpp"
#include "lockstep/units.hpp"

namespace lockstep {
namespace {

// Long enough for a failing rank's last words and its end to arrive together: Python with libtorch
// takes half a second to leave.
constexpr int64_t kHoldNs = 1'000'000'000;
constexpr size_t kLastLines = 6;
constexpr size_t kMostHeld = 10'000;

constexpr size_t kReadBytes = 1 << 16;
constexpr int kFilesOfRank = 6;  // two log files, two pipes of two ends
constexpr int kFilesOfLauncher = 32;

}  // namespace

int files_for_ranks(int ranks) {
  return kFilesOfRank * ranks + kFilesOfLauncher;
}

OutputRouter::OutputRouter(Console& console, const ConsolePlan& plan, std::string folder, int ranks)
    : console_(console),
      plan_(plan),
      folder_(std::move(folder)),
      ranks_(ranks),
      buffer_(kReadBytes) {}

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
        Code::kLaunch, fmt::format("cannot make a pipe: {}", std::strerror(reason)),
        limit_help(reason, "see whether this machine lacks memory", files_for_ranks(ranks_)));
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
    // One turn each, so that a rank that floods cannot starve the others.
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

// A full disk must not end the training: what the file does not take is counted, and the next write
// tries again.
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
      "lockstep: cannot write {}: {}; what the log files do not take is lost, the training goes on",
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
  console_.message(fmt::format("lockstep: {} log file{} in {} lack{} {} lines ({})", files,
                               files == 1 ? "" : "s", folder_, files == 1 ? "s" : "", lines,
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
  const auto place = static_cast<size_t>(&pipe - pipes_.data());
  held_.push_back({monotonic_ns() + kHoldNs, place, std::string(line)});
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
