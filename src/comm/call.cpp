#include "comm/call.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <set>

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
  std::string said;  // the call in words
  std::vector<int> world_ranks;
};

// The smallest first.
void sort_by_size(std::vector<Camp>& camps) {
  std::stable_sort(camps.begin(), camps.end(), [](const Camp& a, const Camp& b) {
    return a.world_ranks.size() < b.world_ranks.size();
  });
}

std::vector<Camp> camps_of(const Group& group, std::span<const Call> calls) {
  std::vector<Camp> camps;
  for (size_t place = 0; place < calls.size(); ++place) {
    auto camp = std::find_if(camps.begin(), camps.end(),
                             [&](const Camp& other) { return agree(*other.call, calls[place]); });
    if (camp == camps.end()) {
      camp = camps.insert(camps.end(), Camp{&calls[place], describe(calls[place]), {}});
    }
    camp->world_ranks.push_back(group.world_ranks.at(place));
  }
  sort_by_size(camps);
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

// Blames the smallest camp where another one has the majority.
[[noreturn]] void throw_different(const Group& group, const std::vector<Camp>& camps,
                                  std::string_view what) {
  size_t ranks = 0;
  std::vector<std::string> said;
  said.reserve(camps.size());
  for (const Camp& camp : camps) {
    ranks += camp.world_ranks.size();
    said.push_back(fmt::format("{} called {}", rank_list(camp.world_ranks), camp.said));
  }
  const bool clear = camps.size() == 1 || 2 * camps.back().world_ranks.size() > ranks;
  const int blamed = clear ? camps.front().world_ranks.front() : -1;
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
      fmt::format("ranks{} {}: {}; {}", group.name == "world" ? "" : " of group " + group.name,
                  what, said.front(), said.back()),
      "make the same calls in the same order, with the same dtype and count, on every rank; look "
      "for an `if` on the rank or on its data around them",
      notes);
}

// "recv #1: 4 x F32, tag 0, from rank 1".
std::string describe_waiting(const Group& group, const RankActivity::Waiting& waiting) {
  const std::string text = describe(waiting.call);
  if (waiting.peer < 0) return text;
  return fmt::format("{}, {} rank {}", text,
                     waiting.call.operation == Operation::kSend ? "to" : "from",
                     group.world_ranks.at(static_cast<size_t>(waiting.peer)));
}

// Who waits for whom, at one moment.
class WaitGraph {
 public:
  WaitGraph(const Group& group, std::span<const RankActivity> activities)
      : group_(group), activities_(activities) {}

  const RankActivity& at(int place) const { return activities_[static_cast<size_t>(place)]; }

  // The places without which this one cannot go on. A collective first needs everybody to come, and
  // then those who still move its data.
  std::set<int> waited_for(int place) const {
    std::set<int> places;
    for (const auto& [call, peer] : at(place).waiting) {
      if (peer >= 0) {
        places.insert(peer);
        continue;
      }
      std::set<int> late = behind(place, &RankActivity::arrived, call.sequence);
      if (late.empty()) late = behind(place, &RankActivity::finished, call.sequence);
      places.merge(late);
    }
    return places;
  }

  // These places, and all that they wait for, directly or through others.
  std::set<int> reached_from(std::set<int> open) const {
    std::set<int> reached;
    while (!open.empty()) {
      const int place = *open.begin();
      open.erase(open.begin());
      if (!reached.insert(place).second || at(place).silent) continue;
      open.merge(waited_for(place));
    }
    return reached;
  }

  // Of these, all of which wait: those who wait for each other and for nobody else.
  std::vector<int> knot(const std::set<int>& reached) const {
    for (const int place : reached) {
      std::set<int> members = reached_from(waited_for(place));
      members.insert(place);
      const bool closed = std::all_of(members.begin(), members.end(), [&](int other) {
        return other == place || reached_from(waited_for(other)).count(place) > 0;
      });
      if (closed) return {members.begin(), members.end()};
    }
    return {};
  }

  // Whether the other side of one of its messages is there: the data is on its way.
  bool exchanges(int place) const {
    const auto& waiting = at(place).waiting;
    return std::any_of(waiting.begin(), waiting.end(), [&](const auto& own) {
      if (own.peer < 0) return false;
      const auto& theirs = at(own.peer).waiting;
      return std::any_of(theirs.begin(), theirs.end(), [&](const auto& other) {
        return other.peer == place && agree(own.call, other.call);
      });
    });
  }

