#include "lockstep/device.hpp"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pthread.h>
#include <sched.h>
#include <sys/sysinfo.h>
#include <torch/cuda.h>

#include <atomic>

#include "device/cpu_allocator.hpp"
#include "device/rng.hpp"
#include "device/stream_order.hpp"
#include "device/worker.hpp"
#include "lockstep/error.hpp"
#include "lockstep/trace.hpp"
#include "torch_compat.hpp"

#if LOCKSTEP_CUDA
#include "device/cuda_support.hpp"
#endif

namespace lockstep {
namespace {

thread_local Device* device_of_thread = nullptr;

// The first slot on a GPU takes its default stream, so that a program written for one GPU changes
// nothing; slots that share it get streams of their own.
std::optional<c10::Stream> stream_for(const SlotPlan& plan) {
  if (plan.kind == DeviceKind::kCpu) return std::nullopt;
  const c10::impl::VirtualGuardImpl gpu(c10::DeviceType::CUDA);
  const c10::Device device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(plan.gpu));
  return plan.slot_on_gpu == 0 ? gpu.getDefaultStream(device) : gpu.getStreamFromGlobalPool(device);
}

void pin_this_thread(const std::vector<int>& cores) {
  if (cores.empty()) return;
  cpu_set_t mask;
  CPU_ZERO(&mask);
  for (const int core : cores) CPU_SET(core, &mask);
  pthread_setaffinity_np(pthread_self(), sizeof(mask), &mask);
}

// The modes of the submitting thread that must hold where its work runs.
class CallerState {
 public:
  CallerState() : autocast_(compat::AutocastDtypes::get()) {}

  // Guard: they hold on this thread.
  class Applied {
   public:
    explicit Applied(const CallerState& state)
        : autocast_before_(compat::AutocastDtypes::get()),
          thread_local_state_(state.thread_local_state_) {
      state.autocast_.set();
    }
    ~Applied() { autocast_before_.set(); }
    Applied(const Applied&) = delete;
    Applied& operator=(const Applied&) = delete;

   private:
    compat::AutocastDtypes autocast_before_;
    at::ThreadLocalStateGuard thread_local_state_;
  };

 private:
  at::ThreadLocalState thread_local_state_;
  compat::AutocastDtypes autocast_;
};

}  // namespace

struct Device::State {
  explicit State(SlotPlan slot)
      : plan(std::move(slot)),
        account(make_memory_account()),
        cpu_pool(CpuPool::make(account)),
        stream(stream_for(plan)),
        rng(torch_device(), plan.index) {}

  torch::Device torch_device() const {
    return plan.kind == DeviceKind::kCpu
               ? torch::Device(torch::kCPU)
               : torch::Device(torch::kCUDA, static_cast<c10::DeviceIndex>(plan.gpu));
  }

  // Makes the calling thread work on this device's hardware.
  void enter_thread(Device& self) {
    device_of_thread = &self;
    if (plan.kind == DeviceKind::kCpu) exchange_current_pool(&cpu_pool);
    pin_this_thread(plan.cores);
    at::set_num_threads(plan.threads);
  }

  SlotPlan plan;
  MemoryAccount& account;
  CpuPool& cpu_pool;  // used by CPU devices only
  std::optional<c10::Stream> stream;
  std::atomic<int64_t> gpu_busy_ns{0};

  std::mutex submit_mutex;  // guards rng's seeding and the order of posting
  DeviceRng rng;

  std::atomic<int64_t> sent_bytes{0};
  std::atomic<int64_t> received_bytes{0};

  std::mutex users_mutex;                            // guards the two below
  std::vector<std::pair<pthread_t, int64_t>> users;  // threads inside UseDevice, CPU time at entry
  int64_t past_users_ns = 0;

  std::atomic<Trace*> trace{nullptr};
  int rank = 0;

  std::optional<Worker> worker;  // last: its thread uses all of the above
};

Device::Device(SlotPlan plan) {
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
  if (state_->stream) cuda::unwatch(*state_->stream);
#endif
  state_->cpu_pool.trim();
}

const SlotPlan& Device::plan() const {
  return state_->plan;
}

torch::Device Device::torch_device() const {
  return state_->torch_device();
}

