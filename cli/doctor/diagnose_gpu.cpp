#include "cli/doctor/diagnose_gpu.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdlib>
#include <sstream>
#include <vector>

#include "cli/doctor/doctor_facts.hpp"
#include "lockstep/units.hpp"

namespace lockstep::cli {
namespace {

using nlohmann::json;

json gpus_of(const json& facts) {
  return fact<json>(facts, "/machine/driver/gpus").value_or(json::array());
}

std::string describe_gpus(const json& facts) {
  std::vector<std::string> names;
  for (const auto& gpu : gpus_of(facts)) {
    names.push_back(fmt::format("{} ({})", gpu.value("name", "?"),
                                format_bytes(gpu.value("memory_bytes", int64_t{0}))));
  }
  const auto cuda = fact<std::string>(facts, "/machine/driver/cuda_version");
  return fmt::format("{}, driver {}{}", fmt::join(names, ", "),
                     fact<std::string>(facts, "/machine/driver/version").value_or("?"),
                     cuda ? " for CUDA " + *cuda : "");
}

}  // namespace

Finding check_cuda(const json& facts) {
  const auto built = fact<bool>(facts, "/probe/torch/cuda_built");
  const auto usable = fact<int64_t>(facts, "/probe/gpus_usable");
  if (!built || !usable) return unknown("CUDA");
  const auto gpus = gpus_of(facts).size();
  const auto visible = fact<std::string>(facts, "/machine/environment/CUDA_VISIBLE_DEVICES");
  if (!*built && gpus > 0) {
    return {"CUDA", Level::kWarn,
            fmt::format("this libtorch has no CUDA, so these stay idle: {}", describe_gpus(facts)),
            "build lockstep with a CUDA libtorch: scripts/quickstart --torch python"};
  }
  if (!*built)
    return {"CUDA", Level::kPass, "not built in, and no GPU is here: devices are cores", ""};
  if (gpus == 0)
    return {"CUDA", Level::kPass, "built in, but no GPU is here: devices are cores", ""};
  const std::string value =
      fmt::format("libtorch can use {} of {}: {}", *usable, gpus, describe_gpus(facts));
  if (*usable == static_cast<int64_t>(gpus)) return {"CUDA", Level::kPass, value, ""};
  if (visible) {
    return {"CUDA", *usable > 0 ? Level::kPass : Level::kWarn,
            fmt::format("{}; CUDA_VISIBLE_DEVICES=\"{}\"", value, *visible),
            *usable > 0 ? "" : "unset CUDA_VISIBLE_DEVICES, or name a GPU that exists"};
  }
  return {"CUDA", *usable > 0 ? Level::kWarn : Level::kFail, value,
          "the driver may be too old for this libtorch, or the GPU is held by another process "
          "(nvidia-smi)"};
}

Finding check_gpu_code(const json& facts) {
  const auto built = fact<bool>(facts, "/probe/cuda/code");
  const auto architectures = fact<std::string>(facts, "/probe/cuda/architectures");
  if (!built || (*built && !architectures)) return unknown("GPU code");
  if (!*built) {
    return {"GPU code", Level::kWarn,
            "this lockstep was built without it: steps are not captured, and ranks on GPUs talk "
            "through the host's memory",
            "configure with -DLOCKSTEP_CUDA=ON and build again"};
  }
  const std::string value = fmt::format("built for {}", *architectures);
  std::vector<std::string> served;
  for (const auto& gpu : gpus_of(facts)) {
    const auto name = gpu.value("name", "?");
    const auto capability = gpu.value("compute_capability", "");
    if (capability.empty()) continue;
    if (!gpu_code_serves(*architectures, capability)) {
      return {
          "GPU code", Level::kFail,
          fmt::format("{}, which {} (compute capability {}) cannot run", value, name, capability),
          "configure with -DCMAKE_CUDA_ARCHITECTURES=native on that machine, and build again"};
    }
    served.push_back(fmt::format("{} ({})", name, capability));
  }
  if (served.empty()) return {"GPU code", Level::kPass, value, ""};
  return {"GPU code", Level::kPass,
          fmt::format("{}, which suits {}", value, fmt::join(served, ", ")), ""};
}

Finding check_gpu_ranks(const json& facts) {
  const auto built = fact<bool>(facts, "/probe/cuda/code");
  const auto nccl = fact<bool>(facts, "/probe/cuda/nccl");
  if (!built || !nccl) return unknown("GPU ranks");
  if (!*built) return {"GPU ranks", Level::kPass, "through the host's memory", ""};
  const std::string alone = *nccl ? "NCCL where each rank has a GPU"
                                  : "no NCCL: ranks of several hosts talk through their memory";
  const auto ipc = fact<bool>(facts, "/probe/cuda/ipc");  // null where no GPU can be used
  if (!ipc) return {"GPU ranks", Level::kPass, alone, ""};
  if (!*ipc) {
    return {"GPU ranks", Level::kWarn,
            alone +
                "; CUDA IPC is not supported here, so ranks that share a GPU talk through the "
                "host's memory",
            "give each rank a GPU of its own"};
  }
  const json gpus = gpus_of(facts);
  for (size_t index = 0; index < gpus.size(); ++index) {
    if (gpus[index].value("may_be_shared", true)) continue;
    return {"GPU ranks", Level::kWarn,
            fmt::format("{}; GPU {} takes one process only (its compute mode), so ranks cannot "
                        "share it",
                        alone, index),
            "give each rank a GPU of its own, or ask the administrator for compute mode DEFAULT"};
  }
  return {"GPU ranks", Level::kPass, alone + "; ranks may share a GPU (ipc)", ""};
}

bool gpu_code_serves(const std::string& architectures, const std::string& capability) {
  int major = 0;
  int minor = 0;
  char dot = 0;
  std::istringstream(capability) >> major >> dot >> minor;
  const int wanted = major * 10 + minor;
  std::istringstream list(architectures);
  for (std::string entry; std::getline(list, entry, ',');) {
    char* rest = nullptr;
    const auto number = static_cast<int>(std::strtol(entry.c_str(), &rest, 10));
    const std::string suffix(rest);
    const bool exact = suffix.starts_with("a");  // with instructions of that GPU only
    const bool machine = !suffix.ends_with("-virtual");
    const bool intermediate = !suffix.ends_with("-real") && !exact;
    if (number == wanted) return true;
    if (machine && !exact && number / 10 == major && number < wanted) return true;
    if (intermediate && number < wanted) return true;
  }
  return false;
}

}  // namespace lockstep::cli
