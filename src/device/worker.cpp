#include "device/worker.hpp"

#include <pthread.h>
#include <time.h>

namespace lockstep {

Worker::Worker(std::string thread_name, std::function<void()> prepare)
    : thread_([this, name = std::move(thread_name), prepare = std::move(prepare)] {
        pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
        prepare();
        loop();
      }) {}

Worker::~Worker() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  has_task_.notify_one();
  thread_.join();
}

void Worker::post(std::function<void()> task) {
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  has_task_.notify_one();
}

void Worker::loop() {
  for (;;) {
    std::function<void()> task;
    {
      std::unique_lock lock(mutex_);
      has_task_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

int64_t Worker::cpu_time_ns() const {
  return thread_cpu_time_ns(const_cast<std::thread&>(thread_).native_handle());
}

int64_t thread_cpu_time_ns(pthread_t handle) {
  clockid_t clock = 0;
  timespec now{};
  if (pthread_getcpuclockid(handle, &clock) != 0 || clock_gettime(clock, &now) != 0) return 0;
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

}  // namespace lockstep
