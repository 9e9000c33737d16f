// ColumnLinear and RowLinear compute the numbers of the whole Linear on one device.

#include "lockstep/tensor_parallel.hpp"

#include <sstream>

#include "lockstep/autocast.hpp"
#include "rank_threads.hpp"

namespace lockstep::test::tensor_parallel_test {
namespace {

using torch::autograd::grad;

torch::nn::Linear whole_linear(int64_t in, int64_t out, bool bias = true) {
  torch::manual_seed(in * 100 + out);
  torch::nn::Linear linear(torch::nn::LinearOptions(in, out).bias(bias));
  linear->to(torch::kFloat64);
  return linear;
}

torch::Tensor rows(torch::IntArrayRef sizes) {
  return torch::randn(sizes, at::detail::createCPUGenerator(7), torch::kFloat64);
}

torch::Tensor own(const torch::Tensor& whole, const Communicator& axis, int64_t dim) {
  return torch::tensor_split(whole, axis.size(), dim)[static_cast<size_t>(axis.rank())];
}

torch::Tensor leaf(const torch::Tensor& values) {
  return values.detach().clone().requires_grad_();
}

// A layer's output for x, and the gradients if the output's gradient is `coefficients`.
struct Passed {
  torch::Tensor output, x, weight, bias;
};

template <class Layer>
Passed pass(Layer& layer, const torch::Tensor& values, const torch::Tensor& coefficients) {
  layer->zero_grad();
  const auto x = leaf(values);
  const auto output = layer->forward(x);
  (output * coefficients).sum().backward();
  return {output.detach(), x.grad(), layer->weight.grad(),
          layer->bias.defined() ? layer->bias.grad() : torch::Tensor()};
}

struct Case {
  int ranks;
  int64_t in, out;
  std::vector<int64_t> leading;  // dimensions before the features
  bool bias;
};

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {1, 6, 4, {5}, true},  {2, 6, 4, {5}, true},    {3, 6, 9, {5}, true}, {2, 6, 4, {2, 3}, true},
      {2, 6, 4, {5}, false}, {3, 7, 5, {2, 3}, true}, {3, 3, 3, {}, true},  {2, 6, 4, {1}, false}};
  return all;
}

torch::Tensor of_case(const Case& each, int64_t features) {
  auto sizes = each.leading;
  sizes.push_back(features);
  return rows(sizes);
}

TEST(ColumnLinear, OutputAndGradientsAreThoseOfTheWhole) {
  for (const auto& each : cases()) {
    auto whole = whole_linear(each.in, each.out, each.bias);
    const auto x = of_case(each, each.in);
    const auto coefficients = of_case(each, each.out);
    const auto expected = pass(whole, x, coefficients);
    run_ranks(each.ranks, [&](const Communicator& axis) {
      for (const bool gather : {false, true}) {
        ColumnLinear layer(whole, axis, {.gather_output = gather});
        const auto found = pass(layer, x, gather ? coefficients : own(coefficients, axis, -1));
        expect_close(found.output, gather ? expected.output : own(expected.output, axis, -1),
                     "output");
        expect_close(found.x, expected.x, "input's gradient");
        expect_close(found.weight, own(expected.weight, axis, 0), "weight's gradient");
        if (each.bias) expect_close(found.bias, own(expected.bias, axis, 0), "bias's gradient");
        EXPECT_TRUE(torch::equal(layer->whole_weight(), whole->weight));
        EXPECT_EQ(layer->whole_bias().defined(), each.bias);
        if (each.bias) {
          EXPECT_TRUE(torch::equal(layer->whole_bias(), whole->bias));
        }
      }
    });
  }
}

