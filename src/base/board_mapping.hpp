#pragma once

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <vector>

#include "board_layout.hpp"
#include "lockstep/error.hpp"

namespace lockstep {

[[noreturn]] inline void board_error(const std::string& message, const std::string& help,
                                     std::vector<std::string> notes = {}) {
  throw Error(Code::kBoard, message, help, std::move(notes));
}

/// Removes the maker's file at the end. A forked child holds a copy, but the file is not its own.
class FileRemoval {
 public:
  explicit FileRemoval(std::string path) : path_(std::move(path)), maker_pid_(::getpid()) {}
  ~FileRemoval() {
    if (maker_pid_ == ::getpid()) ::unlink(path_.c_str());
  }
  FileRemoval(const FileRemoval&) = delete;
  FileRemoval& operator=(const FileRemoval&) = delete;

 private:
  std::string path_;
  pid_t maker_pid_;
};

enum class Access { kRead, kWrite };

/// A mapped board file, shared by a Board and the pages taken from it.
class BoardMapping {
 public:
  BoardMapping(std::string path, void* memory, int64_t bytes, int ranks, Access access)
      : path_(std::move(path)), memory_(memory), bytes_(bytes), ranks_(ranks), access_(access) {}
  ~BoardMapping() { ::munmap(memory_, static_cast<size_t>(bytes_)); }
  BoardMapping(const BoardMapping&) = delete;
  BoardMapping& operator=(const BoardMapping&) = delete;

  /// `ranks` must be what the file's size has room for.
  static std::shared_ptr<const BoardMapping> map(const std::string& path, int fd, int64_t bytes,
                                                 int ranks, Access access) {
    const int protection = access == Access::kWrite ? PROT_READ | PROT_WRITE : PROT_READ;
    void* memory = ::mmap(nullptr, static_cast<size_t>(bytes), protection, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) {
      board_error(fmt::format("cannot map the board {}: {}", path, std::strerror(errno)),
                  "check the memory limits (ulimit -v)");
    }
    return std::make_shared<const BoardMapping>(path, memory, bytes, ranks, access);
  }

  const std::string& path() const { return path_; }
  int ranks() const { return ranks_; }
  Access access() const { return access_; }

  void* header_address() const { return memory_; }
  board_layout::Header& header() const {
    return *std::launder(static_cast<board_layout::Header*>(memory_));
  }

  void* page_address(int rank) const {
    return static_cast<std::byte*>(memory_) + board_layout::kHeaderBytes +
           rank * board_layout::kPageBytes;
  }
  board_layout::RankPage& page(int rank) const {
    return *std::launder(static_cast<board_layout::RankPage*>(page_address(rank)));
  }

  /// Held while a rank writes a value of several words: its threads may communicate at once.
  std::mutex& writing() const { return writing_; }

  void check_rank(int rank) const {
    if (rank >= 0 && rank < ranks_) return;
    board_error(fmt::format("the board {} has no rank {}", path_, rank),
                fmt::format("its ranks are 0 to {}", ranks_ - 1));
  }

 private:
  std::string path_;
  void* memory_;
  int64_t bytes_;
  int ranks_;  // a copy: the file's own number may be overwritten after it was checked
  Access access_;
  mutable std::mutex writing_;
};

/// Bytes of the file of a board with that many ranks.
int64_t file_bytes_for(int64_t ranks);

/// Maps an existing board; a foreign, cut or outdated one is an Error.
std::shared_ptr<const BoardMapping> open_mapping(const std::string& path, Access access);

}  // namespace lockstep
