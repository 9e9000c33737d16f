#include "device/worker.hpp"

#include <time.h>

#include <condition_variable>
#include <deque>
#include <mutex>

namespace lockstep {

struct Worker::Queue {
  std::mutex mutex;  // guards tasks and stopping
  std::condition_variable has_task;
  std::deque<std::function<void()>> tasks;
  bool stopping = false;
};

Worker::Worker(std::string thread_name, std::function<void()> prepare)
    : queue_(std::make_shared<Queue>()),
      thread_([queue = queue_, name = std::move(thread_name), prepare = std::move(prepare)] {
        pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
        prepare();
        loop(*queue);
      }) {}

Worker::~Worker() {
  {
    const std::lock_guard lock(queue_->mutex);
    queue_->stopping = true;
  }
  queue_->has_task.notify_one();
  if (is_this_thread()) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

void Worker::post(std::function<void()> task) {
  {
    const std::lock_guard lock(queue_->mutex);
    queue_->tasks.push_back(std::move(task));
  }
  queue_->has_task.notify_one();
}

void Worker::loop(Queue& queue) {
  for (;;) {
    std::function<void()> task;
    {
      std::unique_lock lock(queue.mutex);
      queue.has_task.wait(lock, [&] { return queue.stopping || !queue.tasks.empty(); });
      if (queue.tasks.empty()) return;
      task = std::move(queue.tasks.front());
      queue.tasks.pop_front();
    }
    task();
  }
}

int64_t Worker::cpu_time_ns() const {
  return thread_cpu_time_ns(thread_.native_handle());
}

int64_t thread_cpu_time_ns(pthread_t handle) {
  clockid_t clock = 0;
  timespec now{};
  if (pthread_getcpuclockid(handle, &clock) != 0 || clock_gettime(clock, &now) != 0) return 0;
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

}  // namespace lockstep
