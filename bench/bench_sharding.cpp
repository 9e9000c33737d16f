// Steps of a stack of linear layers, sharded or with DistributedDataParallel: bytes per weight that
// this rank's device holds after a step, the peak within one, and the time. bench/sharding calls it
// with a JSON of settings.
#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "lockstep/clock.hpp"
#include "lockstep/lockstep.hpp"

namespace {

struct Measured {
  double bytes = 0;
  double peak = 0;
  double ms = 0;
};

template <class Wrapper>
Measured measure(Wrapper& wrapper, lockstep::AdamW& optimizer, const lockstep::World& world,
                 const torch::Tensor& x, int64_t before, double weights, int steps, bool in_parts) {
  const auto loss_of = [&](const torch::Tensor& rows) { return wrapper(rows).pow(2).mean(); };
  std::vector<double> times;
  for (int step = 0; step < steps + 3; ++step) {
    if (step == 3) world.device().reset_peak_memory();
    world.comm().barrier();
    const int64_t begin_ns = lockstep::monotonic_ns();
    optimizer.zero_grad();
    if (in_parts) {
      wrapper.backward_parts(
          [&](const lockstep::BatchPart& part) { return loss_of(part.rows_of(x)); });
    } else {
      loss_of(x).backward();
    }
    optimizer.step();
    if (step >= 3) times.push_back(static_cast<double>(lockstep::monotonic_ns() - begin_ns) * 1e-6);
  }
  std::nth_element(times.begin(), times.begin() + static_cast<long>(times.size() / 2), times.end());
  const auto used = world.device().memory();
  return {static_cast<double>(used.live_bytes - before) / weights,
          static_cast<double>(used.peak_bytes - before) / weights, times[times.size() / 2]};
}

int run(int, char** words) {
  const auto settings = nlohmann::json::parse(words[1]);
  torch::manual_seed(0);
  const auto world = lockstep::World::from_env();
  const lockstep::UseDevice home(world.device());
  const auto width = settings.at("width").get<int64_t>();
  const auto layers = settings.at("layers").get<int64_t>();
  const bool low = settings.at("precision") == "bf16";
  const int stage = settings.at("stage").get<int>();
  const int64_t before = world.device().memory().live_bytes;
  std::optional<lockstep::ChargeHost> on_host;
  if (stage > 0) on_host.emplace();  // the whole model is made there; its shards are the device's
  torch::nn::Sequential net;
  for (int64_t i = 0; i < layers; ++i) {
    net->push_back(torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false)));
  }
  std::optional<lockstep::MasterWeights> masters;
  if (low) masters.emplace(*net);
  torch::Tensor x;
  {
    const lockstep::ChargeHost rows;
    x = torch::randn({settings.value("rows", 32), width})
            .to(low ? torch::kBFloat16 : torch::kFloat);
  }
  on_host.reset();
  const auto weights = static_cast<double>(layers * width * width);
  const int steps = settings.at("steps").get<int>();
  const auto parts = settings.value("virtual_shards", int64_t{0});
  Measured found;
  if (stage == 0) {
    lockstep::DistributedDataParallel ddp(net, world.comm(), {.virtual_shards = parts});
    lockstep::AdamW optimizer(ddp.parameters(), {.masters = masters});
    found = measure(ddp, optimizer, world, x, before, weights, steps, parts > 0);
  } else {
    lockstep::FullyShardedDataParallel fsdp(net, world.comm(),
                                            {.stage = static_cast<lockstep::ShardStage>(stage),
                                             .min_unit_bytes = 0,
                                             .share_on_host = settings.at("shared").get<bool>(),
                                             .virtual_shards = parts});
    lockstep::AdamW optimizer(fsdp.parameters(), {.masters = masters});
    found = measure(fsdp, optimizer, world, x, before, weights, steps, parts > 0);
  }
  if (world.rank() == 0) {
    fmt::print(
        "{}\n",
        nlohmann::json{{"bytes", found.bytes}, {"peak", found.peak}, {"ms", found.ms}}.dump());
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return argc == 2 ? lockstep::run_program(run, argc, argv) : 2;
}
