#include "launch/round.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/running_clock.hpp"
#include "launch/failure_text.hpp"
#include "lockstep/clock.hpp"

namespace lockstep {
namespace {

constexpr int64_t kMillisecond = 1'000'000;
// After the first bad end the others get this long to end too, since one of them may report what
// really happened; longer where the culprit that is named has not ended yet, and longest where
// others say that it has given up: its own error is about to come, and tells most. None where the
// first rank was killed: no other rank can know more about that.
constexpr int64_t kSettleNs = 50 * kMillisecond;
constexpr int64_t kSettleForCulpritNs = 200 * kMillisecond;
constexpr int64_t kSettleForEndingCulpritNs = 3'000 * kMillisecond;
// A rank that ended well may be missed in a rendezvous that the others have yet to begin.
constexpr int64_t kLookForWaitingNs = 50 * kMillisecond;
constexpr int64_t kKillNs = 2'000 * kMillisecond;
constexpr int64_t kListenNs = 2'000 * kMillisecond;
constexpr int64_t kForever = std::numeric_limits<int64_t>::max();

std::vector<std::string> own_environment() {
  std::vector<std::string> entries;
  for (char** entry = environ; *entry != nullptr; ++entry) entries.emplace_back(*entry);
  return entries;
}

int64_t settling_time(Patience patience) {
  switch (patience) {
    case Patience::kNone:
      return kSettleNs;
    case Patience::kForLivingCulprit:
      return kSettleForCulpritNs;
    case Patience::kForEndingCulprit:
      return kSettleForEndingCulpritNs;
  }
  return kSettleNs;
}

// 'R', 'S', 'T', ... from /proc; ' ' where the process is gone.
char process_state(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string line;
  std::getline(file, line);
  const size_t name_end = line.rfind(") ");
  return name_end == std::string::npos || name_end + 2 >= line.size() ? ' ' : line[name_end + 2];
}

// What a rank, of lockstep or of PyTorch, wrote as its error; "" where it wrote none.
std::string message_in_error_file(const std::string& path) {
  std::ifstream file(path);
  const auto json = nlohmann::json::parse(file, nullptr, false);
  if (!json.is_object() || !json.contains("message")) return "";
  const auto& message = json["message"];
  if (message.is_string()) return message.get<std::string>();
  if (!message.is_object() || !message.contains("message")) return "";
  return message["message"].is_string() ? message["message"].get<std::string>() : "";
}

}  // namespace

Round::Round(const RoundContext& context)
    : context_(context),
      output_(context.console, context.plan.console, context.environment.logs,
              context.plan.local_world_size),
      group_(make_starts(), context.leftovers, context.signals.mask_before()),
      ends_(static_cast<size_t>(context.plan.local_world_size)),
      orders_(static_cast<size_t>(context.plan.local_world_size), -1) {}

std::vector<WorkerStart> Round::make_starts() {
  const LaunchPlan& plan = context_.plan;
  const auto inherited = own_environment();
  std::vector<WorkerStart> starts;
  for (int worker = 0; worker < plan.local_world_size; ++worker) {
    const OutputEnds ends = output_.open(rank_of(worker), worker);
    starts.push_back(
        {.path = context_.program,
         .arguments = plan.command,
         .environment = worker_environment(plan, context_.environment, worker, inherited),
         .cores = plan.slots[static_cast<size_t>(worker)].cores,
         .reads_input = rank_of(worker) == 0,
         .output = ends.output,
         .errors = ends.errors});
  }
  return starts;
}

RoundResult Round::run() {
  while (state_ != State::kDone) {
    wait();
    context_.console.flush();
    output_.read_available();
    take_ends();
    take_signals();
    take_node_events();
    advance(running_ns());
    output_.release_held(monotonic_ns());
  }
  group_.sweep();
  output_.finish();
  output_.release_held(kForever);
  return result();
}

void Round::wait() {
  std::vector<pollfd> events = {{context_.signals.descriptor(), POLLIN, 0}};
  if (!group_.lost()) events.push_back({group_.descriptor(), POLLIN, 0});
  if (context_.link != nullptr) events.push_back({context_.link->descriptor(), POLLIN, 0});
  if (context_.console.pending(Stream::kOut)) events.push_back({STDOUT_FILENO, POLLOUT, 0});
  if (context_.console.pending(Stream::kErr)) events.push_back({STDERR_FILENO, POLLOUT, 0});
  output_.add_to(events);
  ::poll(events.data(), events.size(), wait_ms());
}

// -1 where only an event can change anything.
int Round::wait_ms() const {
  int64_t left = kForever;
  if (state_ == State::kRunning && look_for_waiting_) left = kLookForWaitingNs;
  if (state_ == State::kSettling) left = 10 * kMillisecond;
  if (state_ == State::kStopping || state_ == State::kKilling) {
    left = all_ended() ? 0 : deadline_ns_ - running_ns();
  }
  if (state_ == State::kListening) left = deadline_ns_ - running_ns();
  if (output_.next_due_ns() != 0) left = std::min(left, output_.next_due_ns() - monotonic_ns());
  if (left == kForever) return -1;
  left = std::max<int64_t>(0, left);
  return static_cast<int>(std::min<int64_t>(left / kMillisecond + 1, 1000));
}

void Round::take_ends() {
  while (const auto end = group_.take_end()) {
    const auto worker = static_cast<size_t>(end->worker);
    ends_[worker] = *end;
    orders_[worker] = order_++;
    any_bad_ = any_bad_ || end->bad();
  }
}

// Of those that stop: once is graceful, twice is now.
void Round::take_signals() {
  while (const int signal = context_.signals.take()) {
    if (!signal_info(signal).stops) {
      pass_on(signal);
      continue;
    }
    const bool first = state_ == State::kRunning || state_ == State::kSettling ||
                       state_ == State::kWaitingForHosts;
    if (!first) {
      kill();
      continue;
    }
    interrupted_by_ = signal;
    const std::string name = ::strsignal(signal);
    context_.console.message(fmt::format("lockstep: {}: stopping all ranks; once more kills them",
                                         signal == SIGINT ? "Ctrl-C" : name));
    if (context_.link != nullptr) {
      const auto& layout = context_.environment.layout;
      context_.link->report_failure(
          {layout.node_rank, -1, 128 + signal,
           fmt::format("host {} was asked to stop ({})",
                       layout.hosts[static_cast<size_t>(layout.node_rank)], name)});
    }
    stop(signal);
  }
}

void Round::pass_on(int signal) {
  for (int worker = 0; worker < group_.size(); ++worker) {
    if (!ends_[static_cast<size_t>(worker)]) group_.signal_one(worker, signal);
  }
  if (context_.plan.quiet) return;
  context_.console.message(
      fmt::format("lockstep: {} was passed on to the ranks", signal_info(signal).name));
}

void Round::take_node_events() {
  if (context_.link == nullptr) return;
  while (const auto event = context_.link->take()) {
    if (event->kind == NodeEvent::Kind::kFinished) {
      if (state_ == State::kWaitingForHosts) state_ = State::kDone;
      continue;
    }
    // The job's first failure is told to everybody, also to the host that reported it.
    const bool own =
        event->failure && event->failure->node_rank == context_.environment.layout.node_rank;
    if (!event->failure || own || remote_) continue;
    remote_ = event->failure;
    if (state_ != State::kRunning && state_ != State::kWaitingForHosts) continue;
    judge_if_accused();
    stop(SIGTERM);
  }
}

void Round::advance(int64_t now_ns) {
  if (group_.lost()) state_ = State::kDone;
  switch (state_) {
    case State::kRunning:
      if (!any_bad_) {
        if (!all_ended()) {
          if (order_ > 0) look_for_early_leaver();
          return;
        }
        state_ = context_.link == nullptr ? State::kDone : State::kWaitingForHosts;
        if (context_.link != nullptr) context_.link->report_finished();
        return;
      }
      output_.silence_others();
      settling_since_ns_ = now_ns;
      state_ = State::kSettling;
      [[fallthrough]];
    case State::kSettling: {
      const auto views = look_at_ranks();
      const int64_t patience = first_was_killed(views) ? 0 : settling_time(patience_with(views));
      if (all_ended() || now_ns - settling_since_ns_ >= patience) decide();
      return;
    }
    case State::kStopping:
      if (now_ns >= deadline_ns_) kill();
      if (all_ended()) finish_stopping(now_ns);
      return;
    case State::kKilling:
      if (all_ended() || now_ns >= deadline_ns_) finish_stopping(now_ns);
      return;
    case State::kListening:
      if (!remote_ && now_ns >= deadline_ns_) report_verdict();
      if (remote_ || now_ns >= deadline_ns_) state_ = State::kDone;
      return;
    case State::kWaitingForHosts:
    case State::kDone:
      return;
  }
}

// The culprit's own host knows best what happened to it, and is about to say so.
void Round::finish_stopping(int64_t now_ns) {
  const bool listen = verdict_ && verdict_->cause == Cause::kRemote && !remote_;
  state_ = listen && context_.link != nullptr ? State::kListening : State::kDone;
  deadline_ns_ = now_ns + kListenNs;
}

void Round::decide() {
  views_ = look_at_ranks();
  verdict_ = judge(views_, oom_.happened());
  if (verdict_->cause != Cause::kRemote) report_verdict();
  stop(SIGTERM);
}

void Round::report_verdict() {
  if (context_.link == nullptr) return;
  context_.link->report_failure({context_.environment.layout.node_rank, verdict_->root,
                                 verdict_->exit_code, failure_line(*verdict_, views_, {}),
                                 !may_change(*verdict_, views_)});
}

// Nobody would end badly before the whole timeout has passed.
void Round::look_for_early_leaver() {
  views_ = look_at_ranks();
  look_for_waiting_ = may_have_left_early(views_);
  verdict_ = judge_early_leaver(views_);
  if (!verdict_) return;
  report_verdict();
  stop(SIGTERM);
}

// Another host misses a rank of this one: what became of it is seen here, before it is stopped.
void Round::judge_if_accused() {
  const int worker = remote_->rank - context_.environment.layout.first_rank();
  if (worker < 0 || worker >= group_.size()) return;
  views_ = look_at_ranks();
  verdict_ = judge_accused(views_, remote_->rank, oom_.happened());
}

void Round::stop(int signal) {
  output_.silence_others();
  group_.signal_all(signal);
  deadline_ns_ = running_ns() + static_cast<int64_t>(context_.plan.grace_s * 1e9);
  state_ = State::kStopping;
}

void Round::kill() {
  group_.signal_all(SIGKILL);
  deadline_ns_ = running_ns() + kKillNs;
  state_ = State::kKilling;
}

std::vector<RankView> Round::look_at_ranks() const {
  std::vector<RankView> views;
  for (int worker = 0; worker < group_.size(); ++worker) {
    const auto place = static_cast<size_t>(worker);
    RankView view;
    view.rank = rank_of(worker);
    view.pid = group_.pid(worker);
    view.end = ends_[place];
    view.order = orders_[place];
    if (!view.end) view.state = process_state(view.pid);
    try {
      view.board = context_.board.status(worker);
    } catch (const Error&) {
      // A rank that dies may have written over its page; what the kernel says still counts.
    }
    views.push_back(std::move(view));
  }
  return views;
}

RoundResult Round::result() {
  if (group_.lost()) {
    return {RoundResult::Kind::kFailed, 1, "the keeper was killed",
            Error(Code::kProgramFailed, "lockstep's keeper, the parent of all ranks, was killed",
                  "start the job again; nothing is left of it")};
  }
  const bool preempted = std::any_of(ends_.begin(), ends_.end(), [](const auto& end) {
    return end && end->exit_code() == kPreemptedExit;
  });
  if (interrupted_by_ != 0) {
    const int code = preempted ? kPreemptedExit : 128 + interrupted_by_;
    return {RoundResult::Kind::kInterrupted, code, "", std::nullopt};
  }
  if (verdict_ || remote_) return failed();
  if (preempted) return {RoundResult::Kind::kPreempted, kPreemptedExit, "", std::nullopt};
  return {};
}

RoundResult Round::failed() {
  FailureFacts facts;
  const auto& layout = context_.environment.layout;
  facts.host = layout.hosts[static_cast<size_t>(layout.node_rank)];
  facts.program = context_.plan.script.empty() ? context_.plan.command[0] : context_.plan.script;
  facts.world_size = layout.world_size();
  facts.logs = context_.environment.logs;
  facts.now_ns = monotonic_ns();
  if (remote_) facts.remote = remote_->text;
  RoundResult result;
  result.kind = RoundResult::Kind::kFailed;
  if (!verdict_) {  // this host's ranks were well until another host's failed
    verdict_.emplace();
    verdict_->cause = Cause::kRemote;
    verdict_->root = remote_->rank;
    views_.clear();
  }
  const bool remote = verdict_->cause == Cause::kRemote;
  result.exit_code = remote && remote_ ? remote_->exit_code : verdict_->exit_code;
  result.host_lost = remote && remote_ && remote_->rank < 0;
  result.permanent = remote && remote_ ? remote_->permanent : !may_change(*verdict_, views_);
  const int worker = verdict_->root - layout.first_rank();
  if (!remote) {
    facts.error_message =
        message_in_error_file(error_file(context_.environment.logs, verdict_->root));
    facts.last_errors = output_.last_errors(worker);
  }
  result.line = failure_line(*verdict_, views_, facts);
  result.failure = failure_error(*verdict_, views_, facts);
  return result;
}

}  // namespace lockstep
