// Combinations of features: ranks with a part of the rows each, and a part of the model, must train
// the weights that one process trains on all rows, whatever is enabled together with sharding.

#include <gtest/gtest.h>

#include <array>
#include <bitset>
#include <optional>
#include <set>
#include <string>
#include <type_traits>

#include "base/process.hpp"
#include "lockstep/checkpoint.hpp"
#include "lockstep/grad_scaler.hpp"
#include "lockstep/master_weights.hpp"
#include "lockstep/weight_average.hpp"
#include "odd_layers.hpp"
#include "sharding_support.hpp"

namespace lockstep::test::sharding_pairs_test {
namespace {

constexpr int kSteps = 4;
constexpr int64_t kRows = 30;  // of a micro-step, over all ranks

enum Feature {
  kMasters,
  kScaler,
  kAccumulate,
  kClip,
  kGroups,   // two of them, whose learning rates change from step to step
  kZeros,    // gradients are filled with zeros instead of dropped
  kUneven,   // the first rank has no rows at all
  kAverage,  // of the weights, which an evaluation uses between the steps
  kVirtual,  // shards
  kFeatures
};
using Features = std::bitset<kFeatures>;

// Virtual shards have even rows.
Features features(int row) {
  Features on = features_of_row<kFeatures>(row);
  if (on[kVirtual]) on.reset(kUneven);
  return on;
}

std::string name_of(const Features& features) {
  constexpr std::array kNames = {"Masters", "Scaler", "Accumulate", "Clip",   "Groups",
                                 "Zeros",   "Uneven", "Average",    "Virtual"};
  std::string name;
  for (size_t i = 0; i < kFeatures; ++i) {
    if (features[i]) name += kNames[i];
  }
  return name.empty() ? "Plain" : name;
}

/// What a wrapper must not mind: a weight that two layers share, a layer that is used twice,
/// frozen, empty, transposed and float64 parameters.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", OddLinear(6, 8));
    twice = register_module("twice", Twice(8));
    gain = register_module("gain", Gain(8));
    tied = register_parameter("tied", first->weight);
    fill_weights(*this);
    twice->freeze();
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return gain(twice(first(x))).matmul(tied.to(torch::kFloat));
  }
  OddLinear first{nullptr};
  Twice twice{nullptr};
  Gain gain{nullptr};
  torch::Tensor tied;
};
TORCH_MODULE(Net);

torch::Tensor rows_of(int64_t width, double phase) {
  return wave({kRows, width}, phase).to(torch::kFloat);
}

// The rows [begin, end) of a rank.
std::pair<int64_t, int64_t> range_of(int rank, int ranks, bool uneven) {
  if (!uneven) return {kRows * rank / ranks, kRows * (rank + 1) / ranks};
  const auto begin = [&](int of) { return of == 0 ? 0 : kRows * (of - 1) / (ranks - 1); };
  return {begin(rank), begin(rank + 1)};
}

struct Trained {
  torch::Tensor weights;
  torch::Tensor evaluated;  // after each step
};

auto options_of(std::type_identity<Sgd>, const std::optional<MasterWeights>& masters) {
  return SgdOptions{.lr = 0.05, .momentum = 0.9, .weight_decay = 0.1, .masters = masters};
}
auto options_of(std::type_identity<AdamW>, const std::optional<MasterWeights>& masters) {
  return AdamWOptions{.lr = 0.05, .weight_decay = 0.1, .masters = masters};
}

