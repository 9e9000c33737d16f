#include "launch/verdict.hpp"

#include <signal.h>

#include <algorithm>
#include <array>
#include <set>

namespace lockstep {
namespace {

bool ended_badly(const RankView& view) {
  return view.end && view.end->bad();
}

const RankView* find(const std::vector<RankView>& views, int rank) {
  const auto found = std::find_if(views.begin(), views.end(),
                                  [rank](const RankView& view) { return view.rank == rank; });
  return found == views.end() ? nullptr : &*found;
}

// A rank that says it is a victim without knowing whose.
bool is_nameless_victim(const RankView& view) {
  const auto& error = view.board.error;
  return error && error->blamed_rank < 0 &&
         (error->code == Code::kRankFailed || error->code == Code::kRankAbsent);
}

const RankView& first_bad_end(const std::vector<RankView>& views) {
  const RankView* first = nullptr;
  const RankView* first_culprit = nullptr;
  for (const RankView& view : views) {
    if (!ended_badly(view)) continue;
    if (first == nullptr || view.order < first->order) first = &view;
    if (is_nameless_victim(view)) continue;
    if (first_culprit == nullptr || view.order < first_culprit->order) first_culprit = &view;
  }
  return first_culprit == nullptr ? *first : *first_culprit;
}

int blamed_by(const RankView& view) {
  const auto& error = view.board.error;
  return error && error->blamed_rank != view.rank ? error->blamed_rank : -1;
}

// Follows blame until a rank that blames nobody, is alive, left well, or is not of this host.
struct Trail {
  const RankView* last;  // the last rank of this host on it
  int root;
};

Trail follow_blame(const std::vector<RankView>& views, const RankView& witness) {
  std::set<int> seen = {witness.rank};
  Trail trail{&witness, witness.rank};
  while (ended_badly(*trail.last)) {
    const int blamed = blamed_by(*trail.last);
    if (blamed < 0) break;
    if (!seen.insert(blamed).second) return {&witness, witness.rank};  // they blame each other
    trail.root = blamed;
    const RankView* next = find(views, blamed);
    if (next == nullptr) break;
    trail.last = next;
  }
  return trail;
}

// What shells and programs by custom mean by these: bad usage, not executable, not found.
constexpr std::array kPermanentExits = {2, 126, 127};

bool is_permanent(Code code) {
  switch (code) {
    case Code::kUsage:
    case Code::kDeviceSpec:
    case Code::kDeviceMissing:
    case Code::kFileFormat:
    case Code::kTensorMismatch:
    case Code::kSplit:
    case Code::kPlacement:
    case Code::kReplicate:
    case Code::kEngine:
    case Code::kRecord:
    case Code::kWorld:
    case Code::kLaunch:
    case Code::kSchedule:
      return true;
    default:
      return false;
  }
}

Cause cause_of(const RankView& root, bool out_of_memory) {
  if (!root.end) return root.state == 'T' || root.state == 't' ? Cause::kHalted : Cause::kMissing;
  if (!root.end->bad()) return Cause::kLeft;
  if (root.end->signal() == 0) return Cause::kExit;
  return root.end->signal() == SIGKILL && out_of_memory ? Cause::kOutOfMemory : Cause::kSignal;
}

}  // namespace

Verdict judge(const std::vector<RankView>& views, bool out_of_memory) {
  const RankView& witness = first_bad_end(views);
  const Trail trail = follow_blame(views, witness);
  Verdict verdict;
  verdict.root = trail.root;
  verdict.witness = witness.rank;
  const bool remote = trail.last->rank != trail.root;
  verdict.cause = remote ? Cause::kRemote : cause_of(*trail.last, out_of_memory);
  // A culprit that has not ended, or ended well, has no code that tells of the failure.
  verdict.exit_code =
      !remote && ended_badly(*trail.last) ? trail.last->end->exit_code() : witness.end->exit_code();
  for (const RankView& view : views) {
    if (view.rank == verdict.root) continue;
    if (ended_badly(view)) verdict.gave_up.push_back(view.rank);
    if (!view.end) verdict.running.push_back(view.rank);
  }
  return verdict;
}

bool may_change(const Verdict& verdict, const std::vector<RankView>& views) {
  const RankView* root = find(views, verdict.root);
  if (verdict.cause != Cause::kExit || root == nullptr) return true;
  if (root->board.error) return !is_permanent(root->board.error->code);
  return std::find(kPermanentExits.begin(), kPermanentExits.end(), verdict.exit_code) ==
         kPermanentExits.end();
}

bool first_was_killed(const std::vector<RankView>& views) {
  const RankView& first = first_bad_end(views);
  constexpr std::array kDeadly = {SIGKILL, SIGSEGV, SIGBUS, SIGILL, SIGFPE};
  return !first.board.error &&
         std::find(kDeadly.begin(), kDeadly.end(), first.end->signal()) != kDeadly.end();
}

bool blames_a_living_rank(const std::vector<RankView>& views) {
  const Trail trail = follow_blame(views, first_bad_end(views));
  return trail.last->rank != trail.root || !trail.last->end;
}

}  // namespace lockstep
