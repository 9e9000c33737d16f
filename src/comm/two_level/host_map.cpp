#include "comm/two_level/host_map.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>

#include "lockstep/rank_environment.hpp"

namespace lockstep {

HostMap::HostMap(std::span<const std::string> identities, int rank) {
  std::vector<std::string> known;  // [host]
  for (size_t peer = 0; peer < identities.size(); ++peer) {
    const auto found = std::find(known.begin(), known.end(), identities[peer]);
    const auto host = static_cast<size_t>(found - known.begin());
    if (found == known.end()) {
      known.push_back(identities[peer]);
      members_.emplace_back();
    } else if (host_of_.back() != static_cast<int>(host)) {
      in_order_ = false;
    }
    host_of_.push_back(static_cast<int>(host));
    members_[host].push_back(static_cast<int>(peer));
  }
  host_ = host_of(rank);
  local_rank_ = local_rank_of(rank);
}

int HostMap::local_rank_of(int rank) const {
  const auto& ranks = members(host_of(rank));
  return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

int HostMap::largest() const {
  size_t most = 0;
  for (const auto& ranks : members_) most = std::max(most, ranks.size());
  return static_cast<int>(most);
}

namespace {

// "net:[4026531840]", or "" if the system does not tell.
std::string name_of_namespace(const char* kind) {
  std::error_code ignored;
  return std::filesystem::read_symlink(fmt::format("/proc/self/ns/{}", kind), ignored).string();
}

}  // namespace

// Shared memory is handed over through sockets of one network namespace, between processes that see
// each other. Without a boot id the host's name must serve.
std::string host_identity(const RankEnvironment& environment) {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  // mpirun does not number its hosts.
  const bool numbered = environment.launcher == "lockstep" || environment.launcher == "torchrun" ||
                        environment.launcher == "srun";
  return fmt::format("{} {} {} {} user {} node {}", boot, name.data(), name_of_namespace("net"),
                     name_of_namespace("pid"), ::geteuid(),
                     numbered ? std::to_string(environment.node_rank) : "unknown");
}

ElementRange slice_of(int64_t count, int owners, int owner) {
  const int64_t each = count / owners;
  return {owner * each, owner + 1 == owners ? count : (owner + 1) * each};
}

ElementRange overlap(ElementRange a, ElementRange b) {
  const int64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

}  // namespace lockstep