TEST(RowLinear, OutputAndGradientsAreThoseOfTheWhole) {
  for (const auto& each : cases()) {
    auto whole = whole_linear(each.in, each.out, each.bias);
    const auto x = of_case(each, each.in);
    const auto coefficients = of_case(each, each.out);
    const auto expected = pass(whole, x, coefficients);
    run_ranks(each.ranks, [&](const Communicator& axis) {
      for (const bool scatter : {false, true}) {
        RowLinear layer(whole, axis, {.scatter_input = scatter});
        const auto found = pass(layer, scatter ? x : own(x, axis, -1), coefficients);
        expect_close(found.output, expected.output, "output");
        expect_close(found.x, scatter ? expected.x : own(expected.x, axis, -1), "input's gradient");
        expect_close(found.weight, own(expected.weight, axis, 1), "weight's gradient");
        if (each.bias) expect_close(found.bias, expected.bias, "bias's gradient");
        EXPECT_TRUE(torch::equal(layer->whole_weight(), whole->weight));
        if (each.bias) {
          EXPECT_TRUE(torch::equal(layer->whole_bias(), whole->bias));
        }
      }
    });
  }
}

// Fused q, k, v: a rank has its heads of each.
TEST(ColumnLinear, DividesEveryPartOfItsOutput) {
  for (const int ranks : {1, 2, 3}) {
    auto whole = whole_linear(5, 3 * 4);  // over 3 ranks a part is 2, 1, 1
    const auto x = rows({6, 5});
    const auto coefficients = rows({6, 12});
    const auto expected = pass(whole, x, coefficients);
    const auto own_of_parts = [](const torch::Tensor& all, const Communicator& axis, int64_t dim) {
      std::vector<torch::Tensor> pieces;
      for (const auto& part : all.chunk(3, dim)) pieces.push_back(own(part, axis, dim));
      return torch::cat(pieces, dim);
    };
    run_ranks(ranks, [&](const Communicator& axis) {
      ColumnLinear layer(whole, axis, {.parts = 3});
      const auto found = pass(layer, x, own_of_parts(coefficients, axis, 1));
      expect_close(found.output, own_of_parts(expected.output, axis, 1), "output");
      expect_close(found.x, expected.x, "input's gradient");
      expect_close(found.weight, own_of_parts(expected.weight, axis, 0), "weight's gradient");
      EXPECT_TRUE(torch::equal(layer->whole_weight(), whole->weight));
      EXPECT_TRUE(torch::equal(layer->whole_bias(), whole->bias));
      ColumnLinear gathered(whole, axis, {.gather_output = true, .parts = 3});
      const auto all = pass(gathered, x, coefficients);
      expect_close(all.output, expected.output, "gathered output");
      expect_close(all.weight, own_of_parts(expected.weight, axis, 0), "weight's gradient");
    });
  }
}

TEST(TensorParallel, APairTrainsAsOneDevice) {
  const auto x = rows({8, 6});
  const auto y = rows({8, 4}).roll(1, 0);
  const auto train = [&](torch::nn::Sequential& net) {
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
    for (int step = 0; step < 10; ++step) {
      net->zero_grad();
      torch::mse_loss(net->forward(x), y).backward();
      optimizer.step();
    }
  };
  for (const int ranks : {1, 2, 3}) {
    const auto up = whole_linear(6, 12);
    const auto down = whole_linear(12, 4);
    const auto expected_up = whole_linear(6, 12);
    const auto expected_down = whole_linear(12, 4);
    torch::nn::Sequential single(expected_up, torch::nn::ReLU(), expected_down);
    train(single);
    EXPECT_FALSE(torch::allclose(expected_down->weight, down->weight));
    run_ranks(ranks, [&](const Communicator& axis) {
      const ColumnLinear column(up, axis);
      const RowLinear row(down, axis);
      torch::nn::Sequential net(column, torch::nn::ReLU(), row);
      train(net);
      expect_close(column->whole_weight(), expected_up->weight, "first weight");
      expect_close(column->whole_bias(), expected_up->bias, "first bias");
      expect_close(row->whole_weight(), expected_down->weight, "second weight");
      expect_close(row->whole_bias(), expected_down->bias, "second bias");
    });
  }
}

