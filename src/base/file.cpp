#include "base/file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>

#include "lockstep/error.hpp"

namespace lockstep {
namespace {

constexpr rlim_t kManyFiles = 4096;

rlimit limit_of(__rlimit_resource resource) {
  rlimit limit{};
  ::getrlimit(resource, &limit);
  return limit;
}

std::string open_files_help(int needed) {
  const rlimit limit = limit_of(RLIMIT_NOFILE);
  const rlim_t enough =
      needed > 0 ? static_cast<rlim_t>(needed) : std::max(kManyFiles, 2 * limit.rlim_cur);
  std::string text = needed > 0 ? fmt::format("about {} open files are needed, and ", needed) : "";
  text += fmt::format("the limit is {}; raise it with ulimit -n {}", limit.rlim_cur, enough);
  if (limit.rlim_max < enough) {
    text +=
        fmt::format(" (this user may raise it to {}; only an administrator can raise it further)",
                    limit.rlim_max);
  }
  return text;
}

// A disk that is full or fails is no mistake in the request.
bool is_failure_of_disk(int error) {
  return error == ENOSPC || error == EDQUOT || error == EIO || error == EFBIG;
}

[[noreturn]] void fail_write(const std::string& path, int error, const std::string& leftover = "") {
  if (!leftover.empty()) ::unlink(leftover.c_str());
  throw Error(is_failure_of_disk(error) ? Code::kCheckpoint : Code::kFileWrite,
              fmt::format("cannot write {}: {}", path, std::strerror(error)),
              limit_help(error, error == ENOENT   ? "make its folder first"
                                : error == ENOSPC ? "free some space on that disk"
                                : error == EISDIR ? "name a file, not a folder"
                                                  : "name a file in a folder you may write to"));
}

bool write_all(int fd, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return false;
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
  return true;
}

// Writes to a device, pipe or terminal. Renaming over /dev/null would destroy it for everyone.
void write_through(const std::string& path, std::span<const std::span<const std::byte>> pieces) {
  const Descriptor file(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
  if (file.get() < 0) fail_write(path, errno);
  for (const auto& piece : pieces) {
    if (!write_all(file.get(), piece)) fail_write(path, errno);
  }
}

// A writer that was killed has left its file beside the target; whoever writes there next removes
// it. The lock that a writer holds on its file ends with its process.
void remove_leftovers(const std::filesystem::path& target) {
  const std::filesystem::path folder =
      target.has_parent_path() ? target.parent_path() : std::filesystem::path(".");
  const std::string prefix = target.filename().string() + ".tmp-";
  std::error_code error;
  for (std::filesystem::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string path = entry->path().string();
    if (!entry->path().filename().string().starts_with(prefix)) continue;
    const Descriptor file(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    if (file.get() >= 0 && ::flock(file.get(), LOCK_EX | LOCK_NB) == 0) ::unlink(path.c_str());
  }
}

// A new locked file beside the target. Another writer may take it for a leftover until it is
// locked; then there is another try. Without locks on this file system nobody removes it.
struct FileBeside {
  FileBeside(const std::string& path, const std::string& target, mode_t mode) {
    static std::atomic<unsigned> count = 0;  // two threads may write the same path
    struct stat info {};
    do {
      name = fmt::format("{}.tmp-{}-{}", target, ::getpid(), count++);
      ::unlink(name.c_str());  // may be left from a dead process that had this pid
      file.emplace(::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode));
      if (file->get() < 0) fail_write(path, errno);
    } while ((::flock(file->get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) ||
             ::fstat(file->get(), &info) != 0 || info.st_nlink == 0);
  }

  std::string name;
  std::optional<Descriptor> file;
};

}  // namespace

ManyFiles::ManyFiles() : before_(limit_of(RLIMIT_NOFILE)) {
  const rlimit most{before_.rlim_max, before_.rlim_max};
  ::setrlimit(RLIMIT_NOFILE, &most);
}

ManyFiles::~ManyFiles() {
  ::setrlimit(RLIMIT_NOFILE, &before_);
}

// The lowest free descriptor tells about how many are in use.
bool make_room_for_files(int more) {
  rlimit limit = limit_of(RLIMIT_NOFILE);
  const Descriptor free(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const rlim_t used = free.get() < 0 ? limit.rlim_cur : static_cast<rlim_t>(free.get());
  const rlim_t needed = used + static_cast<rlim_t>(more);
  if (needed <= limit.rlim_cur) return true;
  limit.rlim_cur = std::min(needed, limit.rlim_max);
  ::setrlimit(RLIMIT_NOFILE, &limit);
  return needed <= limit.rlim_cur;
}

std::string read_text_file(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat info {};
  if (file.get() < 0 || ::fstat(file.get(), &info) != 0) {
    const int reason = errno;
    throw Error(Code::kFileRead, fmt::format("cannot read {}: {}", path, std::strerror(reason)),
                limit_help(reason, "check the path and its permissions"));
  }
  if (S_ISDIR(info.st_mode)) {
    throw Error(Code::kFileRead, fmt::format("cannot read {}: it is a folder", path),
                "name a file");
  }
  std::string text;
  std::array<char, 1 << 14> buffer;
  for (;;) {
    const ssize_t count = ::read(file.get(), buffer.data(), buffer.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      throw Error(Code::kFileRead, fmt::format("cannot read {}: {}", path, std::strerror(errno)));
    }
    if (count == 0) return text;
    text.append(buffer.data(), static_cast<size_t>(count));
  }
}

std::string read_text_or_empty(const std::string& path) {
  try {
    return read_text_file(path);
  } catch (const Error&) {
    return "";
  }
}

void write_file_atomically(const std::string& path,
                           std::span<const std::span<const std::byte>> pieces, mode_t mode) {
  struct stat info {};
  const bool exists = ::stat(path.c_str(), &info) == 0;
  if (exists && S_ISDIR(info.st_mode)) fail_write(path, EISDIR);
  if (exists && !S_ISREG(info.st_mode)) {
    write_through(path, pieces);
    return;
  }
  // If `path` is a symbolic link, replace the file it points to and keep the link.
  std::error_code unresolved;
  const auto resolved = std::filesystem::canonical(path, unresolved);
  const std::string target = unresolved ? path : resolved.string();

  remove_leftovers(target);
  const FileBeside beside(path, target, mode);
  for (const auto& piece : pieces) {
    if (!write_all(beside.file->get(), piece)) fail_write(path, errno, beside.name);
  }
  if (::fsync(beside.file->get()) != 0) fail_write(path, errno, beside.name);
  if (::rename(beside.name.c_str(), target.c_str()) != 0) fail_write(path, errno, beside.name);
  // The rename is durable only once the folder is on disk. Some file systems refuse to sync a
  // folder; then there is nothing more to do.
  const std::string folder = std::filesystem::path(target).parent_path().string();
  const Descriptor parent(
      ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (parent.get() >= 0) ::fsync(parent.get());
}

void write_file_atomically(const std::string& path, const std::string& text, mode_t mode) {
  const std::array<std::span<const std::byte>, 1> pieces = {std::as_bytes(std::span(text))};
  write_file_atomically(path, pieces, mode);
}

std::string limit_help(int error, std::string otherwise, int files_needed) {
  switch (error) {
    case EMFILE:
      return open_files_help(files_needed);
    case ENFILE:
      return "the whole machine is out of open files (sysctl fs.file-max): end other programs";
    case EFBIG:
      return fmt::format("a file may have at most {} bytes here; raise the limit with ulimit -f",
                         limit_of(RLIMIT_FSIZE).rlim_cur);
    default:
      return otherwise;
  }
}

}  // namespace lockstep