  // What the rank at a place waits in, in words.
  std::string said(int place) const {
    std::vector<std::string> calls;
    for (const auto& waiting : at(place).waiting) {
      calls.push_back(describe_waiting(group_, waiting));
    }
    return fmt::format("{}", fmt::join(calls, " and "));
  }

 private:
  std::set<int> behind(int place, int64_t RankActivity::*counter, int64_t target) const {
    std::set<int> places;
    for (int other = 0; other < group_.size(); ++other) {
      if (other != place && at(other).*counter < target) places.insert(other);
    }
    return places;
  }

  const Group& group_;
  std::span<const RankActivity> activities_;
};

// Where there are any, the ranks at `places` are the cause. This one itself may be: it came too
// late, and a peer that waited for it has given up.
void throw_cause(const Group& group, const Call& call, const WaitGraph& graph,
                 std::vector<int> places, int64_t waited_ns) {
  if (places.empty()) return;
  std::erase(places, group.rank);
  std::vector<MissingRank> missing;
  for (const int place : places) {
    std::string state = graph.at(place).state;
    if (!graph.at(place).waiting.empty()) {
      state += fmt::format("{}it waits in {}", state.empty() ? "" : "; ", graph.said(place));
    }
    missing.push_back({place, state});
  }
  if (!missing.empty()) throw_absent(group, call, missing, waited_ns);
  for (int place = 0; place < group.size(); ++place) {
    if (place == group.rank || graph.at(place).waiting.empty()) continue;
    throw_rank_failed(
        group, call, place,
        fmt::format("waited {} for this rank in {} and gave up",
                    format_seconds(static_cast<double>(waited_ns) * 1e-9), graph.said(place)));
  }
}

// The sides of a knot. Whoever waits in a call of one of them is on that side, too.
std::vector<Camp> camps_around(const Group& group, const WaitGraph& graph,
                               const std::vector<int>& knot) {
  std::vector<Camp> camps;
  for (const int place : knot) {
    const std::string said = graph.said(place);
    const bool known = std::any_of(camps.begin(), camps.end(),
                                   [&](const Camp& camp) { return camp.said == said; });
    if (!known) camps.push_back({nullptr, said, {}});
  }
  for (int place = 0; place < group.size(); ++place) {
    for (Camp& camp : camps) {
      if (camp.said != graph.said(place)) continue;
      camp.world_ranks.push_back(group.world_ranks.at(static_cast<size_t>(place)));
    }
  }
  sort_by_size(camps);
  return camps;
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
  throw_different(group, camps_of(group, calls), "made different calls");
}

void throw_stalled(const Group& group, const Call& call, std::span<const int> awaited,
                   std::span<const RankActivity> activities, int64_t waited_ns) {
  const WaitGraph graph(group, activities);
  const std::set<int> reached =
      graph.reached_from(awaited.empty() ? graph.waited_for(group.rank)
                                         : std::set<int>(awaited.begin(), awaited.end()));
  std::vector<int> silent;
  std::vector<int> elsewhere;  // alive, and in no call
  for (const int place : reached) {
    if (graph.at(place).silent) {
      silent.push_back(place);
    } else if (graph.at(place).waiting.empty()) {
      elsewhere.push_back(place);
    }
  }
  throw_cause(group, call, graph, silent, waited_ns);
  std::stable_sort(elsewhere.begin(), elsewhere.end(),
                   [&](int a, int b) { return graph.at(a).arrived < graph.at(b).arrived; });
  throw_cause(group, call, graph, elsewhere, waited_ns);
  const std::vector<int> knot = graph.knot(reached);
  const std::vector<Camp> camps = camps_around(group, graph, knot);
  const bool moving =
      std::all_of(knot.begin(), knot.end(), [&](int place) { return graph.exchanges(place); });
  if (camps.size() > 1 && !moving) {
    throw_different(group, camps, "made different calls and wait for each other");
  }
  if (knot.size() == 1 && knot.front() != group.rank) {
    throw_cause(group, call, graph, knot, waited_ns);
  }
  throw RankError(
      Code::kRankAbsent, -1,
      fmt::format("{}: not done after {}, though no rank is missing", describe_in(group, call),
                  format_seconds(static_cast<double>(waited_ns) * 1e-9)),
      "the data moves too slowly: give it more time with --timeout of `lockstep run` or "
      "LOCKSTEP_TIMEOUT_S");
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
