#include "course/setup.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <utility>

#include "lockstep/adam.hpp"
#include "lockstep/error.hpp"
#include "lockstep/sgd.hpp"
#include "lockstep/tensor_file.hpp"

namespace course {

// Two calls warm up, so that the third is captured before the steps that are timed begin.
constexpr int64_t kWarmup = 2;
constexpr int64_t kFewSteps = 12;

std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    std::vector<torch::Tensor> parameters, const Options& options,
    const std::optional<lockstep::MasterWeights>& masters) {
  if (options.optimizer == "adamw") {
    return std::make_unique<lockstep::AdamW>(
        std::move(parameters), lockstep::AdamWOptions{.lr = options.lr, .masters = masters});
  }
  return std::make_unique<lockstep::Sgd>(
      std::move(parameters), lockstep::SgdOptions{.lr = options.lr, .masters = masters});
}

void load_initial_weights(torch::nn::Module& net, const Options& options) {
  if (!options.init.empty()) lockstep::load_weights(net, options.init);
}

std::optional<lockstep::MasterWeights> make_masters(torch::nn::Module& net,
                                                    const Options& options) {
  if (!options.master_weights) return std::nullopt;
  return lockstep::MasterWeights(
      net, {.dtype = options.amp == "fp16" ? torch::kHalf : torch::kBFloat16});
}

lockstep::WorldOptions world_options(const Options& options, int devices_per_rank) {
  lockstep::WorldOptions world{
      .devices = options.devices, .devices_per_rank = devices_per_rank, .backend = options.backend};
  if (options.timeout_s) {
    world.timeout = std::chrono::milliseconds(static_cast<int64_t>(*options.timeout_s * 1e3));
  }
  return world;
}

int64_t bucket_cap_bytes(const Options& options) {
  return std::max<int64_t>(1, static_cast<int64_t>(options.bucket_mib * (1 << 20)));
}

lockstep::Nonfinite nonfinite_answer(const Options& options) {
  if (options.nonfinite == "stop") return lockstep::Nonfinite::kStop;
  return options.nonfinite == "warn" ? lockstep::Nonfinite::kWarn : lockstep::Nonfinite::kIgnore;
}

lockstep::DdpOptions ddp_options(const Options& options) {
  lockstep::DdpOptions ddp;
  ddp.bucket_cap_bytes = bucket_cap_bytes(options);
  ddp.first_bucket_bytes = std::min(ddp.first_bucket_bytes, ddp.bucket_cap_bytes);
  ddp.check_replicas_every = options.check_replicas;
  ddp.nonfinite = nonfinite_answer(options);
  if (options.compress != "off") {
    ddp.hook =
        lockstep::compress_gradients(options.compress == "bf16" ? torch::kBFloat16 : torch::kHalf);
  }
  return ddp;
}

lockstep::CaptureOptions capture_options(const Options& options, const lockstep::Device& device) {
  const bool on_gpu = device.plan().kind == lockstep::DeviceKind::kCuda;
  if (options.capture == "on" && !on_gpu) {
    throw lockstep::Error(lockstep::Code::kUsage,
                          fmt::format("--capture on: {} is not a GPU", device.name()),
                          "leave --capture out, or name a GPU with --devices");
  }
  return {.enabled = on_gpu && why_not_captured(options).empty(), .warmup = kWarmup};
}

std::string why_not_captured(const Options& options) {
  if (options.capture == "on") return "";
  if (options.capture == "off") return "--capture off";
  if (!options.never_captured.empty()) return options.never_captured;
  const std::string seen = host_work_of_steps(options);
  if (!seen.empty()) return fmt::format("{} looks into every step", seen);
  if (options.steps < kFewSteps) return fmt::format("fewer than {} steps", kFewSteps);
  return "";
}

}  // namespace course
