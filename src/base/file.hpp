#pragma once

#include <sys/resource.h>
#include <sys/types.h>
#include <unistd.h>

#include <cstddef>
#include <span>
#include <string>

namespace lockstep {

/// Owns a file descriptor and closes it.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

/// Guard: this process may open as many files as its hard limit allows. The usual soft limit, 1024,
/// is for programs that use select().
class ManyFiles {
 public:
  ManyFiles();
  ~ManyFiles();
  ManyFiles(const ManyFiles&) = delete;
  ManyFiles& operator=(const ManyFiles&) = delete;

  const rlimit& before() const { return before_; }

 private:
  rlimit before_{};
};

/// Raises this process's limit on open files, as far as it may, so that `more` can be opened. Does
/// nothing if the limit is high enough. Returns whether they can be.
bool make_room_for_files(int more);

/// Returns a whole file as text. An Error names the path and the reason.
std::string read_text_file(const std::string& path);

/// The same; "" for a file that is not there or cannot be read.
std::string read_text_or_empty(const std::string& path);

/// Writes a new file beside `path`, flushes it to disk and renames it, so that readers see either
/// the old file or the new one. The pieces are written one after the other. The file gets `mode`,
/// less what the umask takes.
void write_file_atomically(const std::string& path,
                           std::span<const std::span<const std::byte>> pieces, mode_t mode = 0644);
void write_file_atomically(const std::string& path, const std::string& text, mode_t mode = 0644);

/// The remedy for an errno that reports a limit of this process: on open files (EMFILE, ENFILE) or
/// on a file's size (EFBIG). Returns `otherwise` for any other errno. `files_needed` is the number
/// of files that the caller keeps open; 0 if it does not know.
std::string limit_help(int error, std::string otherwise, int files_needed = 0);

}  // namespace lockstep
