#include "comm/failure.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <set>

#include "lockstep/units.hpp"

namespace lockstep {
namespace {

constexpr size_t kMaxTextBytes = 4096;

// The fixed part of an encoded record; ranks, fingerprints and text follow it.
struct RecordHead {
  int32_t code = 0;
  int32_t by = 0;
  int32_t blamed = -1;
  uint32_t sides = 0;  // ranks, and as many fingerprints
  uint32_t text_bytes = 0;
};

template <class Item>
void append(std::string& bytes, const Item* items, size_t count) {
  bytes.append(reinterpret_cast<const char*>(items), count * sizeof(Item));
}

template <class Item>
bool take(std::string_view& bytes, Item* items, size_t count) {
  if (bytes.size() / sizeof(Item) < count) return false;
  if (count > 0) std::memcpy(items, bytes.data(), count * sizeof(Item));
  bytes.remove_prefix(count * sizeof(Item));
  return true;
}

// Ranks that made the same call.
struct CallGroup {
  const Fingerprint* call = nullptr;
  std::string text;  // the call in words
  std::vector<int> world_ranks;
};

// The smallest first.
void sort_by_size(std::vector<CallGroup>& call_groups) {
  std::stable_sort(call_groups.begin(), call_groups.end(),
                   [](const CallGroup& a, const CallGroup& b) {
                     return a.world_ranks.size() < b.world_ranks.size();
                   });
}

std::vector<CallGroup> group_by_call(const Group& group, std::span<const Fingerprint> calls,
                                     std::span<const int32_t> ranks) {
  std::vector<CallGroup> call_groups;
  for (size_t i = 0; i < calls.size(); ++i) {
    auto call_group =
        std::find_if(call_groups.begin(), call_groups.end(),
                     [&](const CallGroup& other) { return agree(*other.call, calls[i]); });
    if (call_group == call_groups.end()) {
      call_group =
          call_groups.insert(call_groups.end(), CallGroup{&calls[i], describe(calls[i]), {}});
    }
    call_group->world_ranks.push_back(
        group.world_rank(ranks.empty() ? static_cast<int>(i) : ranks[i]));
  }
  sort_by_size(call_groups);
  return call_groups;
}

// "rank 2", "ranks 0, 1, 3".
std::string rank_list(const std::vector<int>& world_ranks) {
  return fmt::format("rank{} {}", world_ranks.size() == 1 ? "" : "s", fmt::join(world_ranks, ", "));
}

// " of 4" if the ranks are those of the world; otherwise nothing, since "rank 6 of 2" misleads.
std::string of_size(const Group& group) {
  return group.name == "world" ? fmt::format(" of {}", group.size()) : "";
}

// Blames the smallest call group if another one has the majority.
[[noreturn]] void throw_different(const Group& group, const std::vector<CallGroup>& call_groups,
                                  std::string_view what, AbortRecord record = {}) {
  size_t ranks = 0;
  std::vector<std::string> sides;
  sides.reserve(call_groups.size());
  for (const CallGroup& call_group : call_groups) {
    ranks += call_group.world_ranks.size();
    sides.push_back(
        fmt::format("{} called {}", rank_list(call_group.world_ranks), call_group.text));
  }
  const bool clear = call_groups.size() == 1 || 2 * call_groups.back().world_ranks.size() > ranks;
  const int blamed = clear ? call_groups.front().world_ranks.front() : -1;
  // The first and the last group explain the mismatch; with many ranks the rest would bury them.
  constexpr size_t kSidesShown = 6;
  std::vector<std::string> notes;
  for (size_t side = 1; side + 1 < sides.size() && notes.size() + 2 < kSidesShown; ++side) {
    notes.push_back(sides[side]);
  }
  if (sides.size() > kSidesShown) {
    notes.push_back(fmt::format("{} more different calls", sides.size() - kSidesShown));
  }
  record.code = Code::kCallMismatch;
  record.by = group.rank;
  record.blamed = group.group_rank(blamed);
  record.text =
      fmt::format("ranks{} {}: {}; {}", group.name == "world" ? "" : " of group " + group.name,
                  what, sides.front(), sides.back());
  const std::string message = record.text;
  throw CollectiveError(
      Code::kCallMismatch, blamed, std::move(record), message,
      "make the same calls in the same order, with the same dtype and count, on every rank; look "
      "for an `if` on the rank or on its data around them",
      notes);
}

[[noreturn]] void throw_rank_failed_as(const Group& group, const Fingerprint& call, int rank,
                                       std::string_view reason, AbortRecord record) {
  const int world_rank = group.world_rank(rank);
  throw CollectiveError(
      Code::kRankFailed, world_rank, std::move(record),
      fmt::format("{}: rank {}{} {}", describe_in(group, call), world_rank, of_size(group), reason),
      fmt::format("look at rank {}'s own error: this rank is its victim", world_rank));
}

// "recv #1: 4 x F32, tag 0, from rank 1".
std::string describe_waiting(const Group& group, const RankActivity::Waiting& waiting) {
  const std::string text = describe(waiting.call);
  if (waiting.peer < 0) return text;
  return fmt::format("{}, {} rank {}", text,
                     waiting.call.operation == Operation::kSend ? "to" : "from",
                     group.world_rank(waiting.peer));
}

// Which ranks wait for which, at one moment.
class WaitGraph {
 public:
  WaitGraph(const Group& group, std::span<const RankActivity> activities)
      : group_(group), activities_(activities) {}

