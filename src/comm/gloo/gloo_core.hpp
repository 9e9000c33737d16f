#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <thread>
#include <vector>

#include "comm/backend.hpp"
#include "comm/gloo/gloo_data.hpp"
#include "comm/gloo/gloo_link.hpp"
#include "comm/self_messages.hpp"
#include "net/store.hpp"

namespace lockstep {

/// One rank's part in a Gloo group: a thread that makes the collectives strictly in order, each
/// after all ranks have told each other what they call; and the blame when one fails. A group of
/// one rank has no connections, and nothing is ever exchanged.
class GlooCore {
 public:
  struct Task;

  /// What a call does once all ranks agree: calls[place]. Runs in the core's thread.
  using Body = std::function<void(const Task& task, std::span<const Call> calls)>;

  /// A collective on its way.
  struct Task {
    Call call;
    int64_t begun_ns = 0;
    int64_t deadline_ns = 0;
    Body body;
    bool done = false;         // under the core's mutex, as is error
    std::exception_ptr error;  // where it failed
  };

  GlooCore(Group group, Store& store, const std::string& address, int64_t deadline_ns);
  ~GlooCore() { shut_down(); }
  GlooCore(const GlooCore&) = delete;
  GlooCore& operator=(const GlooCore&) = delete;

  const Group& group() const { return group_; }

  /// Queues a collective and gives it the next sequence number.
  std::shared_ptr<Task> begin(Call call, const CallContext& context, Body body);
  bool done(const Task& task);    ///< throws the task's error
  void finish(const Task& task);  ///< waits; throws the task's error

  void send(const ConstBuffer& buffer, int to, int tag, const CallContext& context);
  void recv(const Buffer& buffer, int from, int tag, const CallContext& context);

  /// In a task's body: moves data, and turns a failure into the error that names its cause.
  template <class Transfer>
  void transfer(const Task& task, Transfer&& move) {
    if (!data_) return;
    check(task, data_->run(static_cast<uint32_t>(task.call.sequence), task.deadline_ns, move));
  }

  /// In a task's body: one small text from every rank, [place].
  std::vector<std::string> exchange(const Task& task, GlooLink::Frame frame, std::string_view own);

  void abort(std::string_view reason) noexcept;

  /// Ends the thread and the connections. Calls that are not done fail.
  void shut_down() noexcept;

 private:
  void work();
  void execute(Task& task);
  std::vector<Call> agree_on(const Task& task);
  void check(const Task& task, const GlooData::Outcome& outcome);
  template <class Action>
  void message(Action&& action);
  class MessageUnderWay;

  [[noreturn]] void fail(const Task& task, const GlooLink::Trouble& trouble);
  [[noreturn]] void fail_late(const Task& task, const std::vector<int>& awaited);
  [[noreturn]] void fail_by_roll_call(const Task& task);
  RankActivity activity();
  std::exception_ptr break_down(std::exception_ptr error) noexcept;
  void throw_if_broken();

  const Group group_;
  SelfMessages own_messages_;
  std::vector<int> peers_;          // all places but this rank's
  std::unique_ptr<GlooLink> link_;  // null in a group of one
  std::unique_ptr<GlooData> data_;  // null in a group of one

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Task>> queue_;  // the front one is being made
  std::exception_ptr broken_;                // the first error; every later call throws it
  bool stopping_ = false;
  int64_t collectives_ = 0;
  std::list<RankActivity::Waiting> messages_;  // under way, of any thread
  std::vector<int64_t> sent_;                  // [place], messages
  std::vector<int64_t> received_;              // [place], messages
  std::thread worker_;
};

}  // namespace lockstep
