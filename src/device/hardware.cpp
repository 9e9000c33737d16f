#include "device/hardware.hpp"

#include <ATen/Version.h>
#include <dlfcn.h>
#include <fmt/format.h>
#include <torch/cuda.h>
#include <torch/types.h>

#include "base/machine.hpp"
#include "lockstep/device.hpp"
#include "lockstep/version.hpp"

// What this process runs on: cores, GPUs, and the versions of the libraries.

namespace lockstep {
namespace {

// The value of one of libtorch's build settings: "…, CUDA_VERSION=13.0, …".
std::string torch_setting(const std::string& config, const std::string& name) {
  const size_t at = config.find(name + "=");
  if (at == std::string::npos) return "";
  const size_t begin = at + name.size() + 1;
  return config.substr(begin, config.find_first_of(", \n", begin) - begin);
}

// The NCCL of this process, whoever has brought it; empty: none. Up to 2.8 a version had four
// digits.
std::string nccl_version() {
  using GetVersion = int (*)(int*);
  const auto get = reinterpret_cast<GetVersion>(::dlsym(RTLD_DEFAULT, "ncclGetVersion"));
  int version = 0;
  if (get == nullptr || get(&version) != 0) return "";
  const int base = version < 10'000 ? 1'000 : 10'000;
  return fmt::format("{}.{}.{}", version / base, version % base / 100, version % 100);
}

}  // namespace

// Detected once: a thread under UseDevice would see only its own device's cores.
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

std::map<std::string, std::string> library_versions() {
  const std::string config = at::show_config();
  std::map<std::string, std::string> versions = {
      {"libtorch", torch_setting(config, "TORCH_VERSION")},
      {"cuda", torch_setting(config, "CUDA_VERSION")},
      {"nccl", nccl_version()}};
  std::erase_if(versions, [](const auto& each) { return each.second.empty(); });
  return versions;
}

std::map<std::string, std::string> describe_versions() {
  torch::mm(torch::ones({2, 2}), torch::ones({2, 2}));  // binds the BLAS that is really used
  const std::string config = at::show_config();
  std::map<std::string, std::string> versions = {
      {"lockstep", kVersion},
      {"blas", blas_title(classify_blas(loaded_libraries({"blas", "mkl", "blis"}), config))},
      {"compiler", "g++ " __VERSION__},
  };
  versions.merge(library_versions());
  return versions;
}

}  // namespace lockstep
