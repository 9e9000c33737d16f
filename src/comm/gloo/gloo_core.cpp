#include "comm/gloo/gloo_core.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/running_clock.hpp"
#include "comm/check_call.hpp"
#include "comm/gloo/gloo_meeting.hpp"
#include "comm/make_call.hpp"
#include "lockstep/error.hpp"
#include "net/quiet_thread.hpp"

namespace lockstep {
namespace {

// After a transfer broke: how long until some rank's last words tell why.
constexpr int64_t kExplainNs = 2'000'000'000;

// After a call was not done in time: how long a rank that lives takes to answer the roll call.
constexpr int64_t kRollCallNs = 1'000'000'000;

constexpr std::string_view kEnded = "ended: its connection closed without a word";
constexpr std::string_view kLeft = "left: it destroyed its communicator";

std::string as_bytes(const Call& call) {
  return {reinterpret_cast<const char*>(&call), sizeof call};
}

Call from_bytes(const std::string& bytes) {
  Call call;
  std::memcpy(&call, bytes.data(), std::min(bytes.size(), sizeof call));
  return call;
}

}  // namespace

GlooCore::GlooCore(Group group, Store& store, const std::string& address, int64_t deadline_ns)
    : group_(std::move(group)),
      own_messages_(group_),
      sent_(static_cast<size_t>(group_.size())),
      received_(static_cast<size_t>(group_.size())) {
  for (int place = 0; place < group_.size(); ++place) {
    if (place != group_.rank) peers_.push_back(place);
  }
  if (!peers_.empty()) {
    load_gloo();  // a missing module is found before anybody waits for anybody
    GlooMeeting met = meet(store, group_, address, deadline_ns);
    link_ = std::make_unique<GlooLink>(group_.rank, std::move(met.sockets));
    data_ = std::make_unique<GlooData>(group_, met.address, *link_, deadline_ns);
    link_->on_failure([data = data_.get()] { data->abort(); });
  }
  worker_ = start_quiet_thread([this] { work(); });
  if (link_) link_->on_roll_call([this] { return activity(); });
}

std::shared_ptr<GlooCore::Task> GlooCore::begin(Call call, const CallContext& context, Body body) {
  auto task = std::make_shared<Task>();
  task->begun_ns = running_ns();
  task->deadline_ns = context.deadline_ns;
  task->body = std::move(body);
  call.set_label(context.label);
  const std::lock_guard lock(mutex_);
  call.sequence = ++collectives_;
  task->call = call;
  if (broken_) std::rethrow_exception(broken_);
  queue_.push_back(task);
  changed_.notify_all();
  return task;
}

bool GlooCore::done(const Task& task) {
  const std::lock_guard lock(mutex_);
  if (task.error) std::rethrow_exception(task.error);
  return task.done;
}

void GlooCore::finish(const Task& task) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return task.done; });
  if (task.error) std::rethrow_exception(task.error);
}

void GlooCore::work() {
  for (;;) {
    std::shared_ptr<Task> task;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      task = queue_.front();
    }
    std::exception_ptr error;
    try {
      execute(*task);
    } catch (...) {
      error = break_down(std::current_exception());
    }
    const std::lock_guard lock(mutex_);
    task->body = nullptr;
    task->error = error;
    task->done = true;
    queue_.pop_front();
    changed_.notify_all();
  }
}

void GlooCore::execute(Task& task) {
  throw_if_broken();
  task.body(task, agree_on(task));
}

std::vector<std::string> GlooCore::exchange(const Task& task, GlooLink::Frame frame,
                                            std::string_view own) {
  std::vector<std::string> all(static_cast<size_t>(group_.size()));
  all[static_cast<size_t>(group_.rank)] = own;
  if (!link_) return all;
  link_->send_all(frame, own);
  auto gathered = link_->gather(frame, peers_, task.deadline_ns);
  if (const auto* trouble = std::get_if<GlooLink::Trouble>(&gathered)) fail(task, *trouble);
  auto& theirs = std::get<std::vector<std::string>>(gathered);
  for (size_t i = 0; i < peers_.size(); ++i) {
    all[static_cast<size_t>(peers_[i])] = std::move(theirs[i]);
  }
  return all;
}

// Every rank sees the same calls, and so finds the same mismatch by itself.
std::vector<Call> GlooCore::agree_on(const Task& task) {
  if (!link_) return {task.call};
  std::vector<Call> calls;
  for (const auto& bytes : exchange(task, GlooLink::Frame::kCall, as_bytes(task.call))) {
    calls.push_back(from_bytes(bytes));
  }
  const bool same = std::all_of(calls.begin(), calls.end(),
                                [&](const Call& call) { return agree(calls.front(), call); });
  if (same) return calls;
  Farewell farewell;
  farewell.kind = Farewell::Kind::kMismatch;
  for (int place = 0; place < group_.size(); ++place) farewell.places.push_back(place);
  farewell.calls = calls;
  link_->say_farewell(farewell);
  throw_mismatch(group_, calls);
}

