// Your own module, trained on two logical devices. Ends with 1 if the loss did not fall.

#include <torch/torch.h>

#include <cstdio>

#include "lockstep/lockstep.hpp"

struct NetImpl : torch::nn::Cloneable<NetImpl> {  // Cloneable, so that replicas can be made
  NetImpl() { reset(); }
  void reset() override {
    hidden = register_module("hidden", torch::nn::Linear(16, 64));
    out = register_module("out", torch::nn::Linear(64, 16));
  }
  torch::Tensor forward(const torch::Tensor& x) { return out(torch::tanh(hidden(x))); }
  torch::nn::Linear hidden{nullptr}, out{nullptr};
};
TORCH_MODULE(Net);

int train(int, char**) {
  const lockstep::Devices devices("cpu:2");    // or "cuda:0,1", or "cuda:0*2"
  const lockstep::UseDevice home(devices[0]);  // this thread works for device 0
  torch::manual_seed(0);
  Net net;
  net->to(devices[0].torch_device());
  lockstep::DataParallel parallel(net, devices);
  torch::optim::SGD optimizer(net->parameters(), 0.5);

  const auto x = torch::randn({256, 16}, devices[0].torch_device());
  const auto y = torch::sin(x);
  double first = 0, last = 0;
  for (int step = 0; step <= 100; ++step) {
    optimizer.zero_grad();
    const auto loss = torch::mse_loss(parallel(x), y);  // 128 rows on each device
    loss.backward();                                    // both devices at once
    optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
    if (step % 20 == 0) std::printf("step %3d  loss %.4f\n", step, last);
  }
  return last < first / 2 ? 0 : 1;
}

int main(int argc, char** argv) {
  return lockstep::run_program(train, argc, argv);
}
