#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::cli {

struct GpuProcess {
  pid_t pid = 0;  ///< as the driver sees it: inside a container it may be the host's number
  std::optional<int64_t> memory_bytes = {};
};

/// One GPU at one moment. Values that the driver does not report are empty.
struct GpuSample {
  int index = 0;  ///< the driver's and nvidia-smi's; CUDA_VISIBLE_DEVICES does not change it
  std::string name = {};  ///< "NVIDIA H200"
  int64_t memory_bytes = 0;
  int64_t memory_used_bytes = 0;           ///< by all processes, and by the driver
  std::optional<double> utilisation = {};  ///< share of the last moment in which a kernel ran
  std::optional<double> power_w = {};
  std::optional<double> power_limit_w = {};
  std::optional<int> temperature_c = {};
  std::optional<int> sm_clock_mhz = {};
  std::optional<std::vector<GpuProcess>> processes = {};
  std::string compute_capability = {};     ///< "9.0"
  std::optional<bool> may_be_shared = {};  ///< false: its compute mode allows one process only
};

/// NVIDIA's management library, as long as this object lives. It comes with the driver and is
/// opened at run time, so that lockstep runs where there is none.
class Nvml {
 public:
  Nvml();
  ~Nvml();
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  bool present() const { return library_ != nullptr; }  ///< a driver is installed and answers
  std::string driver_version() const;
  std::string cuda_version()
      const;  ///< the newest that the driver supports, such as "13.0"; or empty
  std::vector<GpuSample> sample() const;  ///< takes a few milliseconds per GPU

 private:
  struct Library;
  std::unique_ptr<Library> library_;
};

/// The NVIDIA driver's version and its GPUs (name, memory_bytes, compute_capability,
/// may_be_shared); null if there is no driver.
nlohmann::json driver_facts();

}  // namespace lockstep::cli