// `model`: the Net, or what wraps it.
template <class Optimizer, class Model>
Trained train(const Features& on, const Communicator& comm, Model& model,
              const std::vector<std::pair<std::string, torch::Tensor>>& parameters,
              const std::optional<MasterWeights>& masters, WeightAverage& average,
              const std::string& folder = "", int end_step = kSteps) {
  constexpr bool kWrapped = !std::is_same_v<Model, Net>;
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;
  std::array<std::vector<torch::Tensor>, 2> members;
  for (const auto& [name, each] : parameters) {
    members[on[kGroups] && name.starts_with("twice") ? 1 : 0].push_back(each);
  }
  Groups groups;
  for (const auto& each : members) {
    if (!each.empty()) groups.emplace_back(each);
  }
  Optimizer optimizer(groups, options_of(std::type_identity<Optimizer>(), masters));
  GradScaler scaler({.init_scale = 256, .growth_interval = 2, .enabled = on[kScaler]});
  StepExtras extras;
  if (on[kClip]) extras.max_norm = 0.1;
  const auto [begin, end] = range_of(comm.rank(), comm.size(), on[kUneven] && comm.size() > 1);
  const int64_t micro_steps = on[kAccumulate] ? 3 : 1;
  std::optional<Checkpoint> checkpoint;
  int first_step = 0;
  if constexpr (std::is_same_v<Model, FullyShardedDataParallel<NetImpl>>) {
    if (!folder.empty()) {
      checkpoint.emplace(folder, comm, CheckpointOptions{.preemption = false});
      checkpoint->add("model", model).add("optimizer", optimizer, model);
      checkpoint->add("average", average).add("scaler", scaler);
      if (masters) checkpoint->add("masters", *masters, model);
      first_step = static_cast<int>(checkpoint->resume());
    }
  }
  Trained trained;
  std::vector<torch::Tensor> evaluated;
  for (int step = first_step; step < end_step; ++step) {
    if (on[kGroups]) {
      optimizer.param_groups()[0].options().set_lr(0.05 / (step + 1));
      optimizer.param_groups()[1].options().set_lr(0.02 * (step + 1));
    }
    for (int64_t micro = 0; micro < micro_steps; ++micro) {
      const double phase = step + 0.1 * static_cast<double>(micro);
      const auto x = rows_of(6, phase).narrow(0, begin, end - begin);
      const auto y = rows_of(6, phase + 1).narrow(0, begin, end - begin);
      const auto loss_of = [&](const torch::Tensor& own_x, const torch::Tensor& own_y) {
        if constexpr (kWrapped) {
          return torch::mse_loss(model(own_x), own_y) / micro_steps;
        } else {
          return torch::mse_loss(model->forward(own_x), own_y) / micro_steps;
        }
      };
      if constexpr (kWrapped) {
        std::optional<NoSync> no_sync;
        if (micro + 1 < micro_steps) no_sync.emplace(model);
        if (on[kVirtual]) {
          model.backward_parts(x, y, loss_of, {.scaler = &scaler});
          continue;
        }
        if (on[kUneven]) model.set_weight(static_cast<double>(end - begin));
        scaler.scale(loss_of(x, y)).backward();
      } else {
        scaler.scale(loss_of(x, y)).backward();
      }
    }
    scaler.step(optimizer, extras);
    scaler.update();
    optimizer.zero_grad(!on[kZeros]);
    if (!on[kAverage]) continue;
    average.update();
    const UseAverage averaged(average);
    const torch::NoGradGuard no_grad;
    if constexpr (kWrapped) {
      evaluated.push_back(model(rows_of(6, 7)));
    } else {
      evaluated.push_back(model->forward(rows_of(6, 7)));
    }
  }
  if (on[kAverage]) trained.evaluated = torch::cat(evaluated);
  if (checkpoint && end_step < kSteps) checkpoint->save(end_step);
  if (checkpoint) checkpoint->finish();
  return trained;
}

torch::Tensor flat_of(const Net& net) {
  std::vector<torch::Tensor> flat;
  for (const auto& each : net->parameters())
    flat.push_back(each.detach().to(torch::kDouble).flatten());
  return torch::cat(flat);
}

// Each once, under its first name.
std::vector<std::pair<std::string, torch::Tensor>> parameters_of(const Net& net) {
  std::vector<std::pair<std::string, torch::Tensor>> parameters;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& item : net->named_parameters()) {
    if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
    parameters.emplace_back(item.key(), item.value());
  }
  return parameters;
}

template <class Optimizer>
Trained train_alone(const Features& on) {
  Net net;
  std::optional<MasterWeights> masters;
  if (on[kMasters]) masters.emplace(*net);
  WeightAverage average(*net, {.decay = 0.5});
  Trained trained =
      train<Optimizer>(on, Communicator::self(), net, parameters_of(net), masters, average);
  if (masters) masters->restore(*net);
  trained.weights = flat_of(net);
  return trained;
}

// `stage` 0: DistributedDataParallel.
template <class Optimizer>
Trained train_on_rank(const Features& on, int stage, const Communicator& comm) {
  Net net;
  std::optional<MasterWeights> masters;
  if (on[kMasters]) masters.emplace(*net);
  const int64_t parts = on[kVirtual] ? 30 : 0;
  if (stage == 0) {
    DistributedDataParallel ddp(
        net, comm, {.first_bucket_bytes = 64, .bucket_cap_bytes = 200, .virtual_shards = parts});
    WeightAverage average(*net, {.decay = 0.5});
    Trained trained = train<Optimizer>(on, comm, ddp, parameters_of(net), masters, average);
    if (masters) masters->restore(*net);
    trained.weights = flat_of(net);
    return trained;
  }
  FullyShardedDataParallel fsdp(net, comm,
                                {.stage = static_cast<ShardStage>(stage),
                                 .min_unit_bytes = 0,
                                 .share_on_host = comm.size() == 3,
                                 .virtual_shards = parts});
  WeightAverage average(fsdp, {.decay = 0.5});
  Trained trained = train<Optimizer>(on, comm, fsdp, fsdp.named_parameters(), masters, average);
  const GatheredParameters gathered(fsdp);
  trained.weights = flat_of(net);
  return trained;
}

