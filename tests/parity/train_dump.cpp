// For tests/parity/train_parity.py: does what its first argument says with lockstep and writes the
// results as safetensors. Inputs and weights come from the same kind of file.

#include <pthread.h>
#include <sched.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/lockstep.hpp"

namespace {

using lockstep::TensorMap;

torch::nn::Linear linear_of(const TensorMap& in, const std::string& name) {
  const auto weight = in.at(name + ".weight");
  torch::nn::Linear linear(weight.size(1), weight.size(0));
  const torch::NoGradGuard no_grad;
  linear->weight.copy_(weight);
  linear->bias.copy_(in.at(name + ".bias"));
  return linear;
}

// Linear, BatchNorm, dropout, linear: output, gradients and running statistics.
TensorMap checkpointed(const TensorMap& in) {
  auto first = linear_of(in, "first");
  auto second = linear_of(in, "second");
  torch::nn::BatchNorm1d norm(first->weight.size(0));
  const auto x = in.at("x").clone().requires_grad_();
  torch::manual_seed(5);
  const auto out = lockstep::checkpoint_activations(
      [&](const torch::Tensor& rows) {
        return second(torch::dropout(torch::tanh(norm(first(rows))), 0.5, /*train=*/true));
      },
      x);
  const auto after = torch::rand({4});
  out.square().sum().backward();
  return {{"out", out.detach()},
          {"after", after},
          {"x.grad", x.grad()},
          {"first.grad", first->weight.grad()},
          {"second.grad", second->weight.grad()},
          {"norm.grad", norm->weight.grad()},
          {"running_mean", norm->running_mean},
          {"running_var", norm->running_var},
          {"num_batches_tracked", norm->num_batches_tracked}};
}

// The rates of two groups, before each of 40 updates.
TensorMap schedules(const TensorMap&) {
  using namespace lockstep;
  const std::map<std::string, LrSchedule> all = {
      {"constant", constant_lr(0.5)},
      {"linear", linear_lr(0.25, 1, 7)},
      {"linear_down", linear_lr(1, 0.1, 40)},
      {"cosine", cosine_lr(30, 0.01)},
      {"step", step_lr(6, 0.3)},
      {"lambda", [](int64_t updates, double base) { return base * std::pow(0.95, updates); }},
      {"warmup_cosine", sequential_lr({linear_lr(0.1, 1, 8), cosine_lr(32)}, {8})},
      {"three", sequential_lr({linear_lr(0.5, 1, 4), constant_lr(1), step_lr(3, 0.5)}, {5, 20})}};
  TensorMap rates;
  for (const auto& [name, schedule] : all) {
    const auto a = torch::zeros({1}).requires_grad_();
    const auto b = torch::zeros({1}).requires_grad_();
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<torch::Tensor>{a},
                        std::make_unique<torch::optim::SGDOptions>(0.4));
    groups.emplace_back(std::vector<torch::Tensor>{b},
                        std::make_unique<torch::optim::SGDOptions>(0.07));
    Sgd optimizer(std::move(groups), {});
    LrScheduler scheduler(optimizer, schedule);
    std::vector<double> seen;
    for (int update = 0; update < 40; ++update) {
      for (const double rate : scheduler.rates()) seen.push_back(rate);
      optimizer.step();
      scheduler.step();
    }
    rates.emplace(name, torch::tensor(seen, torch::kDouble));
  }
  return rates;
}

// The averages of a linear layer that SGD trains.
TensorMap averages(const TensorMap& in) {
  auto net = linear_of(in, "first");
  lockstep::Sgd optimizer(net->parameters(), {.lr = 0.1});
  lockstep::WeightAverage average(*net, {.decay = 0.9});
  for (int step = 0; step < 20; ++step) {
    net(in.at("x")).square().mean().backward();
    optimizer.step({.zero_grad = true});
    average.update();
  }
  TensorMap out;
  for (const auto& entry : average.entries()) out.emplace(entry.name, entry.average);
  return out;
}

struct Trained {
  std::vector<double> losses;
  TensorMap state;
};

Trained train_script(const std::shared_ptr<lockstep::ScriptModule<>>& net, const TensorMap& in,
                     const std::function<torch::Tensor(const torch::Tensor&)>& forward) {
  Trained trained;
  lockstep::Sgd optimizer(net->parameters(), {.lr = 0.1});
  net->train();
  for (int step = 0; step < 6; ++step) {
    const auto loss = torch::mse_loss(forward(in.at("x")), in.at("y"));
    loss.backward();
    optimizer.step({.zero_grad = true});
    trained.losses.push_back(loss.item<double>());
  }
  net->eval();
  const torch::NoGradGuard no_grad;
  trained.state["evaluated"] = net->forward(in.at("x")).clone();
  for (const auto& item : net->named_parameters())
    trained.state[item.key()] = item.value().detach().clone();
  for (const auto& item : net->named_buffers()) trained.state[item.key()] = item.value().clone();
  return trained;
}

