#include "course/course.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>
#include <utility>

#include "lockstep/autocast.hpp"
#include "lockstep/job_record.hpp"
#include "lockstep/optim.hpp"
#include "lockstep/rank_environment.hpp"
#include "lockstep/tensor_file.hpp"

namespace course {
namespace {

constexpr std::chrono::seconds kPatience{2};

int own_rank() {
  try {
    return lockstep::RankEnvironment::from_env().rank;
  } catch (const lockstep::Error&) {
    return 0;  // a process that does not know its rank must speak for itself
  }
}

}  // namespace

void let_rank_0_speak(const lockstep::Error& error) {
  const bool same_on_all_ranks =
      lockstep::exit_code(error.code()) == 2 || error.code() == lockstep::Code::kCheckpoint;
  if (same_on_all_ranks && own_rank() != 0) std::this_thread::sleep_for(kPatience);
}

void print_from_all_ranks(const lockstep::World& world, const Options& options,
                          const std::string& text) {
  for (const auto& each : world.comm().gather_text(text)) {
    std::fputs(each.c_str(), options.out());
  }
  std::fflush(options.out());
}

void print_rank(const lockstep::World& world, const Options& options) {
  if (options.quiet) return;
  const auto& device = world.device();
  print_from_all_ranks(world, options,
                       fmt::format("Rank: {} | Local Rank: {} | Device: {} ({})\n", world.rank(),
                                   world.local_rank(), device.name(), device.plan().physical()));
}

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
  ddp.virtual_shards = options.virtual_shards;
  if (options.compress != "off") {
    ddp.hook =
        lockstep::compress_gradients(options.compress == "bf16" ? torch::kBFloat16 : torch::kHalf);
  }
  return ddp;
}

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

}  // namespace course