// As in zero-bubble schedules: the input's gradient first, those of the weights later.
TEST(TensorParallel, InputAndWeightGradientsMayBeAskedForApart) {
  auto up = whole_linear(6, 4);
  auto down = whole_linear(4, 3);
  const auto values = rows({5, 6});
  const auto x = leaf(values);
  const auto expected =
      grad({down(torch::relu(up(x))).sum()}, {x, up->weight, down->weight}, {}, true);
  run_ranks(2, [&](const Communicator& axis) {
    ColumnLinear column(up, axis);
    RowLinear row(down, axis);
    const auto given = leaf(values);
    const auto loss = row(torch::relu(column(given))).sum();
    EXPECT_EQ(axis.stats().all_reduces, 1);
    const auto input = grad({loss}, {given}, {}, /*retain_graph=*/true);
    EXPECT_EQ(axis.stats().all_reduces, 2);
    expect_close(input[0], expected[0], "input's gradient");
    const auto weights = grad({loss}, {column->weight, row->weight});
    EXPECT_EQ(axis.stats().all_reduces, 2) << "the first layer's weights need no sum";
    expect_close(weights[0], own(expected[1], axis, 0), "first weight's gradient");
    expect_close(weights[1], own(expected[2], axis, 1), "second weight's gradient");
  });
}

TEST(TensorParallel, ForwardMayRunTwiceForOneBackward) {
  auto up = whole_linear(6, 4);
  auto down = whole_linear(4, 3);
  const auto values = rows({5, 6});
  const auto x = leaf(values);
  const auto expected = down(torch::relu(up(x)));
  const auto gradient = grad({expected.sum()}, {x})[0];
  run_ranks(2, [&](const Communicator& axis) {
    ColumnLinear column(up, axis);
    RowLinear row(down, axis);
    const auto given = leaf(values);
    {
      const torch::NoGradGuard no_grad;
      const auto first = row(torch::relu(column(given)));
      expect_close(first, expected, "output without gradients");
      EXPECT_FALSE(first.requires_grad());
      EXPECT_EQ(first.grad_fn(), nullptr);
    }
    const auto again = row(torch::relu(column(given)));
    expect_close(grad({again.sum()}, {given})[0], gradient, "gradient of the second forward");
  });
}

TEST(TensorParallel, TakesTensorsThatAreNotContiguous) {
  auto up = whole_linear(6, 4);
  auto down = whole_linear(4, 3);
  const auto x = rows({6, 5}).t();
  const auto coefficients = rows({3, 5}).t();
  const auto expected = pass(down, up(x).detach(), coefficients);
  run_ranks(2, [&](const Communicator& axis) {
    ColumnLinear column(up, axis);
    RowLinear row(down, axis, {.scatter_input = true});
    const auto hidden = up(x).detach().t().contiguous().t();
    const auto found = pass(row, hidden, coefficients);
    expect_close(found.output, expected.output, "output");
    expect_close(found.x, expected.x, "input's gradient");
    // An expanded gradient has no memory of its own: it must not be summed in place.
    const auto given = leaf(x);
    column(given).sum().backward();
    expect_close(given.grad(), up->weight.sum(0).expand({5, 6}), "gradient of a sum");
  });
}

TEST(TensorParallel, SaysAsMuchAsItsFormulas) {
  auto up = whole_linear(6, 4);
  auto down = whole_linear(4, 3);
  constexpr int64_t kRows = 5;
  constexpr int64_t kBytes = 8;
  run_ranks(2, [&](const Communicator& axis) {
    ColumnLinear column(up, axis);
    RowLinear row(down, axis);
    const auto data = torch::ones({kRows, 6}, torch::kFloat64);
    row(torch::relu(column(data))).sum().backward();
    EXPECT_EQ(axis.stats().calls, 1) << "data needs no gradient, so that backward sums nothing";
    EXPECT_EQ(axis.stats().all_reduce_bytes, kRows * 3 * kBytes);
    row(torch::relu(column(leaf(data)))).sum().backward();
    EXPECT_EQ(axis.stats().calls, 3);
    EXPECT_EQ(axis.stats().all_reduce_bytes, (kRows * 3 * 2 + kRows * 6) * kBytes);
  });
  const auto alone = Communicator::self();
  ColumnLinear column(up, alone, {.gather_output = true});
  RowLinear row(down, alone, {.scatter_input = true});
  const auto x = leaf(rows({kRows, 6}));
  const auto output = row(column(x));
  EXPECT_TRUE(torch::equal(output, down(up(x)))) << "one rank is the plain Linear, to the bit";
  output.sum().backward();
  EXPECT_EQ(alone.stats().calls, 0);
}

