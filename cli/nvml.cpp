#include "cli/nvml.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

#include <array>
#include <nlohmann/json.hpp>

namespace lockstep::cli {
namespace {

using nlohmann::json;

// The part of NVML's stable C interface that is used.
constexpr int kSuccess = 0;
constexpr int kTooSmall = 7;              // NVML_ERROR_INSUFFICIENT_SIZE
constexpr unsigned kCoreTemperature = 0;  // NVML_TEMPERATURE_GPU
constexpr unsigned kSmClock = 1;          // NVML_CLOCK_SM
constexpr unsigned kSharedMode = 0;       // NVML_COMPUTEMODE_DEFAULT
using Device = void*;

struct MemoryInfo {
  unsigned long long total, free, used;
};
struct Utilisation {
  unsigned gpu, memory;  // percent
};
struct ProcessInfo {
  unsigned pid;
  unsigned long long used_memory;  // all ones: unknown
  unsigned gpu_instance, compute_instance;
};

// A function of the library. Calling one that an old driver lacks fails as any other call would.
template <class... Arguments>
class Function {
 public:
  Function(void* library, const char* name)
      : pointer_(reinterpret_cast<int (*)(Arguments...)>(::dlsym(library, name))) {}
  explicit operator bool() const { return pointer_ != nullptr; }
  int operator()(Arguments... arguments) const {
    return pointer_ == nullptr ? -1 : pointer_(arguments...);
  }

 private:
  int (*pointer_)(Arguments...);
};

struct Close {
  void operator()(void* handle) const { ::dlclose(handle); }
};

template <class Number, class... Arguments>
std::optional<Number> number(const Function<Arguments..., unsigned*>& function,
                             Arguments... arguments) {
  unsigned value = 0;
  if (function(arguments..., &value) != kSuccess) return std::nullopt;
  return static_cast<Number>(value);
}

}  // namespace

struct Nvml::Library {
  std::unique_ptr<void, Close> handle;
  Function<> init{handle.get(), "nvmlInit_v2"};
  Function<> shutdown{handle.get(), "nvmlShutdown"};
  Function<char*, unsigned> driver_version{handle.get(), "nvmlSystemGetDriverVersion"};
  Function<int*> cuda_version{handle.get(), "nvmlSystemGetCudaDriverVersion_v2"};
  Function<unsigned*> count{handle.get(), "nvmlDeviceGetCount_v2"};
  Function<unsigned, Device*> by_index{handle.get(), "nvmlDeviceGetHandleByIndex_v2"};
  Function<Device, char*, unsigned> name{handle.get(), "nvmlDeviceGetName"};
  Function<Device, MemoryInfo*> memory{handle.get(), "nvmlDeviceGetMemoryInfo"};
  Function<Device, Utilisation*> utilisation{handle.get(), "nvmlDeviceGetUtilizationRates"};
  Function<Device, unsigned*> power{handle.get(), "nvmlDeviceGetPowerUsage"};
  Function<Device, unsigned*> power_limit{handle.get(), "nvmlDeviceGetEnforcedPowerLimit"};
  Function<Device, unsigned, unsigned*> temperature{handle.get(), "nvmlDeviceGetTemperature"};
  Function<Device, unsigned, unsigned*> clock{handle.get(), "nvmlDeviceGetClockInfo"};
  Function<Device, unsigned*> compute_mode{handle.get(), "nvmlDeviceGetComputeMode"};
  Function<Device, int*, int*> capability{handle.get(), "nvmlDeviceGetCudaComputeCapability"};
  Function<Device, unsigned*, ProcessInfo*> running{handle.get(),
                                                    "nvmlDeviceGetComputeRunningProcesses_v3"};

  bool complete() const { return init && shutdown && count && by_index && name && memory; }

