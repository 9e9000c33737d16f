// Two stages with a copy each of one weight train as one device with the weight itself.

#include "lockstep/tied_weight.hpp"

#include "lockstep/grad_scaler.hpp"
#include "lockstep/master_weights.hpp"
#include "lockstep/optim.hpp"
#include "lockstep/pipeline.hpp"
#include "models/model_support.hpp"

namespace lockstep::test::tied_weight_test {
namespace {

constexpr int64_t kWidth = 6;

torch::nn::Linear linear_of(uint64_t seed) {
  torch::nn::Linear linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false));
  const torch::NoGradGuard no_grad;
  linear->to(torch::kFloat64);
  linear->weight.copy_(values({kWidth, kWidth}, seed));
  return linear;
}

torch::Tensor loss_function(const torch::Tensor& out, const torch::Tensor& target) {
  return (out - target).pow(2).mean();
}

TEST(TiedWeight, TrainsAndIsClippedAsOneDevice) {
  const auto x = values({8, kWidth});
  auto tied = linear_of(1);
  auto middle = linear_of(2);
  AdamW single({tied->weight, middle->weight}, {.lr = 0.05});
  std::vector<double> losses, norms;
  for (int step = 0; step < 4; ++step) {
    const auto loss = loss_function(tied(torch::tanh(middle(torch::tanh(tied(x))))), 2 * x);
    loss.backward();
    losses.push_back(loss.item<double>());
    norms.push_back(single.step({.max_norm = 0.1, .zero_grad = true}).item<double>());
  }
  for (const bool scaled : {false, true}) {
    run_ranks(3, [&](const Communicator& axis) {
      Devices devices("cpu:1");
      const auto first = linear_of(1);
      const auto last = linear_of(9);  // gets the first one's values
      std::vector<torch::nn::Sequential> stages = {
          torch::nn::Sequential(first, torch::nn::Tanh()),
          torch::nn::Sequential(linear_of(2), torch::nn::Tanh()), torch::nn::Sequential(last)};
      Pipeline pipeline(stages, axis, devices[0], one_f_one_b(3, 4), {.loss = loss_function});
      const auto copy = axis.rank() == 0   ? first->weight
                        : axis.rank() == 2 ? last->weight
                                           : torch::Tensor();
      const TiedWeight weight(axis, 0, 2, copy);
      AdamW optimizer(pipeline.parameters(), {.lr = 0.05});
      GradScaler scaler(GradScalerOptions{.enabled = scaled});
      for (size_t step = 0; step < losses.size(); ++step) {
        const auto loss = pipeline.step(x, 2 * x, {.scaler = &scaler});
        EXPECT_NEAR(loss.item<double>(), losses[step], 1e-6 * losses[step]);
        weight.sum_gradients();
        const auto norm = scaler.step(optimizer, {.max_norm = 0.1, .zero_grad = true});
        scaler.update();
        EXPECT_NEAR(norm.item<double>(), norms[step], 1e-9);
      }
      if (copy.defined()) expect_close(copy.detach(), tied->weight.detach(), "copy");
    });
  }
}

// Two stages on two ranks, of a tied weight and another one each.
struct TwoStages {
  explicit TwoStages(const Communicator& axis)
      : tied(linear_of(static_cast<uint64_t>(axis.rank()) + 1)),
        own(linear_of(3)),
        stage(torch::nn::Sequential(tied, torch::nn::Tanh(), own)) {
    stage->to(torch::kFloat32);
  }
  Pipeline pipeline(const Communicator& axis) {
    std::vector<torch::nn::Sequential> stages(2, torch::nn::Sequential(nullptr));
    stages[static_cast<size_t>(axis.rank())] = stage;
    return Pipeline(stages, axis, devices[0], gpipe(2, 2),
                    {.loss = [](const torch::Tensor& out, const torch::Tensor& target) {
                      return torch::mse_loss(out.to(torch::kFloat), target);
                    }});
  }
  Devices devices{"cpu:1"};
  torch::nn::Linear tied, own;
  torch::nn::Sequential stage;
};

