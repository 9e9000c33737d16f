// A module of your own on two logical devices. Exits with 1 if the loss did not fall.
#include <torch/torch.h>

#include <cstdio>
#include <vector>

#include "lockstep/lockstep.hpp"

struct NetImpl : torch::nn::Cloneable<NetImpl> {  // Cloneable: DataParallel can copy it
  NetImpl() { reset(); }
  void reset() override { layer = register_module("layer", torch::nn::Linear(16, 16)); }
  torch::Tensor forward(const torch::Tensor& x) { return torch::tanh(layer(x)); }
  torch::nn::Linear layer{nullptr};
};
TORCH_MODULE(Net);

int main() {
  const lockstep::Devices devices("cpu:2");    // or "cuda:0,1", or "cuda:0*2"
  const lockstep::UseDevice home(devices[0]);  // this thread works for device 0
  torch::manual_seed(0);
  Net net;
  net->to(devices[0].torch_device());
  lockstep::DataParallel parallel(net, devices);
  torch::optim::SGD optimizer(net->parameters(), 1.0);

  const auto x = torch::randn({64, 16}, devices[0].torch_device());
  std::vector<double> losses;
  for (int step = 0; step < 10; ++step) {
    optimizer.zero_grad();
    const auto loss = torch::mse_loss(parallel(x), torch::sin(x));  // 32 rows on each device
    loss.backward();                                                // both devices at once
    optimizer.step();
    losses.push_back(loss.item<double>());
    std::printf("step %d: loss %.4f\n", step, losses.back());
  }
  return losses.back() < 0.9 * losses.front() ? 0 : 1;
}
