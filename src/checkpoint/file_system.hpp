#pragma once

#include <sys/types.h>

#include <cstddef>
#include <span>
#include <string>

namespace lockstep {

/// The calls that change a file system while a checkpoint is written, so that tests can make any of
/// them fail. Each returns 0 or an errno, as the system call of that name would set it.
class FileSystem {
 public:
  virtual ~FileSystem() = default;

  virtual int make_folder(const std::string& path) = 0;

  /// Creates a file for writing, which must not exist. `file` receives its descriptor.
  virtual int create(const std::string& path, int& file) = 0;

  /// Writes at least one byte; `written` receives how many.
  virtual int write(int file, std::span<const std::byte> bytes, size_t& written) = 0;
  virtual int sync(int file) = 0;
  virtual int close(int file) = 0;

  /// Makes the names in a folder durable.
  virtual int sync_folder(const std::string& path) = 0;

  /// Never replaces anything: EEXIST if `to` exists.
  virtual int rename(const std::string& from, const std::string& to) = 0;
  virtual int remove(const std::string& path) = 0;         ///< a file
  virtual int remove_folder(const std::string& path) = 0;  ///< an empty one

  /// That of the operating system, unless a ReplaceFileSystem exists.
  static FileSystem& system();
};

/// Guard: FileSystem::system() is `files`. For tests of what saves checkpoints; one at a time.
class ReplaceFileSystem {
 public:
  explicit ReplaceFileSystem(FileSystem& files);
  ~ReplaceFileSystem();
  ReplaceFileSystem(const ReplaceFileSystem&) = delete;
  ReplaceFileSystem& operator=(const ReplaceFileSystem&) = delete;
};

/// Creates a file, writes the pieces and flushes them to disk. An Error names the path; the file is
/// removed again if it can be.
void write_new_file(FileSystem& files, const std::string& path,
                    std::span<const std::span<const std::byte>> pieces);

void sync_folder(FileSystem& files, const std::string& path);

/// Removes a folder and everything in it. Returns the first errno, 0 if nothing is left of it.
int remove_tree(FileSystem& files, const std::string& path);

/// The Error for a call that failed while `path` was written.
[[noreturn]] void fail_to_write(const std::string& path, int error);

}  // namespace lockstep
