#pragma once

#include <torch/types.h>

#include <future>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/device_plan.hpp"
#include "lockstep/memory.hpp"
#include "lockstep/task.hpp"

namespace lockstep {

class Trace;

/// Bytes a logical device exchanged with others.
struct Traffic {
  int64_t sent_bytes = 0;
  int64_t received_bytes = 0;
};

/// A logical device: a slot with a physical home, a worker with its own threads and cores (or its
/// own stream on a GPU), a memory account, a busy clock and random numbers of its own.
class Device : public std::enable_shared_from_this<Device> {
 public:
  /// Made by Devices.
  explicit Device(SlotPlan plan);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const SlotPlan& plan() const;
  int index() const { return plan().index; }
  std::string name() const { return plan().name(); }
  torch::Device torch_device() const;

  /// Runs `work` on this device's worker, after what was submitted before. Grad mode, inference
  /// mode, autocast and random state of the calling thread hold there too. `name` appears in the
  /// timeline.
  template <class Work>
  auto submit(const char* name, Work work) -> std::future<std::invoke_result_t<Work&>> {
    auto task = std::make_shared<TaskOf<Work>>(std::move(work));
    auto result = task->result();
    post(name, std::move(task));
    return result;
  }

  /// submit() and wait. On the worker itself the work runs at once.
  template <class Work>
  auto run(const char* name, Work work) -> std::invoke_result_t<Work&> {
    if (on_worker()) return work();
    return submit(name, std::move(work)).get();
  }

  MemoryUsage memory() const;
  void reset_peak_memory();
  int64_t capacity_bytes() const;  ///< of the hardware underneath

  /// Time this device has computed. CPU: processor time of the threads that lead its work. GPU:
  /// time in which its stream held unfinished work, sampled every half millisecond.
  double busy_seconds() const;

  Traffic traffic() const;
  void count_traffic_to(Device& receiver, int64_t bytes);

  /// Whether this CPU device's account was charged for the tensor. Never true on a GPU, where
  /// memory does not tell its slot.
  bool owns(const torch::Tensor& tensor) const;

  /// Waits until all work queued on the hardware is done; nothing to do on the CPU.
  void synchronize() const;

  /// Whether the calling thread is this device's worker.
  bool on_worker() const;

  /// Spans of this device's tasks go to `trace` from now on; null: nowhere.
  void record_to(Trace* trace, int rank);
  Trace* trace() const;
  int rank() const;

 private:
  friend class UseDevice;
  friend class StreamOrder;
  struct State;

  void post(const char* name, std::shared_ptr<Task> task);

  std::unique_ptr<State> state_;
};

/// The logical devices of one process, made from a --devices text. A handle: copies share the
/// devices, and an autograd graph that still needs them keeps them alive.
class Devices {
 public:
  /// See plan_devices() for the grammar. An empty text means every GPU, or cpu:2.
  explicit Devices(std::string_view spec = "");
  explicit Devices(const std::vector<SlotPlan>& plans);

  size_t size() const { return devices_.size(); }
  Device& operator[](size_t index) const { return *devices_.at(index); }
  bool is_cuda() const { return devices_.front()->plan().kind == DeviceKind::kCuda; }
  void synchronize() const;

  /// Refuses a call that would wait for workers on one of them; `what` names the call.
  void require_not_on_worker(const char* what) const;

 private:
  std::vector<std::shared_ptr<Device>> devices_;
};

/// Guard: this thread works for `device`, as after torch.cuda.set_device. Its allocations are
/// charged there, it computes with that device's threads on that device's cores (or on its stream),
/// and its processor time counts as busy time.
class UseDevice {
 public:
  explicit UseDevice(Device& device);
  ~UseDevice();
  UseDevice(const UseDevice&) = delete;
  UseDevice& operator=(const UseDevice&) = delete;

 private:
  struct Saved;
  std::unique_ptr<Saved> saved_;  // null where the thread worked for this device already
};

/// The logical device this thread works for; null outside any.
Device* current_device();

/// What this process may use: its cores, and the GPUs libtorch sees.
Hardware detect_hardware();

}  // namespace lockstep