template <class Optimizer>
void expect_same(const Features& on, const Trained& wanted, int stage, int ranks) {
  run_ranks(ranks, [&](const Communicator& comm) {
    const Trained trained = train_on_rank<Optimizer>(on, stage, comm);
    const double tolerance = on[kMasters] ? 1e-2 : 2e-5;
    const std::string what = name_of(on) + " in stage " + std::to_string(stage) + " on " +
                             std::to_string(ranks) + " ranks";
    expect_near_all(trained.weights, wanted.weights, what + ": weights", tolerance);
    if (on[kAverage]) {
      expect_near_all(trained.evaluated, wanted.evaluated, what + ": average", tolerance);
    }
    expect_same_on_all(comm, trained.weights, what);
  });
}

// Trains two steps on some ranks and goes on with others, in another stage.
template <class Optimizer>
void expect_resumes(const Features& on, const Trained& wanted, ShardStage stage, int before,
                    int after) {
  const ScratchFolder scratch;
  const std::string folder = scratch.file("run");
  const auto other = kStages[static_cast<size_t>(stage) % std::size(kStages)];
  for (const bool resumed : {false, true}) {
    run_ranks(resumed ? after : before, [&](const Communicator& comm) {
      Net net;
      std::optional<MasterWeights> masters;
      if (on[kMasters]) masters.emplace(*net);
      FullyShardedDataParallel fsdp(net, comm,
                                    {.stage = resumed ? other : stage,
                                     .min_unit_bytes = 0,
                                     .virtual_shards = on[kVirtual] ? 30 : 0});
      WeightAverage average(fsdp, {.decay = 0.5});
      Trained trained = train<Optimizer>(on, comm, fsdp, fsdp.named_parameters(), masters, average,
                                         folder, resumed ? kSteps : 2);
      if (!resumed) return;
      {
        const GatheredParameters gathered(fsdp);
        trained.weights = flat_of(net);
      }
      const double tolerance = on[kMasters] ? 1e-2 : 2e-5;
      const std::string what = name_of(on) + " from " + std::to_string(before) + " to " +
                               std::to_string(after) + " ranks, stage " +
                               std::to_string(static_cast<int>(stage));
      expect_near_all(trained.weights, wanted.weights, what + ": weights", tolerance);
      if (on[kAverage]) {
        const int64_t half = wanted.evaluated.size(0) / 2;
        expect_near_all(trained.evaluated, wanted.evaluated.narrow(0, half, half),
                        what + ": average", tolerance);
      }
    });
  }
  set_resumed_steps(0);
}

TEST(ShardedPairsResumed, OnOtherRanksInAnotherStage) {
  const Features all(0x1ffU);
  for (const Features& on :
       {Features(all).reset(kUneven), Features(all).reset(kMasters).reset(kVirtual)}) {
    const Trained by_adam = train_alone<AdamW>(on);
    const Trained by_sgd = train_alone<Sgd>(on);
    expect_resumes<AdamW>(on, by_adam, ShardStage::kOptimizer, 2, 3);
    expect_resumes<Sgd>(on, by_sgd, ShardStage::kGradients, 1, 5);
    expect_resumes<AdamW>(on, by_adam, ShardStage::kParameters, 5, 2);
  }
}

class ShardedPairs : public testing::TestWithParam<int> {};

TEST_P(ShardedPairs, TrainAsOneProcessDoes) {
  const Features on = features(GetParam());
  const Trained by_sgd = train_alone<Sgd>(on);
  const Trained by_adam = train_alone<AdamW>(on);
  for (const int stage : {0, 1, 2, 3}) {
    for (const int ranks : {2, 5}) expect_same<Sgd>(on, by_sgd, stage, ranks);
    for (const int ranks : {1, 3}) expect_same<AdamW>(on, by_adam, stage, ranks);
  }
}

INSTANTIATE_TEST_SUITE_P(All, ShardedPairs, testing::Range(0, 16),
                         [](const auto& row) { return name_of(features(row.param)); });

}  // namespace
}  // namespace lockstep::test::sharding_pairs_test
