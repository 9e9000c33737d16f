#include "lockstep/device.hpp"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <pthread.h>
#include <sched.h>
#include <sys/sysinfo.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <fstream>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "base/machine.hpp"
#include "device/capture.hpp"
#include "device/cpu_allocator.hpp"
#include "device/rng.hpp"
#include "device/streams.hpp"
#include "lockstep/error.hpp"
#include "lockstep/trace.hpp"
#include "torch_compat.hpp"

#if LOCKSTEP_CUDA
#include "device/cuda/support.hpp"
#endif

namespace lockstep {
namespace {

// CPU time that a thread has used.
int64_t thread_cpu_time_ns(pthread_t handle) {
  clockid_t clock = 0;
  timespec now{};
  if (pthread_getcpuclockid(handle, &clock) != 0 || clock_gettime(clock, &now) != 0) return 0;
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

// Time for which a thread of this process was ready to run but had no core. None if it has ended,
// or if the kernel does not account for it.
std::optional<int64_t> thread_queued_ns(pid_t thread) {
  std::ifstream file(fmt::format("/proc/self/task/{}/schedstat", thread));
  int64_t running_ns = 0;
  int64_t queued_ns = 0;
  if (!(file >> running_ns >> queued_ns)) return std::nullopt;
  return queued_ns;
}

}  // namespace

// One thread that runs tasks in order. Tasks must not throw.
class Worker {
 public:
  // `prepare` runs first, on the new thread.
  Worker(std::string thread_name, std::function<void()> prepare)
      : queue_(std::make_shared<Queue>()),
        thread_([queue = queue_, name = std::move(thread_name), prepare = std::move(prepare)] {
          queue->thread = ::gettid();
          pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
          prepare();
          run_tasks(*queue);
        }) {}

