#include "cli/nvml.hpp"

#include <dlfcn.h>

#include <array>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>

namespace lockstep::cli {
namespace {

using nlohmann::json;

// The part of NVML's stable C interface that is used; 0 is its code for success.
using Device = void*;
struct MemoryInfo {
  unsigned long long total, free, used;
};
using Init = int (*)();
using Shutdown = int (*)();
using DriverVersion = int (*)(char*, unsigned);
using DeviceCount = int (*)(unsigned*);
using DeviceByIndex = int (*)(unsigned, Device*);
using DeviceName = int (*)(Device, char*, unsigned);
using DeviceMemory = int (*)(Device, MemoryInfo*);

template <class Function>
Function symbol(void* library, const char* name) {
  return reinterpret_cast<Function>(::dlsym(library, name));
}

struct Nvml {
  Init init;
  Shutdown shutdown;
  DriverVersion driver_version;
  DeviceCount count;
  DeviceByIndex by_index;
  DeviceName name;
  DeviceMemory memory;

  explicit Nvml(void* library)
      : init(symbol<Init>(library, "nvmlInit_v2")),
        shutdown(symbol<Shutdown>(library, "nvmlShutdown")),
        driver_version(symbol<DriverVersion>(library, "nvmlSystemGetDriverVersion")),
        count(symbol<DeviceCount>(library, "nvmlDeviceGetCount_v2")),
        by_index(symbol<DeviceByIndex>(library, "nvmlDeviceGetHandleByIndex_v2")),
        name(symbol<DeviceName>(library, "nvmlDeviceGetName")),
        memory(symbol<DeviceMemory>(library, "nvmlDeviceGetMemoryInfo")) {}

  bool complete() const {
    return init && shutdown && driver_version && count && by_index && name && memory;
  }

  json gpus() const {
    json list = json::array();
    unsigned number = 0;
    if (count(&number) != 0) return list;
    for (unsigned index = 0; index < number; ++index) {
      Device device = nullptr;
      std::array<char, 96> text{};
      MemoryInfo info{};
      if (by_index(index, &device) != 0 || name(device, text.data(), text.size()) != 0) continue;
      memory(device, &info);
      list.push_back({{"name", text.data()}, {"memory_bytes", static_cast<int64_t>(info.total)}});
    }
    return list;
  }
};

}  // namespace

json driver_facts() {
  const auto close = [](void* handle) { ::dlclose(handle); };
  const std::unique_ptr<void, decltype(close)> library(
      ::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL), close);
  if (!library) return nullptr;
  const Nvml nvml(library.get());
  if (!nvml.complete() || nvml.init() != 0) return nullptr;
  std::array<char, 96> version{};
  nvml.driver_version(version.data(), version.size());
  json facts = {{"version", version.data()}, {"gpus", nvml.gpus()}};
  nvml.shutdown();
  return facts;
}

}  // namespace lockstep::cli
