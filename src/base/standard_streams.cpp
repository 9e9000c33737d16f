#include "base/standard_streams.hpp"

#include <fcntl.h>
#include <signal.h>
#include <stdio_ext.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>

namespace lockstep {
namespace {

/// Keeps a write to a pipe without a reader from raising SIGPIPE in this thread.
class PipeSignalBlock {
 public:
  PipeSignalBlock() {
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    sigset_t pending;
    ::sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    ::pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~PipeSignalBlock() {
    const timespec at_once{};
    if (!was_pending_) ::sigtimedwait(&pipe_, nullptr, &at_once);
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  PipeSignalBlock(const PipeSignalBlock&) = delete;
  PipeSignalBlock& operator=(const PipeSignalBlock&) = delete;

 private:
  sigset_t pipe_;
  sigset_t before_;
  bool was_pending_;
};

}  // namespace

void reserve_standard_descriptors() {
  for (const int standard : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(standard, F_GETFD) >= 0 || errno != EBADF) continue;
    int fd = ::open("/dev/null", O_RDWR);
    if (fd < 0) fd = ::open("/", O_PATH);  // no /dev here: a descriptor that refuses every write
    if (fd < 0 || fd == standard) continue;
    ::dup2(fd, standard);
    ::close(fd);
  }
}

void send_output_by_line() {
  struct stat target {};
  if (::fstat(STDOUT_FILENO, &target) != 0) return;
  if (!S_ISFIFO(target.st_mode) && !S_ISSOCK(target.st_mode)) return;
  if (__flbf(stdout) != 0 || __fbufsize(stdout) == 1) return;  // 1: the program wants no buffer
  // With a buffer of its own: glibc flushes and starts afresh then, where a mere change of the mode
  // would let putchar fill what is left of the old one.
  static std::array<char, BUFSIZ> buffer;
  std::setvbuf(stdout, buffer.data(), _IOLBF, buffer.size());
}

void print_error(std::string_view text) noexcept {
  const PipeSignalBlock block;
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

}  // namespace lockstep
