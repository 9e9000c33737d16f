// A transformer block over a tensor axis, with or without slices of the sequence, computes the
// numbers of a plain one that is written with torch::nn alone.

#include "lockstep/transformer_block.hpp"

#include <filesystem>

#include "lockstep/autocast.hpp"
#include "lockstep/checkpoint.hpp"
#include "lockstep/distributed_data_parallel.hpp"
#include "lockstep/mesh.hpp"
#include "lockstep/optim.hpp"
#include "lockstep/pipeline.hpp"
#include "lockstep/schedule.hpp"
#include "models/model_support.hpp"

namespace lockstep::test::transformer_block_test {
namespace {

constexpr int64_t kHeads = 5;  // over 2 ranks: 3 and 2
constexpr int64_t kWidth = 20;
constexpr int64_t kPositions = 30;

// Probabilities: of what is added to the stream, and of the attention's weights.
struct Dropout {
  double branch = 0;
  double attention = 0;
};

TransformerBlock whole_block(const Dropout& dropout = {}, torch::ScalarType dtype = torch::kFloat64,
                             int64_t seed = 1) {
  TransformerBlock block(TransformerBlockOptions{.width = kWidth,
                                                 .heads = kHeads,
                                                 .mlp_width = 32,
                                                 .dropout = dropout.branch,
                                                 .attention_dropout = dropout.attention});
  const torch::NoGradGuard no_grad;
  block->to(dtype);
  for (const auto& item : block->named_parameters()) {
    auto parameter = item.value();
    seed += 1;
    parameter.copy_(values(parameter.sizes(), static_cast<uint64_t>(seed)) * 0.3);
    if (item.key().find("ln") == 0 && item.key().find("weight") != std::string::npos) {
      parameter += 1;
    }
  }
  return block;
}

// The same block in libtorch's words.
torch::Tensor plain_block(const std::map<std::string, torch::Tensor>& of, const torch::Tensor& x,
                          const Dropout& dropout = {}) {
  const auto norm = [&](const torch::Tensor& in, const std::string& name) {
    return torch::layer_norm(in, {kWidth}, of.at(name + ".weight"), of.at(name + ".bias"));
  };
  const auto linear = [&](const torch::Tensor& in, const std::string& name) {
    return torch::linear(in, of.at(name + ".weight"), of.at(name + ".bias"));
  };
  const int64_t batch = x.size(0);
  const int64_t positions = x.size(1);
  const auto heads = [&](const torch::Tensor& in) {
    return in.view({batch, positions, kHeads, kWidth / kHeads}).transpose(1, 2);
  };
  const auto qkv = linear(norm(x, "ln1"), "qkv").chunk(3, -1);
  auto scores = heads(qkv[0]).matmul(heads(qkv[1]).transpose(-1, -2)) /
                std::sqrt(static_cast<double>(kWidth / kHeads));
  const auto seen = torch::ones({positions, positions}, torch::kBool).tril();
  scores = scores.masked_fill(~seen, -std::numeric_limits<double>::infinity());
  const auto weights = torch::dropout(torch::softmax(scores, -1), dropout.attention, true);
  const auto mixed =
      weights.matmul(heads(qkv[2])).transpose(1, 2).reshape({batch, positions, kWidth});
  const auto attended = x + torch::dropout(linear(mixed, "proj"), dropout.branch, true);
  const auto hidden = at::gelu(linear(norm(attended, "ln2"), "fc"), "tanh");
  return attended + torch::dropout(linear(hidden, "out"), dropout.branch, true);
}

std::map<std::string, torch::Tensor> leaves_of(const TransformerBlock& block) {
  std::map<std::string, torch::Tensor> leaves;
  for (const auto& [name, whole] : whole_parameters(*block)) leaves[name] = leaf(whole);
  return leaves;
}

// The gradients of all weights, put together: each is hung in place of its weight.
std::map<std::string, torch::Tensor> whole_gradients(TransformerBlock& block) {
  const torch::NoGradGuard no_grad;
  std::vector<torch::Tensor> kept;
  for (auto& parameter : block->parameters()) {
    kept.push_back(parameter.detach().clone());
    parameter.copy_(parameter.grad());
  }
  std::map<std::string, torch::Tensor> gradients;
  for (const auto& [name, whole] : whole_parameters(*block)) gradients[name] = whole.clone();
  size_t next = 0;
  for (auto& parameter : block->parameters()) parameter.copy_(kept[next++]);
  return gradients;
}

void expect_parity(const Dropout& dropout) {
  auto whole = whole_block(dropout);
  const auto given = values({2, kPositions, kWidth});
  const auto coefficients = values({2, kPositions, kWidth}, 8);
  const auto weights = leaves_of(whole);
  const auto x = leaf(given);
  torch::Tensor expected;
  {
    const OwnRandomNumbers numbers(11);
    expected = plain_block(weights, x, dropout);
  }
  (expected * coefficients).sum().backward();
  for (const int ranks : {1, 2, 3, 5}) {
    for (const bool slices : {false, true}) {
      run_ranks(ranks, [&](const Communicator& axis) {
        const OwnRandomNumbers numbers(11);
        TransformerBlock block(whole, axis, slices);
        EXPECT_EQ(block->own_heads(), kHeads / ranks + (axis.rank() < kHeads % ranks ? 1 : 0));
        const auto all = leaf(given);
        const auto own = slices ? scatter_to_sequence(all, axis) : all;
        const auto found = block(own);
        const auto part = [&](const torch::Tensor& each) {
          return slices ? own_slice(each, axis, 1) : each;
        };
        expect_close(found.detach(), part(expected).detach(), "output");
        (found * part(coefficients)).sum().backward();
        expect_close(all.grad(), x.grad(), "input's gradient");
        for (const auto& [name, gradient] : whole_gradients(block)) {
          expect_close(gradient, weights.at(name).grad(), name);
        }
      });
    }
  }
}

TEST(TransformerBlock, OutputAndGradientsAreThoseOfAPlainOne) {
  expect_parity({});
}

TEST(TransformerBlock, DropoutDrawsTheMasksOfOneDevice) {
  expect_parity({.branch = 0.2});
  expect_parity({.attention = 0.2});
  expect_parity({.branch = 0.1, .attention = 0.3});
}

TEST(TransformerBlock, ABranchIsAddedByTheNextNorm) {
  auto first = whole_block({}, torch::kFloat64, 1);
  auto second = whole_block({}, torch::kFloat64, 50);
  const auto x = values({2, 7, kWidth});
  const auto [stream, branch] = first->forward_branch(x, {});
  const auto [last, added] = second->forward_branch(stream, branch);
  expect_close((last + added).detach(), second(first(x)).detach(), "two blocks");
}

TEST(TransformerBlock, DecodesPositionByPosition) {
  auto whole = whole_block({.branch = 0.1});
  whole->eval();
  const auto x = values({2, 9, kWidth});
  const auto expected = whole(x).detach();
  for (const int ranks : {1, 2}) {
    run_ranks(ranks, [&](const Communicator& axis) {
      TransformerBlock block(whole, axis);
      block->eval();
      KeyValueCache cache;
      std::vector<torch::Tensor> outputs = {block->decode(x.narrow(1, 0, 4), cache)};
      for (int64_t i = 4; i < 9; ++i) outputs.push_back(block->decode(x.narrow(1, i, 1), cache));
      EXPECT_EQ(cache.positions(), 9);
      expect_close(torch::cat(outputs, 1), expected, "outputs");
    });
  }
  run_ranks(2, [&](const Communicator& axis) {
    TransformerBlock block(whole, axis, /*sequence_parallel=*/true);
    KeyValueCache cache;
    expect_error(Code::kUsage, {"cannot decode"}, [&] { block->decode(x, cache); });
  });
}

TEST(TransformerBlock, RefusesSizesThatDoNotFit) {
  expect_error(Code::kUsage, {"width 10", "3 heads"},
               [] { TransformerBlock(TransformerBlockOptions{.width = 10, .heads = 3}); });
  run_ranks(6, [](const Communicator& axis) {
    expect_error(Code::kTensorMismatch, {"in units of 4", "6 ranks", "at most 5"},
                 [&] { TransformerBlock(whole_block(), axis); });
  });
  run_ranks(2, [](const Communicator& axis) {
    const TransformerBlock divided(whole_block(), axis);
    expect_error(Code::kTensorMismatch, {"already divided over 2 ranks"},
                 [&] { TransformerBlock(divided, axis); });
  });
}

TEST(TransformerBlock, AutocastStaysNearFloat32) {
  auto whole = whole_block({}, torch::kFloat32);
  const auto x = values({2, kPositions, kWidth}).to(torch::kFloat32);
  const auto expected = whole(x).detach();
  for (const int ranks : {1, 2}) {
    run_ranks(ranks, [&](const Communicator& axis) {
      TransformerBlock block(whole, axis, /*sequence_parallel=*/true);
      const Autocast amp(torch::kCPU, torch::kBFloat16);
      const auto found = block(ranks == 1 ? x : own_slice(x, axis, 1));
      EXPECT_TRUE(torch::allclose(found.to(torch::kFloat32),
                                  ranks == 1 ? expected : own_slice(expected, axis, 1), 0.1, 0.1));
    });
  }
}

// Two data ranks beside two tensor ranks; DDP's hooks run while backward communicates.
TEST(TransformerBlock, TrainsUnderDdpAsOneProcess) {
  const auto given = values({4, kPositions, kWidth});
  const auto train = [](auto& net, const std::vector<torch::Tensor>& parameters,
                        const torch::Tensor& x, double scale) {
    AdamW optimizer(parameters, {.lr = 0.01});
    for (int step = 0; step < 4; ++step) {
      (net(x).pow(2).mean() * scale).backward();
      optimizer.step({.max_norm = 0.1, .zero_grad = true});
    }
  };
  auto single = whole_block();
  train(single, single->parameters(), given, 1);
  for (const bool slices : {false, true}) {
    run_ranks(4, [&](const Communicator& world) {
      const Mesh mesh(world, {{"dp", 2}, {"tp", 2}});
      const auto& tp = mesh.axis("tp");
      TransformerBlock block(whole_block(), tp, slices);
      DistributedDataParallel ddp(block, mesh.axis("dp"));
      auto x = own_slice(given, mesh.axis("dp"), 0);
      if (slices) x = own_slice(x, tp, 1);
      // The mean over a slice counts for its share of the positions.
      train(ddp, block->parameters(), x, slices ? 1.0 / tp.size() : 1.0);
      for (const auto& [name, whole] : whole_parameters(*block)) {
        // Keys' biases have no gradient but rounding, which AdamW makes larger.
        EXPECT_TRUE(torch::allclose(whole, whole_parameters(*single).at(name), 1e-9, 1e-9)) << name;
      }
    });
  }
}

// Stages over ranks, each divided over tensor ranks; a schedule that splits backwards, and one that
// recomputes with dropout.
TEST(TransformerBlock, TrainsInAPipelineAsOneProcess) {
  const auto given = values({4, kPositions, kWidth});
  auto first = whole_block({}, torch::kFloat64, 1);
  auto second = whole_block({}, torch::kFloat64, 50);
  torch::nn::Sequential single(whole_block({}, torch::kFloat64, 1),
                               whole_block({}, torch::kFloat64, 50));
  Sgd optimizer(single->parameters(), {.lr = 0.1});
  std::vector<double> losses;
  for (int step = 0; step < 3; ++step) {
    const auto loss = single->forward(given).pow(2).mean();
    loss.backward();
    losses.push_back(loss.item<double>());
    optimizer.step({.max_norm = 0.1, .zero_grad = true});
  }
  for (const bool zero_bubble_schedule : {false, true}) {
    run_ranks(4, [&](const Communicator& world) {
      const Mesh mesh(world, {{"pp", 2}, {"tp", 2}});
      const auto& tp = mesh.axis("tp");
      Devices devices("cpu:1");
      std::vector<torch::nn::Sequential> stages = {
          torch::nn::Sequential(TransformerBlock(first, tp, true)),
          torch::nn::Sequential(TransformerBlock(second, tp, true))};
      const auto schedule = zero_bubble_schedule ? zero_bubble(2, 2) : one_f_one_b(2, 2);
      PipelineOptions options{.loss = [&](auto& out, auto&) { return out.pow(2).mean() / 2; }};
      if (!zero_bubble_schedule) options.recompute = {0, 1};
      Pipeline pipeline(stages, mesh.axis("pp"), devices[0], schedule, options);
      Sgd own(pipeline.parameters(), {.lr = 0.1});
      const auto x = own_slice(given, tp, 1);
      for (const double expected : losses) {
        const auto loss = pipeline.step(x, x);
        tp.all_reduce(loss);
        EXPECT_NEAR(loss.item<double>(), expected, 1e-6 * expected);  // a step's loss is float32
        own.step({.max_norm = 0.1, .zero_grad = true});
      }
    });
  }
}

TEST(TransformerBlock, CheckpointsLoadOnOtherNumbersOfRanks) {
  const auto folder =
      (std::filesystem::temp_directory_path() / "lockstep-transformer-block-test").string();
  std::filesystem::remove_all(folder);
  auto trained = whole_block({}, torch::kFloat64, 77);
  run_ranks(2, [&](const Communicator& axis) {
    TransformerBlock block(trained, axis);
    Checkpoint checkpoint(folder, axis);
    checkpoint.add("model", *block);
    checkpoint.save(5);
    checkpoint.finish();
  });
  for (const int ranks : {1, 3}) {
    run_ranks(ranks, [&](const Communicator& axis) {
      TransformerBlock block(whole_block(), axis, /*sequence_parallel=*/true);
      Checkpoint checkpoint(folder, axis);
      checkpoint.add("model", *block);
      EXPECT_EQ(checkpoint.resume(), 5);
      for (const auto& [name, whole] : whole_parameters(*block)) {
        EXPECT_TRUE(torch::equal(whole, whole_parameters(*trained).at(name))) << name;
      }
    });
  }
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace lockstep::test::transformer_block_test