TEST(TensorParallel, FrozenWeightsStayFrozen) {
  auto whole = whole_linear(6, 4);
  whole->weight.set_requires_grad(false);
  run_ranks(2, [&](const Communicator& axis) {
    ColumnLinear column(whole, axis);
    EXPECT_FALSE(column->weight.requires_grad());
    EXPECT_TRUE(column->bias.requires_grad());
    const auto x = leaf(rows({5, 6}));
    column(x).sum().backward();
    expect_close(x.grad(), whole->weight.sum(0).expand({5, 6}), "input's gradient");
    EXPECT_FALSE(column->weight.grad().defined());
  });
}

TEST(TensorParallel, AutocastGivesTheLowerPrecisionOfAPlainLinear) {
  auto up = whole_linear(32, 16);
  auto down = whole_linear(16, 8);
  up->to(torch::kFloat32);
  down->to(torch::kFloat32);
  const auto values = rows({12, 32}).to(torch::kFloat32);
  const auto x = leaf(values);
  torch::Tensor expected;
  {
    const Autocast amp(torch::kCPU, torch::kBFloat16);
    expected = down(torch::relu(up(x)));
  }
  expected.sum().backward();
  run_ranks(2, [&](const Communicator& axis) {
    ColumnLinear column(up, axis);
    RowLinear row(down, axis);
    const auto given = leaf(values);
    torch::Tensor output;
    {
      const Autocast amp(torch::kCPU, torch::kBFloat16);
      output = row(torch::relu(column(given)));
    }
    EXPECT_EQ(output.scalar_type(), expected.scalar_type());
    EXPECT_EQ(output.scalar_type(), torch::kBFloat16);
    EXPECT_TRUE(torch::allclose(output, expected, 0.02, 0.02));
    output.sum().backward();
    EXPECT_EQ(given.grad().scalar_type(), torch::kFloat32);
    EXPECT_TRUE(torch::allclose(given.grad(), x.grad(), 0.02, 0.02));
    EXPECT_EQ(row->bias.grad().scalar_type(), torch::kFloat32);
    EXPECT_TRUE(torch::allclose(row->bias.grad(), down->bias.grad(), 0.02, 0.02));
  });
}

