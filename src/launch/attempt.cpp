#include "launch/attempt.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/file.hpp"
#include "base/json_text.hpp"
#include "base/process.hpp"
#include "base/running_clock.hpp"
#include "base/stack.hpp"
#include "launch/crash_bundle.hpp"
#include "lockstep/clock.hpp"

namespace lockstep {
namespace {

constexpr int64_t kMillisecond = 1'000'000;
// After the first bad end the others get this long to end too, since one of them may report what
// really happened. They get longer if the blamed rank has not ended yet, and longest if others
// report that it has given up: its own error is about to come, and tells most. They get no time if
// the first rank was killed: no other rank can know more about that.
constexpr int64_t kSettleNs = 50 * kMillisecond;
constexpr int64_t kSettleForCulpritNs = 200 * kMillisecond;
constexpr int64_t kSettleForEndingCulpritNs = 3'000 * kMillisecond;
// A rank that ended well may be missed in a rendezvous that the others have yet to start.
constexpr int64_t kLookForWaitingNs = 50 * kMillisecond;
constexpr int64_t kLookNs = 1'000 * kMillisecond;  // between two looks for stragglers and stalls
constexpr int64_t kStackNs = 300 * kMillisecond;   // for all ranks to write their stacks
constexpr int64_t kKillNs = 2'000 * kMillisecond;
constexpr int64_t kListenNs = 2'000 * kMillisecond;
constexpr int64_t kAnswerNs = 2'000 * kMillisecond;  // node 0's, after it may have lost a host
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

// The error that a rank, of lockstep or of PyTorch, wrote; "" if it wrote none.
std::string message_in_error_file(const std::string& path) {
  const auto json = parse_json(read_text_or_empty(path)).value_or(nullptr);
  if (!json.is_object() || !json.contains("message")) return "";
  const auto& message = json["message"];
  if (message.is_string()) return message.get<std::string>();
  if (!message.is_object() || !message.contains("message")) return "";
  return message["message"].is_string() ? message["message"].get<std::string>() : "";
}

}  // namespace

Attempt::Attempt(const AttemptContext& context)
    : context_(context),
      output_(context.console, context.plan.console, context.environment.logs,
              context.plan.local_world_size),
      group_(make_starts(), context.leftovers, context.signals.mask_before()),
      ends_(static_cast<size_t>(context.plan.local_world_size)),
      orders_(static_cast<size_t>(context.plan.local_world_size), -1) {
  if (const auto longest_s = context.plan.step_timeout_s) {
    stalls_.emplace(static_cast<int64_t>(*longest_s * 1e9));
  }
}

std::vector<WorkerStart> Attempt::make_starts() {
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
         .errors = ends.errors,
         .open_files = context_.open_files});
  }
  return starts;
}

