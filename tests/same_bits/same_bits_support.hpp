#pragma once

#include <torch/torch.h>

#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "base/process.hpp"
#include "lockstep/lockstep.hpp"
#include "ranks/gloo_threads.hpp"
#include "ranks/rank_threads.hpp"
#include "tensor_support.hpp"

namespace lockstep::test {

/// A transformer block on sequences of five positions.
struct SmallTransformerImpl : torch::nn::Module {
  SmallTransformerImpl() {
    const TransformerBlockOptions sizes{.width = 16, .heads = 2, .dropout = 0.1};
    embed = register_module("embed", torch::nn::Linear(6, 16));
    block = TransformerBlock(sizes);
    register_module("block", block);
    head = register_module("head", torch::nn::Linear(16, 3));
  }
  torch::Tensor forward(const torch::Tensor& x) {  // [rows, 6]
    const auto positions = x.unsqueeze(1) * torch::linspace(0.5, 1.5, 5).view({1, 5, 1});
    return head(block(embed(positions)).mean(1));
  }
  torch::nn::Linear embed{nullptr}, head{nullptr};
  TransformerBlock block{nullptr};
};
TORCH_MODULE(SmallTransformer);

/// Its forward reads a buffer and changes it.
struct DriftImpl : torch::nn::Module {
  DriftImpl() { seen = register_buffer("seen", torch::zeros({1})); }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto out = x + seen;
    if (is_training()) seen.mul_(0.9).add_(x.detach().mean(), 0.1);
    return out;
  }
  torch::Tensor seen;
};
TORCH_MODULE(Drift);

/// Weights that are the same in every thread.
inline void fill_in_waves(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  double phase = 0.1;
  for (auto& each : module.parameters()) {
    const auto wave = torch::arange(each.numel(), torch::kDouble).mul(0.37).add(phase).sin();
    each.copy_(wave.mul(0.3).view(each.sizes()));
    phase += 0.7;
  }
}

/// "mlp" with dropout, "cnn" with batch norm and dropout, or "transformer" with dropout: [rows, 6]
/// -> [rows, 3].
inline torch::nn::Sequential net_of(const std::string& model) {
  torch::nn::Sequential net;
  if (model == "transformer") {
    net = torch::nn::Sequential(SmallTransformer());
  } else if (model == "cnn") {
    net = torch::nn::Sequential(torch::nn::Unflatten(torch::nn::UnflattenOptions(1, {1, 2, 3})),
                                torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, {2, 2})),
                                torch::nn::BatchNorm2d(4), Drift(), torch::nn::ReLU(),
                                torch::nn::Flatten(), torch::nn::Dropout(0.2),
                                torch::nn::Linear(8, 3));
  } else {
    net = torch::nn::Sequential(torch::nn::Linear(6, 24), torch::nn::Tanh(),
                                torch::nn::Dropout(0.2), torch::nn::Linear(24, 3));
  }
  fill_in_waves(*net);
  return net;
}

/// Batch number `index`: the same for every number of ranks.
inline std::pair<torch::Tensor, torch::Tensor> global_batch(int64_t index, int64_t rows) {
  const auto numbers =
      torch::arange(rows * 9).add(index * rows * 9).view({rows, 9}).to(torch::kFloat);
  return {numbers.narrow(1, 0, 6).mul(0.61).cos(), numbers.narrow(1, 6, 3).mul(0.37).sin()};
}

inline torch::Tensor block_of_rank(const torch::Tensor& batch, const Communicator& comm) {
  return batch.chunk(comm.size(), 0)[static_cast<size_t>(comm.rank())];
}

/// What a run leaves behind; two runs must leave the same bits.
struct Trained {
  std::vector<std::pair<std::string, torch::Tensor>> tensors;  // weights, buffers
  std::vector<double> losses;
  double scale = 0;
  int64_t skipped = 0;

