#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>

#include "base/file.hpp"

// Memory that several processes map. It is made by memfd_create: it has no name in any file system,
// so nothing is left behind however its users end, and the size of /dev/shm does not matter.

namespace lockstep {

using OwnedDescriptor = std::unique_ptr<Descriptor>;

int64_t page_bytes();
int64_t round_up(int64_t value, int64_t multiple);

/// Zeroed memory of a fixed size, none of it reserved yet. kOutOfMemory if the system refuses.
OwnedDescriptor make_memory_file(std::string_view name, int64_t bytes);

/// Takes the pages of a range now, near this thread, so that a machine without memory answers with
/// kOutOfMemory and not with SIGBUS at the first touch.
void reserve_memory(int file, int64_t offset, int64_t bytes, std::string_view purpose);

/// A memory file, mapped.
class Mapping {
 public:
  Mapping(OwnedDescriptor file, std::byte* data, int64_t bytes)
      : file_(std::move(file)), data_(data), bytes_(bytes) {}
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  int file() const { return file_->get(); }

  /// Enters pages of a reserved range into this process's tables, where the system can: the first
  /// pass over them then takes no page faults.
  void populate(int64_t offset, int64_t bytes) const;

 private:
  OwnedDescriptor file_;
  std::byte* data_;
  int64_t bytes_;
};

/// Maps every file once for all ranks that share the pool. Ranks that are threads share one, so
/// that they have the same addresses: ThreadSanitizer sees their synchronisation.
class MappingPool {
 public:
  std::shared_ptr<Mapping> map(OwnedDescriptor file);

 private:
  std::mutex mutex_;
  std::map<std::pair<dev_t, ino_t>, std::weak_ptr<Mapping>> mappings_;
};

}  // namespace lockstep
