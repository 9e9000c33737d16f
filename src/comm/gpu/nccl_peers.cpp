#if LOCKSTEP_NCCL

#include "comm/gpu/nccl_peers.hpp"

#include <fmt/format.h>

#include <chrono>
#include <thread>

#include "base/running_clock.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

// A connection ends a little before the process whose end it is.
constexpr int64_t kLastMomentsNs = 500'000'000;

}  // namespace

NcclPeers::NcclPeers(Backend& host, int64_t deadline_ns) : group_(host.group()) {
  const ProcessHome own = ProcessHome::own();
  std::vector<ProcessHome> homes(static_cast<size_t>(host.size()));
  const auto bytes = static_cast<int64_t>(sizeof own);
  host.all_gather({&own, bytes, Dtype::kU8}, {homes.data(), bytes * host.size(), Dtype::kU8},
                  {.deadline_ns = deadline_ns, .label = "processes of the ranks"});
  for (int place = 0; place < host.size(); ++place) {
    const ProcessHome& theirs = homes[static_cast<size_t>(place)];
    if (!own.numbers_as(theirs) || theirs.pid == own.pid) continue;
    peers_.push_back({place, PeerProcess(static_cast<pid_t>(theirs.pid))});
  }
}

void NcclPeers::blaming(const Call& call, const std::function<void()>& part) const {
  try {
    part();
  } catch (const Error& error) {
    const auto* of_rank = dynamic_cast<const RankError*>(&error);
    if (of_rank != nullptr && of_rank->blamed_rank() >= 0) throw;
    if (error.code() == Code::kRankAbsent) {
      throw_ended(call);
      throw_stopped(call);
      throw;
    }
    const int64_t until_ns = running_ns() + kLastMomentsNs;
    while (running_ns() < until_ns) {
      throw_ended(call);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    throw;
  }
}

void NcclPeers::throw_ended(const Call& call) const {
  for (const auto& [place, process] : peers_) {
    if (process.ended()) {
      throw_rank_failed(group_, call, place,
                        fmt::format("died: process {} has ended", process.pid()));
    }
  }
}

void NcclPeers::throw_stopped(const Call& call) const {
  for (const auto& [place, process] : peers_) {
    if (!process.stopped()) continue;
    const int rank = group_.world_ranks[static_cast<size_t>(place)];
    throw RankError(
        Code::kRankAbsent, rank,
        fmt::format("{}: rank {} came, but does not go on: {}", describe_in(group_, call), rank,
                    process.state()),
        fmt::format("let it go on (kill -CONT {}), or start the ranks again", process.pid()));
  }
}

}  // namespace lockstep

#endif
