#include <ATen/Parallel.h>
#include <c10/core/StreamGuard.h>
#include <sched.h>

#include "device/device_state.hpp"
#include "lockstep/device.hpp"

namespace lockstep {
namespace {

thread_local Device* device_of_thread = nullptr;

void pin_this_thread(const std::vector<int>& cores) {
  if (cores.empty()) return;
  cpu_set_t mask;
  CPU_ZERO(&mask);
  for (const int core : cores) CPU_SET(core, &mask);
  pthread_setaffinity_np(pthread_self(), sizeof(mask), &mask);
}

}  // namespace

Device* current_device() {
  return device_of_thread;
}

void UserClock::enter(pthread_t thread) {
  const std::lock_guard lock(mutex_);
  inside_.emplace_back(thread, thread_cpu_time_ns(thread));
}

void UserClock::leave(pthread_t thread) {
  const std::lock_guard lock(mutex_);
  const auto entry = std::find_if(inside_.begin(), inside_.end(), [&](const auto& user) {
    return pthread_equal(user.first, thread) != 0;
  });
  if (entry == inside_.end()) return;
  past_ns_ += thread_cpu_time_ns(thread) - entry->second;
  inside_.erase(entry);
}

int64_t UserClock::total_ns() const {
  const std::lock_guard lock(mutex_);
  int64_t total_ns = past_ns_;
  for (const auto& [thread, at_entry_ns] : inside_) {
    total_ns += thread_cpu_time_ns(thread) - at_entry_ns;
  }
  return total_ns;
}

void Device::State::enter_thread(Device& self) {
  device_of_thread = &self;
  exchange_current_pool(plan.kind == DeviceKind::kCpu ? &cpu_pool : nullptr);
  pin_this_thread(plan.cores);
  // libtorch sets up a thread's number of threads at its first use, from a process-wide number that
  // other threads change: let that happen first, so that ours stays.
  (void)at::get_num_threads();
  at::set_num_threads(plan.threads);
}

struct UseDevice::Saved {
  Saved(Device& device, std::optional<c10::Stream> device_stream)
      : now(device), before(device_of_thread), threads(at::get_num_threads()) {
    CPU_ZERO(&cores);
    pthread_getaffinity_np(pthread_self(), sizeof(cores), &cores);
    if (device_stream) stream.emplace(*device_stream);
  }

  Device& now;
  Device* before;
  int threads;
  cpu_set_t cores;
  CpuPool* pool = nullptr;
  std::optional<c10::StreamGuard> stream;
};

UseDevice::UseDevice(Device& device) {
  if (device_of_thread == &device) return;
  auto& state = *device.state_;
  saved_ = std::make_unique<Saved>(device, state.stream);
  saved_->pool = exchange_current_pool(nullptr);
  if (saved_->before != nullptr) saved_->before->state_->users.leave(pthread_self());
  state.enter_thread(device);
  state.users.enter(pthread_self());
}

UseDevice::~UseDevice() {
  if (!saved_) return;
  saved_->now.state_->users.leave(pthread_self());
  device_of_thread = saved_->before;
  if (saved_->before != nullptr && !saved_->before->on_worker()) {
    saved_->before->state_->users.enter(pthread_self());
  }
  exchange_current_pool(saved_->pool);
  at::set_num_threads(saved_->threads);
  pthread_setaffinity_np(pthread_self(), sizeof(saved_->cores), &saved_->cores);
}

}  // namespace lockstep
