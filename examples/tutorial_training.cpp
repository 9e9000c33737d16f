// A whole training program on as many ranks as it was started with: torch::data's loader, a seed
// for each rank, accumulation, evaluation and metrics over all ranks, weights saved by rank 0.
// Usage: tutorial_training [FILE], the file for the weights. Exits with 1 if the model did not
// learn.
#include <torch/torch.h>

#include <cstdio>

#include "lockstep/lockstep.hpp"

// Points of the plane, and whether they lie in a ring around the origin.
struct Points : torch::data::Dataset<Points> {
  Points(int64_t rows, uint64_t seed) {
    torch::manual_seed(seed);
    x = torch::randn({rows, 2});
    const auto radius = x.norm(2, 1);
    y = ((radius > 0.7) & (radius < 1.5)).to(torch::kLong);
  }
  torch::data::Example<> get(size_t index) override { return {x[index], y[index]}; }
  torch::optional<size_t> size() const override { return x.size(0); }

  torch::Tensor x;
  torch::Tensor y;
};

struct Metrics {
  double loss = 0;
  double accuracy = 0;
};

// Each rank evaluates every R-th row through the module itself, and the sums are added up. Every
// row counts once, also if the ranks' numbers of rows differ.
Metrics evaluate(const lockstep::World& world, torch::nn::Sequential& net, const Points& points) {
  const torch::NoGradGuard no_grad;
  net->eval();
  const auto device = world.device().torch_device();
  const auto rows = points.x.size(0);
  const auto x = points.x.slice(0, world.rank(), rows, world.size()).to(device);
  const auto y = points.y.slice(0, world.rank(), rows, world.size()).to(device);
  const auto out = net->forward(x);
  const auto loss = torch::cross_entropy_loss(out, y);
  const auto accuracy = (out.argmax(1) == y).to(torch::kFloat).mean();
  const auto mean = lockstep::mean_over_ranks(
      world.comm(), {{"loss", loss}, {"accuracy", accuracy}}, static_cast<double>(x.size(0)));
  net->train();
  return {mean.at("loss"), mean.at("accuracy")};
}

int train(int argc, char** argv) {
  constexpr int64_t kEpochs = 8;
  constexpr int64_t kBatch = 32;  // rows of one micro-step on one rank
  constexpr int64_t kAccumSteps = 2;
  constexpr uint64_t kSeed = 1;

  const auto world = lockstep::World::from_env();
  const lockstep::UseDevice home(world.device());
  const auto device = world.device().torch_device();

  Points points(4096, /*seed=*/100);  // the same data set on every rank
  const Points test(1000, /*seed=*/101);

  torch::manual_seed(kSeed + static_cast<uint64_t>(world.rank()));  // other dropout on each rank
  torch::nn::Sequential net(torch::nn::Linear(2, 64), torch::nn::ReLU(), torch::nn::Dropout(0.1),
                            torch::nn::Linear(64, 64), torch::nn::ReLU(), torch::nn::Linear(64, 2));
  net->to(device);
  lockstep::DistributedDataParallel ddp(net, world.comm());  // rank 0's weights go to all
  lockstep::AdamW optimizer(ddp.parameters(), {.lr = 3e-3});

  lockstep::DistributedSampler sampler(points.x.size(0), world.size(), world.rank(),
                                       {.seed = kSeed});
  const auto loader = lockstep::make_data_loader(
      points.map(torch::data::transforms::Stack<>()), sampler,
      torch::data::DataLoaderOptions().batch_size(kBatch).drop_last(true));

  Metrics metrics;
  for (int64_t epoch = 0; epoch < kEpochs; ++epoch) {
    sampler.set_epoch(epoch);  // another order, the same on all ranks
    for (auto [batch, steps, is_last] :
         lockstep::accumulate(sampler.batches(*loader), kAccumSteps, ddp)) {
      const auto out = ddp(batch.data.to(device));
      const auto loss = torch::cross_entropy_loss(out, batch.target.to(device));
      (loss / steps).backward();
      if (is_last) optimizer.step({.max_norm = 1.0, .zero_grad = true});
    }
    metrics = evaluate(world, net, test);
    if (world.rank() == 0) {
      std::printf("epoch %lld: test loss %.4f, accuracy %.1f %%\n", static_cast<long long>(epoch),
                  metrics.loss, 100 * metrics.accuracy);
    }
  }

  if (argc > 1 && world.rank() == 0) lockstep::save_weights(*net, argv[1]);
  return metrics.accuracy > 0.9 ? 0 : 1;
}

int main(int argc, char** argv) {
  return lockstep::run_program(train, argc, argv);
}
