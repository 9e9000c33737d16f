// Every stage on several numbers of ranks trains as one device does on all rows.
#include <gtest/gtest.h>

#include "sharding_support.hpp"

namespace lockstep::test::equivalence_test {
namespace {

constexpr int64_t kRows = 30;  // of all ranks: divides by 1, 2, 3 and 5
constexpr int kSteps = 4;

using MakeOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<torch::Tensor>)>;

std::unique_ptr<torch::optim::Optimizer> lockstep_sgd(std::vector<torch::Tensor> parameters) {
  return std::make_unique<Sgd>(std::move(parameters),
                               SgdOptions{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01});
}
std::unique_ptr<torch::optim::Optimizer> lockstep_adamw(std::vector<torch::Tensor> parameters) {
  return std::make_unique<AdamW>(std::move(parameters), AdamWOptions{.lr = 0.01});
}
std::unique_ptr<torch::optim::Optimizer> torch_sgd(std::vector<torch::Tensor> parameters) {
  return std::make_unique<torch::optim::SGD>(std::move(parameters),
                                             torch::optim::SGDOptions(0.1).momentum(0.9));
}
std::unique_ptr<torch::optim::Optimizer> torch_adamw(std::vector<torch::Tensor> parameters) {
  return std::make_unique<torch::optim::AdamW>(std::move(parameters),
                                               torch::optim::AdamWOptions(0.01));
}

std::string text(ShardStage stage, int ranks) {
  return "stage " + std::to_string(static_cast<int>(stage)) + " on " + std::to_string(ranks) +
         " ranks";
}

// Trains `net` alone on all rows.
template <class Net>
torch::Tensor train_alone(Net net, const MakeOptimizer& make, const torch::Tensor& x,
                          const torch::Tensor& y) {
  auto optimizer = make(net->parameters());
  for (int step = 0; step < kSteps; ++step) {
    optimizer->zero_grad();
    torch::mse_loss(net->forward(x + step), y).backward();
    optimizer->step();
  }
  return weights_of(*net);
}

template <class Net>
void expect_equivalent(const std::function<Net()>& make_net, const MakeOptimizer& make,
                       const torch::Tensor& x, const torch::Tensor& y, std::vector<int> sizes,
                       int64_t min_unit_bytes = 0) {
  const torch::Tensor wanted = train_alone(make_net(), make, x, y);
  for (const ShardStage stage : kStages) {
    for (const int size : sizes) {
      torch::Tensor first_run;
      for (int run = 0; run < 2; ++run) {
        run_ranks(size, [&](const Communicator& comm) {
          auto net = make_net();
          // Gathered or shared, the bits are the same.
          FullyShardedDataParallel fsdp(
              net, comm,
              {.stage = stage, .min_unit_bytes = min_unit_bytes, .share_on_host = run == 1});
          auto optimizer = make(fsdp.parameters());
          for (int step = 0; step < kSteps; ++step) {
            optimizer->zero_grad();
            torch::mse_loss(fsdp(own_rows(x + step, comm)), own_rows(y, comm)).backward();
            optimizer->step();
          }
          const torch::Tensor weights = whole_weights(fsdp);
          expect_near_all(weights, wanted, text(stage, size));
          expect_same_on_all(comm, weights, text(stage, size));
          if (comm.rank() != 0) return;
          if (run == 0) {
            first_run = weights;
          } else {
            EXPECT_TRUE(torch::equal(first_run, weights)) << text(stage, size) << " in two runs";
          }
        });
      }
    }
  }
}

const std::function<torch::nn::Sequential()> kThreeLayers = three_layers;

TEST(ShardedTraining, SgdWithMomentum) {
  expect_equivalent(kThreeLayers, lockstep_sgd, wave({kRows, 6}, 0), wave({kRows, 3}, 1),
                    {1, 2, 3, 5});
}

TEST(ShardedTraining, AdamW) {
  expect_equivalent(kThreeLayers, lockstep_adamw, wave({kRows, 6}, 0), wave({kRows, 3}, 1),
                    {1, 2, 3, 5});
}

TEST(ShardedTraining, OptimizersOfTorch) {
  expect_equivalent(kThreeLayers, torch_sgd, wave({kRows, 6}, 0), wave({kRows, 3}, 1), {1, 3});
  expect_equivalent(kThreeLayers, torch_adamw, wave({kRows, 6}, 0), wave({kRows, 3}, 1), {2, 5});
}

TEST(ShardedTraining, OneUnitForAll) {
  expect_equivalent(kThreeLayers, lockstep_adamw, wave({kRows, 6}, 0), wave({kRows, 3}, 1), {3},
                    int64_t{1} << 20);
}

// Members, a list, a parameter of its own, and a weight that two layers have.
struct OddNetImpl : torch::nn::Module {
  OddNetImpl() {
    table = register_module("table", torch::nn::Linear(6, 12));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int i = 0; i < 3; ++i) blocks->push_back(torch::nn::Linear(12, 12));
    scale = register_parameter("scale", torch::ones({12}));
    out = register_module("out", std::make_shared<torch::nn::Module>());
    out->register_parameter("weight", table->weight);
    to(torch::kDouble);
    fill_weights(*this);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto h = table(x);
    for (auto& block : *blocks) h = torch::tanh(block->as<torch::nn::Linear>()->forward(h)) * scale;
    return torch::matmul(h, out->named_parameters()["weight"]);
  }
  torch::nn::Linear table{nullptr};
  torch::nn::ModuleList blocks;
  std::shared_ptr<torch::nn::Module> out;
  torch::Tensor scale;
};
TORCH_MODULE(OddNet);