AttemptResult Attempt::run() {
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

void Attempt::wait() {
  std::vector<pollfd> events = {{context_.signals.descriptor(), POLLIN, 0}};
  if (!group_.lost()) events.push_back({group_.descriptor(), POLLIN, 0});
  if (context_.link != nullptr) events.push_back({context_.link->descriptor(), POLLIN, 0});
  if (context_.console.pending(Stream::kOut)) events.push_back({STDOUT_FILENO, POLLOUT, 0});
  if (context_.console.pending(Stream::kErr)) events.push_back({STDERR_FILENO, POLLOUT, 0});
  output_.add_to(events);
  ::poll(events.data(), events.size(), wait_ms());
}

// -1 if only an event can change anything.
int Attempt::wait_ms() const {
  int64_t left = kForever;
  if (state_ == State::kRunning && (group_.size() > 1 || stalls_)) left = kLookNs;
  if (state_ == State::kRunning && look_for_waiting_) left = kLookForWaitingNs;
  if (state_ == State::kSettling) left = 10 * kMillisecond;
  if (state_ == State::kStopping || state_ == State::kKilling) {
    left = all_ended() ? 0 : deadline_ns_ - running_ns();
  }
  if (state_ == State::kListening || state_ == State::kReporting) {
    left = deadline_ns_ - running_ns();
  }
  if (output_.next_due_ns() != 0) left = std::min(left, output_.next_due_ns() - monotonic_ns());
  if (left == kForever) return -1;
  left = std::max<int64_t>(0, left);
  return static_cast<int>(std::min<int64_t>(left / kMillisecond + 1, 1000));
}

void Attempt::take_ends() {
  while (const auto end = group_.take_end()) {
    const auto worker = static_cast<size_t>(end->worker);
    ends_[worker] = *end;
    orders_[worker] = order_++;
    any_bad_ = any_bad_ || end->bad();
  }
}

// The first stopping signal is graceful, the second kills.
void Attempt::take_signals() {
  while (const int signal = context_.signals.take()) {
    if (!signal_info(signal).stops) {
      pass_on(signal);
      continue;
    }
    const bool first = state_ == State::kRunning || state_ == State::kSettling ||
                       state_ == State::kWaitingForHosts;
    if (!first && interrupted_by_ == 0 && other_host_was_asked_to_stop()) {
      interrupted_by_ = signal;  // SLURM asks all hosts: it is the same request
      continue;
    }
    if (!first) {
      kill();
      continue;
    }
    interrupted_by_ = signal;
    const std::string name = ::strsignal(signal);
    context_.console.message(
        fmt::format("lockstep: {}: stopping all ranks, which have {} s; once more kills them",
                    signal == SIGINT ? "Ctrl-C" : name, grace_s()));
    if (context_.link != nullptr) {
      const auto& layout = context_.environment.layout;
      // An elastic job goes on without this host, but not without the one that coordinates it.
      const bool leaves = context_.plan.nnodes.elastic() && layout.node_rank != 0;
      context_.link->report_failure(
          {layout.node_rank, -1, 128 + signal,
           fmt::format("host {} was asked to stop ({})",
                       layout.hosts[static_cast<size_t>(layout.node_rank)], name),
           leaves ? Restart::kMayHelp : Restart::kImpossible});
    }
    stop(signal);
  }
}

void Attempt::pass_on(int signal) {
  for (int worker = 0; worker < group_.size(); ++worker) {
    if (!ends_[static_cast<size_t>(worker)]) group_.signal_one(worker, signal);
  }
  if (context_.plan.quiet) return;
  context_.console.message(
      fmt::format("lockstep: {} was passed on to the ranks", signal_info(signal).name));
}

void Attempt::take_node_events() {
  if (context_.link == nullptr) return;
  while (const auto event = context_.link->take()) {
    if (event->kind == NodeEvent::Kind::kFinished) {
      if (state_ == State::kWaitingForHosts) state_ = State::kDone;
      continue;
    }
    if (event->kind == NodeEvent::Kind::kLeft) {
      if (!left_elsewhere_) left_elsewhere_ = event->left_rank;
      continue;
    }
    // The job's first failure is sent to all hosts, including the one that reported it.
    const bool own =
        event->failure && event->failure->node_rank == context_.environment.layout.node_rank;
    report_taken_ = report_taken_ || own;
    if (!event->failure || own || remote_) continue;
    remote_ = event->failure;
    // What ranks of this host report of a lost host is only a consequence of the loss.
    const bool decided = state_ == State::kSettling && remote_->rank < 0;
    if (state_ != State::kRunning && state_ != State::kWaitingForHosts && !decided) continue;
    judge_if_accused();
    stop(SIGTERM);
  }
}

void Attempt::advance(int64_t now_ns) {
  if (group_.lost()) state_ = State::kDone;
  switch (state_) {
    case State::kRunning:
      if (!any_bad_) {
        if (!all_ended()) {
          look_at_progress(now_ns);
          const bool missed = order_ > 0 || left_elsewhere_;
          if (state_ == State::kRunning && missed) look_for_early_leaver();
          return;
        }
        state_ = State::kDone;
        if (context_.link == nullptr) return;
        views_ = look_at_ranks();
        report_early_leaver();
        context_.link->report_finished();
        state_ = State::kWaitingForHosts;
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
      if (remote_) state_ = State::kDone;
      if (state_ == State::kDone || now_ns < deadline_ns_) return;
      report_root_cause();
      deadline_ns_ = now_ns + kAnswerNs + static_cast<int64_t>(context_.plan.host_timeout_s * 1e9);
      state_ = State::kReporting;
      return;
    case State::kReporting:
      if (remote_ || report_taken_ || now_ns >= deadline_ns_) state_ = State::kDone;
      return;
    case State::kWaitingForHosts:
    case State::kDone:
      return;
  }
}

// The culprit's own host knows best what happened, and is about to report it.
void Attempt::finish_stopping(int64_t now_ns) {
  const bool listen = root_cause_ && root_cause_->cause == Cause::kRemote && !remote_;
  state_ = listen && context_.link != nullptr ? State::kListening : State::kDone;
  deadline_ns_ = now_ns + kListenNs;
}

void Attempt::decide() {
  views_ = look_at_ranks();
  root_cause_ = find_root_cause(views_, oom_.happened());
  ask_for_stacks();
  if (root_cause_->cause != Cause::kRemote) report_root_cause();
  stop(SIGTERM);
}

void Attempt::report_root_cause() {
  if (context_.link == nullptr) return;
  context_.link->report_failure({context_.environment.layout.node_rank, root_cause_->rank,
                                 root_cause_->exit_code, failure_line(*root_cause_, views_, {}),
                                 restart_after(*root_cause_, views_)});
}

// While ranks that answer are alive: after a stall their stacks show where each one waits.
void Attempt::ask_for_stacks() const {
  switch (root_cause_->cause) {
    case Cause::kMissing:
    case Cause::kLate:
    case Cause::kDisagreement:
    case Cause::kStalled:
    case Cause::kRemote:
      break;
    default:
      return;  // the culprit's end explains itself
  }
  std::vector<std::string> awaited;
  for (const RankView& view : views_) {
    if (view.end || view.state == 'T' || !writes_stack(view.pid)) continue;
    ::kill(view.pid, stack_signal());
    awaited.push_back(stack_file_of(context_.environment.logs, view.rank));
  }
  const int64_t deadline_ns = monotonic_ns() + kStackNs;
  const auto unwritten = [](const std::string& path) {
    return !read_text_or_empty(path).ends_with("end\n");
  };
  while (monotonic_ns() < deadline_ns && std::any_of(awaited.begin(), awaited.end(), unwritten)) {
    ::poll(nullptr, 0, 5);
  }
}

void Attempt::look_at_progress(int64_t now_ns) {
  if ((group_.size() < 2 && !stalls_) || now_ns < next_look_ns_) return;
  next_look_ns_ = now_ns + kLookNs;
  const auto views = look_at_ranks();
  std::vector<RankStatus> ranks;
  for (const RankView& view : views) {
    if (view.end) continue;
    ranks.push_back(view.board);
    ranks.back().rank = view.rank;
  }
  if (ranks.size() == views.size()) {
    const auto found = stragglers_.look(ranks);
    if (found && !context_.plan.quiet) context_.console.message("lockstep: " + describe(*found));
  }
  if (!stalls_ || !stalls_->look(ranks, now_ns)) return;
  views_ = views;
  root_cause_ = find_stall(views_, *context_.plan.step_timeout_s);
  ask_for_stacks();
  report_root_cause();
  stop(SIGTERM);
}

// Otherwise no rank would fail before the whole timeout has passed.
void Attempt::look_for_early_leaver() {
  views_ = look_at_ranks();
  look_for_waiting_ = left_elsewhere_ || !ranks_that_never_came(views_).empty();
  root_cause_ = find_early_leaver(views_);
  if (root_cause_) {
    report_root_cause();
    return stop(SIGTERM);
  }
  report_early_leaver();
  if (!left_elsewhere_ || !somebody_waits_in_rendezvous(views_)) return;
  remote_ = RemoteFailure{.node_rank = context_.environment.layout.node_rank,
                          .rank = *left_elsewhere_,
                          .text = never_came_line(*left_elsewhere_)};
  context_.link->report_failure(*remote_);
  stop(SIGTERM);
}

// Ranks of other hosts may wait for it in the rendezvous, now or later.
void Attempt::report_early_leaver() {
  const auto ranks = ranks_that_never_came(views_);
  if (context_.link == nullptr || left_reported_ || ranks.empty()) return;
  context_.link->report_left(ranks.front());
  left_reported_ = true;
}

// Another host misses a rank of this one: find out what became of it before it is stopped.
void Attempt::judge_if_accused() {
  const int worker = remote_->rank - context_.environment.layout.first_rank();
  if (worker < 0 || worker >= group_.size()) return;
  views_ = look_at_ranks();
  root_cause_ = find_cause_in_rank(views_, remote_->rank, oom_.happened());
  ask_for_stacks();
}

// Ranks that are well, and were asked to stop here or on another host, finish their step and save.
double Attempt::grace_s() const {
  const bool asked = interrupted_by_ == SIGTERM ||
                     (remote_ && remote_->rank < 0 && remote_->exit_code == 128 + SIGTERM);
  const bool well = !any_bad_ && !root_cause_;
  return asked && well ? context_.plan.grace_to_save_s : context_.plan.grace_s;
}

void Attempt::stop(int signal) {
  output_.silence_others();
  group_.signal_all(signal);
  deadline_ns_ = running_ns() + static_cast<int64_t>(grace_s() * 1e9);
  state_ = State::kStopping;
}

void Attempt::kill() {
  group_.signal_all(SIGKILL);
  deadline_ns_ = running_ns() + kKillNs;
  state_ = State::kKilling;
}

std::vector<RankView> Attempt::look_at_ranks() const {
  std::vector<RankView> views;
  for (int worker = 0; worker < group_.size(); ++worker) {
    const auto index = static_cast<size_t>(worker);
    RankView view;
    view.rank = rank_of(worker);
    view.pid = group_.pid(worker);
    view.end = ends_[index];
    view.order = orders_[index];
    if (!view.end) {
      const auto stat = read_process_stat(view.pid);
      if (stat) view.state = stat->state;
    }
    try {
      view.board = context_.board.status(worker);
    } catch (const Error&) {
      // A dying rank may have overwritten its page; what the kernel says still counts.
    }
    views.push_back(std::move(view));
  }
  return views;
}

AttemptResult Attempt::result() {
  if (group_.lost()) {
    return {
        AttemptResult::Kind::kFailed, 1, "the supervisor was killed",
        Error(Code::kProgramFailed, "lockstep's supervisor, the parent of all ranks, was killed",
              "start the job again; nothing is left of it")};
  }
  const bool preempted = std::any_of(ends_.begin(), ends_.end(), [](const auto& end) {
    return end && end->exit_code() == kPreemptedExit;
  });
  if (interrupted_by_ != 0) {
    const int code = preempted ? kPreemptedExit : 128 + interrupted_by_;
    return {AttemptResult::Kind::kInterrupted, code, "", std::nullopt};
  }
  // Another host's launcher was asked to stop, and the ranks of all hosts have saved together.
  if (preempted && other_host_was_asked_to_stop() && !root_cause_) {
    return {AttemptResult::Kind::kPreempted, kPreemptedExit, "", std::nullopt};
  }
  if (root_cause_ || remote_) return failed();
  if (preempted) return {AttemptResult::Kind::kPreempted, kPreemptedExit, "", std::nullopt};
  return {};
}

AttemptResult Attempt::failed() {
  FailureFacts facts;
  const auto& layout = context_.environment.layout;
  facts.host = layout.hosts[static_cast<size_t>(layout.node_rank)];
  facts.program = context_.plan.script.empty() ? context_.plan.command[0] : context_.plan.script;
  facts.world_size = layout.world_size();
  facts.logs = context_.environment.logs;
  facts.now_ns = monotonic_ns();
  if (remote_) facts.remote = remote_->text;
  AttemptResult result;
  result.kind = AttemptResult::Kind::kFailed;
  if (remote_ && remote_->rank < 0 && root_cause_ && is_victim(*root_cause_, views_)) {
    root_cause_.reset();
  }
  if (!root_cause_) {  // this host's ranks were fine until another host's failed
    root_cause_.emplace();
    root_cause_->cause = Cause::kRemote;
    root_cause_->rank = remote_->rank;
    views_.clear();
  }
  const bool remote = root_cause_->cause == Cause::kRemote;
  result.exit_code = remote && remote_ ? remote_->exit_code : root_cause_->exit_code;
  result.restart = remote && remote_ ? remote_->restart : restart_after(*root_cause_, views_);
  const int worker = root_cause_->rank - layout.first_rank();
  if (!remote) {
    facts.error_message =
        message_in_error_file(error_file_of(context_.environment.logs, root_cause_->rank));
    facts.last_errors = output_.last_errors(worker);
    for (const RankView& view : views_) {
      auto stack = functions_in_stack(
          read_text_or_empty(stack_file_of(context_.environment.logs, view.rank)));
      if (!stack.empty()) facts.stacks[view.rank] = std::move(stack);
    }
  }
  result.line = failure_line(*root_cause_, views_, facts);
  facts.bundle =
      write_crash_bundle({.plan = context_.plan,
                          .environment = context_.environment,
                          .board = context_.board,
                          .ranks = remote ? look_at_ranks() : views_,
                          .failure = failure_error(*root_cause_, views_, facts).block()});
  result.failure = failure_error(*root_cause_, views_, facts);
  return result;
}

}  // namespace lockstep
