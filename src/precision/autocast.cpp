#include "lockstep/autocast.hpp"

#include <fmt/format.h>
#include <torch/cuda.h>

#include "base/machine.hpp"
#include "base/mutation.hpp"
#include "lockstep/device.hpp"
#include "lockstep/error.hpp"
#include "torch_compat.hpp"
#include "verify/step_recorder.hpp"

namespace lockstep {
namespace {

void require_device(torch::Device device) {
  if (device.is_cpu()) return;
  if (!device.is_cuda()) {
    throw Error(Code::kDeviceMissing,
                fmt::format("Autocast does not know {} devices", device.str()),
                "use the CPU or a CUDA device");
  }
  if (!torch::cuda::is_available()) {
    throw Error(
        Code::kDeviceMissing,
        fmt::format("Autocast on {}, but libtorch {} has no GPU here", device.str(), TORCH_VERSION),
        "use the CPU with bf16; `lockstep doctor` says what is missing for CUDA");
  }
}

}  // namespace

void require_autocast(torch::Device device, torch::ScalarType dtype) {
  require_device(device);
  if (dtype == torch::kBFloat16) return;
  if (dtype != torch::kHalf) {
    throw Error(Code::kUsage,
                fmt::format("Autocast to {}, which is not a lower precision", toString(dtype)),
                "use torch::kBFloat16 or torch::kHalf");
  }
  if (device.is_cpu() && !compat::kCpuAutocastHalf) {
    throw Error(Code::kEngine,
                fmt::format("libtorch {} cannot compute in fp16 on the CPU", TORCH_VERSION),
                "use bf16 on the CPU, or fp16 on a GPU; libtorch 2.5 and later have both");
  }
}

torch::ScalarType default_autocast_dtype(torch::Device device) {
  return device.is_cuda() ? torch::kHalf : torch::kBFloat16;
}

Autocast::Autocast(torch::Device device, torch::ScalarType dtype, bool enabled)
    : kind_(device.type()) {
  avoid_hidden_amx();
  require_device(device);
  if (enabled) require_autocast(device, dtype);
  auto* recorder = StepRecorder::of_process();
  if (recorder != nullptr && enabled) recorder->note_dtype(dtype);
  const auto before = compat::AutocastSwitch::get(kind_);
  enabled_before_ = before.enabled;
  dtype_before_ = before.dtype;
  cache_before_ = at::autocast::is_autocast_cache_enabled();
  compat::AutocastSwitch{enabled, enabled ? dtype : before.dtype}.set(kind_);
  at::autocast::increment_nesting();
}

Autocast::Autocast(const Device& device, torch::ScalarType dtype, bool enabled)
    : Autocast(device.torch_device(), dtype, enabled) {}

Autocast::~Autocast() {
  const bool keeps_casts = is_planted(Mutation::kCastsKept);
  if (at::autocast::decrement_nesting() == 0 && !keeps_casts) at::autocast::clear_cache();
  compat::AutocastSwitch{enabled_before_, dtype_before_}.set(kind_);
  at::autocast::set_autocast_cache_enabled(cache_before_);
}

}  // namespace lockstep
