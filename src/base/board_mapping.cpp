#include "board_mapping.hpp"

#include <fcntl.h>
#include <sys/stat.h>

#include "base/limits.hpp"
#include "descriptor.hpp"

namespace lockstep {

using namespace board_layout;

int64_t file_bytes_for(int64_t ranks) {
  return kHeaderBytes + ranks * kPageBytes;
}

namespace {

void check_header(const std::string& path, const Header& header, int64_t file_bytes) {
  if (header.magic.load(std::memory_order_acquire) != kMagic) {
    board_error(fmt::format("{} is not a board, or is still being made", path),
                "name the board of a running job");
  }
  if (header.layout_version != kLayoutVersion || header.page_bytes != kPageBytes) {
    board_error(
        fmt::format("the board {} has layout {} with pages of {} bytes; this program reads layout "
                    "{} with {}",
                    path, header.layout_version, header.page_bytes, kLayoutVersion, kPageBytes),
        "use the same version of lockstep for the launcher, the program and `lockstep top`");
  }
  if (header.ranks < 1 || file_bytes_for(header.ranks) != file_bytes) {
    board_error(fmt::format("the board {} has {} bytes, but {} ranks need {}", path, file_bytes,
                            header.ranks, file_bytes_for(header.ranks)),
                "it is damaged: remove it and start the run again");
  }
}

}  // namespace

std::shared_ptr<const BoardMapping> open_mapping(const std::string& path, Access access) {
  const int mode = access == Access::kWrite ? O_RDWR : O_RDONLY;
  const Descriptor file(::open(path.c_str(), mode | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  struct stat status {};
  if (file.get() < 0 || ::fstat(file.get(), &status) != 0) {
    const int reason = errno;
    board_error(fmt::format("cannot open the board {}: {}", path, std::strerror(reason)),
                limit_help(reason, reason == ENOENT ? "the run has ended, or was never started"
                                                    : "name the board of a running job"));
  }
  if (!S_ISREG(status.st_mode))
    board_error(fmt::format("{} is not a board: not a regular file", path), "name a board");
  if (status.st_uid != ::geteuid()) {
    board_error(fmt::format("the board {} belongs to user {}, this process runs as {}", path,
                            status.st_uid, ::geteuid()),
                "open only your own runs");
  }
  if (status.st_size < kHeaderBytes) {
    board_error(
        fmt::format("{} has {} bytes; a board has at least {}", path, status.st_size, kHeaderBytes),
        "it is damaged or still being made: remove it if no run uses it");
  }
  const int64_t ranks = (status.st_size - kHeaderBytes) / kPageBytes;
  auto mapping =
      BoardMapping::map(path, file.get(), status.st_size, static_cast<int>(ranks), access);
  check_header(path, mapping->header(), status.st_size);
  return mapping;
}

}  // namespace lockstep
