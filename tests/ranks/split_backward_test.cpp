// A backward in two parts gives the same gradients as one, and computes nothing twice.

#include "pipeline/split_backward.hpp"

#include <ATen/record_function.h>
#include <torch/torch.h>

#include <atomic>
#include <functional>

#include "ranks/pipeline_support.hpp"

namespace lockstep::test::split_backward_test {
namespace {

std::atomic<int> products = 0;

// Guard: counts matrix products on all threads.
class CountProducts {
 public:
  CountProducts() {
    products = 0;
    handle_ = at::addGlobalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& function)
                                       -> std::unique_ptr<at::ObserverContext> {
          const std::string name = function.name();
          if (name == "aten::mm" || name == "aten::bmm") products += 1;
          return nullptr;
        }).scopes({at::RecordScope::FUNCTION}));
  }
  ~CountProducts() { at::removeCallback(handle_); }
  CountProducts(const CountProducts&) = delete;
  CountProducts& operator=(const CountProducts&) = delete;

 private:
  at::CallbackHandle handle_;
};

struct Found {
  torch::Tensor input_gradient;
  std::vector<torch::Tensor> weight_gradients;
  int products = 0;
};

torch::Tensor leaf(const torch::Tensor& x) {
  return x.detach().clone().requires_grad_();
}

std::vector<torch::Tensor> take_gradients(const torch::nn::Sequential& net) {
  std::vector<torch::Tensor> gradients;
  for (const auto& parameter : net->parameters()) gradients.push_back(parameter.grad());
  for (auto& parameter : net->parameters()) parameter.mutable_grad().reset();
  return gradients;
}

Found whole(const torch::nn::Sequential& net, const torch::Tensor& x) {
  auto input = leaf(x);
  const auto out = torch::nn::Sequential(net)->forward(input);
  const CountProducts count;
  torch::autograd::backward({out}, {torch::cos(out.detach())});
  return {input.grad(), take_gradients(net), products};
}

Found in_parts(const torch::nn::Sequential& net, const torch::Tensor& x, bool expect_split = true) {
  auto input = leaf(x);
  const auto out = torch::nn::Sequential(net)->forward(input);
  const CountProducts count;
  SplitBackward split(out, torch::cos(out.detach()), input);
  for (const auto& parameter : net->parameters()) {
    EXPECT_EQ(parameter.grad().defined(), !expect_split) << "weights come later";
  }
  split.accumulate_weights();
  return {split.input_gradient(), take_gradients(net), products};
}

void expect_equal(const Found& parts, const Found& one) {
  EXPECT_TRUE(parts.input_gradient.equal(one.input_gradient));
  ASSERT_EQ(parts.weight_gradients.size(), one.weight_gradients.size());
  for (size_t i = 0; i < one.weight_gradients.size(); ++i) {
    EXPECT_TRUE(parts.weight_gradients[i].equal(one.weight_gradients[i])) << i;
  }
  EXPECT_EQ(parts.products, one.products) << "every product is made once";
}

TEST(SplitBackward, EqualsOneBackwardToTheBit) {
  const auto x = test::draw_rows(6, 1).x;
  for (const auto& net : {test::deep_mlp(3), test::small_transformer(3)}) {
    expect_equal(in_parts(net, x), whole(net, x));
  }
}

TEST(SplitBackward, AddsToGradientsThatAreThere) {
  const auto x = test::draw_rows(6, 1).x;
  auto net = test::deep_mlp(2);
  const auto once = whole(net, x);
  for (int i = 0; i < 2; ++i) {
    auto input = leaf(x);
    const auto out = net->forward(input);
    SplitBackward split(out, torch::cos(out.detach()), input);
    split.accumulate_weights();
  }
  const auto twice = take_gradients(net);
  for (size_t i = 0; i < twice.size(); ++i) {
    test::expect_close(twice[i], 2 * once.weight_gradients[i], std::to_string(i));
  }
}

// Where splitting would not be exact, the first part does everything.
TEST(SplitBackward, SharedWeightsAreNotSplit) {
  const auto x = test::draw_rows(6, 1).x;
  torch::manual_seed(2);
  const torch::nn::Linear shared(test::kWidth, test::kWidth);
  const torch::nn::Sequential net(shared, torch::nn::Tanh(), shared);
  expect_equal(in_parts(net, x, /*expect_split=*/false), whole(net, x));
}

TEST(SplitBackward, HooksRunOnce) {
  const auto x = test::draw_rows(6, 1).x;
  int calls = 0;
  torch::manual_seed(2);
  const torch::nn::Sequential net(torch::nn::Linear(test::kWidth, test::kWidth),
                                  torch::nn::Functional([&](const torch::Tensor& y) {
                                    y.register_hook([&](const torch::Tensor& gradient) {
                                      ++calls;
                                      return gradient * 2;
                                    });
                                    return y;
                                  }));
  const auto one = whole(net, x);
  EXPECT_EQ(calls, 1);
  expect_equal(in_parts(net, x, /*expect_split=*/false), one);
  EXPECT_EQ(calls, 2);
}

TEST(SplitBackward, WithoutAnInputAllIsDoneAtOnce) {
  const auto x = test::draw_rows(6, 1).x;
  auto net = test::deep_mlp(2);
  const auto expected = whole(net, x);
  const auto out = net->forward(x);
  SplitBackward split(out, torch::cos(out.detach()), {});
  EXPECT_FALSE(split.input_gradient().defined());
  const auto found = take_gradients(net);
  split.accumulate_weights();
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_TRUE(found[i].equal(expected.weight_gradients[i])) << i;
  }
}

TEST(SplitBackward, AnOutputThatIgnoresItsInputHasNoGradientForIt) {
  torch::manual_seed(2);
  const auto weight = torch::randn({3}).requires_grad_();
  auto input = torch::ones({3}).requires_grad_();
  SplitBackward split(weight * 2, torch::ones({3}), input);
  split.accumulate_weights();
  EXPECT_FALSE(split.input_gradient().defined());
  EXPECT_TRUE(weight.grad().equal(torch::full({3}, 2.0)));
}

}  // namespace
}  // namespace lockstep::test::split_backward_test