TEST(ShardedTraining, TiedWeightsAcrossUnits) {
  const std::function<OddNet()> make = [] { return OddNet(); };
  OddNet net;
  ASSERT_TRUE(net->table->weight.is_same(net->out->named_parameters()["weight"]));
  expect_equivalent(make, lockstep_adamw, wave({kRows, 6}, 0), wave({kRows, 6}, 1), {1, 2, 5});
}

struct CnnImpl : torch::nn::Module {
  CnnImpl() {
    layers = register_module(
        "layers", torch::nn::Sequential(torch::nn::Conv2d(1, 4, 3), torch::nn::ReLU(),
                                        torch::nn::Conv2d(4, 3, 3), torch::nn::Flatten()));
    to(torch::kDouble);
    fill_weights(*this);
  }
  torch::Tensor forward(const torch::Tensor& x) { return layers->forward(x).mean(1, true); }
  torch::nn::Sequential layers{nullptr};
};
TORCH_MODULE(Cnn);

TEST(ShardedTraining, Convolutions) {
  const std::function<Cnn()> make = [] { return Cnn(); };
  expect_equivalent(make, lockstep_sgd, wave({kRows, 1, 8, 8}, 0), wave({kRows, 1}, 1), {1, 2, 3});
}

struct RecurrentImpl : torch::nn::Module {
  RecurrentImpl() {
    lstm = register_module(
        "lstm", torch::nn::LSTM(torch::nn::LSTMOptions(4, 7).num_layers(2).batch_first(true)));
    head = register_module("head", torch::nn::Linear(7, 2));
    to(torch::kDouble);
    fill_weights(*this);
  }
  torch::Tensor forward(const torch::Tensor& x) { return head(std::get<0>(lstm(x))); }
  torch::nn::LSTM lstm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Recurrent);

TEST(ShardedTraining, Lstm) {
  const std::function<Recurrent()> make = [] { return Recurrent(); };
  expect_equivalent(make, lockstep_sgd, wave({kRows, 3, 4}, 0), wave({kRows, 3, 2}, 1), {1, 2, 3});
}