// The float32 weights are given to the second copy, too: rounded ones alone drift apart.
TEST(TiedWeight, CopiesWithMasterWeightsStayTheSame) {
  const auto x = values({8, kWidth}).to(torch::kFloat32);
  run_ranks(2, [&](const Communicator& axis) {
    TwoStages model(axis);
    MasterWeights masters(*model.stage);
    Pipeline pipeline = model.pipeline(axis);
    const TiedWeight weight(axis, 0, 1, model.tied->weight);
    expect_same_on_all(axis, masters.of(model.tied->weight), "a master weight at first");
    AdamW optimizer(pipeline.parameters(), {.lr = 0.01, .masters = masters});
    for (int step = 0; step < 3; ++step) {
      pipeline.step(x.to(torch::kBFloat16), x);
      weight.sum_gradients();
      optimizer.step({.zero_grad = true});
    }
    expect_same_on_all(axis, masters.of(model.tied->weight), "a master weight");
    expect_same_on_all(axis, flat_weights({model.tied->weight}), "a weight");
  });
}

// A frozen weight has no gradient, so that weight decay does not change it.
TEST(TiedWeight, AFrozenOneStaysWhatItIs) {
  const auto x = values({8, kWidth}).to(torch::kFloat32);
  run_ranks(2, [&](const Communicator& axis) {
    TwoStages model(axis);
    Pipeline pipeline = model.pipeline(axis);
    const TiedWeight weight(axis, 0, 1, model.tied->weight);
    AdamW optimizer(pipeline.parameters(), {.lr = 0.1, .weight_decay = 0.5});
    model.tied->weight.requires_grad_(false);
    const auto before = model.tied->weight.clone();
    const auto trained_before = model.own->weight.detach().clone();
    pipeline.step(x, x);
    weight.sum_gradients();
    optimizer.step({.zero_grad = true});
    EXPECT_TRUE(torch::equal(model.tied->weight, before));
    EXPECT_FALSE(torch::equal(model.own->weight, trained_before));
  });
}

TEST(TiedWeight, CopiesThatAreUpdatedDifferentlyAreRefused) {
  const auto x = values({8, kWidth}).to(torch::kFloat32);
  for (const auto& outcome : outcomes_of_ranks(2, [&](const Communicator& axis) {
         TwoStages model(axis);
         Pipeline pipeline = model.pipeline(axis);
         const TiedWeight weight(axis, 0, 1, model.tied->weight);
         AdamW optimizer(pipeline.parameters(),
                         {.lr = 0.1, .weight_decay = axis.rank() == 0 ? 0.5 : 0.0});
         for (int step = 0; step < 2; ++step) {
           pipeline.step(x, x);
           weight.sum_gradients();
           optimizer.step({.zero_grad = true});
         }
       })) {
    EXPECT_EQ(outcome.code(), Code::kReplicasDiffer) << outcome.text();
    EXPECT_NE(outcome.text().find("tied weight"), std::string::npos) << outcome.text();
  }
}

TEST(TiedWeight, RefusesRanksAndCopiesThatDoNotFit) {
  run_ranks(2, [](const Communicator& axis) {
    const auto copy = torch::ones({2});
    expect_error(Code::kUsage, {"ranks 1 and 1"}, [&] { TiedWeight(axis, 1, 1, copy); });
    expect_error(Code::kUsage, {"ranks 0 and 2", "2 ranks"}, [&] { TiedWeight(axis, 0, 2, copy); });
    expect_error(Code::kUsage, {"has no copy"}, [&] { TiedWeight(axis, 0, 1, {}); });
    torch::nn::Linear layer(2, 2);
    std::optional<MasterWeights> masters;
    if (axis.rank() == 1) masters.emplace(*layer);
    expect_error(Code::kTensorMismatch, {"with a float32 master weight"},
                 [&] { TiedWeight(axis, 0, 1, layer->weight); });
  });
}

}  // namespace
}  // namespace lockstep::test::tied_weight_test