// Two stages of one process: their threads make calls in any order.
TEST(TensorParallel, PartsThatRunAtTheSameTimeGetAnAxisEach) {
  auto up = whole_linear(6, 4);
  auto down = whole_linear(4, 3);
  const auto expected = down(torch::relu(up(rows({5, 6})))).detach();
  const auto x = rows({5, 6});
  run_ranks(2, [&](const Communicator& axis) {
    std::vector<torch::nn::Sequential> parts;
    for (int i = 0; i < 2; ++i) {
      parts.emplace_back(ColumnLinear(up, axis), torch::nn::ReLU(), RowLinear(down, axis));
      set_tensor_axis(*parts.back(), axis.split(0, axis.rank(), "part"));
    }
    const auto calls = axis.stats().calls;
    std::vector<std::thread> threads;
    for (auto& part : parts) {
      threads.emplace_back([&, part]() mutable {
        for (int i = 0; i < 50; ++i) {
          const auto output = part->forward(leaf(x));
          output.sum().backward();
          expect_close(output.detach(), expected, "output");
        }
      });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(axis.stats().calls, calls) << "nobody uses the first axis any more";
  });
}

TEST(TensorParallel, PrintsWhatARankHas) {
  run_ranks(2, [](const Communicator& axis) {
    std::ostringstream text;
    text << *ColumnLinear(torch::nn::Linear(6, 4), axis) << "\n"
         << *RowLinear(torch::nn::Linear(4, 3), axis);
    EXPECT_EQ(text.str(),
              "lockstep::ColumnLinear(in_features=6, out_features=2 of 4, bias=true)\n"
              "lockstep::RowLinear(in_features=2 of 4, out_features=3, bias=true)");
  });
}

TEST(TensorParallel, RefusesWhatCannotBeDivided) {
  run_ranks(3, [](const Communicator& axis) {
    expect_error(Code::kTensorMismatch, {"2 output features of ColumnLinear", "3 ranks", "2 ranks"},
                 [&] { ColumnLinear(torch::nn::Linear(6, 2), axis); });
    expect_error(Code::kTensorMismatch, {"6 output features", "in 3 parts", "3 ranks"},
                 [&] { ColumnLinear(torch::nn::Linear(6, 6), axis, {.parts = 3}); });
    expect_error(Code::kTensorMismatch, {"8 output features", "3 equal parts"},
                 [&] { ColumnLinear(torch::nn::Linear(6, 8), axis, {.parts = 3}); });
    expect_error(Code::kTensorMismatch, {"0 equal parts"},
                 [&] { ColumnLinear(torch::nn::Linear(6, 8), axis, {.parts = 0}); });
    expect_error(Code::kTensorMismatch, {"1 input features of RowLinear", "3 ranks"},
                 [&] { RowLinear(torch::nn::Linear(1, 6), axis); });
    expect_error(Code::kTensorMismatch, {"of 3", "rank 0 of 1"}, [&] {
      set_tensor_axis(*RowLinear(torch::nn::Linear(3, 6), axis), Communicator::self());
    });
  });
}

TEST(TensorParallel, RefusesInputsThatDoNotFit) {
  run_ranks(2, [](const Communicator& axis) {
    ColumnLinear column(torch::nn::Linear(6, 4), axis);
    RowLinear row(torch::nn::Linear(4, 3), axis);
    RowLinear scattering(torch::nn::Linear(4, 3), axis, {.scatter_input = true});
    expect_error(Code::kTensorMismatch, {"ColumnLinear", "6 input features", "given 3"}, [&] {
      column(torch::ones({5, 3}));
    });
    expect_error(Code::kTensorMismatch, {"RowLinear", "takes 2", "given 4", "scatter_input"}, [&] {
      row(torch::ones({5, 4}));
    });
    expect_error(Code::kTensorMismatch, {"RowLinear", "takes 4", "given 2"}, [&] {
      scattering(torch::ones({5, 2}));
    });
    EXPECT_EQ(axis.stats().calls, 0) << "found before anybody waits";
  });
}

TEST(TensorParallel, RefusesASecondDerivative) {
  auto whole = whole_linear(6, 4);
  run_ranks(2, [&](const Communicator& axis) {
    ColumnLinear column(whole, axis);
    const auto x = leaf(rows({5, 6}));
    const auto loss = column(x).pow(2).sum();
    expect_error(Code::kEngine, {"differentiated twice"},
                 [&] { grad({loss}, {x}, {}, true, /*create_graph=*/true); });
  });
}

TEST(TensorParallel, RanksWithOtherRowsAreNamedAndNobodyHangs) {
  auto whole = whole_linear(4, 3);
  const auto outcomes = outcomes_of_ranks(2, [&](const Communicator& axis) {
    RowLinear row(whole, axis);
    row(torch::ones({axis.rank() + 5, 2}, torch::kFloat64));
  });
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.code(), Code::kCallMismatch) << outcome.text();
    EXPECT_NE(outcome.text().find("tp row forward"), std::string::npos) << outcome.text();
  }
}

}  // namespace
}  // namespace lockstep::test::tensor_parallel_test
