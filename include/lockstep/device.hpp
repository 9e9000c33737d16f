#pragma once

#include <torch/types.h>

#include <future>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/detail/task.hpp"
#include "lockstep/device_plan.hpp"
#include "lockstep/memory.hpp"

namespace lockstep {

class Trace;

/// Bytes that a logical device exchanged with others.
struct Traffic {
  int64_t sent_bytes = 0;
  int64_t received_bytes = 0;
};

/// A logical device: a share of the machine's cores or of a GPU, with a worker thread, a memory
/// account, a busy clock and its own random numbers.
class Device : public std::enable_shared_from_this<Device> {
 public:
  /// Use Devices to make devices.
  explicit Device(SlotPlan plan);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const SlotPlan& plan() const;
  int index() const { return plan().index; }
  std::string name() const { return plan().name(); }
  torch::Device torch_device() const;

  /// Runs `work` on this device's worker, after all work submitted before. The calling thread's
  /// grad mode, inference mode, autocast and random state apply there too. `name` appears in the
  /// timeline.
  template <class Work>
  auto submit(const char* name, Work work) -> std::future<std::invoke_result_t<Work&>> {
    auto task = std::make_shared<TaskOf<Work>>(std::move(work));
    auto result = task->result();
    post(name, std::move(task));
    return result;
  }

  /// Submits `work` and waits for it. On the worker itself, runs it at once.
  template <class Work>
  auto run(const char* name, Work work) -> std::invoke_result_t<Work&> {
    if (on_worker()) return work();
    return submit(name, std::move(work)).get();
  }

  MemoryUsage memory() const;
  void reset_peak_memory();
  int64_t capacity_bytes() const;  ///< of the hardware underneath

  /// Limits the memory of this CPU device: an allocation beyond it is an Error that says
  /// what is needed and what there is. 0: no limit.
  void set_memory_limit(int64_t bytes);

  /// Time for which this device has computed. On the CPU, it is the processor time of the threads
  /// that lead its work. On a GPU, it is the time in which its stream had unfinished work, sampled
  /// every half millisecond.
  double busy_seconds() const;

  /// Time in which the threads that lead its work were ready to run but had no core, because other
  /// threads did: of other programs, or of devices on the same cores. None on a GPU, and where the
  /// kernel does not tell.
  std::optional<double> queued_seconds() const;

  Traffic traffic() const;
  void count_traffic_to(Device& receiver, int64_t bytes);

  /// Whether this CPU device's account was charged for the tensor. Always false on a GPU, where a
  /// block does not tell its slot.
  bool owns(const torch::Tensor& tensor) const;

  /// Waits until all work queued on the GPU is done. Does nothing on the CPU.
  void synchronize() const;

  /// How many tasks were submitted since the calling thread's generator was last seeded or drawn
  /// from. Together with that generator's state it determines the random numbers of the next task,
  /// so a checkpoint has both.
  int64_t random_position() const;
  void set_random_position(int64_t position);

  /// Whether the calling thread is this device's worker.
  bool on_worker() const;

  /// Adds spans of this device's tasks to `trace` from now on; null stops it.
  void record_to(Trace* trace, int rank);
  Trace* trace() const;
  int rank() const;

 private:
  friend class UseDevice;
  struct State;

  void post(const char* name, std::shared_ptr<Task> task);

  std::unique_ptr<State> state_;
};

/// The logical devices of one process, made from a --devices text. Copies share the devices, and an
/// autograd graph that still needs them keeps them alive.
class Devices {
 public:
  /// plan_devices() describes the grammar. An empty text means every GPU, or cpu:2.
  explicit Devices(std::string_view spec = "");
  explicit Devices(const std::vector<SlotPlan>& plans);

  size_t size() const { return devices_.size(); }
  Device& operator[](size_t index) const { return *devices_.at(index); }
  bool is_cuda() const { return devices_.front()->plan().kind == DeviceKind::kCuda; }
  void synchronize() const;

  /// Throws if the calling thread is one of the workers, which `what` would wait for.
  void require_not_on_worker(const char* what) const;

 private:
  std::vector<std::shared_ptr<Device>> devices_;
};

/// Guard: this thread works for `device`, as after torch.cuda.set_device. Its allocations are
/// charged to that device, it computes with the device's threads on the device's cores or stream,
/// and its processor time counts as the device's busy time.
class UseDevice {
 public:
  explicit UseDevice(Device& device);
  ~UseDevice();
  UseDevice(const UseDevice&) = delete;
  UseDevice& operator=(const UseDevice&) = delete;

 private:
  struct Saved;
  std::unique_ptr<Saved> saved_;  // null if the thread already worked for this device
};

/// The logical device that this thread works for; null if there is none.
Device* current_device();

/// The cores that this process may use and the GPUs that libtorch sees.
Hardware detect_hardware();

}  // namespace lockstep