struct EncoderImpl : torch::nn::Module {
  EncoderImpl() {
    const auto layer =
        torch::nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(16).dropout(0);
    encoder = register_module(
        "encoder", torch::nn::TransformerEncoder(torch::nn::TransformerEncoderOptions(layer, 2)));
    to(torch::kDouble);
    fill_weights(*this);
  }
  // [rows, length, width]; attention wants the length first
  torch::Tensor forward(const torch::Tensor& x) {
    return encoder(x.transpose(0, 1)).transpose(0, 1);
  }
  torch::nn::TransformerEncoder encoder{nullptr};
};
TORCH_MODULE(Encoder);

TEST(ShardedTraining, TransformerEncoder) {
  const std::function<Encoder()> make = [] { return Encoder(); };
  expect_equivalent(make, lockstep_adamw, wave({kRows, 4, 8}, 0), wave({kRows, 4, 8}, 1),
                    {1, 2, 3});
}

// Stage 3 frees a unit when the next one is used, and gathers it again in backward.
TEST(ShardedTraining, UnitsFollowTheModule) {
  run_ranks(2, [](const Communicator& comm) {
    auto net = three_layers();
    FullyShardedDataParallel fsdp(net, comm, {.min_unit_bytes = 0, .share_on_host = false});
    ASSERT_EQ(fsdp.units().size(), 3U);
    EXPECT_EQ(fsdp.units()[1].name, "2");
    EXPECT_EQ(fsdp.units()[1].parameters, (std::vector<std::string>{"2.weight", "2.bias"}));
    const auto x = wave({4, 6}, 0);
    fsdp(x).sum().backward();
    // Forward gathers all; backward begins with the last one, which is still there, and needs the
    // second again. The first has no input that wants a gradient.
    EXPECT_EQ(fsdp.stats().gathers, 4);
    EXPECT_EQ(fsdp.stats().reduce_scatters, 3);
    for (const auto& [name, shard] : fsdp.named_parameters()) {
      EXPECT_EQ(shard.grad().defined(), shard.numel() > 0) << name;
    }
    for (const auto& each : net->parameters()) EXPECT_FALSE(each.grad().defined());
  });
}

// The order of the first step is the next steps' forecast.
TEST(ShardedTraining, NextUnitIsPrefetched) {
  run_ranks(2, [](const Communicator& comm) {
    auto net = three_layers();
    FullyShardedDataParallel fsdp(net, comm, {.min_unit_bytes = 0, .share_on_host = false});
    const auto x = wave({4, 6}, 0);
    fsdp(x).sum().backward();
    EXPECT_EQ(fsdp.stats().prefetched, 0);
    fsdp(x).sum().backward();
    // All but the first; and the second, which backward needs again, is not released meanwhile.
    EXPECT_EQ(fsdp.stats().gathers, 7);
    EXPECT_EQ(fsdp.stats().prefetched, 2);
  });
}

TEST(ShardedTraining, SharedUnitsAreNotGathered) {
  run_ranks(2, [](const Communicator& comm) {
    auto net = three_layers();
    FullyShardedDataParallel fsdp(net, comm, {.min_unit_bytes = 0});
    Sgd optimizer(fsdp.parameters(), {.lr = 0.1});
    for (int step = 0; step < 3; ++step) {
      fsdp(wave({4, 6}, step)).sum().backward();
      optimizer.step(StepExtras{.zero_grad = true});
    }
    for (const auto& unit : fsdp.units()) EXPECT_TRUE(unit.shared);
    EXPECT_EQ(fsdp.stats().gathers, 0);
  });
}

TEST(ShardedTraining, UnitsByName) {
  run_ranks(2, [](const Communicator& comm) {
    auto net = three_layers();
    FullyShardedDataParallel fsdp(net, comm, {.units = {"4"}});
    ASSERT_EQ(fsdp.units().size(), 2U);
    EXPECT_EQ(fsdp.units()[0].parameters, (std::vector<std::string>{"4.weight", "4.bias"}));
    EXPECT_EQ(fsdp.units()[1].parameters.size(), 4U);
  });
}

}  // namespace
}  // namespace lockstep::test::equivalence_test
