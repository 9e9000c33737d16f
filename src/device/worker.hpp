#pragma once

#include <pthread.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>

namespace lockstep {

/// One thread that runs tasks in the order they come. Tasks must not throw.
class Worker {
 public:
  /// `prepare` runs first, on the new thread.
  Worker(std::string thread_name, std::function<void()> prepare);

  /// Waits for the tasks already posted. On the worker itself, which is then running its last task,
  /// the thread is left to end on its own.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  void post(std::function<void()> task);
  bool is_this_thread() const { return std::this_thread::get_id() == thread_.get_id(); }

  /// CPU time this thread has used, in nanoseconds; any thread may ask.
  int64_t cpu_time_ns() const;

 private:
  struct Queue;  // shared with the thread, which may outlive this object
  static void loop(Queue& queue);

  std::shared_ptr<Queue> queue_;
  mutable std::thread thread_;
};

/// CPU time of the thread behind `handle`, in nanoseconds.
int64_t thread_cpu_time_ns(pthread_t handle);

}  // namespace lockstep
