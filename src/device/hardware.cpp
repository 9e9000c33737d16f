#include <ATen/Version.h>
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

std::map<std::string, std::string> describe_versions() {
  torch::mm(torch::ones({2, 2}), torch::ones({2, 2}));  // binds the BLAS that is really used
  const std::string config = at::show_config();
  std::map<std::string, std::string> versions = {
      {"lockstep", kVersion},
      {"libtorch", torch_setting(config, "TORCH_VERSION")},
      {"blas", blas_title(classify_blas(loaded_libraries({"blas", "mkl", "blis"}), config))},
      {"compiler", "g++ " __VERSION__},
  };
  const std::string cuda = torch_setting(config, "CUDA_VERSION");
  if (!cuda.empty()) versions["cuda"] = cuda;
  return versions;
}

}  // namespace lockstep
