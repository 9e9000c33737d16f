// Two stages with a copy each of one weight train as one device with the weight itself.

#include "lockstep/tied_weight.hpp"

#include "lockstep/grad_scaler.hpp"
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

TEST(TiedWeight, RefusesRanksAndCopiesThatDoNotFit) {
  run_ranks(2, [](const Communicator& axis) {
    const auto copy = torch::ones({2});
    expect_error(Code::kUsage, {"ranks 1 and 1"}, [&] { TiedWeight(axis, 1, 1, copy); });
    expect_error(Code::kUsage, {"ranks 0 and 2", "2 ranks"}, [&] { TiedWeight(axis, 0, 2, copy); });
    expect_error(Code::kUsage, {"has no copy"}, [&] { TiedWeight(axis, 0, 1, {}); });
  });
}

}  // namespace
}  // namespace lockstep::test::tied_weight_test
