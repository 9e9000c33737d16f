#include "launch/failure_text.hpp"

#include <fmt/format.h>
#include <string.h>

#include <algorithm>

#include "launch/number_list.hpp"
#include "lockstep/units.hpp"

namespace lockstep {
namespace {

constexpr size_t kLongestLine = 300;
constexpr size_t kQuotedLines = 4;

// Whatever a rank said, as one line of bounded length.
std::string one_line(std::string text) {
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  for (size_t at = text.find('\n'); at != std::string::npos; at = text.find('\n', at)) {
    text.replace(at, 1, " / ");
  }
  if (text.size() <= kLongestLine) return text;
  size_t end = kLongestLine;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return text.substr(0, end) + " ...";
}

const RankView* find(const std::vector<RankView>& views, int rank) {
  const auto found = std::find_if(views.begin(), views.end(),
                                  [rank](const RankView& view) { return view.rank == rank; });
  return found == views.end() ? nullptr : &*found;
}

Code code_of(const Verdict& verdict, const RankView* root) {
  switch (verdict.cause) {
    case Cause::kOutOfMemory:
      return Code::kOutOfMemory;
    case Cause::kHalted:
    case Cause::kMissing:
    case Cause::kLate:
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

std::string message_of(const Verdict& verdict, const RankView* root, const FailureFacts& facts) {
  const std::string who = fmt::format("rank {}", verdict.root);
  switch (verdict.cause) {
    case Cause::kOutOfMemory:
      return who + " was killed by the system (signal 9): out of memory";
    case Cause::kHalted:
      return who + " is stopped (SIGSTOP) and did not come";
    case Cause::kMissing:
      return who + (verdict.before_rendezvous
                        ? " did not come to the rendezvous: it was running, but made no World"
                        : " did not come: it was running, but not where the others waited");
    case Cause::kLate:
      return who + " did not come in time to a call in which others waited for it";
    case Cause::kLeft:
      return fmt::format("{} ended with exit code {} {}", who, root->end->exit_code(),
                         verdict.before_rendezvous ? "and never came to the rendezvous of all ranks"
                                                   : "while others needed it");
    case Cause::kDisagreement:
      return one_line(
          root->board.error->code == Code::kCallMismatch
              ? root->board.error->message
              : fmt::format("ranks wait for each other: {}: {}", who, root->board.error->message));
    case Cause::kRemote:
      return facts.remote.empty() ? who + " of another host is at fault" : one_line(facts.remote);
    case Cause::kSignal:
      return fmt::format("{} was killed by signal {} ({})", who, root->end->signal(),
                         ::strsignal(root->end->signal()));
    case Cause::kExit:
      break;
  }
  if (root->board.error) return one_line(fmt::format("{}: {}", who, root->board.error->message));
  const std::string how = fmt::format("{} ended with exit code {}", who, root->end->exit_code());
  return facts.error_message.empty() ? how : one_line(how + ": " + facts.error_message);
}

// "step 17; in all_reduce #52 of 24.0 MiB (bucket 3) for 0.41 s".
std::string place_of(const RankStatus& board, int64_t now_ns) {
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

std::string describe_victims(const Verdict& verdict) {
  std::string text;
  const bool one_culprit = verdict.cause != Cause::kDisagreement;
  if (one_culprit && !verdict.gave_up.empty()) text = name_ranks(verdict.gave_up) + " gave up";
  if (!verdict.running.empty()) {
    text += (text.empty() ? "" : ", ") + name_ranks(verdict.running) + " stopped by lockstep";
  }
  return text;
}

void add_quotes(const Verdict& verdict, const RankView* root, const FailureFacts& facts,
                std::vector<std::string>& notes) {
  const bool has_own_words =
      (verdict.cause == Cause::kExit || verdict.cause == Cause::kDisagreement) && root != nullptr &&
      root->board.error.has_value();
  if (has_own_words) return;
  const size_t count = std::min(facts.last_errors.size(), kQuotedLines);
  for (size_t i = facts.last_errors.size() - count; i < facts.last_errors.size(); ++i) {
    notes.push_back("it wrote: " + one_line(facts.last_errors[i]));
  }
}

// What the ranks of this host say that are on the other sides.
void add_other_sides(const RankView& root, const std::vector<RankView>& views,
                     std::vector<std::string>& notes) {
  size_t shown = 0;
  for (const RankView& view : views) {
    const auto& error = view.board.error;
    if (!error || error->message == root.board.error->message || shown == kQuotedLines) continue;
    notes.push_back(one_line(fmt::format("rank {} reported: {}", view.rank, error->message)));
    ++shown;
  }
  notes.emplace_back("nobody can tell which of them is wrong");
}

}  // namespace

Error failure_error(const Verdict& verdict, const std::vector<RankView>& views,
                    const FailureFacts& facts) {
  const RankView* root = find(views, verdict.root);
  const RankView* witness = find(views, verdict.witness);
  std::vector<std::string> notes;
  if (root != nullptr) {
    notes.push_back(fmt::format("rank {} of {} on {}, process {}, {}", root->rank, facts.world_size,
                                facts.host, root->pid, facts.program));
    const std::string place = place_of(root->board, facts.now_ns);
    if (!place.empty()) notes.push_back("it was at " + place);
  }
  if (verdict.cause == Cause::kDisagreement) {
    add_other_sides(*root, views, notes);
  } else if (witness != nullptr && witness != root && witness->board.error) {
    notes.push_back(one_line(
        fmt::format("rank {} reported: {}", witness->rank, witness->board.error->message)));
  }
  add_quotes(verdict, root, facts, notes);
  const std::string victims = describe_victims(verdict);
  // Where nobody can tell who is wrong, nobody can tell who is a victim.
  const char* label = verdict.cause == Cause::kDisagreement ? "" : "victims: ";
  if (!victims.empty()) notes.push_back(label + victims);
  const Code code = code_of(verdict, root);
  if (root == nullptr) {
    notes.push_back("logs of this host's ranks: " + facts.logs);
    return {code, message_of(verdict, root, facts),
            fmt::format("read the logs on that host; `lockstep explain {}`", code_name(code)),
            notes};
  }
  notes.push_back("logs of all ranks: " + facts.logs);
  return {code, message_of(verdict, root, facts),
          fmt::format("tail {}/rank{}.*; `lockstep explain {}`", facts.logs, verdict.root,
                      code_name(code)),
          notes};
}

std::string failure_line(const Verdict& verdict, const std::vector<RankView>& views,
                         const FailureFacts& facts) {
  return message_of(verdict, find(views, verdict.root), facts);
}

}  // namespace lockstep
