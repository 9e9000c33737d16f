#include <gtest/gtest.h>

#include "same_bits_support.hpp"

namespace lockstep::test::same_bits_pipeline_test {
namespace {

constexpr int64_t kRows = 48;

struct Recipe {
  std::string schedule = "1f1b";
  int64_t shards = 8;
  int64_t steps = 12;
  bool batch_norm = false;
  bool weighs = false;  // a loss that leaves out some targets
  bool scaled = false;
};

torch::nn::Sequential stage_layers(bool batch_norm) {
  torch::nn::Sequential net(torch::nn::Linear(6, 16));
  if (batch_norm) net->push_back(torch::nn::BatchNorm1d(16));
  net->push_back(torch::nn::Tanh());
  net->push_back(torch::nn::Dropout(0.2));
  net->push_back(torch::nn::Linear(16, 16));
  net->push_back(torch::nn::Tanh());
  net->push_back(torch::nn::Linear(16, 3));
  fill_in_waves(*net);
  return net;
}

// Both stages in this process; the ranks are those of the data axis.
Trained train_recipe(const Recipe& recipe, const Communicator& comm) {
  const auto net = stage_layers(recipe.batch_norm);
  const Devices devices("cpu:2");
  const auto micro_batches = static_cast<int>(recipe.shards / comm.size());
  const auto masked = [](const torch::Tensor& out, const torch::Tensor& y) {
    const auto counts = y.gt(-0.5);
    return ((out - y).square() * counts).sum() / counts.sum();
  };
  PipelineOptions options{
      .loss = [](const auto& out, const auto& y) { return torch::mse_loss(out, y); },
      .data = comm,
      .virtual_shards = recipe.shards};
  if (recipe.weighs) {
    options.loss = masked;
    options.loss_weight = [](const torch::Tensor& y) { return y.gt(-0.5).sum().item<double>(); };
  }
  const auto cut = cut_by_count(static_cast<int64_t>(net->size()), 2);
  Pipeline pipeline(split_stages(net, cut), devices,
                    make_schedule(recipe.schedule, 2, micro_batches), options);
  Sgd optimizer(pipeline.parameters(), {.lr = 0.05, .momentum = 0.9});
  GradScaler scaler({.init_scale = 1024, .growth_interval = 5, .enabled = recipe.scaled});
  Trained trained;
  for (int64_t step = 0; step < recipe.steps; ++step) {
    for (int64_t micro = 0; micro < 2; ++micro) {
      const auto [x, y] = global_batch(2 * step + micro, kRows);
      const auto loss =
          pipeline.step(block_of_rank(x, comm), block_of_rank(y, comm),
                        {.loss_factor = 0.5, .synchronise = micro == 1, .scaler = &scaler});
      trained.losses.push_back(loss.item<double>());
    }
    scaler.step(optimizer, {.max_norm = 0.3, .zero_grad = true});
    scaler.update();
  }
  trained.scale = scaler.get_scale();
  trained.add(*net);
  return trained;
}

void expect_same_on_ranks(const Recipe& recipe, const std::vector<int>& ranks,
                          const std::string& what) {
  expect_same_on(
      ranks, [&](const Communicator& comm) { return train_recipe(recipe, comm); }, what);
}

TEST(SameBitsPipeline, EverySchedule) {
  expect_same_on_ranks({.schedule = "1f1b"}, {2, 4}, "1f1b");
  expect_same_on_ranks({.schedule = "gpipe", .scaled = true}, {2}, "gpipe");
  expect_same_on_ranks({.schedule = "zero-bubble"}, {2}, "zero-bubble");
}

TEST(SameBitsPipeline, BatchNormAndWeights) {
  expect_same_on_ranks({.batch_norm = true}, {2, 4}, "batch norm");
  expect_same_on_ranks({.weighs = true}, {2, 4}, "loss_weight");
  expect_same_on_ranks({.shards = 6}, {2, 3}, "6 parts");
}

TEST(SameBitsPipeline, RefusesOtherNumbersOfMicroBatches) {
  const Devices devices("cpu:2");
  const auto net = stage_layers(false);
  expect_error(Code::kUsage, {"virtual_shards is 8, but 1 data rank with 4 micro-batches"}, [&] {
    const Pipeline pipeline(
        split_stages(net, cut_by_count(static_cast<int64_t>(net->size()), 2)), devices,
        one_f_one_b(2, 4),
        {.loss = [](const auto& out, const auto& y) { return torch::mse_loss(out, y); },
         .virtual_shards = 8});
  });
}

}  // namespace
}  // namespace lockstep::test::same_bits_pipeline_test