// A script from Python, alone, in DistributedDataParallel and in DataParallel.
TensorMap scripts(const TensorMap& in, const std::string& script, const std::string& saved) {
  TensorMap out;
  const auto add = [&](const std::string& how, const Trained& trained) {
    out[how + ".losses"] = torch::tensor(trained.losses, torch::kDouble);
    for (const auto& [name, tensor] : trained.state) out[how + "." + name] = tensor;
  };
  const auto load = [&] {
    return std::make_shared<lockstep::ScriptModule<>>(torch::jit::load(script));
  };
  {
    const auto net = load();
    add("alone", train_script(net, in, [&](const torch::Tensor& x) { return net->forward(x); }));
  }
  {
    const auto comms = lockstep::Communicator::threads(1);
    const auto net = load();
    lockstep::DistributedDataParallel ddp(net, comms[0]);
    add("ddp", train_script(net, in, [&](const torch::Tensor& x) { return ddp(x); }));
    net->save_script(saved);
  }
  {
    const lockstep::Devices devices("cpu:2");
    const lockstep::UseDevice home(devices[0]);
    const auto net = load();
    lockstep::DataParallel parallel(net, devices);
    add("dp", train_script(net, in, [&](const torch::Tensor& x) { return parallel(x); }));
  }
  return out;
}

// Two ranks on halves of the rows have the weights of one on all.
TensorMap script_ranks(const TensorMap& in, const std::string& script) {
  const auto comms = lockstep::Communicator::threads(2);
  std::vector<TensorMap> states(2);
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const auto net = std::make_shared<lockstep::ScriptModule<>>(torch::jit::load(script));
      lockstep::DistributedDataParallel ddp(net, comms[rank]);
      lockstep::Sgd optimizer(net->parameters(), {.lr = 0.1});
      for (int step = 0; step < 6; ++step) {
        const auto x = in.at("x").chunk(2)[rank];
        torch::mse_loss(ddp(x), in.at("y").chunk(2)[rank]).backward();
        optimizer.step({.zero_grad = true});
      }
      for (const auto& item : net->named_parameters()) {
        states[rank][item.key()] = item.value().detach().clone();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  TensorMap out;
  for (size_t rank = 0; rank < 2; ++rank) {
    for (const auto& [name, tensor] : states[rank]) {
      out["rank" + std::to_string(rank) + "." + name] = tensor;
    }
  }
  return out;
}

int64_t cores_of_this_thread() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  pthread_getaffinity_np(pthread_self(), sizeof(cores), &cores);
  return CPU_COUNT(&cores);
}

// Each row is the number of cores that the thread which made it may use.
struct CoresOfThread : torch::data::datasets::BatchDataset<CoresOfThread, std::vector<int64_t>> {
  std::vector<int64_t> get_batch(torch::ArrayRef<size_t>) override {
    return {cores_of_this_thread()};
  }
  torch::optional<size_t> size() const override { return 1; }
};

// A loader's worker may use all cores of the job, and the rank only its own.
int check_cores() {
  const auto world = lockstep::World::from_env();
  const lockstep::UseDevice home(world.device());
  const auto of_job = lockstep::parse_cores(std::getenv("LOCKSTEP_HOST_CORES")).size();
  const auto of_rank = world.device().plan().cores.size();
  lockstep::DistributedSampler sampler(1, 1, 0);
  const auto loader = lockstep::make_data_loader(
      CoresOfThread(), sampler, torch::data::DataLoaderOptions().batch_size(1).workers(1));
  bool right = cores_of_this_thread() == static_cast<int64_t>(of_rank);
  for (auto& batch : *loader) right = right && batch[0] == static_cast<int64_t>(of_job);
  return right ? 0 : 1;
}

void metrics(const std::string& folder) {
  {
    lockstep::MetricsLog log(folder, {.resumed_after = 0});
    for (int64_t step = 1; step <= 400; ++step) {
      log.write(step, {{"loss/train", 1.0 / static_cast<double>(step)}, {"lr", 0.5}});
    }
  }
  lockstep::MetricsLog log(folder, {.resumed_after = 300});
  for (int64_t step = 301; step <= 500; ++step)
    log.write(step, "loss/train", -1.0 * static_cast<double>(step));
}

int dump(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  const std::string& what = arguments.at(0);
  if (what == "cores") return check_cores();
  if (what == "metrics") {
    metrics(arguments.at(1));
    return 0;
  }
  const auto in = lockstep::load_tensors(arguments.at(1));
  const auto out = what == "checkpointed"   ? checkpointed(in)
                   : what == "schedules"    ? schedules(in)
                   : what == "averages"     ? averages(in)
                   : what == "script_ranks" ? script_ranks(in, arguments.at(3))
                                            : scripts(in, arguments.at(3), arguments.at(4));
  lockstep::save_tensors(arguments.at(2), out);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::run_program(dump, argc, argv);
}
