#include "cli/lab/folder_lock.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "lockstep/error.hpp"

namespace lockstep::cli {
namespace {

// Opens the lock file and locks it. A lock on a file that its owner has removed meanwhile counts
// for nothing, so it is taken again.
int open_lock(const std::string& path, const std::string& folder) {
  for (;;) {
    const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (file < 0) {
      throw Error(Code::kFileWrite,
                  fmt::format("cannot write into {}: {}", folder, std::strerror(errno)),
                  limit_help(errno, "name a folder you may write to with --out"));
    }
    if (::flock(file, LOCK_EX | LOCK_NB) != 0) {
      char owner[16] = {};
      const ssize_t length = ::pread(file, owner, sizeof(owner) - 1, 0);
      ::close(file);
      throw Error(Code::kUsage,
                  fmt::format("another lab is writing into {}{}", folder,
                              length > 0 ? fmt::format(" (process {})", owner) : ""),
                  "wait until it has ended, or name another folder with --out");
    }
    struct stat own {};
    struct stat named {};
    const bool same = ::fstat(file, &own) == 0 && ::stat(path.c_str(), &named) == 0 &&
                      own.st_ino == named.st_ino && own.st_dev == named.st_dev;
    if (same) return file;
    ::close(file);
  }
}

}  // namespace

FolderLock::FolderLock(const std::string& folder)
    : path_((std::filesystem::path(folder) / ".lock").string()), file_(open_lock(path_, folder)) {
  const std::string owner = std::to_string(::getpid());
  if (::ftruncate(file_.get(), 0) != 0) return;  // the lock holds without the owner's name
  [[maybe_unused]] const ssize_t written = ::pwrite(file_.get(), owner.data(), owner.size(), 0);
}

FolderLock::~FolderLock() {
  ::unlink(path_.c_str());
}

}  // namespace lockstep::cli
