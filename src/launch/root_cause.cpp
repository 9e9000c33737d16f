#include "launch/root_cause.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <signal.h>
#include <string.h>

#include <algorithm>
#include <array>
#include <set>

#include "base/lists.hpp"
#include "launch/progress.hpp"
#include "lockstep/detail/board.hpp"
#include "lockstep/units.hpp"

namespace lockstep {
namespace {

bool ended_badly(const RankView& view) {
  return view.end && view.end->bad();
}

const RankView* find_rank(const std::vector<RankView>& views, int rank) {
  const auto found = std::find_if(views.begin(), views.end(),
                                  [rank](const RankView& view) { return view.rank == rank; });
  return found == views.end() ? nullptr : &*found;
}

// True for a rank that knows it is a victim, but not of which rank.
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

// True if a rank gave up because another one did not come; otherwise it is a victim of one that had
// failed or given up before.
bool missed_somebody(const RankView& view) {
  return view.board.error && view.board.error->code != Code::kRankFailed;
}

// Blame leads from one rank to the next, up to one that blames nobody, is alive, ended well, or is
// on another host.
struct Trail {
  const RankView* last;                // its last rank of this host
  int root;                            // the rank at its end
  std::vector<const RankView*> cycle;  // ranks that blame each other, if any
};

Trail follow_blame(const std::vector<RankView>& views, const RankView& first) {
  Trail trail{&first, first.rank, {}};
  std::vector<const RankView*> path = {&first};
  while (ended_badly(*trail.last)) {
    const int blamed = blamed_by(*trail.last);
    if (blamed < 0) break;
    const auto repeated = std::find_if(
        path.begin(), path.end(), [blamed](const RankView* view) { return view->rank == blamed; });
    if (repeated != path.end()) {
      trail.cycle.assign(repeated, path.end());
      break;
    }
    trail.root = blamed;
    const RankView* next = find_rank(views, blamed);
    if (next == nullptr) break;
    trail.last = next;
    path.push_back(next);
  }
  return trail;
}

// By convention: bad usage, not executable, not found.
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

// Ranks of a cycle that miss each other wait for each other. If only one of them is missed, it came
// too late, and the others are blamed for having given up.
void judge_cycle(const Trail& trail, RootCause& root_cause) {
  std::set<int> missed;
  for (const RankView* view : trail.cycle) {
    if (!missed_somebody(*view)) continue;
    missed.insert(blamed_by(*view));
    root_cause.first_failure = view->rank;
  }
  root_cause.rank = missed.empty() ? root_cause.first_failure : *missed.begin();
  root_cause.cause = missed.empty()       ? Cause::kExit
                     : missed.size() == 1 ? Cause::kLate
                                          : Cause::kDisagreement;
}

bool differs_from_others(const RankView& view) {
  return view.board.error && view.board.error->code == Code::kCallMismatch &&
         view.board.error->blamed_rank < 0;
}

void list_others(const std::vector<RankView>& views, RootCause& root_cause) {
  for (const RankView& view : views) {
    if (view.rank == root_cause.rank) continue;
    if (ended_badly(view)) root_cause.gave_up.push_back(view.rank);
    if (!view.end) root_cause.running.push_back(view.rank);
  }
}

bool never_came(const RankView& view) {
  return view.end && view.end->status == 0 && view.board.pid == 0;
}

bool waits_in_rendezvous(const RankView& view) {
  const CollectiveStatus& call = view.board.collective;
  return !view.end && call.sequence == kRendezvousSequence && call.finished_ns == 0;
}

constexpr size_t kLongestQuote = 300;
constexpr size_t kQuotedLines = 4;

// A rank's message as one line of bounded length.
std::string one_line(std::string text) {
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  for (size_t at = text.find('\n'); at != std::string::npos; at = text.find('\n', at)) {
    text.replace(at, 1, " / ");
  }
  if (text.size() <= kLongestQuote) return text;
  size_t end = kLongestQuote;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return text.substr(0, end) + " ...";
}

Code code_of(const RootCause& root_cause, const RankView* root) {
  switch (root_cause.cause) {
    case Cause::kOutOfMemory:
      return Code::kOutOfMemory;
    case Cause::kHalted:
    case Cause::kMissing:
    case Cause::kLate:
    case Cause::kStalled:
      return Code::kRankAbsent;
    case Cause::kDisagreement:
      return Code::kCallMismatch;
    case Cause::kLeft:
    case Cause::kRemote:
      return Code::kRankFailed;
    case Cause::kSignal:
      return Code::kProgramFailed;
    case Cause::kExit:
      break;
  }
  return root != nullptr && root->board.error ? root->board.error->code : Code::kProgramFailed;
}

// Some errors name their rank themselves.
std::string with_rank(const std::string& who, const std::string& message) {
  const bool named = message.starts_with(who + ",") || message.starts_with(who + ":") ||
                     message.starts_with(who + " ");
  return named ? message : who + ": " + message;
}

std::string message_of(const RootCause& root_cause, const RankView* root,
                       const FailureFacts& facts) {
  const std::string who = fmt::format("rank {}", root_cause.rank);
  switch (root_cause.cause) {
    case Cause::kOutOfMemory:
      return who + " was killed by the system (signal 9): out of memory";
    case Cause::kHalted:
      return who + " is stopped (SIGSTOP) and did not come";
    case Cause::kMissing:
      return who + (root_cause.before_rendezvous
                        ? " did not come to the rendezvous: it was running, but made no World"
                        : " did not come: it was running, but not where the others waited");
    case Cause::kLate:
      return who + " did not come in time to a call in which others waited for it";
    case Cause::kStalled:
      return fmt::format("{} made no step and no collective for {} (--step-timeout)",
                         name_ranks(root_cause.stalled), format_seconds(root_cause.stalled_s));
    case Cause::kLeft:
      if (root_cause.before_rendezvous) return never_came_line(root_cause.rank);
      return fmt::format("{} ended with exit code {} while others needed it", who,
                         root->end->exit_code());
    case Cause::kDisagreement:
      return one_line(root->board.error->code == Code::kCallMismatch
                          ? root->board.error->message
                          : "ranks wait for each other: " +
                                with_rank(who, root->board.error->message));
    case Cause::kRemote:
      return facts.remote.empty() ? who + " of another host is at fault" : one_line(facts.remote);
    case Cause::kSignal:
      return fmt::format("{} was killed by signal {} ({})", who, root->end->signal(),
                         ::strsignal(root->end->signal()));
    case Cause::kExit:
      break;
  }
  if (root->board.error) return one_line(with_rank(who, root->board.error->message));
  const std::string how = fmt::format("{} ended with exit code {}", who, root->end->exit_code());
  return facts.error_message.empty() ? how : one_line(how + ": " + facts.error_message);
}

// "step 17; in all_reduce #52 of 24.0 MiB (bucket 3) for 0.41 s".
std::string position_of(const RankStatus& board, int64_t now_ns) {
  if (board.updated_ns == 0) return "";
  std::string text = fmt::format("step {}", board.step);
  const CollectiveStatus& call = board.collective;
  if (call.sequence == 0) return text + ", no collective yet";
  text += fmt::format(", {} {}", call.finished_ns == 0 ? "in" : "after", call.operation);
  if (call.sequence > 0) text += fmt::format(" #{} of {}", call.sequence, format_bytes(call.bytes));
  if (call.bucket >= 0) text += fmt::format(" (bucket {})", call.bucket);
  const int64_t since = call.finished_ns == 0 ? call.started_ns : call.finished_ns;
  return text + fmt::format(", {} ago", format_seconds(static_cast<double>(now_ns - since) * 1e-9));
}

std::string describe_victims(const RootCause& root_cause) {
  std::string text;
  const bool one_culprit = root_cause.cause != Cause::kDisagreement;
  if (one_culprit && !root_cause.gave_up.empty())
    text = name_ranks(root_cause.gave_up) + " gave up";
  if (!root_cause.running.empty()) {
    text += (text.empty() ? "" : ", ") + name_ranks(root_cause.running) + " stopped by lockstep";
  }
  return text;
}

void add_quotes(const RootCause& root_cause, const RankView* root, const FailureFacts& facts,
                std::vector<std::string>& notes) {
  const bool has_own_words =
      (root_cause.cause == Cause::kExit || root_cause.cause == Cause::kDisagreement) &&
      root != nullptr && root->board.error.has_value();
  if (has_own_words) return;
  const size_t count = std::min(facts.last_errors.size(), kQuotedLines);
  for (size_t i = facts.last_errors.size() - count; i < facts.last_errors.size(); ++i) {
    notes.push_back("it wrote: " + one_line(facts.last_errors[i]));
  }
}

// What the ranks of this host on the other sides of a disagreement say.
void add_other_sides(const RankView& root, const std::vector<RankView>& views,
                     std::vector<std::string>& notes) {
  size_t shown = 0;
  for (const RankView& view : views) {
    const auto& error = view.board.error;
    if (!error || error->message == root.board.error->message || shown == kQuotedLines) continue;
    notes.push_back(one_line(fmt::format("rank {} reported: {}", view.rank, error->message)));
    ++shown;
  }
  notes.emplace_back("it is unknown which of them is wrong");
}

// Where the other ranks without progress are.
void add_stalled(const RootCause& root_cause, const std::vector<RankView>& views,
                 const FailureFacts& facts, std::vector<std::string>& notes) {
  size_t shown = 0;
  for (const RankView& view : views) {
    const auto& stalled = root_cause.stalled;
    const bool other = view.rank != root_cause.rank &&
                       std::find(stalled.begin(), stalled.end(), view.rank) != stalled.end();
    if (!other || shown++ >= kQuotedLines) continue;
    std::string note =
        fmt::format("rank {} was at {}", view.rank, position_of(view.board, facts.now_ns));
    if (const auto stack = facts.stacks.find(view.rank); stack != facts.stacks.end()) {
      note += fmt::format("; its stack: {}", fmt::join(stack->second, " < "));
    }
    notes.push_back(one_line(note));
  }
}

}  // namespace

RootCause find_root_cause(const std::vector<RankView>& views, bool out_of_memory) {
  const RankView& first = first_bad_end(views);
  const Trail trail = follow_blame(views, first);
  RootCause root_cause;
  root_cause.first_failure = first.rank;
  root_cause.before_rendezvous = first.board.error && first.board.error->code == Code::kRendezvous;
  root_cause.exit_code = first.end->exit_code();
  if (!trail.cycle.empty()) {
    judge_cycle(trail, root_cause);
  } else if (trail.last->rank != trail.root) {
    root_cause.rank = trail.root;
    root_cause.cause = Cause::kRemote;
  } else {
    root_cause.rank = trail.root;
    root_cause.cause = cause_of(*trail.last, out_of_memory);
    // A culprit that has not ended, or ended well, has no exit code that tells of the failure. Its
    // victims exit with 2 if the rendezvous failed, which means a faulty request; this is none.
    if (root_cause.before_rendezvous) root_cause.exit_code = 1;
    if (ended_badly(*trail.last)) root_cause.exit_code = trail.last->end->exit_code();
  }
  if (root_cause.cause == Cause::kExit && differs_from_others(*trail.last)) {
    // All of them found the same; which one ended first says nothing.
    const auto differing = std::find_if(views.begin(), views.end(), differs_from_others);
    root_cause.cause = Cause::kDisagreement;
    root_cause.rank = root_cause.first_failure = differing->rank;
  }
  if (root_cause.cause == Cause::kMissing) {
    // It came, but with another call than the rest, and was only too slow to report that itself.
    const auto accuser = std::find_if(views.begin(), views.end(), [&](const RankView& view) {
      return ended_badly(view) && blamed_by(view) == root_cause.rank &&
             view.board.error->code == Code::kCallMismatch;
    });
    if (accuser != views.end()) {
      root_cause.cause = Cause::kDisagreement;
      root_cause.rank = root_cause.first_failure = accuser->rank;
    }
  }
  list_others(views, root_cause);
  return root_cause;
}

Restart restart_after(const RootCause& root_cause, const std::vector<RankView>& views) {
  const RankView* root = find_rank(views, root_cause.rank);
  if (root_cause.cause != Cause::kExit || root == nullptr) return Restart::kMayHelp;
  const bool permanent = root->board.error
                             ? is_permanent(root->board.error->code)
                             : std::find(kPermanentExits.begin(), kPermanentExits.end(),
                                         root_cause.exit_code) != kPermanentExits.end();
  return permanent ? Restart::kSameAgain : Restart::kMayHelp;
}

bool is_victim(const RootCause& root_cause, const std::vector<RankView>& views) {
  const RankView* root = find_rank(views, root_cause.rank);
  if (root == nullptr || !root->board.error) return false;
  const Code code = root->board.error->code;
  return code == Code::kRankFailed || code == Code::kRankAbsent;
}

bool first_was_killed(const std::vector<RankView>& views) {
  const RankView& first = first_bad_end(views);
  constexpr std::array kDeadly = {SIGKILL, SIGSEGV, SIGBUS, SIGILL, SIGFPE};
  return !first.board.error &&
         std::find(kDeadly.begin(), kDeadly.end(), first.end->signal()) != kDeadly.end();
}

RootCause find_cause_in_rank(const std::vector<RankView>& views, int rank, bool out_of_memory) {
  RootCause root_cause;
  root_cause.rank = root_cause.first_failure = rank;
  const RankView* view = find_rank(views, rank);
  root_cause.cause = cause_of(*view, out_of_memory);
  root_cause.before_rendezvous = never_came(*view);
  if (ended_badly(*view)) root_cause.exit_code = view->end->exit_code();
  list_others(views, root_cause);
  return root_cause;
}

std::vector<int> ranks_that_never_came(const std::vector<RankView>& views) {
  std::vector<int> ranks;
  for (const RankView& view : views) {
    if (never_came(view)) ranks.push_back(view.rank);
  }
  return ranks;
}

bool somebody_waits_in_rendezvous(const std::vector<RankView>& views) {
  return std::any_of(views.begin(), views.end(), waits_in_rendezvous);
}

std::string never_came_line(int rank) {
  return fmt::format("rank {} ended with exit code 0 and never came to the rendezvous of all ranks",
                     rank);
}

std::optional<RootCause> find_early_leaver(const std::vector<RankView>& views) {
  const auto leaver = std::find_if(views.begin(), views.end(), never_came);
  if (leaver == views.end() || !somebody_waits_in_rendezvous(views)) return std::nullopt;
  RootCause root_cause;
  root_cause.cause = Cause::kLeft;
  root_cause.rank = root_cause.first_failure = leaver->rank;
  root_cause.before_rendezvous = true;
  list_others(views, root_cause);
  return root_cause;
}

RootCause find_stall(const std::vector<RankView>& views, double longest_s) {
  RootCause root_cause;
  root_cause.cause = Cause::kStalled;
  root_cause.stalled_s = longest_s;
  const RankView* last = nullptr;
  for (const RankView& view : views) {
    if (view.end || waits_for_others(view.board)) continue;
    root_cause.stalled.push_back(view.rank);
    if (last == nullptr || view.board.step < last->board.step) last = &view;
  }
  root_cause.rank = root_cause.first_failure = last == nullptr ? -1 : last->rank;
  list_others(views, root_cause);
  std::erase_if(root_cause.running, [&](int rank) {
    return std::find(root_cause.stalled.begin(), root_cause.stalled.end(), rank) !=
           root_cause.stalled.end();
  });
  return root_cause;
}

Patience patience_with(const std::vector<RankView>& views) {
  const Trail trail = follow_blame(views, first_bad_end(views));
  if (!trail.cycle.empty()) return Patience::kNone;
  if (trail.last->rank != trail.root) return Patience::kForLivingCulprit;
  if (trail.last->end) return Patience::kNone;
  const auto gave_up = [&](const RankView& view) {
    return ended_badly(view) && blamed_by(view) == trail.root && !missed_somebody(view);
  };
  return std::any_of(views.begin(), views.end(), gave_up) ? Patience::kForEndingCulprit
                                                          : Patience::kForLivingCulprit;
}

Error failure_error(const RootCause& root_cause, const std::vector<RankView>& views,
                    const FailureFacts& facts) {
  const RankView* root = find_rank(views, root_cause.rank);
  const RankView* first = find_rank(views, root_cause.first_failure);
  std::vector<std::string> notes;
  if (root != nullptr) {
    notes.push_back(fmt::format("rank {} of {} on {}, process {}, {}", root->rank, facts.world_size,
                                facts.host, root->pid, facts.program));
    const std::string position = position_of(root->board, facts.now_ns);
    if (!position.empty()) notes.push_back("it was at " + position);
    if (const auto stack = facts.stacks.find(root->rank); stack != facts.stacks.end()) {
      notes.push_back(
          one_line(fmt::format("its stack, innermost first: {}", fmt::join(stack->second, " < "))));
    }
    add_stalled(root_cause, views, facts, notes);
  }
  if (root_cause.cause == Cause::kDisagreement) {
    add_other_sides(*root, views, notes);
  } else if (first != nullptr && first != root && first->board.error) {
    notes.push_back(
        one_line(fmt::format("rank {} reported: {}", first->rank, first->board.error->message)));
  }
  add_quotes(root_cause, root, facts, notes);
  const std::string victims = describe_victims(root_cause);
  // If it is unknown which rank is wrong, it is unknown which ones are victims.
  const char* label = root_cause.cause == Cause::kDisagreement ? "" : "victims: ";
  if (!victims.empty()) notes.push_back(label + victims);
  const Code code = code_of(root_cause, root);
  const char* bundle = facts.bundle.empty() ? "" : ", and crash.json";
  if (root == nullptr) {
    notes.push_back(fmt::format("logs of this host's ranks{}: {}", bundle, facts.logs));
    return {code, message_of(root_cause, root, facts),
            fmt::format("read the logs on that host; `lockstep explain {}`", code_name(code)),
            notes};
  }
  notes.push_back(fmt::format("logs of all ranks{}: {}", bundle, facts.logs));
  return {code, message_of(root_cause, root, facts),
          fmt::format("tail {}/rank{}.*; `lockstep explain {}`", facts.logs, root_cause.rank,
                      code_name(code)),
          notes};
}

std::string failure_line(const RootCause& root_cause, const std::vector<RankView>& views,
                         const FailureFacts& facts) {
  return message_of(root_cause, find_rank(views, root_cause.rank), facts);
}

std::string name_ranks(const std::vector<int>& ranks) {
  if (ranks.empty()) return "no rank";
  if (ranks.size() == 1) return fmt::format("rank {}", ranks[0]);
  const std::vector<int> but_last(ranks.begin(), ranks.end() - 1);
  // A list of dozens would fill the screen.
  if (ranks.size() > 8) return fmt::format("ranks {}", format_number_list(ranks));
  return fmt::format("ranks {} and {}", fmt::join(but_last, ", "), ranks.back());
}

}  // namespace lockstep
