#include "launch/log_folder.hpp"

#include <fmt/format.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "lockstep/error.hpp"

namespace lockstep {
namespace {

void make_folder(const std::string& path) {
  if (::mkdir(path.c_str(), 0700) == 0) return;
  throw Error(Code::kFileWrite,
              fmt::format("cannot make the log folder {}: {}", path, std::strerror(errno)),
              "name another with --log-dir, or set TMPDIR");
}

}  // namespace

LogFolder::LogFolder(std::string path, bool keep) : path_(std::move(path)), keep_(keep) {
  const auto above = std::filesystem::path(path_).parent_path();
  std::error_code failed;  // make_folder below says what is wrong
  if (keep_ && !above.empty()) std::filesystem::create_directories(above, failed);
  make_folder(path_);
}

LogFolder::~LogFolder() {
  std::error_code ignored;
  if (!keep_) std::filesystem::remove_all(path_, ignored);
}

std::string LogFolder::round_folder(int round) const {
  const std::string folder = fmt::format("{}/{}", path_, round);
  if (!std::filesystem::is_directory(folder)) make_folder(folder);
  return folder;
}

std::string log_file(const std::string& round_folder, int rank, Stream stream) {
  return fmt::format("{}/rank{}.{}", round_folder, rank, stream == Stream::kOut ? "out" : "err");
}

}  // namespace lockstep
