// Combinations of features: ranks with a part of the rows each must train the weights that one
// process trains on all rows, whatever is enabled together with DistributedDataParallel.

#include <torch/torch.h>

#include <array>
#include <bitset>

#include "lockstep/distributed_data_parallel.hpp"
#include "lockstep/grad_scaler.hpp"
#include "lockstep/master_weights.hpp"
#include "lockstep/mesh.hpp"
#include "lockstep/optim.hpp"
#include "lockstep/tensor_parallel.hpp"
#include "rank_threads.hpp"

namespace lockstep::test::feature_pairs_test {
namespace {

constexpr int kSteps = 4;
constexpr int64_t kRows = 12;  // of a micro-step, over all data ranks

torch::Tensor made_up(torch::IntArrayRef sizes, double phase) {
  int64_t count = 1;
  for (const int64_t size : sizes) count *= size;
  return torch::arange(count).view(sizes).mul(0.37).add(phase).sin();
}

// What is enabled, as bits, so that all combinations can be enumerated.
enum Feature { kMasters, kScaler, kNoSync, kClip, kKeep, kTensor, kFeatures };
using Features = std::bitset<kFeatures>;

std::string name_of(const Features& features) {
  constexpr std::array kNames = {"Masters", "Scaler", "NoSync", "Clip", "Keep", "Tensor"};
  std::string name;
  for (size_t i = 0; i < kFeatures; ++i) {
    if (features[i]) name += kNames[i];
  }
  return name.empty() ? "Plain" : name;
}

torch::nn::Linear layer(int64_t in, int64_t out) {
  torch::nn::Linear made(in, out);
  const torch::NoGradGuard no_grad;
  made->weight.copy_(made_up({out, in}, 0.3) * 0.5);
  made->bias.copy_(made_up({out}, 0.7) * 0.5);
  return made;
}

struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(const std::optional<Communicator>& axis) {
    layers = axis ? torch::nn::Sequential(ColumnLinear(layer(6, 10), *axis), torch::nn::Tanh(),
                                          RowLinear(layer(10, 3), *axis))
                  : torch::nn::Sequential(layer(6, 10), torch::nn::Tanh(), layer(10, 3));
    register_module("layers", layers);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return layers->forward(x.to(parameters()[0].scalar_type())).to(torch::kFloat);
  }
  torch::nn::Sequential layers{nullptr};
};
TORCH_MODULE(Model);

// The bias of the second layer, which every rank has whole, after a few steps. Ranks of the data
// axis begin with different weights: those of its rank 0 count.
template <class Optimizer>
torch::Tensor train(const Features& on, const Communicator& data,
                    const std::optional<Communicator>& tensor) {
  Model model(tensor);
  {
    const torch::NoGradGuard no_grad;
    for (auto& each : model->parameters()) each.add_(0.25 * data.rank());
  }
  std::optional<MasterWeights> masters;
  if (on[kMasters]) masters.emplace(*model);
  DistributedDataParallel ddp(model, data);
  Optimizer optimizer(ddp.parameters(), {.lr = 0.05, .masters = masters});
  GradScaler scaler({.init_scale = 256, .growth_interval = 2, .enabled = on[kScaler]});
  StepExtras extras;
  if (on[kClip]) extras.max_norm = 0.1;
  std::vector<torch::Tensor> kept;
  std::vector<torch::Tensor> copies;
  const int64_t mine = kRows / data.size();
  const int64_t micro_steps = on[kNoSync] ? 3 : 1;
  for (int step = 0; step < kSteps; ++step) {
    for (int64_t micro = 0; micro < micro_steps; ++micro) {
      std::optional<NoSync> no_sync;
      if (micro + 1 < micro_steps) no_sync.emplace(ddp);
      const double phase = step + 0.1 * static_cast<double>(micro);
      const auto x = made_up({kRows, 6}, phase).narrow(0, data.rank() * mine, mine);
      const auto y = made_up({kRows, 3}, phase + 1).narrow(0, data.rank() * mine, mine);
      const auto loss = torch::mse_loss(ddp(x), y) / micro_steps;
      scaler.scale(loss).backward();
    }
    scaler.step(optimizer, extras);
    scaler.update();
    for (const auto& parameter : model->parameters()) {
      if (!on[kKeep]) break;
      kept.push_back(parameter.grad());
      copies.push_back(parameter.grad().clone());
    }
    optimizer.zero_grad();
  }
  for (size_t i = 0; i < kept.size(); ++i) {
    EXPECT_TRUE(torch::equal(kept[i], copies[i])) << "kept gradient " << i;
  }
  ddp.check_replicas();
  const auto bias = model->parameters().back();
  return (masters ? masters->of(bias) : bias).detach().clone();
}

template <class Optimizer>
void expect_trains_as_one_process(const Features& on) {
  // bf16 gradients are rounded before and after they are averaged.
  const double tolerance = on[kMasters] ? 5e-3 : 2e-5;
  const torch::Tensor expected = train<Optimizer>(on, Communicator::self(), std::nullopt);
  for (const int data_ranks : {2, 3}) {
    const int tensor_ranks = on[kTensor] ? 2 : 1;
    run_ranks(data_ranks * tensor_ranks, [&](const Communicator& world) {
      const Mesh mesh(world, {{"dp", data_ranks}, {"tp", tensor_ranks}});
      std::optional<Communicator> tensor;
      if (on[kTensor]) tensor = mesh.axis("tp");
      const torch::Tensor bias = train<Optimizer>(on, mesh.axis("dp"), tensor);
      EXPECT_TRUE(torch::allclose(bias, expected, 0, tolerance))
          << "off by " << (bias - expected).abs().max().item<double>();
      const auto first = bias.clone();
      world.broadcast(first, 0);
      EXPECT_TRUE(torch::equal(bias, first)) << "rank " << world.rank() << " differs from rank 0";
    });
  }
}

class FeaturePairs : public testing::TestWithParam<int> {};

// All combinations that one model can have. AdamW hides a factor that is common to all gradients;
// Sgd shows it.
TEST_P(FeaturePairs, TrainAsOneProcessDoes) {
  const Features on(static_cast<unsigned long>(GetParam()));
  expect_trains_as_one_process<AdamW>(on);
  expect_trains_as_one_process<Sgd>(on);
}

INSTANTIATE_TEST_SUITE_P(All, FeaturePairs, testing::Range(0, 1 << kFeatures),
                         [](const auto& combination) {
                           return name_of(Features(static_cast<unsigned long>(combination.param)));
                         });

}  // namespace
}  // namespace lockstep::test::feature_pairs_test
