#include "launch/output.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "launch/log_folder.hpp"
#include "lockstep/clock.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

// Long enough for a failing rank's last words and its end to arrive together: Python with libtorch
// takes half a second to leave.
constexpr int64_t kHoldNs = 1'000'000'000;
constexpr size_t kLastLines = 6;
constexpr size_t kMostHeld = 10'000;

void write_file(int file, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::write(file, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return;  // a full disk must not end the training; the console still has it
    bytes.remove_prefix(static_cast<size_t>(count));
  }
}

}  // namespace

OutputRouter::OutputRouter(Console& console, const ConsolePlan& plan, std::string folder)
    : console_(console), plan_(plan), folder_(std::move(folder)) {}

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
    throw Error(Code::kFileWrite, fmt::format("cannot write {}: {}", path, std::strerror(errno)),
                "name another folder with --log-dir");
  }
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
    const int reason = errno;
    ::close(file);
    throw Error(Code::kLaunch, fmt::format("cannot make a pipe: {}", std::strerror(reason)),
                "raise the number of descriptors: ulimit -n 4096");
  }
  ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
  pipes_.push_back(
      {rank, local_rank, stream, decide_shown(plan_, rank, local_rank, stream), ends[0], file});
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
  std::array<char, 1 << 16> buffer;
  const ssize_t count = ::read(pipe.fd, buffer.data(), buffer.size());
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (count <= 0) {
    ::close(pipe.fd);
    pipe.fd = -1;
    return false;
  }
  const std::string_view bytes(buffer.data(), static_cast<size_t>(count));
  write_file(pipe.file, bytes);
  pipe.lines.add(bytes, [&](std::string_view line, char end) { take_line(pipe, line, end); });
  return true;
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
}

std::vector<std::string> OutputRouter::last_errors(int local_rank) const {
  const auto pipe = std::find_if(pipes_.begin(), pipes_.end(), [&](const Pipe& candidate) {
    return candidate.local_rank == local_rank && candidate.stream == Stream::kErr;
  });
  const size_t count = std::min(pipe->unshown, pipe->last.size());
  return {pipe->last.end() - static_cast<long>(count), pipe->last.end()};
}

}  // namespace lockstep
