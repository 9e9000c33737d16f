// A run that can be stopped at any time and goes on with the same bits: alone, or on several ranks
// by `lockstep run -n 2 build/release/bin/tutorial_checkpoint`.
//
// usage: tutorial_checkpoint [FOLDER [STEPS]]
//
// Without a folder it uses a temporary one and checks itself: a run that was stopped in the middle
// must end with the weights of one that was not. Exits with 1 if it does not.
#include <torch/torch.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "lockstep/lockstep.hpp"

namespace {

torch::nn::Sequential make_net() {
  return torch::nn::Sequential(torch::nn::Linear(16, 64), torch::nn::ReLU(),
                               torch::nn::Dropout(0.2), torch::nn::Linear(64, 16));
}

// Trains up to `steps`, from the latest checkpoint of the folder. Returns the weights, or nothing
// if the run was asked to stop.
std::vector<torch::Tensor> train(const lockstep::World& world, const std::string& folder,
                                 int64_t steps) {
  auto net = make_net();
  net->to(world.device().torch_device());
  lockstep::DistributedDataParallel ddp(net, world.comm());
  lockstep::AdamW optimizer(ddp.parameters(), {.lr = 1e-2});
  const auto rows = torch::linspace(-1, 1, 160 * 16).reshape({160, 16});
  lockstep::DistributedSampler sampler(160, world.size(), world.rank());

  lockstep::Checkpoint checkpoint(folder, world.comm(), {.every = 10});
  checkpoint.add("model", *net).add("optimizer", optimizer, *net).add("sampler", sampler);
  for (int64_t step = checkpoint.resume() + 1; step <= steps; ++step) {
    const auto chosen = torch::tensor(sampler.next_batch(16), torch::kInt64);
    const auto x = rows.index_select(0, chosen).to(world.device().torch_device());
    const auto loss = torch::mse_loss(ddp(x), torch::sin(3 * x));
    loss.backward();
    optimizer.step({.zero_grad = true});
    if (world.rank() == 0 && step % 10 == 0) {
      std::printf("step %lld: loss %.4f\n", static_cast<long long>(step), loss.item<double>());
    }
    if (!checkpoint.step(step)) return {};
  }
  checkpoint.finish();
  std::vector<torch::Tensor> weights;
  for (const auto& parameter : net->parameters()) weights.push_back(parameter.detach().clone());
  return weights;
}

// A folder that all ranks of this job share and no other job has.
std::string temporary_folder(const lockstep::World& world) {
  const auto number = torch::zeros({1}, torch::kInt64);
  number[0] = static_cast<int64_t>(::getpid());
  world.comm().broadcast(number, 0);
  return (std::filesystem::temp_directory_path() /
          ("lockstep-tutorial-" + std::to_string(number.item<int64_t>())))
      .string();
}

int run(int argc, char** argv) {
  const auto world = lockstep::World::from_env();
  const lockstep::UseDevice home(world.device());
  const auto rank = static_cast<uint64_t>(world.rank());
  if (argc > 1) {
    torch::manual_seed(rank);
    const bool done = !train(world, argv[1], argc > 2 ? std::atoll(argv[2]) : 100).empty();
    return done ? 0 : lockstep::kExitPreempted;
  }
  const std::string folder = temporary_folder(world);
  torch::manual_seed(rank);
  const auto whole = train(world, folder + "/whole", 40);
  torch::manual_seed(rank);
  train(world, folder + "/parts", 20);
  torch::manual_seed(100 + rank);  // whatever comes now, the checkpoint has the random numbers
  const auto parts = train(world, folder + "/parts", 40);
  world.comm().barrier();
  if (world.rank() == 0) std::filesystem::remove_all(folder);
  for (size_t i = 0; i < whole.size(); ++i) {
    if (!torch::equal(whole[i], parts[i])) return 1;
  }
  if (world.rank() == 0) std::printf("the run that was stopped has the same weights\n");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::run_program(run, argc, argv);
}
