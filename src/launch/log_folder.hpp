#pragma once

#include <string>

#include "launch/console_plan.hpp"

namespace lockstep {

/// The folder of one run's output: a folder a round, two files a rank. Removed with everything in
/// it at the end, unless keep() was called.
class LogFolder {
 public:
  /// Makes the folder, and those above it where a user named them. An Error (kFileWrite) where that
  /// is impossible.
  LogFolder(std::string path, bool keep);
  ~LogFolder();
  LogFolder(const LogFolder&) = delete;
  LogFolder& operator=(const LogFolder&) = delete;

  const std::string& path() const { return path_; }
  bool kept() const { return keep_; }
  void keep() { keep_ = true; }

  /// <path>/<round>, made on the first call.
  std::string round_folder(int round) const;

 private:
  std::string path_;
  bool keep_;
};

/// <folder>/rank2.out or .err.
std::string log_file(const std::string& round_folder, int rank, Stream stream);

}  // namespace lockstep
