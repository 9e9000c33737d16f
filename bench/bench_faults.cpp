// Ranks for bench/faults, where no program of the course does what a fault needs.
//
// usage: bench_faults preempt FOLDER STEPS   trains with a warm-up and evaluations, says which of
// them begins
//        bench_faults mismatch KIND          the last rank makes another call: operation, shape,
//        dtype, order bench_faults batches COUNT [join]   10 steps, but COUNT on the last rank
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <string>
#include <thread>

#include "lockstep/lockstep.hpp"

namespace {

using lockstep::World;
using Arguments = std::vector<std::string>;

torch::nn::Sequential make_net() {
  torch::manual_seed(7);
  return torch::nn::Sequential(torch::nn::Linear(16, 64), torch::nn::ReLU(),
                               torch::nn::Linear(64, 16));
}

void say(const World& world, const std::string& text) {
  std::printf("rank %d: %s\n", world.rank(), text.c_str());
}

// Every phase lasts long enough for a signal to hit it.
int preempt(const World& world, const Arguments& words) {
  constexpr std::chrono::milliseconds kPhase{400};
  constexpr int64_t kEvaluateEvery = 50;
  const int64_t steps = std::stoll(words.at(1));
  auto net = make_net();
  lockstep::DistributedDataParallel ddp(net, world.comm());
  lockstep::AdamW optimizer(ddp.parameters(), {.lr = 1e-2});
  lockstep::Checkpoint checkpoint(words.at(0), world.comm(), {.every = 1'000'000});
  checkpoint.add("model", *net).add("optimizer", optimizer, *net);
  int64_t step = checkpoint.resume();
  const auto x = torch::linspace(-1, 1, 64 * 16).reshape({64, 16}) / (world.rank() + 1);
  const auto idle_forwards = [&] {
    const torch::NoGradGuard no_grad;
    const auto end = std::chrono::steady_clock::now() + kPhase;
    while (std::chrono::steady_clock::now() < end) net->forward(x);
  };
  say(world, "begins warm-up");
  idle_forwards();
  while (step < steps) {
    if (step % kEvaluateEvery == 0) {
      say(world, "begins evaluation");
      idle_forwards();
      say(world, "begins training");
    }
    torch::mse_loss(ddp(x), torch::sin(3 * x)).backward();
    optimizer.step({.zero_grad = true});
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    if (!checkpoint.step(++step)) {
      say(world, "stopped after step " + std::to_string(step));
      return lockstep::kExitPreempted;
    }
  }
  checkpoint.finish();
  say(world, "ended after step " + std::to_string(step));
  return 0;
}

// Says whether the call that fails has left this rank's tensor as it was.
int mismatch(const World& world, const Arguments& words) {
  const std::string& kind = words.at(0);
  const auto& comm = world.comm();
  const bool odd = world.rank() + 1 == world.size();
  const auto dtype = odd && kind == "dtype" ? torch::kFloat64 : torch::kFloat32;
  const auto tensor =
      torch::full({odd && kind == "shape" ? 1 << 19 : 1 << 20}, world.rank() + 1, dtype);
  const auto other = torch::full({1 << 10}, world.rank() + 1, torch::kFloat32);
  comm.barrier();
  try {
    if (odd && kind == "operation") comm.broadcast(tensor, 0);
    if (odd && kind == "order") comm.all_reduce(other);
    comm.all_reduce(tensor);
    if (kind == "order") comm.all_reduce(other);
  } catch (const lockstep::Error&) {
    const bool same = tensor.eq(world.rank() + 1).all().item<bool>() &&
                      other.eq(world.rank() + 1).all().item<bool>();
    say(world, same ? "unchanged" : "changed");
    throw;
  }
  say(world, "not noticed");
  return 0;
}

int batches(const World& world, const Arguments& words) {
  const bool odd = world.rank() + 1 == world.size();
  const int64_t count = odd ? std::stoll(words.at(0)) : 10;
  auto net = make_net();
  lockstep::DistributedDataParallel ddp(net, world.comm());
  lockstep::Sgd optimizer(ddp.parameters(), {.lr = 1e-2});
  const auto x = torch::linspace(-1, 1, 64 * 16).reshape({64, 16});
  const auto train = [&] {
    for (int64_t step = 0; step < count; ++step) {
      torch::mse_loss(ddp(x), torch::sin(3 * x)).backward();
      optimizer.step({.zero_grad = true});
    }
  };
  if (words.size() > 1 && words[1] == "join") {
    lockstep::join(ddp, train);
    ddp.check_replicas();
  } else {
    train();
  }
  say(world, "trained");
  return 0;
}

int run(int argc, char** argv) {
  const Arguments words(argv + std::min(argc, 2), argv + argc);
  const std::string what = argc > 1 ? argv[1] : "";
  const auto world = World::from_env();
  const lockstep::UseDevice home(world.device());
  if (what == "preempt") return preempt(world, words);
  if (what == "mismatch") return mismatch(world, words);
  if (what == "batches") return batches(world, words);
  throw lockstep::Error(lockstep::Code::kUsage, "\"" + what + "\" is no fault of bench_faults",
                        "start it by bench/faults");
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::run_program(run, argc, argv);
}
