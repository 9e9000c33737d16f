#include "comm/shm/shm_memory.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>

#include "base/file.hpp"
#include "lockstep/error.hpp"
#include "lockstep/units.hpp"

namespace lockstep {
namespace {

constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE of Linux 5.14, which older headers lack

[[noreturn]] void fail_memory(std::string_view purpose, int64_t need, const std::string& why,
                              int error = 0) {
  throw Error(Code::kOutOfMemory,
              fmt::format("no memory for {}: need {}, {}", purpose, format_bytes(need), why),
              limit_help(error,
                         "use fewer ranks, a smaller model or smaller buckets, or raise the "
                         "memory limit of the container"));
}

[[noreturn]] void fail_memory(std::string_view purpose, int64_t need, int error) {
  fail_memory(purpose, need, std::strerror(error), error);
}

// What the kernel thinks can be had without swapping; the maximum if it does not say.
int64_t available_bytes() {
  std::ifstream file("/proc/meminfo");
  std::string name;
  std::string rest;
  int64_t kibibytes = 0;
  while (file >> name >> kibibytes && std::getline(file, rest)) {
    if (name == "MemAvailable:") return kibibytes * 1024;
  }
  return std::numeric_limits<int64_t>::max();
}

}  // namespace

int64_t page_bytes() {
  static const int64_t bytes = ::sysconf(_SC_PAGESIZE);
  return bytes;
}

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

OwnedDescriptor make_memory_file(std::string_view name, int64_t bytes) {
  auto file = std::make_unique<Descriptor>(
      ::memfd_create(std::string(name).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (file->get() < 0 || ::ftruncate(file->get(), bytes) != 0) {
    fail_memory(name, bytes, errno);
  }
  // A peer that shrank the file would kill the others with SIGBUS.
  if (::fcntl(file->get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    fail_memory(name, bytes, errno);
  }
  return file;
}

void reserve_memory(int file, int64_t offset, int64_t bytes, std::string_view purpose) {
  if (bytes == 0) return;
  // Memory files have no limit of their own: asked for too much, the kernel would end a process.
  if (const int64_t have = available_bytes(); bytes > have) {
    fail_memory(purpose, bytes, fmt::format("have {}", format_bytes(have)));
  }
  int error = 0;
  do {
    error = ::posix_fallocate(file, offset, bytes);
  } while (error == EINTR);
  if (error != 0) fail_memory(purpose, bytes, error);
}

Mapping::~Mapping() {
  ::munmap(data_, static_cast<size_t>(bytes_));
}

void Mapping::populate(int64_t offset, int64_t bytes) const {
  ::madvise(data_ + offset, static_cast<size_t>(bytes), kPopulateWrite);
}

std::shared_ptr<Mapping> MappingPool::map(OwnedDescriptor file) {
  struct stat status {};
  if (::fstat(file->get(), &status) != 0) {
    throw Error(Code::kInternal,
                fmt::format("cannot read the size of a memory file: {}", std::strerror(errno)));
  }
  const std::lock_guard lock(mutex_);
  std::weak_ptr<Mapping>& known = mappings_[{status.st_dev, status.st_ino}];
  if (auto mapping = known.lock()) return mapping;
  void* data = ::mmap(nullptr, static_cast<size_t>(status.st_size), PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_NORESERVE, file->get(), 0);
  if (data == MAP_FAILED) {
    fail_memory("a mapping of shared memory", status.st_size,
                fmt::format("{} (ulimit -v limits address space)", std::strerror(errno)));
  }
  auto mapping =
      std::make_shared<Mapping>(std::move(file), static_cast<std::byte*>(data), status.st_size);
  known = mapping;
  std::erase_if(mappings_, [](const auto& entry) { return entry.second.expired(); });
  return mapping;
}

}  // namespace lockstep
