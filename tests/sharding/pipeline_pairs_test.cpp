// Combinations of features of a pipeline: stages of several data ranks must train the weights that
// one process trains on all rows.

#include <gtest/gtest.h>

#include <array>
#include <bitset>
#include <string>

#include "lockstep/grad_scaler.hpp"
#include "lockstep/master_weights.hpp"
#include "lockstep/mesh.hpp"
#include "lockstep/pipeline.hpp"
#include "odd_layers.hpp"
#include "sharding_support.hpp"

namespace lockstep::test::pipeline_pairs_test {
namespace {

constexpr int kSteps = 3;
constexpr int64_t kRows = 30;  // of a call, over all data ranks

enum Feature {
  kMasters,
  kScaler,
  kAccumulate,
  kClip,
  kZeros,      // gradients are filled with zeros instead of dropped
  kUneven,     // the first data rank has few rows
  kRecompute,  // all stages
  kSplit,      // a schedule whose backward has two parts
  kFeatures
};
using Features = std::bitset<kFeatures>;

// What the data ranks do with a stage.
enum class Data { kAverage, kShard, kVirtual };

std::string name_of(const Features& features) {
  constexpr std::array kNames = {"Masters", "Scaler", "Accumulate", "Clip",
                                 "Zeros",   "Uneven", "Recompute",  "Split"};
  std::string name;
  for (size_t i = 0; i < kFeatures; ++i) {
    if (features[i]) name += kNames[i];
  }
  return name.empty() ? "Plain" : name;
}

torch::nn::Sequential make_net() {
  Twice twice(8);
  torch::nn::Sequential net(OddLinear(6, 8, /*turned=*/true), Gain(8), twice, OddLinear(8, 8),
                            OddLinear(8, 6));
  fill_weights(*net);
  twice->freeze();
  return net;
}

torch::Tensor mse(const torch::Tensor& out, const torch::Tensor& y) {
  return torch::mse_loss(out, y);
}

std::pair<torch::Tensor, torch::Tensor> batch_of(int step, int call, const Features& on,
                                                 const Communicator& data) {
  const double phase = step + 0.3 * call;
  const int64_t ranks = data.size(), rank = data.rank();
  const auto begin = [&](int64_t of) {
    if (!on[kUneven]) return kRows * of / ranks;
    return of == 0 ? 0 : of == ranks ? kRows : 4 + (kRows - 4) * (of - 1) / (ranks - 1);
  };
  const auto own = [&](double at) {
    return wave({kRows, 6}, at)
        .to(torch::kFloat)
        .narrow(0, begin(rank), begin(rank + 1) - begin(rank));
  };
  return {own(phase), own(phase + 1)};
}

// `call_of` runs forward and backward of a call.
template <class CallOf>
void train(const Features& on, const std::vector<torch::Tensor>& parameters,
           const std::optional<MasterWeights>& masters, const CallOf& call_of) {
  Sgd optimizer(parameters, {.lr = 0.05, .momentum = 0.9, .weight_decay = 0.1, .masters = masters});
  GradScaler scaler({.init_scale = 256, .growth_interval = 2, .enabled = on[kScaler]});
  StepExtras extras;
  if (on[kClip]) extras.max_norm = 0.1;
  const int calls = on[kAccumulate] ? 3 : 1;
  for (int step = 0; step < kSteps; ++step) {
    for (int call = 0; call < calls; ++call) call_of(step, call, calls, scaler);
    scaler.step(optimizer, extras);
    scaler.update();
    optimizer.zero_grad(!on[kZeros]);
  }
}

using Weights = std::map<std::string, torch::Tensor>;

Weights train_alone(const Features& on) {
  auto net = make_net();
  std::optional<MasterWeights> masters;
  if (on[kMasters]) masters.emplace(*net);
  train(on, net->parameters(), masters, [&](int step, int call, int calls, GradScaler& scaler) {
    const auto [x, y] = batch_of(step, call, {}, Communicator::self());
    scaler.scale(mse(net->forward(x), y) / calls).backward();
  });
  if (masters) masters->restore(*net);
  Weights weights;
  for (const auto& item : net->named_parameters()) weights[item.key()] = item.value().detach();
  return weights;
}

// `pipeline_ranks` 1: the stages are devices of one process.
void expect_same(const Features& on, const Weights& wanted, Data how, int data_ranks,
                 int pipeline_ranks) {
  constexpr int kStages = 2;
  const std::string what = name_of(on) + ", " + std::to_string(static_cast<int>(how)) + ", " +
                           std::to_string(data_ranks) + " x " + std::to_string(pipeline_ranks) +
                           ": ";
  run_ranks(data_ranks * pipeline_ranks, [&](const Communicator& world) {
    const Mesh mesh(world, {{"dp", data_ranks}, {"pp", pipeline_ranks}});
    const Communicator& data = mesh.axis("dp");
    const Devices devices(pipeline_ranks == 1 ? "cpu:2" : "cpu:1");
    auto net = make_net();
    std::optional<MasterWeights> masters;
    if (on[kMasters]) masters.emplace(*net);
    PipelineOptions options{.loss = mse};
    options.data = data;
    if (on[kRecompute]) options.recompute = {0, 1};
    if (how == Data::kShard) options.shard = ShardOptions{.min_unit_bytes = 0};
    const int micro_batches = how == Data::kVirtual ? 6 / data_ranks : 3;
    if (how == Data::kVirtual) options.virtual_shards = 6;
    const auto schedule =
        make_schedule(on[kSplit] ? "zero-bubble" : "1f1b", kStages, micro_batches);
    const auto stages = split_stages(net, std::vector<int64_t>{2, 3});
    Pipeline pipeline = pipeline_ranks == 1
                            ? Pipeline(stages, devices, schedule, options)
                            : Pipeline(stages, mesh.axis("pp"), devices[0], schedule, options);
    train(on, pipeline.parameters(), masters,
          [&](int step, int call, int calls, GradScaler& scaler) {
            const auto [x, y] = batch_of(step, call, on, data);
            pipeline.step(
                x, y,
                {.loss_factor = 1.0 / calls, .synchronise = call + 1 == calls, .scaler = &scaler});
          });
    if (masters && how != Data::kShard) masters->restore(*net);
    for (const int stage : pipeline.local_stages()) {
      std::optional<GatheredParameters> gathered;
      if (ShardedModel* model = pipeline.sharded(stage)) gathered.emplace(*model);
      for (const auto& item : pipeline.stage(stage)->named_parameters()) {
        expect_near_all(item.value().detach().to(torch::kDouble),
                        wanted.at(item.key()).to(torch::kDouble), what + item.key(),
                        on[kMasters] ? 1e-2 : 2e-5);
      }
    }
  });
}

class PipelinePairs : public testing::TestWithParam<int> {};

TEST_P(PipelinePairs, TrainAsOneProcessDoes) {
  const Features on = features_of_row<kFeatures>(GetParam());
  const Weights wanted = train_alone(on);
  for (const Data how : {Data::kAverage, Data::kShard, Data::kVirtual}) {
    if (how == Data::kVirtual && on[kUneven]) continue;
    expect_same(on, wanted, how, /*data_ranks=*/2, /*pipeline_ranks=*/2);
    expect_same(on, wanted, how, /*data_ranks=*/3, /*pipeline_ranks=*/1);
  }
}

INSTANTIATE_TEST_SUITE_P(All, PipelinePairs, testing::Range(0, 16), [](const auto& row) {
  return name_of(features_of_row<kFeatures>(row.param));
});

}  // namespace
}  // namespace lockstep::test::pipeline_pairs_test
