#include "lockstep/engine.hpp"

#include <ATen/Version.h>
#include <fmt/format.h>
#include <torch/cuda.h>
#include <torch/types.h>

#include "lockstep/loaded_libraries.hpp"
#include "lockstep/version.hpp"

namespace lockstep {
namespace {

// libtorch tells its own version, and CUDA's, in its build settings: "…, CUDA_VERSION=13.0, …".
std::string setting(const std::string& config, const std::string& name) {
  const size_t at = config.find(name + "=");
  if (at == std::string::npos) return "";
  const size_t begin = at + name.size() + 1;
  return config.substr(begin, config.find_first_of(", \n", begin) - begin);
}

}  // namespace

std::map<std::string, std::string> describe_versions() {
  torch::mm(torch::ones({2, 2}), torch::ones({2, 2}));  // binds the BLAS that is really used
  const std::string config = at::show_config();
  std::map<std::string, std::string> versions = {
      {"lockstep", kVersion},
      {"libtorch", setting(config, "TORCH_VERSION")},
      {"blas", blas_title(classify_blas(loaded_libraries({"blas", "mkl", "blis"}), config))},
      {"compiler", "g++ " __VERSION__},
  };
  const std::string cuda = setting(config, "CUDA_VERSION");
  if (!cuda.empty()) versions["cuda"] = cuda;
  return versions;
}

}  // namespace lockstep
