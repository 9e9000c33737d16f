// A module of your own on as many ranks as it was started with: alone, or by `lockstep run -n 4`,
// torchrun, mpirun or srun. Exits with 1 if the loss did not fall.
#include <torch/torch.h>

#include <cstdio>
#include <vector>

#include "lockstep/lockstep.hpp"

struct NetImpl : torch::nn::Module {
  NetImpl() { layer = register_module("layer", torch::nn::Linear(16, 16)); }
  torch::Tensor forward(const torch::Tensor& x) { return torch::tanh(layer(x)); }
  torch::nn::Linear layer{nullptr};
};
TORCH_MODULE(Net);

int train(int, char**) {
  const auto world = lockstep::World::from_env();  // which rank is this, and who are the others
  const lockstep::UseDevice home(world.device());  // its share of the cores, or its GPU
  torch::manual_seed(static_cast<uint64_t>(world.rank()));
  Net net;
  net->to(world.device().torch_device());
  lockstep::DistributedDataParallel ddp(net, world.comm());  // rank 0's weights go to all
  torch::optim::SGD optimizer(ddp.parameters(), 1.0);

  const auto x = torch::randn({32, 16}, world.device().torch_device());  // this rank's own rows
  std::vector<double> losses;
  for (int step = 0; step < 10; ++step) {
    optimizer.zero_grad();
    const auto loss = torch::mse_loss(ddp(x), torch::sin(x));
    loss.backward();  // gradients are averaged over the ranks meanwhile
    optimizer.step();
    losses.push_back(loss.item<double>());
    if (world.rank() == 0) std::printf("step %d: loss %.4f\n", step, losses.back());
  }
  return losses.back() < 0.9 * losses.front() ? 0 : 1;
}

int main(int argc, char** argv) {
  return lockstep::run_program(train, argc, argv);  // an error is printed with its remedy
}
