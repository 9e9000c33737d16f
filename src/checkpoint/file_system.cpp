#include "checkpoint/file_system.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "base/file.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

std::atomic<FileSystem*> replacement{nullptr};

int errno_if(bool failed) {
  return failed ? errno : 0;
}

class SystemFiles final : public FileSystem {
 public:
  int make_folder(const std::string& path) override {
    return errno_if(::mkdir(path.c_str(), 0755) != 0);
  }

  int create(const std::string& path, int& file) override {
    file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    return errno_if(file < 0);
  }

  int write(int file, std::span<const std::byte> bytes, size_t& written) override {
    ssize_t count = 0;
    do {
      count = ::write(file, bytes.data(), bytes.size());
    } while (count < 0 && errno == EINTR);
    if (count < 0) return errno;
    if (count == 0) return EIO;
    written = static_cast<size_t>(count);
    return 0;
  }

  int sync(int file) override { return errno_if(::fsync(file) != 0); }

  int close(int file) override { return errno_if(::close(file) != 0 && errno != EINTR); }

  int sync_folder(const std::string& path) override {
    const Descriptor folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (folder.get() < 0) return errno;
    // Some file systems have nothing to flush for a folder and say so.
    if (::fsync(folder.get()) != 0 && errno != EINVAL && errno != ENOTSUP) return errno;
    return 0;
  }

  int rename(const std::string& from, const std::string& to) override {
    if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) return 0;
    if (errno != EINVAL && errno != ENOSYS) return errno;
    // The file system cannot promise it. Only one process writes here, so a look beforehand will
    // do.
    struct stat ignored {};
    if (::lstat(to.c_str(), &ignored) == 0) return EEXIST;
    return errno_if(::rename(from.c_str(), to.c_str()) != 0);
  }

  int remove(const std::string& path) override { return errno_if(::unlink(path.c_str()) != 0); }

  int remove_folder(const std::string& path) override {
    return errno_if(::rmdir(path.c_str()) != 0);
  }
};

int write_pieces(FileSystem& files, int file, std::span<const std::span<const std::byte>> pieces) {
  for (auto piece : pieces) {
    while (!piece.empty()) {
      size_t written = 0;
      if (const int error = files.write(file, piece, written)) return error;
      piece = piece.subspan(written);
    }
  }
  return files.sync(file);
}

}  // namespace

FileSystem& FileSystem::system() {
  static SystemFiles files;
  FileSystem* replaced = replacement.load();
  return replaced != nullptr ? *replaced : files;
}

ReplaceFileSystem::ReplaceFileSystem(FileSystem& files) {
  replacement = &files;
}

ReplaceFileSystem::~ReplaceFileSystem() {
  replacement = nullptr;
}

void fail_to_write(const std::string& path, int error) {
  throw Error(Code::kFileWrite, fmt::format("cannot write {}: {}", path, std::strerror(error)),
              limit_help(error, error == ENOSPC || error == EDQUOT ? "free some space on that disk"
                                : error == EIO    ? "the disk reports an error: use another one"
                                : error == ENOENT ? "make the folder above it first"
                                                  : "name a folder you may write to"));
}

void write_new_file(FileSystem& files, const std::string& path,
                    std::span<const std::span<const std::byte>> pieces) {
  int file = -1;
  if (const int error = files.create(path, file)) fail_to_write(path, error);
  int error = write_pieces(files, file, pieces);
  const int at_close = files.close(file);  // network file systems may report a failed write here
  if (error == 0) error = at_close;
  if (error == 0) return;
  files.remove(path);
  fail_to_write(path, error);
}

void sync_folder(FileSystem& files, const std::string& path) {
  if (const int error = files.sync_folder(path)) fail_to_write(path, error);
}

int remove_tree(FileSystem& files, const std::string& path) {
  namespace fs = std::filesystem;
  int first = 0;
  const auto note = [&](int error) {
    if (first == 0 && error != ENOENT) first = error;
  };
  std::error_code unreadable;
  std::vector<fs::directory_entry> entries;
  for (fs::directory_iterator it(path, unreadable), end; !unreadable && it != end;
       it.increment(unreadable)) {
    entries.push_back(*it);
  }
  for (const auto& entry : entries) {
    std::error_code ignored;
    const bool folder = entry.is_directory(ignored) && !entry.is_symlink(ignored);
    note(folder ? remove_tree(files, entry.path().string()) : files.remove(entry.path().string()));
  }
  note(files.remove_folder(path));
  return first;
}

}  // namespace lockstep
