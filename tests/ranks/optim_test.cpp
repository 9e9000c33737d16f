// lockstep's optimizers against torch::optim of the same libtorch.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>

#include "lockstep/adamw.hpp"
#include "lockstep/sgd.hpp"
#include "tensor_support.hpp"

namespace lockstep {
namespace {

using test::load;
using test::saved;
using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;
using Tensors = std::vector<torch::Tensor>;

// Odd sizes: shorter than a vector, one more than many, one that several threads share.
Tensors make_parameters(torch::ScalarType dtype = torch::kFloat32, bool large = false) {
  torch::manual_seed(11);
  Tensors parameters;
  for (const int64_t count : {1, 3, 5, 17, 4099}) parameters.push_back(torch::randn({count}));
  parameters.push_back(torch::randn({}));
  parameters.push_back(torch::randn({7, 3, 5, 5}).contiguous(torch::MemoryFormat::ChannelsLast));
  parameters.push_back(torch::randn({13, 6}).t());
  parameters.push_back(torch::randn({0, 4}));
  if (large) parameters.push_back(torch::randn({1000003}));
  for (auto& parameter : parameters) {
    parameter = parameter.detach().to(dtype).requires_grad_(true);
  }
  return parameters;
}

// Gradients of one step, the same for the same step.
void set_gradients(const Tensors& parameters, int step, double scale = 1) {
  torch::manual_seed(1000 + static_cast<uint64_t>(step));
  for (const auto& parameter : parameters) {
    torch::Tensor gradient = torch::empty_like(parameter);
    gradient.copy_(torch::randn(parameter.sizes()) * scale);
    parameter.mutable_grad() = gradient;
  }
}

// Longest difference of any element against the longest weight of its tensor.
void expect_same(const Tensors& actual, const Tensors& expected, double tolerance,
                 const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    if (actual[i].numel() == 0) continue;
    const double difference = (actual[i] - expected[i]).detach().abs().max().item<double>();
    EXPECT_LE(difference, tolerance * expected[i].detach().abs().max().item<double>())
        << what << ", parameter " << i;
  }
}

double tolerance_of(torch::ScalarType dtype) {
  return dtype == torch::kFloat64 ? 1e-14 : 1e-6;
}

struct Pair {
  std::string name;
  std::function<std::unique_ptr<Optimizer>(const Tensors&)> ours;
  std::function<std::unique_ptr<Optimizer>(const Tensors&)> theirs;
};

Pair sgd_pair(const std::string& name, const SgdOptions& options) {
  return {name, [=](const Tensors& p) { return std::make_unique<Sgd>(p, options); },
          [=](const Tensors& p) {
            return std::make_unique<torch::optim::SGD>(p, torch::optim::SGDOptions(options.lr)
                                                              .momentum(options.momentum)
                                                              .dampening(options.dampening)
                                                              .weight_decay(options.weight_decay)
                                                              .nesterov(options.nesterov));
          }};
}

Pair adamw_pair(const std::string& name, const AdamWOptions& options) {
  return {name, [=](const Tensors& p) { return std::make_unique<AdamW>(p, options); },
          [=](const Tensors& p) {
            return std::make_unique<torch::optim::AdamW>(p,
                                                         torch::optim::AdamWOptions(options.lr)
                                                             .betas({options.beta1, options.beta2})
                                                             .eps(options.eps)
                                                             .weight_decay(options.weight_decay));
          }};
}

std::vector<Pair> all_pairs() {
  return {
      sgd_pair("plain", {.lr = 0.01}),
      sgd_pair("decay", {.lr = 0.01, .weight_decay = 0.1}),
      sgd_pair("momentum", {.lr = 0.01, .momentum = 0.9}),
      sgd_pair("dampening", {.lr = 0.01, .momentum = 0.9, .dampening = 0.3, .weight_decay = 0.01}),
      sgd_pair("nesterov", {.lr = 0.01, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true}),
      adamw_pair("adamw", {}),
      adamw_pair("adamw, other numbers",
                 {.lr = 0.02, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0.3}),
      adamw_pair("adamw, no decay", {.lr = 0.01, .weight_decay = 0}),
  };
}

TEST(Optim, HundredStepsEqualTorch) {
  for (const auto dtype : {torch::kFloat32, torch::kFloat64}) {
    for (const Pair& pair : all_pairs()) {
      const Tensors actual = make_parameters(dtype);
      const Tensors expected = make_parameters(dtype);
      const auto ours = pair.ours(actual);
      const auto theirs = pair.theirs(expected);
      for (int step = 0; step < 100; ++step) {
        set_gradients(actual, step);
        set_gradients(expected, step);
        ours->step();
        theirs->step();
      }
      expect_same(actual, expected, tolerance_of(dtype), pair.name);
    }
  }
}

TEST(Optim, BitsDoNotDependOnTheNumberOfThreads) {
  const int threads = at::get_num_threads();
  for (const Pair& pair : all_pairs()) {
    std::vector<Tensors> results;
    for (const int count : {1, 2, 3}) {
      at::set_num_threads(count);
      results.push_back(make_parameters(torch::kFloat32, true));
      const auto optimizer = pair.ours(results.back());
      for (int step = 0; step < 3; ++step) {
        set_gradients(results.back(), step);
        optimizer->step();
      }
    }
    at::set_num_threads(threads);
    for (size_t i = 0; i < results[0].size(); ++i) {
      EXPECT_TRUE(torch::equal(results[0][i], results[1][i])) << pair.name << ' ' << i;
      EXPECT_TRUE(torch::equal(results[0][i], results[2][i])) << pair.name << ' ' << i;
    }
  }
}

TEST(Optim, AMillionWeightsOverSeveralThreadsEqualTorch) {
  for (const Pair& pair : {all_pairs()[4], all_pairs()[5]}) {
    const Tensors actual = make_parameters(torch::kFloat32, true);
    const Tensors expected = make_parameters(torch::kFloat32, true);
    const auto ours = pair.ours(actual);
    const auto theirs = pair.theirs(expected);
    for (int step = 0; step < 10; ++step) {
      set_gradients(actual, step);
      set_gradients(expected, step);
      ours->step();
      theirs->step();
    }
    expect_same(actual, expected, 1e-6, pair.name);
  }
}

TEST(Optim, ATrainedNetEqualsTorchs) {
  for (const Pair& pair : {all_pairs()[4], all_pairs()[5]}) {
    std::vector<double> losses[2];
    for (const bool mine : {true, false}) {
      torch::manual_seed(2);
      torch::nn::Sequential net(torch::nn::Linear(17, 33), torch::nn::Tanh(),
                                torch::nn::Linear(33, 5));
      net->to(torch::kFloat64);
      const auto x = torch::randn({64, 17}, torch::kFloat64);
      const auto y = torch::sin(x.narrow(1, 0, 5));
      const auto optimizer = mine ? pair.ours(net->parameters()) : pair.theirs(net->parameters());
      for (int step = 0; step < 100; ++step) {
        net->zero_grad();
        const auto loss = torch::mse_loss(net->forward(x), y);
        loss.backward();
        optimizer->step();
        losses[mine ? 0 : 1].push_back(loss.item<double>());
      }
    }
    for (size_t i = 0; i < losses[0].size(); ++i) {
      ASSERT_NEAR(losses[0][i], losses[1][i], 1e-10 * losses[1][i]) << pair.name << " step " << i;
    }
    EXPECT_LT(losses[0].back(), losses[0].front()) << pair.name << " did not learn";
  }
}

// Saved by one in the middle, loaded by the other, both ways.
TEST(Optim, StatesMoveBetweenOursAndTorchs) {
  for (const Pair& pair : all_pairs()) {
    for (const bool to_ours : {true, false}) {
      const Tensors moved = make_parameters();
      const Tensors stayed = make_parameters();
      const auto first = to_ours ? pair.theirs(moved) : pair.ours(moved);
      const auto second = to_ours ? pair.ours(moved) : pair.theirs(moved);
      const auto whole = pair.theirs(stayed);
      for (int step = 0; step < 20; ++step) {
        if (step == 10) load(*second, saved(*first));
        set_gradients(moved, step);
        set_gradients(stayed, step);
        (step < 10 ? first : second)->step();
        whole->step();
      }
      expect_same(moved, stayed, 1e-6, pair.name + (to_ours ? " to ours" : " to torch's"));
    }
  }
}

TEST(Optim, ASavedStateIsAsSmallAsTorchs) {
  const Pair pair = adamw_pair("adamw", {});
  const Tensors parameters = make_parameters();
  const auto ours = pair.ours(parameters);
  const auto theirs = pair.theirs(parameters);
  set_gradients(parameters, 0);
  ours->step();
  theirs->step();
  const auto size = static_cast<double>(saved(*theirs).size());
  EXPECT_NEAR(static_cast<double>(saved(*ours).size()), size, 0.05 * size)
      << "the states share an allocation, but not a file record";
}

TEST(Optim, NewStatesShareOneAllocationAndAreAligned) {
  const Tensors parameters = make_parameters();
  AdamW optimizer(parameters);
  set_gradients(parameters, 0);
  optimizer.step();
  uintptr_t least = UINTPTR_MAX;
  uintptr_t most = 0;
  int64_t bytes = 0;
  for (const auto& item : optimizer.state()) {
    const auto& state = static_cast<const torch::optim::AdamWParamState&>(*item.second);
    for (const auto& tensor : {state.exp_avg(), state.exp_avg_sq()}) {
      if (tensor.numel() == 0) continue;
      const auto address = reinterpret_cast<uintptr_t>(tensor.data_ptr());
      EXPECT_EQ(address % 64, 0U);
      least = std::min(least, address);
      most = std::max(most, address + static_cast<size_t>(tensor.numel()) * sizeof(float));
      bytes += (tensor.numel() * 4 + 63) / 64 * 64;
    }
  }
  EXPECT_LE(static_cast<int64_t>(most - least), bytes);
}

TEST(Optim, ParametersWithoutGradientAreLeftAloneAndCountTheirOwnSteps) {
  for (const Pair& pair : {all_pairs()[2], all_pairs()[5]}) {
    const Tensors actual = make_parameters();
    const Tensors expected = make_parameters();
    const auto ours = pair.ours(actual);
    const auto theirs = pair.theirs(expected);
    for (int step = 0; step < 12; ++step) {
      for (const auto& parameters : {actual, expected}) {
        set_gradients(parameters, step);
        if (step % 3 != 0) parameters[1].mutable_grad().reset();
        parameters[3].mutable_grad().reset();
      }
      ours->step();
      theirs->step();
    }
    expect_same(actual, expected, 1e-6, pair.name);
    EXPECT_TRUE(torch::equal(actual[3], make_parameters()[3])) << pair.name;
    EXPECT_EQ(ours->state().size(), theirs->state().size()) << pair.name;
    EXPECT_EQ(ours->state().size(), actual.size() - 1) << pair.name;
  }
}

TEST(Optim, WithoutMomentumThereIsNoState) {
  const Tensors parameters = make_parameters();
  Sgd optimizer(parameters, {.lr = 0.1, .weight_decay = 0.1});
  set_gradients(parameters, 0);
  optimizer.step();
  EXPECT_TRUE(optimizer.state().empty());
}

template <class Options>
std::vector<OptimizerParamGroup> two_groups(const Tensors& parameters, const Options& second) {
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(Tensors(parameters.begin(), parameters.begin() + 3));
  groups.emplace_back(Tensors(parameters.begin() + 3, parameters.end()),
                      std::make_unique<Options>(second));
  return groups;
}

TEST(Optim, GroupsKeepTheirOptionsAndASchedulerChangesThem) {
  const auto second = torch::optim::SGDOptions(0.05).momentum(0.5).nesterov(true);
  const Tensors actual = make_parameters();
  const Tensors expected = make_parameters();
  Sgd ours(two_groups(actual, second), {.lr = 0.1, .momentum = 0.9});
  torch::optim::SGD theirs(two_groups(expected, second),
                           torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::optim::StepLR our_schedule(ours, 3, 0.5);
  torch::optim::StepLR their_schedule(theirs, 3, 0.5);
  for (int step = 0; step < 20; ++step) {
    set_gradients(actual, step);
    set_gradients(expected, step);
    ours.step();
    theirs.step();
    our_schedule.step();
    their_schedule.step();
  }
  expect_same(actual, expected, 1e-6, "sgd");
  EXPECT_LT(ours.param_groups()[1].options().get_lr(), 0.001) << "the schedule did nothing";

  const auto other = torch::optim::AdamWOptions(0.05).betas({0.5, 0.9}).weight_decay(0);
  const Tensors actual_adamw = make_parameters();
  const Tensors expected_adamw = make_parameters();
  AdamW our_adamw(two_groups(actual_adamw, other), {});
  torch::optim::AdamW their_adamw(two_groups(expected_adamw, other), {});
  for (int step = 0; step < 20; ++step) {
    set_gradients(actual_adamw, step);
    set_gradients(expected_adamw, step);
    our_adamw.step();
    their_adamw.step();
  }
  expect_same(actual_adamw, expected_adamw, 1e-6, "adamw");
}

TEST(Optim, ClippingIsClipGradNorm) {
  for (const double max_norm : {0.5, 1e6, 0.0}) {
    for (const Pair& pair : {all_pairs()[3], all_pairs()[5]}) {
      const Tensors actual = make_parameters();
      const Tensors expected = make_parameters();
      const auto ours = pair.ours(actual);
      const auto theirs = pair.theirs(expected);
      for (int step = 0; step < 10; ++step) {
        set_gradients(actual, step);
        set_gradients(expected, step);
        dynamic_cast<FusedOptimizer&>(*ours).step_fused({}, {.max_norm = max_norm});
        torch::nn::utils::clip_grad_norm_(expected, max_norm);
        theirs->step();
      }
      expect_same(actual, expected, 1e-5, pair.name);
      for (size_t i = 0; i < actual.size(); ++i) {
        test::expect_close(actual[i].grad(), expected[i].grad(), pair.name + ": gradient left");
      }
    }
  }
}

TEST(Optim, ClippingAnInfiniteNormDoesAsTorchDoes) {
  for (const double bad :
       {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    const Tensors actual = make_parameters();
    const Tensors expected = make_parameters();
    Sgd ours(actual, {.lr = 0.1});
    torch::optim::SGD theirs(expected, 0.1);
    for (const auto& parameters : {actual, expected}) {
      set_gradients(parameters, 0);
      parameters[1].grad()[1] = bad;
    }
    ours.step({.max_norm = 1.0});
    torch::nn::utils::clip_grad_norm_(expected, 1.0);
    theirs.step();
    for (size_t i = 0; i < actual.size(); ++i) {
      EXPECT_TRUE(torch::allclose(actual[i], expected[i], 1e-6, 0, /*equal_nan=*/true)) << i;
    }
  }
}

TEST(Optim, ScaledGradientsAreUnscaledOnTheWay) {
  constexpr double kScale = 1024;
  for (const Pair& pair : {all_pairs()[0], all_pairs()[4], all_pairs()[5]}) {
    for (const bool give_squares : {false, true}) {
      const Tensors actual = make_parameters();
      const Tensors expected = make_parameters();
      const auto ours = pair.ours(actual);
      const auto theirs = pair.theirs(expected);
      for (int step = 0; step < 10; ++step) {
        set_gradients(actual, step, kScale);
        set_gradients(expected, step);
        ScaledGradients scaled;
        scaled.inverse_scale = 1 / kScale;
        if (give_squares) {
          double squares = 0;
          for (const auto& parameter : actual) {
            squares += parameter.grad().to(torch::kFloat64).square().sum().item<double>();
          }
          scaled.sum_of_squares = torch::tensor(squares, torch::kFloat64);
        }
        dynamic_cast<FusedOptimizer&>(*ours).step_fused(scaled, {.max_norm = 2.0});
        torch::nn::utils::clip_grad_norm_(expected, 2.0);
        theirs->step();
      }
      expect_same(actual, expected, 1e-5, pair.name);
      test::expect_close(actual[4].grad(), expected[4].grad(), "unscaled and clipped");
    }
  }
}

TEST(Optim, AnOverflowThatTheScalerFoundChangesNothing) {
  const Tensors parameters = make_parameters();
  AdamW optimizer(parameters);
  set_gradients(parameters, 0);
  ScaledGradients scaled;
  scaled.found_inf = torch::ones({});
  optimizer.step_fused(scaled, {.zero_grad = true});
  const Tensors untouched = make_parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_TRUE(torch::equal(parameters[i], untouched[i]));
    EXPECT_FALSE(parameters[i].grad().defined());
  }
  EXPECT_TRUE(optimizer.state().empty());
}

TEST(Optim, ZeroGradRidesAlong) {
  for (const Pair& pair : {all_pairs()[0], all_pairs()[5]}) {
    const Tensors actual = make_parameters();
    const Tensors expected = make_parameters();
    const auto ours = pair.ours(actual);
    const auto theirs = pair.theirs(expected);
    set_gradients(actual, 0);
    set_gradients(expected, 0);
    dynamic_cast<FusedOptimizer&>(*ours).step_fused({}, {.max_norm = 0.1, .zero_grad = true});
    torch::nn::utils::clip_grad_norm_(expected, 0.1);
    theirs->step();
    expect_same(actual, expected, 1e-6, pair.name);
    for (const auto& parameter : actual) EXPECT_FALSE(parameter.grad().defined());
  }
}

TEST(Optim, ZeroGradByItself) {
  const Tensors parameters = make_parameters();
  Sgd sgd(parameters);
  set_gradients(parameters, 0);
  sgd.zero_grad(/*set_to_none=*/false);
  EXPECT_EQ(parameters[4].grad().abs().sum().item<float>(), 0);
  AdamW adamw(parameters);
  adamw.zero_grad();
  EXPECT_FALSE(parameters[4].grad().defined());
}

TEST(Optim, GradientsInAnotherMemoryOrder) {
  const Tensors actual = make_parameters();
  const Tensors expected = make_parameters();
  AdamW ours(actual);
  torch::optim::AdamW theirs(expected);
  for (int step = 0; step < 5; ++step) {
    for (const auto& parameters : {actual, expected}) {
      set_gradients(parameters, step);
      for (const size_t i : {6U, 7U}) {
        parameters[i].mutable_grad() = parameters[i].grad().contiguous();
      }
    }
    ASSERT_NE(actual[7].strides(), actual[7].grad().strides());
    ours.step({.max_norm = 0.5});
    torch::nn::utils::clip_grad_norm_(expected, 0.5);
    theirs.step();
  }
  expect_same(actual, expected, 1e-5, "weights");
  test::expect_close(actual[7].grad(), expected[7].grad(), "a clipped gradient, written back");
}

TEST(Optim, AClosureRunsFirstWithGradients) {
  const auto weight = torch::ones({3}, torch::requires_grad());
  Sgd optimizer({weight}, {.lr = 0.5});
  const torch::NoGradGuard no_grad;
  const auto loss = optimizer.step([&] {
    optimizer.zero_grad();
    const auto value = weight.square().sum();
    value.backward();
    return value;
  });
  EXPECT_EQ(loss.item<float>(), 3);
  EXPECT_TRUE(torch::equal(weight, torch::zeros({3})));
}

// A graph that was made before the step must not be walked after it: its weights are gone.
TEST(Optim, AutogradNoticesThatWeightsChanged) {
  for (const Pair& pair : {all_pairs()[0], all_pairs()[5]}) {
    for (const bool mine : {true, false}) {
      const auto weight = torch::ones({3}, torch::requires_grad());
      const auto optimizer = mine ? pair.ours({weight}) : pair.theirs({weight});
      const auto graph = weight.square().sum();
      weight.mutable_grad() = torch::ones({3});
      optimizer->step();
      // libtorch's SGD changes weight.data(), of which autograd learns nothing.
      if (!mine && pair.name == "plain") continue;
      EXPECT_THROW(graph.backward(), c10::Error) << pair.name << (mine ? " ours" : " torch's");
    }
  }
}

TEST(Optim, RefusalsNameTheParameterAndTheRemedy) {
  const auto dense = torch::ones({4}, torch::requires_grad());
  const auto bf16 = torch::ones({4}, torch::kBFloat16).requires_grad_(true);
  test::expect_error(Code::kTensorMismatch, {"parameter 1 of group 0", "bfloat16", "optim::SGD"},
                     [&] {
                       Sgd optimizer({dense, bf16});
                     });
  test::expect_error(Code::kTensorMismatch, {"parameter 0 of group 0", "bfloat16", "optim::AdamW"},
                     [&] { AdamW optimizer({bf16}); });
  const auto gaps = torch::ones({4, 4}).slice(1, 0, 4, 2).requires_grad_(true);
  test::expect_error(Code::kTensorMismatch, {"[4, 2]", "dense"}, [&] { Sgd optimizer({gaps}); });
  const auto meta = torch::empty({4}, torch::device(torch::kMeta)).requires_grad_(true);
  test::expect_error(Code::kPlacement, {"meta"}, [&] { Sgd optimizer({meta}); });

  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(Tensors{dense}, std::make_unique<torch::optim::AdamWOptions>(
                                          torch::optim::AdamWOptions(0.1).amsgrad(true)));
  test::expect_error(Code::kUsage, {"amsgrad", "group 0", "torch::optim::AdamW"},
                     [&] { AdamW optimizer(groups, {}); });

  const auto late = torch::ones({2}, torch::requires_grad());
  AdamW optimizer({dense});
  optimizer.add_param_group(OptimizerParamGroup({late}, groups[0].options().clone()));
  dense.mutable_grad() = torch::ones({4});
  test::expect_error(Code::kUsage, {"amsgrad", "group 1"}, [&] { optimizer.step(); });
  EXPECT_TRUE(torch::equal(dense, torch::ones({4}))) << "refused, and yet changed";
}

TEST(Optim, RefusalsOfAStepChangeNothing) {
  const auto first = torch::ones({4}, torch::requires_grad());
  const auto table = torch::ones({4, 2}, torch::requires_grad());
  Sgd optimizer({first, table}, {.lr = 1, .momentum = 0.9});
  torch::embedding(table, torch::tensor({1, 2}), -1, false, /*sparse=*/true).sum().backward();
  first.mutable_grad() = torch::ones({4});
  test::expect_error(Code::kTensorMismatch, {"parameter 1", "sparse", "optim::SGD"},
                     [&] { optimizer.step(); });
  table.mutable_grad().reset();
  test::expect_error(Code::kUsage, {"max_norm", "-1"}, [&] { optimizer.step({.max_norm = -1}); });
  EXPECT_TRUE(torch::equal(first, torch::ones({4})));
  EXPECT_TRUE(optimizer.state().empty());

  table.mutable_grad() = torch::ones({4, 2});
  optimizer.step();
  const auto bytes = saved(optimizer);
  const auto other = torch::ones({5}, torch::requires_grad());
  Sgd wrong({other, table}, {.lr = 1, .momentum = 0.9});
  load(wrong, bytes);
  other.mutable_grad() = torch::ones({5});
  test::expect_error(Code::kTensorMismatch, {"momentum buffer", "[4]", "[5]"},
                     [&] { wrong.step(); });
}

// As module.parameters() lists a weight that two layers share.
TEST(Optim, AParameterThatIsListedTwiceIsUpdatedOnce) {
  for (const Pair& pair : all_pairs()) {
    const Tensors actual = make_parameters();
    const Tensors expected = make_parameters();
    Tensors listed = actual;
    listed.insert(listed.end(), actual.begin(), actual.end());
    const auto ours = pair.ours(listed);
    const auto theirs = pair.theirs(expected);
    for (int step = 0; step < 5; ++step) {
      set_gradients(actual, step);
      set_gradients(expected, step);
      ours->step();
      theirs->step();
    }
    expect_same(actual, expected, tolerance_of(torch::kFloat32), pair.name);
  }
}

TEST(Optim, AParameterInTwoGroupsIsRefused) {
  const auto weight = torch::ones({4}, torch::requires_grad());
  const auto other = torch::ones({2}, torch::requires_grad());
  const std::vector<OptimizerParamGroup> groups = {OptimizerParamGroup({other, weight, weight}),
                                                   OptimizerParamGroup({weight})};
  const std::initializer_list<std::string> said = {"parameter 0 of group 1",
                                                   "parameter 1 of group 0", "one group"};
  test::expect_error(Code::kUsage, said, [&] { Sgd optimizer(groups, {}); });
  test::expect_error(Code::kUsage, said, [&] { AdamW optimizer(groups, {}); });

  Sgd optimizer({other, weight}, {.lr = 1});
  optimizer.add_param_group(groups[1]);
  weight.mutable_grad() = torch::ones({4});
  test::expect_error(Code::kUsage, said, [&] { optimizer.step(); });
  EXPECT_TRUE(torch::equal(weight, torch::ones({4}))) << "refused, and yet changed";
}

TEST(Optim, AGradientThatIsOneNumberRepeatedIsClippedToo) {
  const auto weight = torch::zeros({4}, torch::requires_grad());
  weight.mutable_grad() = torch::ones({}).expand({4});
  Sgd optimizer({weight}, {.lr = 1});
  optimizer.step({.max_norm = 1.0});
  test::expect_close(weight.detach(), torch::full({4}, -0.5F), "weight");
  test::expect_close(weight.grad(), torch::full({4}, 0.5F), "gradient");
}

}  // namespace
}  // namespace lockstep
