#include "base/backends.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "lockstep/rank_environment.hpp"

namespace lockstep {

const BackendInfo* find_backend(std::string_view name) {
  const auto* const found =
      std::find_if(kBackends.begin(), kBackends.end(),
                   [&](const BackendInfo& each) { return each.name == name; });
  return found == kBackends.end() ? nullptr : found;
}

std::vector<std::string> backend_names() {
  std::vector<std::string> names = {"auto"};
  for (const BackendInfo& each : kBackends) names.emplace_back(each.name);
  return names;
}

std::vector<std::string> launched_backends(bool several_hosts) {
  std::vector<std::string> names = {"auto"};
  for (const BackendInfo& each : kBackends) {
    const bool serves = !each.one_rank && !(several_hosts && each.one_host);
    if (serves && !each.has_own_launcher()) names.emplace_back(each.name);
  }
  return names;
}

std::string alternatives(const std::vector<std::string>& words) {
  if (words.size() < 2) return fmt::format("{}", fmt::join(words, ""));
  return fmt::format("{} or {}", fmt::join(words.begin(), words.end() - 1, ", "), words.back());
}

}  // namespace lockstep
