// A model in two stages, each on a logical device of its own, with eight micro-batches that flow
// through them. Exits with 1 if the loss did not fall.
#include <torch/torch.h>

#include <cstdio>

#include "lockstep/lockstep.hpp"

int train(int, char**) {
  torch::manual_seed(1);
  torch::nn::Sequential model(torch::nn::Linear(64, 256), torch::nn::ReLU(),
                              torch::nn::Linear(256, 256), torch::nn::ReLU(),
                              torch::nn::Linear(256, 8));

  const lockstep::Devices devices("cpu:2");
  const auto layers = static_cast<int64_t>(model->size());
  lockstep::Pipeline pipeline(lockstep::split_stages(model, lockstep::cut_by_count(layers, 2)),
                              devices, lockstep::one_f_one_b(/*stages=*/2, /*micro_batches=*/8),
                              {.loss = [](const torch::Tensor& out, const torch::Tensor& y) {
                                return torch::mse_loss(out, y);
                              }});
  lockstep::Sgd optimizer(pipeline.parameters(), {.lr = 0.5});

  const auto x = torch::randn({256, 64});
  const auto y = torch::tanh(x.narrow(1, 0, 8));
  double first = 0;
  double last = 0;
  for (int step = 0; step < 50; ++step) {
    last = pipeline.step(x, y).item<double>();  // all micro-batches, forward and backward
    if (step == 0) first = last;
    optimizer.step();
    optimizer.zero_grad();
  }
  std::printf("loss %.4f -> %.4f on %s and %s\n", first, last, devices[0].name().c_str(),
              devices[1].name().c_str());
  return last < 0.5 * first ? 0 : 1;
}

int main(int argc, char** argv) {
  return lockstep::run_program(train, argc, argv);
}
