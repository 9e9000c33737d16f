// Slices of a sequence over a tensor axis compute the numbers of the whole sequence on one device.

#include "lockstep/sequence_parallel.hpp"

#include "lockstep/autocast.hpp"
#include "lockstep/grad_scaler.hpp"
#include "lockstep/optim.hpp"
#include "models/model_support.hpp"

namespace lockstep::test::sequence_parallel_test {
namespace {

constexpr int64_t kPositions = 30;  // of 1, 2, 3 and 5 ranks
constexpr int64_t kWidth = 6;

// x + down(gelu(up(norm(x)))), as the rest of a block is.
struct Whole {
  Whole()
      : norm(torch::nn::LayerNormOptions({kWidth})),
        up(kWidth, 10),
        down(torch::nn::LinearOptions(10, kWidth)) {
    torch::manual_seed(3);
    for (auto* linear : {&up, &down}) {
      torch::nn::init::normal_((*linear)->weight);
      torch::nn::init::normal_((*linear)->bias);
    }
    torch::nn::init::normal_(norm->weight);
    norm->to(torch::kFloat64);
    up->to(torch::kFloat64);
    down->to(torch::kFloat64);
  }
  torch::Tensor forward(const torch::Tensor& x) { return x + down(torch::gelu(up(norm(x)))); }
  torch::nn::LayerNorm norm;
  torch::nn::Linear up, down;
};

struct Divided {
  Divided(const Whole& whole, const Communicator& axis)
      : norm(whole.norm, axis),
        up(whole.up, axis, {.sequence_parallel = true}),
        down(whole.down, axis, {.sequence_parallel = true}) {}
  torch::Tensor forward(const torch::Tensor& own) { return own + down(torch::gelu(up(norm(own)))); }
  std::vector<torch::Tensor> parameters() {
    return {norm->weight, norm->bias, up->weight, up->bias, down->weight, down->bias};
  }
  ParallelLayerNorm norm;
  ColumnLinear up;
  RowLinear down;
};

torch::Tensor own_features(const torch::Tensor& whole, const Communicator& axis, int64_t dim) {
  return torch::tensor_split(whole, axis.size(), dim)[static_cast<size_t>(axis.rank())];
}

TEST(SequenceParallel, OutputAndGradientsAreThoseOfTheWhole) {
  for (const auto& leading : std::vector<std::vector<int64_t>>{{}, {1}, {4}, {2, 3}}) {
    auto sizes = leading;
    sizes.insert(sizes.end(), {kPositions, kWidth});
    const auto given = values(sizes);
    const auto coefficients = values(sizes, 8);
    Whole whole;
    const auto x = leaf(given);
    const auto expected = whole.forward(x);
    (expected * coefficients).sum().backward();
    for (const int ranks : {1, 2, 3, 5}) {
      run_ranks(ranks, [&](const Communicator& axis) {
        Divided net(whole, axis);
        const auto all = leaf(given);
        const auto found = net.forward(scatter_to_sequence(all, axis));
        expect_close(found.detach(), own_slice(expected.detach(), axis, -2), "output");
        (found * own_slice(coefficients, axis, -2)).sum().backward();
        expect_close(all.grad(), x.grad(), "input's gradient");
        expect_close(net.norm->weight.grad(), whole.norm->weight.grad(), "norm's weight");
        expect_close(net.norm->bias.grad(), whole.norm->bias.grad(), "norm's bias");
        expect_close(net.up->weight.grad(), own_features(whole.up->weight.grad(), axis, 0), "up");
        expect_close(net.up->bias.grad(), own_features(whole.up->bias.grad(), axis, 0), "bias");
        expect_close(net.down->weight.grad(), own_features(whole.down->weight.grad(), axis, 1),
                     "down");
        expect_close(net.down->bias.grad(), whole.down->bias.grad(), "row-parallel bias");
        expect_same_on_all(axis, net.norm->weight.grad(), "norm's weight gradient");
        expect_same_on_all(axis, net.down->bias.grad(), "row-parallel bias gradient");
      });
    }
  }
}

TEST(SequenceParallel, WhatFollowsAGatherIsComputedAlike) {
  const auto given = values({2, kPositions, kWidth});
  const auto coefficients = values({2, kPositions, kWidth}, 8);
  for (const int ranks : {1, 2, 5}) {
    run_ranks(ranks, [&](const Communicator& axis) {
      const auto own = leaf(own_slice(given, axis, 1));
      const auto all = gather_from_sequence(own, axis);
      EXPECT_TRUE(torch::equal(all.detach(), given));
      (all.pow(2) * coefficients).sum().backward();
      expect_close(own.grad(), own_slice(2 * given * coefficients, axis, 1), "gradient");
    });
  }
}

// The norm of the whole model counts a weight that all ranks have once, and every slice.
TEST(SequenceParallel, IsClippedByTheNormOfTheWhole) {
  const auto given = values({2, kPositions, kWidth});
  Whole whole;
  const Whole untouched;
  const auto train = [&](auto& optimizer, auto&& loss) {
    torch::Tensor norm;
    for (int step = 0; step < 3; ++step) {
      loss().backward();
      norm = optimizer.step({.max_norm = 0.5, .zero_grad = true});
    }
    return norm.template item<double>();
  };
  Sgd single({whole.norm->weight, whole.norm->bias, whole.up->weight, whole.up->bias,
              whole.down->weight, whole.down->bias},
             {.lr = 0.1});
  const double expected = train(single, [&] { return whole.forward(given).pow(2).sum(); });
  EXPECT_GT(expected, 0.5);
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [&](const Communicator& axis) {
      Divided net(untouched, axis);
      Sgd optimizer(net.parameters(), {.lr = 0.1});
      const auto own = own_slice(given, axis, 1);
      const double norm = train(optimizer, [&] { return net.forward(own).pow(2).sum(); });
      EXPECT_NEAR(norm, expected, 1e-9 * expected);
      expect_close(net.norm->weight.detach(), whole.norm->weight.detach(), "norm");
      expect_close(net.down->whole_weight(), whole.down->weight, "down");
      expect_close(net.down->bias.detach(), whole.down->bias.detach(), "bias");
    });
  }
}