  void add(const torch::nn::Module& module) {
    for (const auto& each : module.named_parameters()) {
      tensors.emplace_back(each.key(), each.value().detach().clone());
    }
    for (const auto& each : module.named_buffers()) {
      tensors.emplace_back(each.key(), each.value().detach().clone());
    }
  }

  /// Adds what `whole`, a run without a break, found before this one began.
  void continues(const Trained& whole) {
    losses.insert(losses.begin(), whole.losses.begin(),
                  whole.losses.end() - static_cast<ptrdiff_t>(losses.size()));
    skipped = whole.skipped;
  }

  /// A pipeline rank without the last stage is told the loss in float32.
  void round_losses_to_float() {
    for (double& loss : losses) loss = static_cast<float>(loss);
  }
};

inline void expect_same_run(const Trained& actual, const Trained& expected,
                            const std::string& what) {
  ASSERT_EQ(actual.tensors.size(), expected.tensors.size()) << what;
  for (size_t i = 0; i < actual.tensors.size(); ++i) {
    const auto& [name, value] = actual.tensors[i];
    const auto& wanted = expected.tensors[i].second;
    // Bytes: equal() would take -0 for 0.
    EXPECT_EQ(0, std::memcmp(value.contiguous().data_ptr(), wanted.contiguous().data_ptr(),
                             value.nbytes()))
        << what << ": " << name << " is off by "
        << (value - wanted).to(torch::kDouble).abs().max().item<double>();
    EXPECT_TRUE(value.to(torch::kDouble).isfinite().all().item<bool>()) << what << ": " << name;
  }
  EXPECT_EQ(actual.losses, expected.losses) << what;
  EXPECT_EQ(actual.scale, expected.scale) << what;
  EXPECT_EQ(actual.skipped, expected.skipped) << what;
}

using RunRanks = std::function<void(int, const std::function<void(const Communicator&)>&)>;

/// Runs `train` on ranks that are threads; returns what rank 0 trained. Several threads compute on
/// a rank that is alone, as on a machine that it has for itself.
inline Trained train_on(int ranks, const std::function<Trained(const Communicator&)>& train,
                        const RunRanks& run = run_ranks) {
  Trained result;
  run(ranks, [&](const Communicator& comm) {
    at::set_num_threads(ranks == 1 ? 2 : 1);
    Trained mine = train(comm);
    if (comm.rank() == 0) result = std::move(mine);
  });
  return result;
}

/// Expects that every number of ranks leaves the same bits as one rank does; returns what that did.
inline Trained expect_same_on(const std::vector<int>& ranks,
                              const std::function<Trained(const Communicator&)>& train,
                              const std::string& what, const RunRanks& run = run_ranks) {
  torch::manual_seed(7);
  const Trained alone = train_on(1, train);
  for (const int count : ranks) {
    expect_same_run(train_on(count, train, run), alone,
                    what + " on " + std::to_string(count) + " ranks");
  }
  return alone;
}

/// Expects the bits of a run on one rank, which is never stopped, of runs that stop after `steps`
/// on some ranks and go on with other ones. A recipe has `steps` and the `folder` of checkpoints.
template <class Recipe>
void expect_same_after_resume(const Recipe& recipe, int64_t steps,
                              const std::vector<std::pair<int, int>>& before_and_after,
                              Trained (*train_recipe)(const Recipe&, const Communicator&),
                              const std::string& what) {
  const auto train = [&](const Recipe& part, int ranks) {
    torch::manual_seed(7);
    return train_on(ranks, [&](const Communicator& comm) { return train_recipe(part, comm); });
  };
  const Trained whole = train(recipe, 1);
  for (const auto& [before, after] : before_and_after) {
    const ScratchFolder scratch;
    Recipe part = recipe;
    part.folder = scratch.file("run");
    part.steps = steps;
    train(part, before);
    part.steps = recipe.steps;
    Trained resumed = train(part, after);
    resumed.continues(whole);
    expect_same_run(resumed, whole, what + "resumed on " + std::to_string(after));
  }
  set_resumed_steps(0);
}

}  // namespace lockstep::test
