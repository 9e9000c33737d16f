#include "lockstep/device.hpp"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <sys/sysinfo.h>
#include <torch/cuda.h>

#include "base/hidden_amx.hpp"
#include "device/caller_state.hpp"
#include "device/capture.hpp"
#include "device/device_state.hpp"
#include "lockstep/error.hpp"
#include "lockstep/trace.hpp"

#if LOCKSTEP_CUDA
#include "device/cuda/support.hpp"
#endif

namespace lockstep {
namespace {

// The first slot on a GPU takes its default stream, so that a program written for one GPU changes
// nothing; slots that share it get streams of their own.
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
    } catch (...) {  // a guard's own failure, such as a GPU that is gone
      task->fail(std::current_exception());
    }
    task->publish();
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
  const int64_t busy_ns = state_->stream ? state_->gpu_busy_ns.load()
                                         : state_->worker->cpu_time_ns() + state_->users.total_ns();
  return static_cast<double>(busy_ns) * 1e-9;
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

// Asked once: a thread under UseDevice would see its own device's cores only.
Hardware detect_hardware() {
  static const Hardware hardware = [] {
#if LOCKSTEP_CUDA
    return Hardware::detect(static_cast<int>(torch::cuda::device_count()));
#else
    return Hardware::detect(0);
#endif
  }();
  return hardware;
}

}  // namespace lockstep
