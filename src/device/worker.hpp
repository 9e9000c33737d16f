#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace lockstep {

/// One thread that runs tasks in the order they come. Tasks must not throw.
class Worker {
 public:
  /// `prepare` runs first, on the new thread.
  Worker(std::string thread_name, std::function<void()> prepare);

  /// Waits for the tasks already posted.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  void post(std::function<void()> task);
  bool is_this_thread() const { return std::this_thread::get_id() == thread_.get_id(); }

  /// CPU time this thread has used, in nanoseconds; any thread may ask.
  int64_t cpu_time_ns() const;

 private:
  void loop();

  std::mutex mutex_;  // guards tasks_ and stopping_
  std::condition_variable has_task_;
  std::deque<std::function<void()>> tasks_;
  bool stopping_ = false;
  std::thread thread_;  // last: it uses all of the above
};

/// CPU time of the thread behind `handle`, in nanoseconds.
int64_t thread_cpu_time_ns(pthread_t handle);

}  // namespace lockstep