  const RankActivity& at(int rank) const { return activities_[static_cast<size_t>(rank)]; }

  // The ranks without which this one cannot go on. A collective first needs everybody to come, and
  // then those who still move its data.
  std::set<int> waited_for(int rank) const {
    std::set<int> ranks;
    for (const auto& [call, peer] : at(rank).waiting) {
      if (peer >= 0) {
        ranks.insert(peer);
        continue;
      }
      std::set<int> late = behind(rank, &RankActivity::arrived, call.sequence);
      if (late.empty()) late = behind(rank, &RankActivity::finished, call.sequence);
      ranks.merge(late);
    }
    return ranks;
  }

  // These ranks, and all that they wait for, directly or through others.
  std::set<int> reached_from(std::set<int> open) const {
    std::set<int> reached;
    while (!open.empty()) {
      const int rank = *open.begin();
      open.erase(open.begin());
      if (!reached.insert(rank).second || at(rank).silent) continue;
      open.merge(waited_for(rank));
    }
    return reached;
  }

  // Of these ranks, returns those that wait only for each other.
  std::vector<int> knot(const std::set<int>& reached) const {
    for (const int rank : reached) {
      std::set<int> members = reached_from(waited_for(rank));
      members.insert(rank);
      const bool closed = std::all_of(members.begin(), members.end(), [&](int other) {
        return other == rank || reached_from(waited_for(other)).count(rank) > 0;
      });
      if (closed) return {members.begin(), members.end()};
    }
    return {};
  }

  // Whether the other side of one of its messages is there: the data is on its way.
  bool exchanges(int rank) const {
    const auto& waiting = at(rank).waiting;
    return std::any_of(waiting.begin(), waiting.end(), [&](const auto& own) {
      if (own.peer < 0) return false;
      const auto& theirs = at(own.peer).waiting;
      return std::any_of(theirs.begin(), theirs.end(), [&](const auto& other) {
        return other.peer == rank && agree(own.call, other.call);
      });
    });
  }

  // What a rank waits in, in words.
  std::string text_of(int rank) const {
    std::vector<std::string> calls;
    for (const auto& waiting : at(rank).waiting) {
      calls.push_back(describe_waiting(group_, waiting));
    }
    return fmt::format("{}", fmt::join(calls, " and "));
  }

 private:
  std::set<int> behind(int rank, int64_t RankActivity::*counter, int64_t target) const {
    std::set<int> ranks;
    for (int other = 0; other < group_.size(); ++other) {
      if (other != rank && at(other).*counter < target) ranks.insert(other);
    }
    return ranks;
  }

