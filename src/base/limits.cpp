#include "base/limits.hpp"

#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>

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
    text += fmt::format(" (this user may raise it to {}; beyond that an administrator must)",
                        limit.rlim_max);
  }
  return text;
}

}  // namespace

std::string limit_help(int error, std::string otherwise, int files_needed) {
  switch (error) {
    case EMFILE:
      return open_files_help(files_needed);
    case ENFILE:
      return "the whole machine has no open file left (sysctl fs.file-max): end other programs";
    case EFBIG:
      return fmt::format("a file may have {} bytes here; raise the limit with ulimit -f",
                         limit_of(RLIMIT_FSIZE).rlim_cur);
    default:
      return otherwise;
  }
}

}  // namespace lockstep