// A slice of the sequence costs as much communication as tensor parallelism alone.
TEST(SequenceParallel, CallsAreThoseOfTheTable) {
  const Whole whole;
  run_ranks(2, [&](const Communicator& axis) {
    Divided net(whole, axis);
    const auto own = leaf(own_slice(values({1, kPositions, kWidth}), axis, 1));
    const auto out = net.forward(own);
    EXPECT_EQ(axis.stats().calls, 2) << "an all-gather and a reduce-scatter";
    EXPECT_EQ(axis.stats().all_reduces, 0);
    out.sum().backward();
    EXPECT_EQ(axis.stats().calls, 6) << "the same, and the norm's and the bias's gradients";
    EXPECT_EQ(axis.stats().all_reduces, 2);
  });
}

TEST(SequenceParallel, AutocastReducesInTheLowerPrecision) {
  Whole whole;
  whole.norm->to(torch::kFloat32);
  whole.up->to(torch::kFloat32);
  whole.down->to(torch::kFloat32);
  const auto given = values({2, kPositions, kWidth}).to(torch::kFloat32);
  torch::Tensor expected;
  {
    const Autocast amp(torch::kCPU, torch::kBFloat16);
    expected = whole.forward(given);
  }
  expected.sum().backward();
  run_ranks(2, [&](const Communicator& axis) {
    Divided net(whole, axis);
    torch::Tensor found;
    {
      const Autocast amp(torch::kCPU, torch::kBFloat16);
      found = net.forward(own_slice(given, axis, 1));
    }
    EXPECT_TRUE(torch::allclose(found, own_slice(expected, axis, 1), 0.05, 0.05));
    found.sum().backward();
    EXPECT_EQ(net.norm->weight.grad().scalar_type(), torch::kFloat32);
    EXPECT_TRUE(torch::allclose(net.norm->weight.grad(), whole.norm->weight.grad(), 0.05, 0.5));
    EXPECT_TRUE(torch::allclose(net.down->bias.grad(), whole.down->bias.grad(), 0.05, 0.5));
  });
}

