// A training loop of your own that measures itself, alone or as the ranks of `lockstep run -n 2`.
// With LOCKSTEP_RECORD=run.json it leaves a record: `lockstep report run.json` turns it into tables
// and charts, and `lockstep compare` measures one run against another.
// The first argument is the width of the hidden layer. Exits with 1 if the loss did not fall.
#include <torch/torch.h>

#include <cstdio>
#include <string>

#include "lockstep/lockstep.hpp"

struct NetImpl : torch::nn::Module {
  explicit NetImpl(int64_t width) {
    hidden = register_module("hidden", torch::nn::Linear(64, width));
    output = register_module("output", torch::nn::Linear(width, 8));
  }
  torch::Tensor forward(const torch::Tensor& x) { return output(torch::relu(hidden(x))); }
  torch::nn::Linear hidden{nullptr};
  torch::nn::Linear output{nullptr};
};
TORCH_MODULE(Net);

int train(int argc, char** argv) {
  const int64_t width = argc > 1 ? std::stoll(argv[1]) : 256;
  const int64_t steps = 40;
  const int64_t batch = 256;  // rows of one step over all ranks

  const auto world = lockstep::World::from_env();  // which rank is this, and who are the others
  const lockstep::UseDevice home(world.device());  // its share of the cores, or its GPU
  torch::manual_seed(static_cast<uint64_t>(world.rank()));  // other rows on every rank
  Net net(width);
  net->to(world.device().torch_device());
  lockstep::DistributedDataParallel ddp(net, world.comm());  // rank 0's weights go to all
  torch::optim::SGD optimizer(ddp.parameters(), 0.1);

  const int64_t rows = batch / world.size();  // this rank's share of the batch
  lockstep::RunMeter meter("measured", world.devices(), steps, world.board_page());
  meter.watch(ddp.sync());  // counts its all-reduces
  for (int64_t step = 0; step < steps; ++step) {
    const auto x = torch::randn({rows, 64}, world.device().torch_device());
    const auto y = torch::tanh(x.narrow(1, 0, 8));

    meter.begin_step();
    optimizer.zero_grad();
    const auto loss = torch::mse_loss(ddp(x), y);
    loss.backward();  // gradients are averaged over the ranks meanwhile
    optimizer.step();
    meter.end_step(loss);
  }

  lockstep::RunRecord about;  // what the meter cannot know
  about.options = {{"width", std::to_string(width)}, {"steps", std::to_string(steps)}};
  about.split = {rows};
  about.effective_batch = rows * world.size();
  lockstep::save_record(meter, world, about);

  const double first = meter.losses().front();
  const double last = meter.losses().back();
  if (world.rank() == 0) std::printf("loss %.4f -> %.4f\n", first, last);
  return last < first ? 0 : 1;
}

int main(int argc, char** argv) {
  return lockstep::run_program(train, argc, argv);
}
