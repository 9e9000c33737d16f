#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

enum class DeviceKind { kCpu, kCuda };

/// What this process may use of the machine.
struct Hardware {
  std::vector<int> cores;                      ///< ids of the cores this process may run on
  int gpus = 0;                                ///< CUDA devices visible to libtorch
  std::optional<int> threads_per_device = {};  ///< OMP_NUM_THREADS, where the user set it

  /// Cores from the affinity mask and OMP_NUM_THREADS from the environment; GPUs as told.
  static Hardware detect(int gpus);
};

/// One logical device: a slot with a physical home.
struct SlotPlan {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;           ///< position among the logical devices
  int gpu = -1;            ///< GPU ordinal; -1 on the CPU
  int slot_on_gpu = 0;     ///< which of the slots that share this GPU
  int shared_by = 1;       ///< how many logical devices use the same hardware, this one included
  int threads = 1;         ///< compute threads of its worker
  std::vector<int> cores;  ///< cores its worker runs on; empty: wherever the system puts it

  std::string name() const;      ///< "cpu:1", "cuda:0", "cuda:0#1" where GPU 0 is shared
  std::string physical() const;  ///< "core 1", "cores 0-3", "all cores, shared", "GPU 0"
  bool operator==(const SlotPlan&) const = default;
};

/// "0-3,8" for {0, 1, 2, 3, 8}, and back. A text of another form is an Error.
std::string format_cores(const std::vector<int>& cores);
std::vector<int> parse_cores(std::string_view text);

/// Turns a --devices text into logical devices: `cpu`, `cpu:N`, `cuda`, `cuda:0,1`, `cuda:0*4`,
/// `cuda:0*2,1*2`. An empty text means every GPU, or `cpu:2` where there is none.
/// Each CPU device gets cores / devices cores, at least one thread; where there are more devices
/// than cores they share all of them.
std::vector<SlotPlan> plan_devices(std::string_view spec, const Hardware& hardware);

/// The --devices text for so many logical devices on these GPUs, as evenly as they go: `cuda:0*2,1`
/// for three on two of them.
std::string spread_over_gpus(const std::vector<int>& gpus, int devices);

/// The --devices text for so many logical devices where the user named none: every GPU, shared
/// where there are too few, or without any the cores.
std::string default_devices(const Hardware& hardware, int devices);

}  // namespace lockstep