  const Group& group_;
  std::span<const RankActivity> activities_;
};

// Where there are any, `ranks` are the cause. This one itself may be: it came too
// late, and a peer that waited for it has given up.
void throw_cause(const Group& group, const Fingerprint& call, const WaitGraph& graph,
                 std::vector<int> ranks, int64_t waited_ns) {
  if (ranks.empty()) return;
  std::erase(ranks, group.rank);
  std::vector<MissingRank> missing;
  for (const int rank : ranks) {
    std::string state = graph.at(rank).state;
    if (!graph.at(rank).waiting.empty()) {
      state += fmt::format("{}it waits in {}", state.empty() ? "" : "; ", graph.text_of(rank));
    }
    missing.push_back({rank, state});
  }
  if (!missing.empty()) throw_absent(group, call, missing, waited_ns);
  for (int rank = 0; rank < group.size(); ++rank) {
    if (rank == group.rank || graph.at(rank).waiting.empty()) continue;
    throw_rank_failed(
        group, call, rank,
        fmt::format("waited {} for this rank in {} and gave up",
                    format_seconds(static_cast<double>(waited_ns) * 1e-9), graph.text_of(rank)));
  }
}

// The sides of a knot. A rank that waits in one of these calls belongs to the same group.
std::vector<CallGroup> call_groups_in(const Group& group, const WaitGraph& graph,
                                      const std::vector<int>& knot) {
  std::vector<CallGroup> call_groups;
  for (const int rank : knot) {
    const std::string text = graph.text_of(rank);
    const bool known =
        std::any_of(call_groups.begin(), call_groups.end(),
                    [&](const CallGroup& call_group) { return call_group.text == text; });
    if (!known) call_groups.push_back({nullptr, text, {}});
  }
  for (int rank = 0; rank < group.size(); ++rank) {
    for (CallGroup& call_group : call_groups) {
      if (call_group.text != graph.text_of(rank)) continue;
      call_group.world_ranks.push_back(group.world_rank(rank));
    }
  }
  sort_by_size(call_groups);
  return call_groups;
}

}  // namespace

AbortRecord AbortRecord::of(const std::exception_ptr& error, const Group& group) {
  AbortRecord record{.code = Code::kInternal, .by = group.rank, .blamed = group.rank};
  try {
    std::rethrow_exception(error);
  } catch (const CollectiveError& failure) {
    return failure.record();
  } catch (const RankError& failure) {
    record.code = failure.code();
    record.blamed = group.group_rank(failure.blamed_rank());
    record.text = failure.message();
  } catch (const Error& failure) {
    record.code = failure.code();
    record.text = failure.message();
  } catch (const std::exception& failure) {
    record.text = describe(failure);
  } catch (...) {
    record.text = "an unknown exception";
  }
  return record;
}

std::string AbortRecord::encode() const {
  const RecordHead head{.code = static_cast<int32_t>(code),
                        .by = by,
                        .blamed = blamed,
                        .sides = static_cast<uint32_t>(fingerprints.size()),
                        .text_bytes = static_cast<uint32_t>(std::min(text.size(), kMaxTextBytes))};
  std::string bytes;
  append(bytes, &head, 1);
  append(bytes, ranks.data(), head.sides);
  append(bytes, fingerprints.data(), head.sides);
  append(bytes, text.data(), head.text_bytes);
  return bytes;
}

std::optional<AbortRecord> AbortRecord::decode(std::string_view bytes) {
  RecordHead head;
  if (!take(bytes, &head, 1)) return std::nullopt;
  if (head.sides > bytes.size() / (sizeof(int32_t) + sizeof(Fingerprint))) return std::nullopt;
  AbortRecord record{.code = static_cast<Code>(head.code), .by = head.by, .blamed = head.blamed};
  record.ranks.resize(head.sides);
  record.fingerprints.resize(head.sides);
  if (!take(bytes, record.ranks.data(), head.sides)) return std::nullopt;
  if (!take(bytes, record.fingerprints.data(), head.sides)) return std::nullopt;
  if (head.text_bytes > std::min(bytes.size(), kMaxTextBytes)) return std::nullopt;
  if (!std::all_of(record.fingerprints.begin(), record.fingerprints.end(), is_valid)) {
    return std::nullopt;
  }
  record.text = bytes.substr(0, head.text_bytes);
  return record;
}

size_t AbortRecord::max_bytes(int size) {
  return sizeof(RecordHead) + kMaxTextBytes +
         static_cast<size_t>(size) * (sizeof(int32_t) + sizeof(Fingerprint));
}

void throw_mismatch(const Group& group, std::span<const Fingerprint> calls,
                    std::span<const int32_t> ranks) {
  AbortRecord record;
  record.fingerprints.assign(calls.begin(), calls.end());
  record.ranks.assign(ranks.begin(), ranks.end());
  for (size_t i = record.ranks.size(); i < calls.size(); ++i) {
    record.ranks.push_back(static_cast<int32_t>(i));
  }
  throw_different(group, group_by_call(group, calls, ranks), "made different calls",
                  std::move(record));
}

void require_same_message(const Group& group, int sender, const Fingerprint& sent, int receiver,
                          const Fingerprint& received) {
  if (agree(sent, received)) return;
  throw_mismatch(group, std::array{sent, received}, std::array<int32_t, 2>{sender, receiver});
}

void throw_absent(const Group& group, const Fingerprint& call, std::span<const MissingRank> missing,
                  int64_t waited_ns) {
  std::vector<int> world_ranks;
  std::vector<std::string> notes;
  constexpr size_t kStatesShown = 6;
  for (const MissingRank& each : missing) {
    world_ranks.push_back(group.world_rank(each.rank));
    if (!each.state.empty() && notes.size() < kStatesShown) {
      notes.push_back(fmt::format("rank {}: {}", world_ranks.back(), each.state));
    }
  }
  const std::string message =
      fmt::format("{}: {}{} absent after {}", describe_in(group, call), rank_list(world_ranks),
                  of_size(group), format_seconds(static_cast<double>(waited_ns) * 1e-9));
  throw CollectiveError(
      Code::kRankAbsent, world_ranks.empty() ? -1 : world_ranks.front(),
      {.code = Code::kRankAbsent,
       .by = group.rank,
       .blamed = missing.empty() ? -1 : missing.front().rank,
       .text = message},
      message,
      fmt::format("see what {} did instead of this call; where it is only slow, give "
                  "it more time with --timeout of `lockstep run` or LOCKSTEP_TIMEOUT_S",
                  rank_list(world_ranks)),
      notes);
}

void throw_rank_failed(const Group& group, const Fingerprint& call, int rank,
                       std::string_view reason) {
  throw_rank_failed_as(
      group, call, rank, reason,
      {.code = Code::kRankFailed, .by = group.rank, .blamed = rank, .text = std::string(reason)});
}

// The first culprit stays the culprit: those who learn of it second hand blame the same rank.
void throw_recorded(const Group& group, const Fingerprint& call, const AbortRecord& record,
                    std::string_view state, int64_t waited_ns) {
  const auto in_group = [&](int rank) { return rank >= 0 && rank < group.size(); };
  if (!in_group(record.by) || record.blamed < -1 || record.blamed >= group.size() ||
      !std::all_of(record.ranks.begin(), record.ranks.end(), in_group)) {
    throw CollectiveError(Code::kRankFailed, -1, {.by = group.rank, .text = record.text},
                          fmt::format("{}: a peer gave up, and names ranks that this group lacks",
                                      describe_in(group, call)),
                          "use the same version of lockstep on all ranks");
  }
  const std::string text = record.text.empty() ? "it gave no reason" : record.text;
  const bool blames_other =
      record.blamed >= 0 && record.blamed != group.rank && record.blamed != record.by;
  if (record.code == Code::kCallMismatch) {
    if (!record.fingerprints.empty()) {
      throw_mismatch(group, record.fingerprints, record.ranks);
    }
    throw CollectiveError(record.code, record.blamed < 0 ? -1 : group.world_rank(record.blamed),
                          record, text, "make the same calls in the same order on every rank");
  }
  if (record.code == Code::kRankAbsent && blames_other) {
    const MissingRank missing{record.blamed, std::string(state)};
    throw_absent(group, call, {&missing, 1}, waited_ns);
  }
  if (record.code == Code::kRankAbsent && record.blamed < 0) {
    throw CollectiveError(record.code, -1, record, text,
                          "see whether a rank hangs; where one is only slow, give it more time "
                          "with --timeout of `lockstep run` or LOCKSTEP_TIMEOUT_S");
  }
  if (record.code == Code::kRankFailed && blames_other) {
    throw_rank_failed_as(group, call, record.blamed, text, record);
  }
  const bool blames_us = record.code == Code::kRankFailed && record.blamed == group.rank;
  throw_rank_failed_as(
      group, call, record.by,
      fmt::format("{}{}", blames_us ? "gave up because it lost this rank: " : "gave up: ", text),
      record);
}

void throw_stalled(const Group& group, const Fingerprint& call, std::span<const int> awaited,
                   std::span<const RankActivity> activities, int64_t waited_ns) {
  const WaitGraph graph(group, activities);
  const std::set<int> reached =
      graph.reached_from(awaited.empty() ? graph.waited_for(group.rank)
                                         : std::set<int>(awaited.begin(), awaited.end()));
  std::vector<int> silent;
  std::vector<int> elsewhere;  // alive, and in no call
  for (const int rank : reached) {
    if (graph.at(rank).silent) {
      silent.push_back(rank);
    } else if (graph.at(rank).waiting.empty()) {
      elsewhere.push_back(rank);
    }
  }
  throw_cause(group, call, graph, silent, waited_ns);
  std::stable_sort(elsewhere.begin(), elsewhere.end(),
                   [&](int a, int b) { return graph.at(a).arrived < graph.at(b).arrived; });
  throw_cause(group, call, graph, elsewhere, waited_ns);
  const std::vector<int> knot = graph.knot(reached);
  const std::vector<CallGroup> call_groups = call_groups_in(group, graph, knot);
  const bool moving =
      std::all_of(knot.begin(), knot.end(), [&](int rank) { return graph.exchanges(rank); });
  if (call_groups.size() > 1 && !moving) {
    throw_different(group, call_groups, "made different calls and wait for each other");
  }
  if (knot.size() == 1 && knot.front() != group.rank) {
    throw_cause(group, call, graph, knot, waited_ns);
  }
  const std::string message =
      fmt::format("{}: not done after {}, though no rank is missing", describe_in(group, call),
                  format_seconds(static_cast<double>(waited_ns) * 1e-9));
  throw CollectiveError(
      Code::kRankAbsent, -1, {.code = Code::kRankAbsent, .by = group.rank, .text = message},
      message,
      "the data moves too slowly: give it more time with --timeout of `lockstep run` or "
      "LOCKSTEP_TIMEOUT_S");
}

}  // namespace lockstep