  // Waits for the tasks already posted. If called on the worker itself, by its last task, the
  // thread is left to end on its own.
  ~Worker() {
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
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  void post(std::function<void()> task) {
    {
      const std::lock_guard lock(queue_->mutex);
      queue_->tasks.push_back(std::move(task));
    }
    queue_->has_task.notify_one();
  }

  bool is_this_thread() const { return std::this_thread::get_id() == thread_.get_id(); }

  int64_t cpu_time_ns() const { return thread_cpu_time_ns(thread_.native_handle()); }
  std::optional<int64_t> queued_ns() const { return thread_queued_ns(queue_->thread); }

 private:
  struct Queue {  // shared with the thread, which may outlive this object
    std::atomic<pid_t> thread{0};
    std::mutex mutex;  // guards tasks and stopping
    std::condition_variable has_task;
    std::deque<std::function<void()>> tasks;
    bool stopping = false;
  };

  static void run_tasks(Queue& queue) {
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

  std::shared_ptr<Queue> queue_;
  mutable std::thread thread_;
};

// The modes of a thread that apply wherever its work runs: grad mode, inference mode, autocast.
class CallerState {
 public:
  CallerState()
      : autocast_(compat::AutocastDtypes::get()), in_autocast_guard_(autocast_nesting() > 0) {}

  // Guard: they apply to this thread.
  class Applied {
   public:
    explicit Applied(const CallerState& state)
        : autocast_before_(compat::AutocastDtypes::get()),
          thread_local_state_(state.thread_local_state_),
          in_autocast_guard_(state.in_autocast_guard_) {
      state.autocast_.set();
      // Only then: in a task that trains, a guard around each forward is the outermost one, and
      // must clear its casts before the weights change.
      if (in_autocast_guard_) at::autocast::increment_nesting();
    }

    // Casts of this task's weights must not outlive it. libtorch 1.13 keeps them per thread, where
    // the caller's own autocast guard cannot clear them.
    ~Applied() {
      const int nesting =
          in_autocast_guard_ ? at::autocast::decrement_nesting() : autocast_nesting();
      if (nesting == 0) at::autocast::clear_cache();
      autocast_before_.set();
    }
    Applied(const Applied&) = delete;
    Applied& operator=(const Applied&) = delete;

   private:
    compat::AutocastDtypes autocast_before_;
    at::ThreadLocalStateGuard thread_local_state_;
    bool in_autocast_guard_;
  };

 private:
  // libtorch only tells it when it changes.
  static int autocast_nesting() {
    at::autocast::increment_nesting();
    return at::autocast::decrement_nesting();
  }

  at::ThreadLocalState thread_local_state_;
  compat::AutocastDtypes autocast_;
  bool in_autocast_guard_;
};

// Processor time, and time without a core, of a device's threads other than its worker.
class UserClock {
 public:
  struct Reading {
    int64_t cpu_ns = 0;
    int64_t queued_ns = 0;
  };

  // Called on the thread that enters or leaves.
  void enter() {
    const std::lock_guard lock(mutex_);
    const pid_t id = ::gettid();
    inside_.push_back({pthread_self(), id, read(pthread_self(), id)});
  }

  void leave() {
    const std::lock_guard lock(mutex_);
    const auto entry = std::find_if(inside_.begin(), inside_.end(),
                                    [](const User& user) { return user.id == ::gettid(); });
    if (entry == inside_.end()) return;
    add_since(*entry, past_);
    inside_.erase(entry);
  }

  Reading total() const {
    const std::lock_guard lock(mutex_);
    Reading total = past_;
    for (const auto& user : inside_) add_since(user, total);
    return total;
  }

 private:
  struct User {
    pthread_t thread;
    pid_t id;
    Reading at_entry;
  };

  static Reading read(pthread_t thread, pid_t id) {
    return {thread_cpu_time_ns(thread), thread_queued_ns(id).value_or(0)};
  }

  static void add_since(const User& user, Reading& sum) {
    const Reading now = read(user.thread, user.id);
    sum.cpu_ns += now.cpu_ns - user.at_entry.cpu_ns;
    sum.queued_ns += now.queued_ns - user.at_entry.queued_ns;
  }

  mutable std::mutex mutex_;
  std::vector<User> inside_;
  Reading past_;
};

struct Device::State {
  explicit State(SlotPlan slot);

  torch::Device torch_device() const;

  // Makes the calling thread work on this device's hardware.
  void enter_thread(Device& self);

  SlotPlan plan;
  MemoryAccount& account;
  CpuPool& cpu_pool;                    // used by CPU devices only
  std::optional<OwnStream> own_stream;  // of slots that share a GPU, except the first
  std::optional<c10::Stream> stream;    // of GPU slots
  std::atomic<int64_t> gpu_busy_ns{0};
  UserClock users;
  pid_t process = getpid();

  std::mutex submit_mutex;  // guards the seeding of rng and the order of tasks
  DeviceRng rng;

  std::atomic<int64_t> sent_bytes{0};
  std::atomic<int64_t> received_bytes{0};

  std::atomic<Trace*> trace{nullptr};
  std::atomic<int> rank{0};

  std::optional<Worker> worker;  // last: its thread uses all of the above
};

namespace {

thread_local Device* device_of_thread = nullptr;

void pin_this_thread(const std::vector<int>& cores) {
  if (cores.empty()) return;
  cpu_set_t mask;
  CPU_ZERO(&mask);
  for (const int core : cores) CPU_SET(core, &mask);
  pthread_setaffinity_np(pthread_self(), sizeof(mask), &mask);
}

// The first slot on a GPU uses its default stream, so that a program written for one GPU needs no
// change. Slots that share a GPU get streams of their own.
std::optional<c10::Stream> stream_for(const SlotPlan& plan, torch::Device device,
                                      std::optional<OwnStream>& own) {
  if (plan.kind == DeviceKind::kCpu) return std::nullopt;
  if (plan.slot_on_gpu == 0) {
    return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDefaultStream(device);
  }
  own.emplace(device);
  return own->get();
}

}  // namespace

Device::State::State(SlotPlan slot)
    : plan(std::move(slot)),
      account(make_memory_account()),
      cpu_pool(CpuPool::make(account)),
      stream(stream_for(plan, torch_device(), own_stream)),
      rng(torch_device(), plan.index) {}

torch::Device Device::State::torch_device() const {
  return plan.kind == DeviceKind::kCpu
             ? torch::Device(torch::kCPU)
             : torch::Device(torch::kCUDA, static_cast<c10::DeviceIndex>(plan.gpu));
}

Device::Device(SlotPlan plan) {
  avoid_hidden_amx();
  install_cpu_allocator();
  state_ = std::make_unique<State>(std::move(plan));
#if LOCKSTEP_CUDA
  if (state_->stream) {
    cuda::watch_memory(*state_->stream, state_->account);
    cuda::watch_busy(*state_->stream, state_->gpu_busy_ns);
  }
#endif
  state_->worker.emplace(name(), [this] { state_->enter_thread(*this); });
}

Device::~Device() {
  state_->worker.reset();
#if LOCKSTEP_CUDA
  if (state_->stream) {
    cuda::unwatch_memory(*state_->stream, state_->account);
    cuda::unwatch_busy(state_->gpu_busy_ns);
  }
#endif
  state_->cpu_pool.retire();
}

const SlotPlan& Device::plan() const {
  return state_->plan;
}

torch::Device Device::torch_device() const {
  return state_->torch_device();
}

void Device::post(const char* name, std::shared_ptr<Task> task) {
  if (getpid() != state_->process) {
    throw Error(Code::kEngine, fmt::format("{} has no worker in this process", this->name()),
                "make the devices after fork(), not before");
  }
  require_not_capturing(
      fmt::format("work for {}, which has a thread and a stream of its own,", this->name()),
      "run a step with DataParallel, Pipeline or Device::run without capture");
  RepeatableScope::require_none(this->name());
  const std::lock_guard lock(state_->submit_mutex);
  const auto under_guards = [name](Device& self, Task& work, const CallerState& caller,
                                   uint64_t seed) {
    const TraceScope span(self.trace(), self.rank(), self.index(), name);
    const CallerState::Applied modes(caller);
    const UseRng random(self.state_->rng);
    self.state_->rng.reseed(seed);
    std::optional<c10::StreamGuard> stream;
    if (self.state_->stream) stream.emplace(*self.state_->stream);
    work.run();
  };
  state_->worker->post([self = shared_from_this(), task = std::move(task), caller = CallerState(),
                        seed = state_->rng.next_seed(), under_guards] {
    try {
      under_guards(*self, *task, caller, seed);
    } catch (...) {  // a guard failed, for example because the GPU is gone
      task->fail(std::current_exception());
    }
    task->publish();
  });
}

int64_t Device::random_position() const {
  const std::lock_guard lock(state_->submit_mutex);
  return state_->rng.position();
}

void Device::set_random_position(int64_t position) {
  const std::lock_guard lock(state_->submit_mutex);
  state_->rng.set_position(position);
}

bool Device::on_worker() const {
  return state_->worker->is_this_thread();
}

MemoryUsage Device::memory() const {
  return state_->account.usage();
}

void Device::reset_peak_memory() {
  state_->account.reset_peak();
}

void Device::set_memory_limit(int64_t bytes) {
  if (bytes < 0 || state_->stream) {
    throw Error(Code::kUsage,
                state_->stream
                    ? fmt::format("{} is on a GPU, whose memory has no other limit", name())
                    : fmt::format("{} bytes cannot be a limit of memory", bytes),
                "set a limit of 0 or more bytes on a CPU device");
  }
  state_->account.set_limit(bytes);
}

int64_t Device::capacity_bytes() const {
#if LOCKSTEP_CUDA
  if (state_->stream) return cuda::capacity_bytes(plan().gpu);
#endif
  struct sysinfo memory {};
  sysinfo(&memory);
  return static_cast<int64_t>(memory.totalram) * memory.mem_unit;
}

double Device::busy_seconds() const {
  const int64_t busy_ns = state_->stream
                              ? state_->gpu_busy_ns.load()
                              : state_->worker->cpu_time_ns() + state_->users.total().cpu_ns;
  return static_cast<double>(busy_ns) * 1e-9;
}

std::optional<double> Device::queued_seconds() const {
  if (state_->stream) return std::nullopt;
  const auto of_worker = state_->worker->queued_ns();
  if (!of_worker) return std::nullopt;
  return static_cast<double>(*of_worker + state_->users.total().queued_ns) * 1e-9;
}

Traffic Device::traffic() const {
  return {state_->sent_bytes.load(), state_->received_bytes.load()};
}

void Device::count_traffic_to(Device& receiver, int64_t bytes) {
  state_->sent_bytes.fetch_add(bytes, std::memory_order_relaxed);
  receiver.state_->received_bytes.fetch_add(bytes, std::memory_order_relaxed);
}

bool Device::owns(const torch::Tensor& tensor) const {
  return account_of(tensor) == &state_->account;
}

void Device::synchronize() const {
  if (!state_->stream) return;
  c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).synchronizeStream(*state_->stream);
}

void Device::record_to(Trace* trace, int rank) {
  state_->rank = rank;
  state_->trace = trace;
}

Trace* Device::trace() const {
  return state_->trace;
}

int Device::rank() const {
  return state_->rank;
}

Devices::Devices(std::string_view spec) : Devices(plan_devices(spec, detect_hardware())) {}

Devices::Devices(const std::vector<SlotPlan>& plans) {
  if (plans.empty()) throw Error(Code::kDeviceSpec, "no logical device", "plan at least one");
  for (const auto& plan : plans) devices_.push_back(std::make_shared<Device>(plan));
}

void Devices::synchronize() const {
  for (const auto& device : devices_) device->synchronize();
}

void Devices::require_not_on_worker(const char* what) const {
  for (const auto& device : devices_) {
    if (!device->on_worker()) continue;
    throw Error(Code::kEngine,
                fmt::format("{} was called on the worker of {}, which it needs itself", what,
                            device->name()),
                "call it from another thread, or give an inner DataParallel devices of its own");
  }
}

Device* current_device() {
  return device_of_thread;
}

void Device::State::enter_thread(Device& self) {
  device_of_thread = &self;
  exchange_current_pool(plan.kind == DeviceKind::kCpu ? &cpu_pool : nullptr);
  pin_this_thread(plan.cores);
  // At its first use, libtorch sets a thread's number of threads from a process-wide number that
  // other threads change. Let that happen first, so that ours is not overwritten. In a forked child
  // the first call also replaces libtorch's thread pool, and a second one at that time finds none.
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
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
  if (saved_->before != nullptr) saved_->before->state_->users.leave();
  state.enter_thread(device);
  state.users.enter();
}

UseDevice::~UseDevice() {
  if (!saved_) return;
  saved_->now.state_->users.leave();
  device_of_thread = saved_->before;
  if (saved_->before != nullptr && !saved_->before->on_worker()) {
    saved_->before->state_->users.enter();
  }
  exchange_current_pool(saved_->pool);
  at::set_num_threads(saved_->threads);
  pthread_setaffinity_np(pthread_self(), sizeof(saved_->cores), &saved_->cores);
}

}  // namespace lockstep
