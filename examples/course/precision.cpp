#include "course/precision.hpp"

#include <torch/torch.h>

#include <limits>

#include "lockstep/autocast.hpp"

namespace course {

Precision choose_precision(Options& options, const lockstep::Device& device) {
  if (options.amp.empty()) {
    const auto dtype = lockstep::default_autocast_dtype(device.torch_device());
    options.amp = dtype == torch::kHalf ? "fp16" : "bf16";
  }
  if (options.amp == "off") return {};
  const Precision chosen{.lower = true,
                         .dtype = options.amp == "fp16" ? torch::kHalf : torch::kBFloat16};
  lockstep::require_autocast(device.torch_device(), chosen.dtype);
  return chosen;
}

bool plants_overflow(const Options& options, int64_t step, const lockstep::World& world) {
  return step + 1 == options.overflow_at && world.rank() + 1 == world.size();
}

void plant_overflow(const torch::Tensor& out) {
  out.register_hook([](const torch::Tensor& gradient) {
    torch::Tensor spoiled = gradient.clone();
    spoiled.view(-1)[0].fill_(std::numeric_limits<float>::infinity());
    return spoiled;
  });
}

}  // namespace course
