// For tests/parity/checkpoint_parity.py: resumes in FOLDER, trains to step UNTIL with OPTIMIZER on
// rows that Python can make too, and saves.
//
// usage: checkpoint_train FOLDER OPTIMIZER UNTIL
#include <torch/torch.h>

#include <cstdio>
#include <memory>
#include <string>

#include "lockstep/lockstep.hpp"

namespace {

using Optimizer = std::unique_ptr<torch::optim::Optimizer>;

Optimizer make_optimizer(const std::string& name, const torch::nn::Module& net) {
  const auto parameters = net.parameters();
  if (name == "Sgd") {
    return std::make_unique<lockstep::Sgd>(
        parameters, lockstep::SgdOptions{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01});
  }
  if (name == "Adam") {
    return std::make_unique<lockstep::Adam>(parameters, lockstep::AdamOptions{.lr = 0.01});
  }
  if (name == "AdamW") {
    return std::make_unique<lockstep::AdamW>(parameters, lockstep::AdamWOptions{.lr = 0.01});
  }
  if (name == "torch.SGD") {
    return std::make_unique<torch::optim::SGD>(
        parameters, torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
  }
  if (name == "torch.Adam") {
    return std::make_unique<torch::optim::Adam>(parameters,
                                                torch::optim::AdamOptions(0.01).amsgrad(true));
  }
  if (name == "torch.AdamW") {
    return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(0.01));
  }
  if (name == "torch.Adagrad") {
    return std::make_unique<torch::optim::Adagrad>(parameters, torch::optim::AdagradOptions(0.01));
  }
  if (name == "torch.RMSprop") {
    return std::make_unique<torch::optim::RMSprop>(
        parameters, torch::optim::RMSpropOptions(0.01).momentum(0.5));
  }
  throw lockstep::Error(lockstep::Code::kUsage, "there is no optimizer " + name, "see the source");
}

int train(int argc, char** argv) {
  if (argc != 4) {
    throw lockstep::Error(lockstep::Code::kUsage, "three arguments are needed",
                          "FOLDER OPTIMIZER UNTIL");
  }
  // Not net->to(kFloat64), which converts BatchNorm's counter too; PyTorch's double() does not.
  torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
  torch::manual_seed(7);
  torch::nn::Sequential net(torch::nn::BatchNorm1d(6), torch::nn::Linear(6, 8), torch::nn::Tanh(),
                            torch::nn::Linear(8, 3));
  const Optimizer optimizer = make_optimizer(argv[2], *net);
  lockstep::Checkpoint checkpoint(argv[1], {.every = 1, .keep = 1000});
  checkpoint.add("model", *net).add("optimizer", *optimizer, *net);
  for (int64_t step = checkpoint.resume() + 1; step <= std::stoll(argv[3]); ++step) {
    const auto x = torch::sin(torch::arange(60, torch::kFloat64).reshape({10, 6}) * step);
    const auto y = torch::cos(torch::arange(30, torch::kFloat64).reshape({10, 3}) * step);
    optimizer->zero_grad();
    torch::mse_loss(net->forward(x), y).backward();
    optimizer->step();
    if (!checkpoint.step(step)) return lockstep::kExitPreempted;
  }
  checkpoint.finish();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::run_program(train, argc, argv);
}