TEST(SequenceParallel, RefusesWhatCannotBeDivided) {
  const Whole whole;
  run_ranks(2, [&](const Communicator& axis) {
    expect_error(Code::kTensorMismatch, {"7 positions", "2 ranks", "pad sequences", "to 8"}, [&] {
      scatter_to_sequence(values({3, 7, kWidth}), axis);
    });
    expect_error(Code::kTensorMismatch, {"[6]", "no dimension of positions"},
                 [&] { scatter_to_sequence(values({6}), axis); });
    RowLinear row(whole.down, axis, {.sequence_parallel = true});
    expect_error(Code::kTensorMismatch, {"RowLinear", "7 positions"}, [&] {
      row(values({3, 7, 5}));
    });
    expect_error(Code::kUsage, {"ColumnLinear", "gather_output", "sequence_parallel"}, [&] {
      ColumnLinear(whole.up, axis, {.gather_output = true, .sequence_parallel = true});
    });
    expect_error(Code::kUsage, {"RowLinear", "scatter_input", "sequence_parallel"}, [&] {
      RowLinear(whole.down, axis, {.scatter_input = true, .sequence_parallel = true});
    });
    EXPECT_EQ(axis.stats().calls, 0) << "found before anybody waits";
  });
}

TEST(SequenceParallel, SlicesOfDifferentLengthsAreNamedAndNobodyHangs) {
  const Whole whole;
  const auto outcomes = outcomes_of_ranks(2, [&](const Communicator& axis) {
    ColumnLinear column(whole.up, axis, {.sequence_parallel = true});
    column(values({1, 3 + axis.rank(), kWidth}));
  });
  for (const auto& outcome : outcomes) EXPECT_EQ(outcome.code(), Code::kCallMismatch);
}

TEST(ParallelDropout, MasksAreThoseOfOneDevice) {
  const auto given = values({2, kPositions, kWidth});
  torch::Tensor expected, second;
  {
    const OwnRandomNumbers numbers(5);
    expected = torch::dropout(given, 0.3, true);
    second = torch::dropout(given, 0.3, true);
  }
  EXPECT_FALSE(torch::equal(expected, second));
  for (const int ranks : {1, 2, 3, 5}) {
    for (const bool slices : {false, true}) {
      run_ranks(ranks, [&](const Communicator& axis) {
        const OwnRandomNumbers numbers(5);
        ParallelDropout drop(0.3, axis, slices);
        const auto part = [&](const torch::Tensor& whole) {
          return slices ? own_slice(whole, axis, 1) : whole;
        };
        EXPECT_TRUE(torch::equal(drop(part(given)), part(expected)));
        EXPECT_TRUE(torch::equal(drop(part(given)), part(second)));
        drop->eval();
        EXPECT_TRUE(torch::equal(drop(part(given)), part(given)));
      });
    }
  }
}

TEST(ParallelDropout, RanksThatDrawDifferentlyAreRefused) {
  const auto outcomes = outcomes_of_ranks(3, [](const Communicator& axis) {
    const OwnRandomNumbers numbers(axis.rank() == 2 ? 6 : 5);
    ParallelDropout(0.5, axis)(torch::ones({4, 100}));
  });
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.code(), Code::kTensorMismatch) << outcome.text();
    EXPECT_NE(outcome.text().find("ranks 0 and 2"), std::string::npos) << outcome.text();
  }
  expect_error(Code::kUsage, {"probability 1.5"},
               [] { ParallelDropout(1.5, Communicator::self()); });
}

}  // namespace
}  // namespace lockstep::test::sequence_parallel_test