// A message is one more kind of task, made by the caller's own thread: it concerns two ranks only,
// and must not wait behind collectives whose order the two may see differently.
template <class Action>
void GlooCore::message(Action&& action) {
  throw_if_broken();
  try {
    action();
  } catch (...) {
    std::rethrow_exception(break_down(std::current_exception()));
  }
}

// Shows a message to those who ask what this rank waits in.
class GlooCore::MessageUnderWay {
 public:
  MessageUnderWay(GlooCore& core, const Call& call, int peer) : core_(core) {
    const std::lock_guard lock(core_.mutex_);
    at_ = core_.messages_.insert(core_.messages_.end(), {call, peer});
  }
  ~MessageUnderWay() {
    const std::lock_guard lock(core_.mutex_);
    core_.messages_.erase(at_);
  }
  MessageUnderWay(const MessageUnderWay&) = delete;
  MessageUnderWay& operator=(const MessageUnderWay&) = delete;

 private:
  GlooCore& core_;
  std::list<RankActivity::Waiting>::iterator at_;
};

void GlooCore::send(const ConstBuffer& buffer, int to, int tag, const CallContext& context) {
  check_message(group_, buffer.count, to);
  message([&] {
    if (to == group_.rank) return own_messages_.send(buffer, tag, context);
    Task task;
    task.call = make_message_call(Operation::kSend, ++sent_[static_cast<size_t>(to)], buffer, tag,
                                  context.label);
    task.begun_ns = running_ns();
    task.deadline_ns = context.deadline_ns;
    const MessageUnderWay shown(*this, task.call, to);
    link_->send(to, GlooLink::Frame::kMessage, as_bytes(task.call));
    if (buffer.count == 0) return;
    const auto outcome = data_->run(
        static_cast<uint32_t>(task.call.sequence), task.deadline_ns,
        [&](const auto& api, auto* gloo, const LockstepGlooCall& call) {
          return api.send(gloo, buffer.data, static_cast<size_t>(buffer.bytes()), to, &call);
        });
    if (outcome.status == LOCKSTEP_GLOO_LATE) fail_late(task, {to});
    check(task, outcome);
  });
}

void GlooCore::recv(const Buffer& buffer, int from, int tag, const CallContext& context) {
  check_message(group_, buffer.count, from);
  message([&] {
    if (from == group_.rank) return own_messages_.recv(buffer, tag, context);
    Task task;
    task.call = make_message_call(Operation::kRecv, ++received_[static_cast<size_t>(from)],
                                  {nullptr, buffer.count, buffer.dtype}, tag, context.label);
    task.begun_ns = running_ns();
    task.deadline_ns = context.deadline_ns;
    const MessageUnderWay shown(*this, task.call, from);
    const auto gathered =
        link_->gather(GlooLink::Frame::kMessage, std::span(&from, 1), task.deadline_ns);
    if (const auto* trouble = std::get_if<GlooLink::Trouble>(&gathered)) fail(task, *trouble);
    const Call theirs = from_bytes(std::get<std::vector<std::string>>(gathered).front());
    if (!agree(theirs, task.call)) {
      Farewell farewell;
      farewell.kind = Farewell::Kind::kMismatch;
      farewell.places = {from, group_.rank};
      farewell.calls = {theirs, task.call};
      link_->say_farewell(farewell);
      throw_farewell(group_, task.call, from, farewell);
    }
    if (buffer.count == 0) return;
    const auto outcome = data_->run(
        static_cast<uint32_t>(task.call.sequence), task.deadline_ns,
        [&](const auto& api, auto* gloo, const LockstepGlooCall& call) {
          return api.recv(gloo, buffer.data, static_cast<size_t>(buffer.bytes()), from, &call);
        });
    if (outcome.status == LOCKSTEP_GLOO_LATE) fail_late(task, {from});
    check(task, outcome);
  });
}

void GlooCore::check(const Task& task, const GlooData::Outcome& outcome) {
  if (outcome.status == LOCKSTEP_GLOO_OK) return;
  if (outcome.status == LOCKSTEP_GLOO_LATE) fail_late(task, {});
  const auto trouble = link_->find_trouble(running_ns() + kExplainNs);
  if (trouble.kind != GlooLink::Trouble::Kind::kLate) fail(task, trouble);
  throw RankError(Code::kRankFailed, -1,
                  fmt::format("{}: a connection broke, and no rank says why: {}",
                              describe(task.call), outcome.text),
                  "check the network between the hosts");
}

