// A training step that a GPU replays as one CUDA graph; the same program trains on the CPU, where
// the step simply runs. Exits with 1 if the loss did not fall.
#include <torch/torch.h>

#include <cstdio>

#include "lockstep/lockstep.hpp"

int train(int, char**) {
  torch::manual_seed(1);
  const torch::Device device(torch::cuda::is_available() ? torch::kCUDA : torch::kCPU);
  torch::nn::Sequential net(torch::nn::Linear(64, 256), torch::nn::ReLU(),
                            torch::nn::Linear(256, 8));
  net->to(device);
  lockstep::Sgd optimizer(net->parameters(), {.lr = 0.5});

  // The first calls run this function, later ones replay it: nothing in it may wait for the GPU.
  lockstep::CapturedStep step([&](const torch::Tensor& x, const torch::Tensor& y) {
    const auto loss = torch::mse_loss(net->forward(x), y);
    loss.backward();
    optimizer.step({.zero_grad = true});
    return loss;
  });

  double first = 0;
  double last = 0;
  for (int i = 0; i < 50; ++i) {
    const auto x = torch::randn({256, 64}, device);
    last = step(x, torch::tanh(x.narrow(1, 0, 8))).item<double>();  // waiting here is fine
    if (i == 0) first = last;
  }
  std::printf("loss %.4f -> %.4f, %s\n", first, last,
              step.replayed() ? "replayed" : ("not captured: " + step.why_not()).c_str());
  return last < 0.5 * first ? 0 : 1;
}

int main(int argc, char** argv) {
  return lockstep::run_program(train, argc, argv);
}
