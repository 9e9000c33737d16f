// lockstep's optimizers against torch::optim of the same libtorch.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "optim_cases.hpp"

namespace lockstep::test {
namespace {

using torch::optim::OptimizerParamGroup;

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

}  // namespace
}  // namespace lockstep::test
