#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// The hardware under a logical device.
enum class DeviceKind { kCpu, kCuda };

/// The hardware that this process may use.
struct Hardware {
  std::vector<int> cores;                      ///< ids of the cores it may run on
  int gpus = 0;                                ///< CUDA devices visible to libtorch
  std::optional<int> threads_per_device = {};  ///< OMP_NUM_THREADS, if it is set

  /// Reads the affinity mask and OMP_NUM_THREADS. The caller counts the GPUs.
  static Hardware detect(int gpus);
};

/// One logical device: a slot with a physical home.
struct SlotPlan {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;           ///< number among the logical devices
  int gpu = -1;            ///< GPU ordinal; -1 on the CPU
  int slot_on_gpu = 0;     ///< number among the slots that share this GPU
  int shared_by = 1;       ///< logical devices on the same hardware, this one included
  int threads = 1;         ///< compute threads of its worker
  std::vector<int> cores;  ///< cores its worker is pinned to; empty if it is not pinned

  std::string name() const;      ///< "cpu:1", "cuda:0", or "cuda:0#1" if GPU 0 is shared
  std::string physical() const;  ///< "core 1", "cores 0-3", "all cores, shared", "GPU 0"
  bool operator==(const SlotPlan&) const = default;
};

/// Converts between {0, 1, 2, 3, 8} and "0-3,8". A text of another form is an Error.
std::string format_cores(const std::vector<int>& cores);
std::vector<int> parse_cores(std::string_view text);

/// Turns a --devices text into logical devices: `cpu`, `cpu:N`, `cuda`, `cuda:0,1`, `cuda:0*4`,
/// `cuda:0*2,1*2`. An empty text means every GPU, or `cpu:2` if there is none. Each CPU device gets
/// cores / devices cores and at least one thread. If there are more devices than cores, they share
/// all of them.
std::vector<SlotPlan> plan_devices(std::string_view spec, const Hardware& hardware);

/// The same for `cpu:N`, with any number of devices: a launcher's ranks.
std::vector<SlotPlan> plan_cpu_devices(int devices, const Hardware& hardware);

/// The --devices text that spreads logical devices over GPUs as evenly as possible: `cuda:0*2,1`
/// for three devices on two GPUs.
std::string spread_over_gpus(const std::vector<int>& gpus, int devices);

/// The --devices text for a number of logical devices if the user gave none: spread over all GPUs,
/// or over the cores if there is no GPU.
std::string default_devices(const Hardware& hardware, int devices);

}  // namespace lockstep
