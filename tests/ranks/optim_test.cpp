// lockstep's optimizers against torch::optim of the same libtorch.

#include "lockstep/optim.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <initializer_list>
#include <limits>
#include <stdexcept>

#include "optim_support.hpp"
#include "tensor_support.hpp"

namespace lockstep::test::optim_test {
namespace {

using torch::optim::OptimizerParamGroup;

constexpr int64_t kMillion = 1'000'003;

// Odd sizes: shorter than a vector, one more than many, and with `longest` one that several
// threads share.
Tensors odd_parameters(torch::ScalarType dtype = torch::kFloat32, int64_t longest = 0) {
  torch::manual_seed(11);
  Tensors parameters;
  for (const int64_t count : {1, 3, 5, 17, 4099}) parameters.push_back(torch::randn({count}));
  parameters.push_back(torch::randn({}));
  parameters.push_back(torch::randn({7, 3, 5, 5}).contiguous(torch::MemoryFormat::ChannelsLast));
  parameters.push_back(torch::randn({13, 6}).t());
  parameters.push_back(torch::randn({0, 4}));
  if (longest > 0) parameters.push_back(torch::randn({longest}));
  for (auto& parameter : parameters) {
    parameter = parameter.detach().to(dtype).requires_grad_(true);
  }
  return parameters;
}

std::vector<OptimizerPair> all_pairs() {
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
      adam_pair("adam", {}),
      adam_pair("adam, other numbers",
                {.lr = 0.02, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0.3}),
  };
}

// Those of all_pairs().
std::vector<OptimizerPair> pairs_named(std::initializer_list<std::string> names) {
  std::vector<OptimizerPair> chosen;
  for (const auto& name : names) {
    for (const auto& pair : all_pairs()) {
      if (pair.name == name) chosen.push_back(pair);
    }
  }
  if (chosen.size() != names.size()) throw std::invalid_argument("no such kind of update");
  return chosen;
}

// Both optimizers over odd parameters.
SideBySide side_by_side(const OptimizerPair& pair, torch::ScalarType dtype = torch::kFloat32,
                        int64_t longest = 0) {
  return {pair, [=] { return odd_parameters(dtype, longest); }};
}

TEST(Optim, HundredStepsEqualTorch) {
  for (const auto dtype : {torch::kFloat32, torch::kFloat64}) {
    for (const auto& pair : all_pairs()) {
      const auto both = side_by_side(pair, dtype);
      both.steps(0, 99);
      both.expect_equal(dtype == torch::kFloat64 ? 1e-14 : 1e-6);
    }
  }
}

TEST(Optim, BitsDoNotDependOnTheNumberOfThreads) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer does not see the barriers of OpenMP's threads";
#endif
  const int threads = at::get_num_threads();
  for (const auto& pair : all_pairs()) {
    std::vector<Tensors> results;
    for (const int count : {1, 2, 3}) {
      at::set_num_threads(count);
      results.push_back(odd_parameters(torch::kFloat32, kMillion));
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
  for (const auto& pair : pairs_named({"nesterov", "adamw"})) {
    const auto both = side_by_side(pair, torch::kFloat32, kMillion);
    both.steps(0, 9);
    both.expect_equal(1e-6);
  }
}

TEST(Optim, ATrainedNetEqualsTorchs) {
  for (const auto& pair : pairs_named({"nesterov", "adamw"})) {
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

TEST(Optim, ParametersWithoutGradientAreLeftAloneAndCountTheirOwnSteps) {
  for (const auto& pair : pairs_named({"momentum", "adamw"})) {
    const auto both = side_by_side(pair);
    for (int step = 0; step < 12; ++step) {
      both.set_gradients(step);
      for (const auto& parameters : {both.actual, both.expected}) {
        if (step % 3 != 0) parameters[1].mutable_grad().reset();
        parameters[3].mutable_grad().reset();
      }
      both.ours->step();
      both.theirs->step();
    }
    both.expect_equal(1e-6);
    EXPECT_TRUE(torch::equal(both.actual[3], odd_parameters()[3])) << pair.name;
    EXPECT_EQ(both.ours->state().size(), both.theirs->state().size()) << pair.name;
    EXPECT_EQ(both.ours->state().size(), both.actual.size() - 1) << pair.name;
  }
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
  const OptimizerPair sgd = {
      "sgd",
      [&](const Tensors& p) {
        return std::make_unique<Sgd>(two_groups(p, second), SgdOptions{.lr = 0.1, .momentum = 0.9});
      },
      [&](const Tensors& p) {
        return std::make_unique<torch::optim::SGD>(two_groups(p, second),
                                                   torch::optim::SGDOptions(0.1).momentum(0.9));
      }};
  const auto scheduled = side_by_side(sgd);
  torch::optim::StepLR our_schedule(*scheduled.ours, 3, 0.5);
  torch::optim::StepLR their_schedule(*scheduled.theirs, 3, 0.5);
  for (int step = 0; step < 20; ++step) {
    scheduled.steps(step, step);
    our_schedule.step();
    their_schedule.step();
  }
  scheduled.expect_equal(1e-6);
  EXPECT_LT(scheduled.ours->param_groups()[1].options().get_lr(), 0.001)
      << "the schedule did nothing";

  const auto other = torch::optim::AdamWOptions(0.05).betas({0.5, 0.9}).weight_decay(0);
  const OptimizerPair adamw = {"adamw",
                               [&](const Tensors& p) {
                                 return std::make_unique<AdamW>(two_groups(p, other),
                                                                AdamWOptions{});
                               },
                               [&](const Tensors& p) {
                                 return std::make_unique<torch::optim::AdamW>(
                                     two_groups(p, other), torch::optim::AdamWOptions());
                               }};
  const auto both = side_by_side(adamw);
  both.steps(0, 19);
  both.expect_equal(1e-6);
}

// As module.parameters() lists a weight that two layers share.
TEST(Optim, AParameterThatIsListedTwiceIsUpdatedOnce) {
  for (auto pair : all_pairs()) {
    pair.ours = [once = pair.ours](const Tensors& parameters) {
      Tensors listed = parameters;
      listed.insert(listed.end(), parameters.begin(), parameters.end());
      return once(listed);
    };
    const auto both = side_by_side(pair);
    both.steps(0, 4);
    both.expect_equal(1e-6);
  }
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
  for (const auto& pair : pairs_named({"plain", "adamw"})) {
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

// Gradients are clipped, unscaled and cleared during the step, as by torch's own functions.

TEST(Optim, ClippingIsClipGradNorm) {
  for (const double max_norm : {0.5, 1e6, 0.0}) {
    for (const auto& pair : pairs_named({"dampening", "adamw", "adam, other numbers"})) {
      const auto both = side_by_side(pair);
      for (int step = 0; step < 10; ++step) {
        both.set_gradients(step);
        const auto norm = fused(*both.ours).step_fused({}, {.max_norm = max_norm});
        const auto expected = torch::nn::utils::clip_grad_norm_(both.expected, max_norm);
        EXPECT_NEAR(norm.item<double>(), expected, 1e-5 * expected) << pair.name;
        both.theirs->step();
      }
      both.expect_equal(1e-5);
      for (size_t i = 0; i < both.actual.size(); ++i) {
        expect_close(both.actual[i].grad(), both.expected[i].grad(), pair.name + ": gradient left");
      }
    }
  }
}

TEST(Optim, ClippingAnInfiniteNormDoesAsTorchDoes) {
  for (const double bad :
       {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    const auto both = side_by_side(sgd_pair("sgd", {.lr = 0.1}));
    both.set_gradients(0);
    for (const auto& parameters : {both.actual, both.expected}) parameters[1].grad()[1] = bad;
    dynamic_cast<Sgd&>(*both.ours).step({.max_norm = 1.0});
    torch::nn::utils::clip_grad_norm_(both.expected, 1.0);
    both.theirs->step();
    for (size_t i = 0; i < both.actual.size(); ++i) {
      EXPECT_TRUE(torch::allclose(both.actual[i], both.expected[i], 1e-6, 0, /*equal_nan=*/true))
          << i;
    }
  }
}

TEST(Optim, ScaledGradientsAreUnscaledOnTheWay) {
  constexpr double kScale = 1024;
  for (const auto& pair : pairs_named({"plain", "nesterov", "adamw"})) {
    for (const bool give_squares : {false, true}) {
      const auto both = side_by_side(pair);
      for (int step = 0; step < 10; ++step) {
        set_gradients(both.actual, step, kScale);
        set_gradients(both.expected, step);
        ScaledGradients scaled;
        scaled.inverse_scale = 1 / kScale;
        if (give_squares) {
          double squares = 0;
          for (const auto& parameter : both.actual) {
            squares += parameter.grad().to(torch::kFloat64).square().sum().item<double>();
          }
          scaled.sum_of_squares = torch::tensor(squares, torch::kFloat64);
        }
        fused(*both.ours).step_fused(scaled, {.max_norm = 2.0});
        torch::nn::utils::clip_grad_norm_(both.expected, 2.0);
        both.theirs->step();
      }
      both.expect_equal(1e-5);
      expect_close(both.actual[4].grad(), both.expected[4].grad(), "unscaled and clipped");
    }
  }
}

TEST(Optim, AnOverflowThatTheScalerFoundChangesNothing) {
  const Tensors parameters = odd_parameters();
  AdamW optimizer(parameters);
  set_gradients(parameters, 0);
  ScaledGradients scaled;
  scaled.found_inf = torch::ones({});
  optimizer.step_fused(scaled, {.zero_grad = true});
  const Tensors untouched = odd_parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_TRUE(torch::equal(parameters[i], untouched[i]));
    EXPECT_FALSE(parameters[i].grad().defined());
  }
  EXPECT_TRUE(optimizer.state().empty());
}

TEST(Optim, ZeroGradRidesAlong) {
  for (const auto& pair : pairs_named({"plain", "adamw"})) {
    const auto both = side_by_side(pair);
    both.set_gradients(0);
    fused(*both.ours).step_fused({}, {.max_norm = 0.1, .zero_grad = true});
    torch::nn::utils::clip_grad_norm_(both.expected, 0.1);
    both.theirs->step();
    both.expect_equal(1e-6);
    for (const auto& parameter : both.actual) EXPECT_FALSE(parameter.grad().defined());
  }
}

TEST(Optim, ZeroGradByItself) {
  const Tensors parameters = odd_parameters();
  Sgd sgd(parameters);
  set_gradients(parameters, 0);
  sgd.zero_grad(/*set_to_none=*/false);
  EXPECT_EQ(parameters[4].grad().abs().sum().item<float>(), 0);
  AdamW adamw(parameters);
  adamw.zero_grad();
  EXPECT_FALSE(parameters[4].grad().defined());
}

TEST(Optim, GradientsInAnotherMemoryOrder) {
  const auto both = side_by_side(adamw_pair("weights", {}));
  for (int step = 0; step < 5; ++step) {
    both.set_gradients(step);
    for (const auto& parameters : {both.actual, both.expected}) {
      for (const size_t i : {6U, 7U}) {
        parameters[i].mutable_grad() = parameters[i].grad().contiguous();
      }
    }
    ASSERT_NE(both.actual[7].strides(), both.actual[7].grad().strides());
    dynamic_cast<AdamW&>(*both.ours).step({.max_norm = 0.5});
    torch::nn::utils::clip_grad_norm_(both.expected, 0.5);
    both.theirs->step();
  }
  both.expect_equal(1e-5);
  expect_close(both.actual[7].grad(), both.expected[7].grad(), "a clipped gradient, written back");
}

TEST(Optim, AGradientThatIsOneNumberRepeatedIsClippedToo) {
  const auto weight = torch::zeros({4}, torch::requires_grad());
  weight.mutable_grad() = torch::ones({}).expand({4});
  Sgd optimizer({weight}, {.lr = 1});
  optimizer.step({.max_norm = 1.0});
  expect_close(weight.detach(), torch::full({4}, -0.5F), "weight");
  expect_close(weight.grad(), torch::full({4}, 0.5F), "gradient");
}

// The state is torch::optim's, in one piece of memory.

// Saved by one in the middle, loaded by the other, both ways.
TEST(Optim, StatesMoveBetweenOursAndTorchs) {
  for (const auto& pair : all_pairs()) {
    for (const bool to_ours : {true, false}) {
      const Tensors moved = odd_parameters();
      const Tensors stayed = odd_parameters();
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
      expect_near(moved, stayed, 1e-6, pair.name + (to_ours ? " to ours" : " to torch's"));
    }
  }
}

TEST(Optim, ASavedStateIsAsSmallAsTorchs) {
  const auto both = side_by_side(adamw_pair("adamw", {}));
  both.steps(0, 0);
  const auto size = static_cast<double>(saved(*both.theirs).size());
  EXPECT_NEAR(static_cast<double>(saved(*both.ours).size()), size, 0.05 * size)
      << "the states share an allocation, but not a file record";
}

TEST(Optim, NewStatesShareOneAllocationAndAreAligned) {
  const Tensors parameters = odd_parameters();
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

TEST(Optim, WithoutMomentumThereIsNoState) {
  const Tensors parameters = odd_parameters();
  Sgd optimizer(parameters, {.lr = 0.1, .weight_decay = 0.1});
  set_gradients(parameters, 0);
  optimizer.step();
  EXPECT_TRUE(optimizer.state().empty());
}

// Refusals name the parameter and change nothing.

TEST(Optim, RefusalsNameTheParameterAndTheRemedy) {
  const auto dense = torch::ones({4}, torch::requires_grad());
  const auto bf16 = torch::ones({4}, torch::kBFloat16).requires_grad_(true);
  expect_error(Code::kTensorMismatch, {"parameter 1 of group 0", "bfloat16", "optim::SGD"}, [&] {
    Sgd optimizer({dense, bf16});
  });
  expect_error(Code::kTensorMismatch, {"parameter 0 of group 0", "bfloat16", "optim::AdamW"},
               [&] { AdamW optimizer({bf16}); });
  const auto gaps = torch::ones({4, 4}).slice(1, 0, 4, 2).requires_grad_(true);
  expect_error(Code::kTensorMismatch, {"[4, 2]", "dense"}, [&] { Sgd optimizer({gaps}); });
  const auto meta = torch::empty({4}, torch::device(torch::kMeta)).requires_grad_(true);
  expect_error(Code::kPlacement, {"meta"}, [&] { Sgd optimizer({meta}); });

  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(Tensors{dense}, std::make_unique<torch::optim::AdamWOptions>(
                                          torch::optim::AdamWOptions(0.1).amsgrad(true)));
  expect_error(Code::kUsage, {"amsgrad", "group 0", "torch::optim::AdamW"},
               [&] { AdamW optimizer(groups, {}); });

  const auto late = torch::ones({2}, torch::requires_grad());
  AdamW optimizer({dense});
  optimizer.add_param_group(OptimizerParamGroup({late}, groups[0].options().clone()));
  dense.mutable_grad() = torch::ones({4});
  expect_error(Code::kUsage, {"amsgrad", "group 1"}, [&] { optimizer.step(); });
  EXPECT_TRUE(torch::equal(dense, torch::ones({4}))) << "refused, and yet changed";
}

TEST(Optim, RefusalsOfAStepChangeNothing) {
  const auto first = torch::ones({4}, torch::requires_grad());
  const auto table = torch::ones({4, 2}, torch::requires_grad());
  Sgd optimizer({first, table}, {.lr = 1, .momentum = 0.9});
  torch::embedding(table, torch::tensor({1, 2}), -1, false, /*sparse=*/true).sum().backward();
  first.mutable_grad() = torch::ones({4});
  expect_error(Code::kTensorMismatch, {"parameter 1", "sparse", "optim::SGD"},
               [&] { optimizer.step(); });
  table.mutable_grad().reset();
  expect_error(Code::kUsage, {"max_norm", "-1"}, [&] { optimizer.step({.max_norm = -1}); });
  EXPECT_TRUE(torch::equal(first, torch::ones({4})));
  EXPECT_TRUE(optimizer.state().empty());

  table.mutable_grad() = torch::ones({4, 2});
  optimizer.step();
  const auto bytes = saved(optimizer);
  const auto other = torch::ones({5}, torch::requires_grad());
  Sgd wrong({other, table}, {.lr = 1, .momentum = 0.9});
  load(wrong, bytes);
  other.mutable_grad() = torch::ones({5});
  expect_error(Code::kTensorMismatch, {"momentum buffer", "[4]", "[5]"}, [&] { wrong.step(); });
}

TEST(Optim, AParameterInTwoGroupsIsRefused) {
  const auto weight = torch::ones({4}, torch::requires_grad());
  const auto other = torch::ones({2}, torch::requires_grad());
  const std::vector<OptimizerParamGroup> groups = {OptimizerParamGroup({other, weight, weight}),
                                                   OptimizerParamGroup({weight})};
  const std::initializer_list<std::string> said = {"parameter 0 of group 1",
                                                   "parameter 1 of group 0", "one group"};
  expect_error(Code::kUsage, said, [&] { Sgd optimizer(groups, {}); });
  expect_error(Code::kUsage, said, [&] { AdamW optimizer(groups, {}); });

  Sgd optimizer({other, weight}, {.lr = 1});
  optimizer.add_param_group(groups[1]);
  weight.mutable_grad() = torch::ones({4});
  expect_error(Code::kUsage, said, [&] { optimizer.step(); });
  EXPECT_TRUE(torch::equal(weight, torch::ones({4}))) << "refused, and yet changed";
}

}  // namespace
}  // namespace lockstep::test::optim_test
