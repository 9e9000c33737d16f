#include "comm/call.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>

#include "lockstep/error.hpp"
#include "lockstep/units.hpp"

namespace lockstep {
namespace {

constexpr std::array<std::string_view, 9> kOperationNames = {
    "all_reduce", "broadcast", "reduce_scatter", "all_gather", "send",
    "recv",       "barrier",   "split",          "allocate"};
constexpr std::array<std::string_view, 4> kReduceNames = {"sum", "mean", "max", "min"};

// Ranks that made one and the same call.
struct Camp {
  const Call* call = nullptr;
  std::vector<int> world_ranks;
};

std::vector<Camp> camps_of(const Group& group, std::span<const Call> calls) {
  std::vector<Camp> camps;
  for (size_t place = 0; place < calls.size(); ++place) {
    auto camp = std::find_if(camps.begin(), camps.end(),
                             [&](const Camp& other) { return agree(*other.call, calls[place]); });
    if (camp == camps.end()) camp = camps.insert(camps.end(), Camp{&calls[place], {}});
    camp->world_ranks.push_back(group.world_ranks.at(place));
  }
  std::stable_sort(camps.begin(), camps.end(), [](const Camp& a, const Camp& b) {
    return a.world_ranks.size() < b.world_ranks.size();
  });
  return camps;
}

// "rank 2", "ranks 0, 1, 3".
std::string rank_list(const std::vector<int>& world_ranks) {
  return fmt::format("rank{} {}", world_ranks.size() == 1 ? "" : "s", fmt::join(world_ranks, ", "));
}

// " of 4" where the ranks are those of the world; otherwise nothing, since "rank 6 of 2" misleads.
std::string of_size(const Group& group) {
  return group.name == "world" ? fmt::format(" of {}", group.size()) : "";
}

}  // namespace

std::string describe_in(const Group& group, const Call& call) {
  if (group.name == "world") return describe(call);
  return fmt::format("{} in group {}", describe(call), group.name);
}

std::string_view operation_name(Operation operation) {
  return kOperationNames.at(static_cast<size_t>(operation));
}

void Call::set_label(std::string_view text) {
  const size_t kept = std::min(text.size(), sizeof label - 1);
  std::fill(std::copy_n(text.begin(), kept, label), std::end(label), '\0');
}

bool agree(const Call& a, const Call& b) {
  const bool same_data =
      a.sequence == b.sequence && a.count == b.count && a.dtype == b.dtype && a.root == b.root;
  if (a.operation == Operation::kSend) return same_data && b.operation == Operation::kRecv;
  if (a.operation == Operation::kRecv) return same_data && b.operation == Operation::kSend;
  return same_data && a.operation == b.operation && a.reduce == b.reduce &&
         std::equal(std::begin(a.label), std::end(a.label), std::begin(b.label));
}

std::string describe(const Call& call) {
  std::string text = fmt::format("{} #{}", operation_name(call.operation), call.sequence);
  if (call.label[0] != '\0') text += fmt::format(" ({})", call.label);
  const std::string elements = fmt::format(": {} x {}", call.count, dtype_name(call.dtype));
  switch (call.operation) {
    case Operation::kAllReduce:
    case Operation::kReduceScatter:
      return text + elements + ", " +
             std::string(kReduceNames.at(static_cast<size_t>(call.reduce)));
    case Operation::kBroadcast:
      return text + elements + fmt::format(", root {}", call.root);
    case Operation::kSend:
    case Operation::kRecv:
      return text + elements + fmt::format(", tag {}", call.root);
    case Operation::kAllGather:
      return text + elements;
    case Operation::kAllocate:
      return text + ": " + format_bytes(call.count);
    case Operation::kBarrier:
    case Operation::kSplit:
      return text;
  }
  return text;
}

void require_same_message(const Group& group, int sender, const Call& sent, int receiver,
                          const Call& received) {
  if (agree(sent, received)) return;
  const auto world_rank = [&](int place) {
    return group.world_ranks.at(static_cast<size_t>(place));
  };
  const Group pair{.world_ranks = {world_rank(sender), world_rank(receiver)}, .name = group.name};
  throw_mismatch(pair, std::array{sent, received});
}

void throw_mismatch(const Group& group, std::span<const Call> calls) {
  const std::vector<Camp> camps = camps_of(group, calls);
  const Camp& majority = camps.back();
  const bool clear = camps.size() == 1 || 2 * majority.world_ranks.size() > calls.size();
  const int blamed = clear ? camps.front().world_ranks.front() : -1;
  std::vector<std::string> said;
  said.reserve(camps.size());
  for (const Camp& camp : camps) {
    said.push_back(fmt::format("{} called {}", rank_list(camp.world_ranks), describe(*camp.call)));
  }
  // Two sides tell what happened; with many ranks the rest would bury it.
  constexpr size_t kSidesShown = 6;
  std::vector<std::string> notes;
  for (size_t side = 1; side + 1 < said.size() && notes.size() + 2 < kSidesShown; ++side) {
    notes.push_back(said[side]);
  }
  if (said.size() > kSidesShown) {
    notes.push_back(fmt::format("{} more different calls", said.size() - kSidesShown));
  }
  throw RankError(
      Code::kCallMismatch, blamed,
      fmt::format("ranks{} made different calls: {}; {}",
                  group.name == "world" ? "" : " of group " + group.name, said.front(),
                  said.back()),
      "make the same calls in the same order, with the same dtype and count, on every rank; look "
      "for an `if` on the rank or on its data around them",
      notes);
}

void throw_absent(const Group& group, const Call& call, std::span<const MissingRank> missing,
                  int64_t waited_ns) {
  std::vector<int> world_ranks;
  std::vector<std::string> notes;
  constexpr size_t kStatesShown = 6;
  for (const MissingRank& rank : missing) {
    world_ranks.push_back(group.world_ranks.at(static_cast<size_t>(rank.place)));
    if (!rank.state.empty() && notes.size() < kStatesShown) {
      notes.push_back(fmt::format("rank {}: {}", world_ranks.back(), rank.state));
    }
  }
  throw RankError(
      Code::kRankAbsent, world_ranks.empty() ? -1 : world_ranks.front(),
      fmt::format("{}: {}{} absent after {}", describe_in(group, call), rank_list(world_ranks),
                  of_size(group), format_seconds(static_cast<double>(waited_ns) * 1e-9)),
      fmt::format("see what {} did instead of this call; where it is only slow, give "
                  "it more time with --timeout of `lockstep run` or LOCKSTEP_TIMEOUT_S",
                  rank_list(world_ranks)),
      notes);
}

void throw_rank_failed(const Group& group, const Call& call, int place, std::string_view reason) {
  const int world_rank = group.world_ranks.at(static_cast<size_t>(place));
  throw RankError(
      Code::kRankFailed, world_rank,
      fmt::format("{}: rank {}{} {}", describe_in(group, call), world_rank, of_size(group), reason),
      fmt::format("look at rank {}'s own error: this rank is its victim", world_rank));
}

}  // namespace lockstep