  std::optional<std::vector<GpuProcess>> processes(Device device) const {
    std::vector<ProcessInfo> infos(16);
    auto length = static_cast<unsigned>(infos.size());
    int result = running(device, &length, infos.data());
    if (result == kTooSmall) {
      infos.resize(length + 16);  // more processes may have started since
      length = static_cast<unsigned>(infos.size());
      result = running(device, &length, infos.data());
    }
    if (result != kSuccess) return std::nullopt;
    std::vector<GpuProcess> list;
    for (unsigned i = 0; i < length; ++i) {
      GpuProcess process{.pid = static_cast<pid_t>(infos[i].pid)};
      if (infos[i].used_memory != ~0ULL) {
        process.memory_bytes = static_cast<int64_t>(infos[i].used_memory);
      }
      list.push_back(process);
    }
    return list;
  }

  std::optional<GpuSample> sample(unsigned index) const {
    Device device = nullptr;
    std::array<char, 96> text{};
    MemoryInfo info{};
    if (by_index(index, &device) != kSuccess ||
        name(device, text.data(), text.size()) != kSuccess || memory(device, &info) != kSuccess) {
      return std::nullopt;
    }
    GpuSample gpu{.index = static_cast<int>(index),
                  .name = text.data(),
                  .memory_bytes = static_cast<int64_t>(info.total),
                  .memory_used_bytes = static_cast<int64_t>(info.used)};
    Utilisation share{};
    if (utilisation(device, &share) == kSuccess) gpu.utilisation = share.gpu / 100.0;
    if (const auto mw = number<double>(power, device)) gpu.power_w = *mw / 1000;
    if (const auto mw = number<double>(power_limit, device)) gpu.power_limit_w = *mw / 1000;
    gpu.temperature_c = number<int>(temperature, device, kCoreTemperature);
    gpu.sm_clock_mhz = number<int>(clock, device, kSmClock);
    gpu.processes = processes(device);
    int major = 0;
    int minor = 0;
    if (capability(device, &major, &minor) == kSuccess) {
      gpu.compute_capability = fmt::format("{}.{}", major, minor);
    }
    if (const auto mode = number<unsigned>(compute_mode, device)) {
      gpu.may_be_shared = *mode == kSharedMode;
    }
    return gpu;
  }
};

Nvml::Nvml() {
  std::unique_ptr<void, Close> handle(::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL));
  if (!handle) return;
  auto library = std::unique_ptr<Library>(new Library{.handle = std::move(handle)});
  if (library->complete() && library->init() == kSuccess) library_ = std::move(library);
}

Nvml::~Nvml() {
  if (library_) library_->shutdown();
}

std::string Nvml::driver_version() const {
  std::array<char, 96> text{};
  if (library_) library_->driver_version(text.data(), text.size());
  return text.data();
}

std::string Nvml::cuda_version() const {
  int version = 0;  // 13000 is 13.0, 12080 is 12.8
  if (!library_ || library_->cuda_version(&version) != kSuccess) return "";
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

std::vector<GpuSample> Nvml::sample() const {
  std::vector<GpuSample> gpus;
  unsigned number_of_gpus = 0;
  if (!library_ || library_->count(&number_of_gpus) != kSuccess) return gpus;
  for (unsigned index = 0; index < number_of_gpus; ++index) {
    if (auto gpu = library_->sample(index)) gpus.push_back(std::move(*gpu));
  }
  return gpus;
}

json driver_facts() {
  const Nvml nvml;
  if (!nvml.present()) return nullptr;
  json gpus = json::array();
  for (const auto& gpu : nvml.sample()) {
    json facts = {{"name", gpu.name}, {"memory_bytes", gpu.memory_bytes}};
    if (!gpu.compute_capability.empty()) facts["compute_capability"] = gpu.compute_capability;
    if (gpu.may_be_shared) facts["may_be_shared"] = *gpu.may_be_shared;
    gpus.push_back(std::move(facts));
  }
  json facts = {{"version", nvml.driver_version()}, {"gpus", gpus}};
  if (const auto cuda = nvml.cuda_version(); !cuda.empty()) facts["cuda_version"] = cuda;
  return facts;
}

}  // namespace lockstep::cli
