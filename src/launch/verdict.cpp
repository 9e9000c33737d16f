#include "launch/verdict.hpp"

#include <signal.h>

#include <algorithm>
#include <array>
#include <set>

#include "base/board_layout.hpp"

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

// Whether a rank gave up because another one did not come; otherwise it is a victim of one that
// had failed or given up before.
bool missed_somebody(const RankView& view) {
  return view.board.error && view.board.error->code != Code::kRankFailed;
}

// Blame leads from one rank to the next, until one that blames nobody, is alive, left well, or is
// not of this host.
struct Trail {
  const RankView* last;  // the last rank of this host on it
  int root;
  std::vector<const RankView*> circle;  // ranks that blame each other; empty: they do not
};

Trail follow_blame(const std::vector<RankView>& views, const RankView& witness) {
  Trail trail{&witness, witness.rank, {}};
  std::vector<const RankView*> path = {&witness};
  while (ended_badly(*trail.last)) {
    const int blamed = blamed_by(*trail.last);
    if (blamed < 0) break;
    const auto met = std::find_if(path.begin(), path.end(),
                                  [blamed](const RankView* view) { return view->rank == blamed; });
    if (met != path.end()) {
      trail.circle.assign(met, path.end());
      break;
    }
    trail.root = blamed;
    const RankView* next = find(views, blamed);
    if (next == nullptr) break;
    trail.last = next;
    path.push_back(next);
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

// Ranks of a circle that miss each other wait for each other. Where only one of them is missed, it
// came too late, and the others are blamed for having given up.
void judge_circle(const Trail& trail, Verdict& verdict) {
  std::set<int> missed;
  for (const RankView* view : trail.circle) {
    if (!missed_somebody(*view)) continue;
    missed.insert(blamed_by(*view));
    verdict.witness = view->rank;
  }
  verdict.root = missed.empty() ? verdict.witness : *missed.begin();
  verdict.cause = missed.empty()       ? Cause::kExit
                  : missed.size() == 1 ? Cause::kLate
                                       : Cause::kDisagreement;
}

bool differs_from_others(const RankView& view) {
  return view.board.error && view.board.error->code == Code::kCallMismatch &&
         view.board.error->blamed_rank < 0;
}

void list_others(const std::vector<RankView>& views, Verdict& verdict) {
  for (const RankView& view : views) {
    if (view.rank == verdict.root) continue;
    if (ended_badly(view)) verdict.gave_up.push_back(view.rank);
    if (!view.end) verdict.running.push_back(view.rank);
  }
}

bool never_came(const RankView& view) {
  return view.end && view.end->status == 0 && view.board.pid == 0;
}

bool waits_in_rendezvous(const RankView& view) {
  const CollectiveStatus& call = view.board.collective;
  return !view.end && call.sequence == board_layout::kRendezvousSequence && call.finished_ns == 0;
}

}  // namespace

Verdict judge(const std::vector<RankView>& views, bool out_of_memory) {
  const RankView& witness = first_bad_end(views);
  const Trail trail = follow_blame(views, witness);
  Verdict verdict;
  verdict.witness = witness.rank;
  verdict.before_rendezvous = witness.board.error && witness.board.error->code == Code::kRendezvous;
  verdict.exit_code = witness.end->exit_code();
  if (!trail.circle.empty()) {
    judge_circle(trail, verdict);
  } else if (trail.last->rank != trail.root) {
    verdict.root = trail.root;
    verdict.cause = Cause::kRemote;
  } else {
    verdict.root = trail.root;
    verdict.cause = cause_of(*trail.last, out_of_memory);
    // A culprit that has not ended, or ended well, has no code that tells of the failure. Its
    // victims' is 2 where the ranks never met, as for a request that is at fault, which this is
    // not.
    if (verdict.before_rendezvous) verdict.exit_code = 1;
    if (ended_badly(*trail.last)) verdict.exit_code = trail.last->end->exit_code();
  }
  if (verdict.cause == Cause::kExit && differs_from_others(*trail.last)) {
    // Every one of them found the same; which was the first to end says nothing.
    const auto first = std::find_if(views.begin(), views.end(), differs_from_others);
    verdict.cause = Cause::kDisagreement;
    verdict.root = verdict.witness = first->rank;
  }
  list_others(views, verdict);
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

Verdict judge_accused(const std::vector<RankView>& views, int root, bool out_of_memory) {
  Verdict verdict;
  verdict.root = verdict.witness = root;
  const RankView* view = find(views, root);
  verdict.cause = cause_of(*view, out_of_memory);
  if (ended_badly(*view)) verdict.exit_code = view->end->exit_code();
  list_others(views, verdict);
  return verdict;
}

bool may_have_left_early(const std::vector<RankView>& views) {
  return std::any_of(views.begin(), views.end(), never_came);
}

std::optional<Verdict> judge_early_leaver(const std::vector<RankView>& views) {
  const auto leaver = std::find_if(views.begin(), views.end(), never_came);
  const auto waits = std::find_if(views.begin(), views.end(), waits_in_rendezvous);
  if (leaver == views.end() || waits == views.end()) return std::nullopt;
  Verdict verdict;
  verdict.cause = Cause::kLeft;
  verdict.root = verdict.witness = leaver->rank;
  verdict.before_rendezvous = true;
  list_others(views, verdict);
  return verdict;
}

Patience patience_with(const std::vector<RankView>& views) {
  const Trail trail = follow_blame(views, first_bad_end(views));
  if (!trail.circle.empty()) return Patience::kNone;
  if (trail.last->rank != trail.root) return Patience::kForLivingCulprit;
  if (trail.last->end) return Patience::kNone;
  const auto gave_up = [&](const RankView& view) {
    return ended_badly(view) && blamed_by(view) == trail.root && !missed_somebody(view);
  };
  return std::any_of(views.begin(), views.end(), gave_up) ? Patience::kForEndingCulprit
                                                          : Patience::kForLivingCulprit;
}

}  // namespace lockstep
