#include "world/gpu_choice.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <vector>

#include "comm/gpu/gpu_reduce.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

bool same_gpu(const GpuCard& a, const GpuCard& b) {
  return a.on_gpu != 0 && b.on_gpu != 0 && a.uuid == b.uuid;
}

// The first ranks found to share a GPU; none where each has its own.
std::vector<size_t> sharing_ranks(std::span<const GpuCard> cards) {
  for (const GpuCard& card : cards) {
    std::vector<size_t> ranks;
    for (size_t rank = 0; rank < cards.size(); ++rank) {
      if (same_gpu(card, cards[rank])) ranks.push_back(rank);
    }
    if (ranks.size() > 1) return ranks;
  }
  return {};
}

// The first rank that computes on the CPU; cards.size() where none does.
size_t rank_on_cpu(std::span<const GpuCard> cards) {
  const auto found = std::find_if(cards.begin(), cards.end(),
                                  [](const GpuCard& card) { return card.on_gpu == 0; });
  return static_cast<size_t>(found - cards.begin());
}

// NCCL refuses ranks of one host on one GPU. Who names hosts decides himself which are one.
bool named_hosts(std::span<const GpuCard> cards) {
  return std::all_of(cards.begin(), cards.end(),
                     [](const GpuCard& card) { return card.names_host != 0; });
}

bool reaches(const GpuCard& from, const GpuCard& to) {
  const auto end = from.reached.begin() + from.reached_count;
  return same_gpu(from, to) || std::find(from.reached.begin(), end, to.uuid) != end;
}

// As far as is known: a GPU that a rank does not see may be within its reach.
bool can_use_ipc(std::span<const GpuCard> cards) {
  if (cards.size() > kMostGpuReduceRanks) return false;
  return std::all_of(cards.begin(), cards.end(), [&](const GpuCard& from) {
    return from.shares != 0 && std::all_of(cards.begin(), cards.end(),
                                           [&](const GpuCard& to) { return reaches(from, to); });
  });
}

std::string choose_automatically(std::span<const GpuCard> cards, bool one_host, bool has_nccl) {
  if (cards.size() == 1 || rank_on_cpu(cards) < cards.size()) return "";
  if (has_nccl && sharing_ranks(cards).empty()) return "nccl";
  return one_host && can_use_ipc(cards) ? "ipc" : "";
}

}  // namespace

std::string choose_gpu_backend(const std::string& asked, std::span<const GpuCard> cards,
                               bool one_host, bool has_nccl) {
  if (asked == "auto") return choose_automatically(cards, one_host, has_nccl);
  const size_t on_cpu = rank_on_cpu(cards);
  if (on_cpu < cards.size()) {
    throw Error(Code::kBackend,
                fmt::format("backend {} moves the memory of GPUs, but rank {} computes on the CPU",
                            asked, on_cpu),
                asked == "nccl" ? "give each rank a GPU of its own with --devices cuda, or use auto"
                                : "give the ranks GPUs with --devices, such as cuda:0*2 for two "
                                  "that share one, or use auto");
  }
  if (asked == "ipc" && !one_host) {
    throw Error(Code::kBackend,
                "backend ipc serves the ranks of one host, but these are on several",
                "use auto, or nccl with a GPU for each rank");
  }
  const std::vector<size_t> sharing = sharing_ranks(cards);
  if (asked == "nccl" && !sharing.empty() && !named_hosts(cards)) {
    throw Error(Code::kBackend,
                fmt::format("backend nccl needs a GPU for each rank, but ranks {} share the GPU {}",
                            fmt::join(sharing, ", "), cards[sharing[0]].bus_id),
                one_host ? "use auto or ipc, or give each rank a GPU of its own with --devices"
                         : "use auto or gloo, or give each rank a GPU of its own with --devices");
  }
  return asked;
}

}  // namespace lockstep
