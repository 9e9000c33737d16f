#pragma once

#include <string>

#include "base/file.hpp"

namespace lockstep::cli {

/// Keeps other labs from writing into the same folder, as long as it lives. A folder that is in use
/// is an Error that names the process.
class FolderLock {
 public:
  explicit FolderLock(const std::string& folder);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  std::string path_;
  Descriptor file_;
};

}  // namespace lockstep::cli