void Device::post(const char* name, std::function<void()> task) {
  const std::lock_guard lock(state_->submit_mutex);
  state_->worker->post(
      [this, name, task = std::move(task), caller = CallerState(), seed = state_->rng.next_seed()] {
        const TraceScope span(trace(), rank(), index(), name);
        const CallerState::Applied modes(caller);
        const UseRng random(state_->rng);
        state_->rng.reseed(seed);
        if (state_->stream) {
          const c10::StreamGuard stream(*state_->stream);
          task();
        } else {
          task();
        }
      });
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

int64_t Device::capacity_bytes() const {
#if LOCKSTEP_CUDA
  if (state_->stream) return cuda::capacity_bytes(plan().gpu);
#endif
  struct sysinfo memory {};
  sysinfo(&memory);
  return static_cast<int64_t>(memory.totalram) * memory.mem_unit;
}

double Device::busy_seconds() const {
  if (state_->stream) return static_cast<double>(state_->gpu_busy_ns.load()) * 1e-9;
  const std::lock_guard lock(state_->users_mutex);
  int64_t total_ns = state_->worker->cpu_time_ns() + state_->past_users_ns;
  for (const auto& [thread, at_entry_ns] : state_->users)
    total_ns += thread_cpu_time_ns(thread) - at_entry_ns;
  return static_cast<double>(total_ns) * 1e-9;
}

Traffic Device::traffic() const {
  return {state_->sent_bytes.load(), state_->received_bytes.load()};
}

void Device::count_traffic_to(Device& receiver, int64_t bytes) {
  state_->sent_bytes.fetch_add(bytes, std::memory_order_relaxed);
  receiver.state_->received_bytes.fetch_add(bytes, std::memory_order_relaxed);
}

bool Device::holds(const torch::Tensor& tensor) const {
  if (tensor.device() != torch_device()) return false;
  const MemoryAccount* account = account_of(tensor);
  return account == nullptr || account == &state_->account || account == &host_account();
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
  for (const auto& plan : plans) devices_.push_back(std::make_unique<Device>(plan));
}

void Devices::synchronize() const {
  for (const auto& device : devices_) device->synchronize();
}

struct UseDevice::Saved {
  explicit Saved(Device& device)
      : now(device), before(device_of_thread), threads(at::get_num_threads()) {
    CPU_ZERO(&cores);
    pthread_getaffinity_np(pthread_self(), sizeof(cores), &cores);
    if (device.state_->stream) stream.emplace(*device.state_->stream);
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
  saved_ = std::make_unique<Saved>(device);
  auto& state = *device.state_;
  saved_->pool = exchange_current_pool(nullptr);
  state.enter_thread(device);
  const std::lock_guard lock(state.users_mutex);
  state.users.emplace_back(pthread_self(), thread_cpu_time_ns(pthread_self()));
}

UseDevice::~UseDevice() {
  if (!saved_) return;
  auto& state = *saved_->now.state_;
  {
    const std::lock_guard lock(state.users_mutex);
    const auto self = std::find_if(state.users.rbegin(), state.users.rend(), [](const auto& user) {
      return pthread_equal(user.first, pthread_self());
    });
    state.past_users_ns += thread_cpu_time_ns(pthread_self()) - self->second;
    state.users.erase(std::next(self).base());
  }
  device_of_thread = saved_->before;
  exchange_current_pool(saved_->pool);
  at::set_num_threads(saved_->threads);
  pthread_setaffinity_np(pthread_self(), sizeof(saved_->cores), &saved_->cores);
}

Device* current_device() {
  return device_of_thread;
}

Hardware detect_hardware() {
#if LOCKSTEP_CUDA
  return Hardware::detect(static_cast<int>(torch::cuda::device_count()));
#else
  return Hardware::detect(0);
#endif
}

StreamOrder StreamOrder::now(const Device& device) {
  StreamOrder order;
  if (!device.state_->stream) return order;
  order.event_.emplace(c10::DeviceType::CUDA);
  order.event_->record(
      c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(device.torch_device()));
  return order;
}

void StreamOrder::hold_back(const Device& device) const {
  if (!event_) return;
  event_->block(
      c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(device.torch_device()));
}

void keep_for_current_stream(const torch::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return;
  tensor.record_stream(
      c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(tensor.device()));
}

}  // namespace lockstep