void GlooCore::fail(const Task& task, const GlooLink::Trouble& trouble) {
  switch (trouble.kind) {
    case GlooLink::Trouble::Kind::kTold:
      if (trouble.farewell.kind == Farewell::Kind::kStuck) {
        // The link answers roll calls as well; this thread may be the first to hear of one.
        link_->say_farewell(Farewell::of(activity()));
        fail_by_roll_call(task);
      }
      link_->say_farewell(pass_on(trouble.farewell, trouble.place));
      throw_farewell(group_, task.call, trouble.place, trouble.farewell);
    case GlooLink::Trouble::Kind::kGone: {
      Farewell farewell;
      farewell.kind = Farewell::Kind::kFailed;
      farewell.places = {trouble.place};
      farewell.reason = trouble.left ? kLeft : kEnded;
      link_->say_farewell(farewell);
      throw_rank_failed(group_, task.call, trouble.place, farewell.reason);
    }
    case GlooLink::Trouble::Kind::kLate:
      break;
  }
  fail_late(task, trouble.missing);
}

// What this rank does, for peers that wait for it.
RankActivity GlooCore::activity() {
  const std::lock_guard lock(mutex_);
  RankActivity activity;
  activity.arrived = activity.finished = collectives_;
  activity.waiting.assign(messages_.begin(), messages_.end());
  if (!queue_.empty()) {
    const Call& call = queue_.front()->call;
    activity.arrived = call.sequence;
    activity.finished = call.sequence - 1;
    activity.waiting.push_back({call, -1});
  }
  return activity;
}

// This rank's call was not done in time, because of those it awaits or of others that they wait
// for. `awaited` empty: all ranks came to this call, and then the data did not.
void GlooCore::fail_late(const Task& task, const std::vector<int>& awaited) {
  Farewell roll_call = Farewell::of(activity());
  roll_call.waited_ns = std::max<int64_t>(running_ns() - task.begun_ns, 1);
  roll_call.places.assign(awaited.begin(), awaited.end());
  link_->say_farewell(roll_call);
  fail_by_roll_call(task);
}

// Whoever lives has answered, or answers now, with what it does. All ranks judge by these answers.
void GlooCore::fail_by_roll_call(const Task& task) {
  GlooLink::RollCall roll_call = link_->take_roll_call(running_ns() + kRollCallNs);
  for (RankActivity& activity : roll_call.activities) {
    activity.state = fmt::format("it {}; it has begun {} collective{}",
                                 activity.silent ? "does not answer" : "is alive", activity.arrived,
                                 activity.arrived == 1 ? "" : "s");
  }
  if (const int gone = link_->first_gone(); gone >= 0) {
    throw_rank_failed(group_, task.call, gone, kEnded);
  }
  const auto trouble = link_->find_trouble(0);
  if (trouble.kind == GlooLink::Trouble::Kind::kTold &&
      trouble.farewell.kind != Farewell::Kind::kStuck) {
    throw_farewell(group_, task.call, trouble.place, trouble.farewell);
  }
  throw_stalled(group_, task.call, roll_call.awaited, roll_call.activities, roll_call.waited_ns);
}

// What was not said yet is said now; the connections that still stand are of no more use.
std::exception_ptr GlooCore::break_down(std::exception_ptr error) noexcept {
  std::exception_ptr first;
  {
    const std::lock_guard lock(mutex_);
    if (!broken_) broken_ = error;
    first = broken_;
  }
  if (!link_) return first;
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& exception) {
    abort(describe(exception));
  } catch (...) {
    abort("an unknown exception");
  }
  return first;
}

void GlooCore::throw_if_broken() {
  const std::lock_guard lock(mutex_);
  if (broken_) std::rethrow_exception(broken_);
}

void GlooCore::abort(std::string_view reason) noexcept {
  try {
    Farewell farewell;
    farewell.kind = Farewell::Kind::kAborted;
    farewell.reason = fmt::format("gave up: {}", reason);
    {
      const std::lock_guard lock(mutex_);
      if (!broken_) {
        broken_ = std::make_exception_ptr(
            RankError(Code::kRankFailed, group_.world_ranks.at(static_cast<size_t>(group_.rank)),
                      fmt::format("this rank {}", farewell.reason),
                      "look for what made it give up: its communicator is of no more use"));
      }
    }
    if (!link_) return;
    link_->say_farewell(farewell);
    data_->abort();
  } catch (...) {
    // No memory for a reason: peers notice the ended connection instead.
  }
}

void GlooCore::shut_down() noexcept {
  bool unfinished = false;
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return;
    stopping_ = true;
    unfinished = !queue_.empty();
    changed_.notify_all();
  }
  if (unfinished) abort("it destroyed its communicator with calls under way");
  worker_.join();
  if (link_) {
    link_->say_farewell({});
    link_->on_failure(nullptr);
  }
  data_.reset();
  link_.reset();
}

}  // namespace lockstep
