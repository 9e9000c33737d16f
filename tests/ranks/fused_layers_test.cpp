// Fused layers on the CPU: the numbers and gradients of the operations they stand for, and errors
// that name what does not fit.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/autocast.hpp"
#include "lockstep/fused_layers.hpp"
#include "tensor_support.hpp"

namespace lockstep::test::fused_layers_test {
namespace {

using test::expect_close;
using torch::Tensor;

Tensor random(std::vector<int64_t> sizes) {
  return torch::randn(sizes, torch::kFloat64).requires_grad_();
}

TEST(FusedLayers, LinearIsLinearThenActivation) {
  torch::manual_seed(1);
  const auto x = random({2, 5, 7});
  const auto weight = random({3, 7});
  const auto bias = random({3});
  const auto plain = torch::matmul(x, weight.t()) + bias;
  expect_close(lockstep::linear(x, weight, bias), plain, "no activation");
  expect_close(lockstep::linear(x, weight, bias, Activation::kRelu), plain.clamp_min(0), "relu");
  expect_close(lockstep::linear(x, weight, {}), torch::matmul(x, weight.t()), "no bias");
  const auto inner = 0.7978845608028654 * (plain + 0.044715 * plain.pow(3));
  expect_close(lockstep::linear(x, weight, bias, Activation::kGeluTanh),
               0.5 * plain * (1 + inner.tanh()), "gelu");
}

TEST(FusedLayers, MultiLayerHasActivationsBetweenOnly) {
  torch::manual_seed(2);
  const auto x = random({4, 6});
  const std::vector<Tensor> weights = {random({5, 6}), random({3, 5}), random({2, 3})};
  const std::vector<Tensor> biases = {random({5}), {}, random({2})};
  auto expected = torch::relu(torch::matmul(x, weights[0].t()) + biases[0]);
  expected = torch::relu(torch::matmul(expected, weights[1].t()));
  expected = torch::matmul(expected, weights[2].t()) + biases[2];
  const auto actual = multi_layer(x, weights, biases, Activation::kRelu);
  expect_close(actual, expected, "output");
  const std::vector<Tensor> inputs = {x, weights[0], weights[1], weights[2], biases[0], biases[2]};
  const auto mine = torch::autograd::grad({actual.square().sum()}, inputs);
  const auto theirs = torch::autograd::grad({expected.square().sum()}, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    expect_close(mine[i], theirs[i], "gradient " + std::to_string(i));
  }
}

TEST(FusedLayers, AddLayerNormGivesSumAndNorm) {
  torch::manual_seed(3);
  const auto x = random({3, 4, 6});
  const auto branch = random({3, 4, 6});
  const auto weight = random({6});
  const auto bias = random({6});
  const auto [sum, normed] = add_layer_norm(x, branch, weight, bias);
  expect_close(sum, x + branch, "sum");
  const auto centred = sum - sum.mean(-1, true);
  const auto variance = centred.square().mean(-1, true);
  expect_close(normed, centred / (variance + 1e-5).sqrt() * weight + bias, "norm");
  const auto [same, alone] = add_layer_norm(x, {}, weight, bias);
  EXPECT_TRUE(same.is_same(x));
  EXPECT_EQ(alone.sizes(), x.sizes());
}

TEST(FusedLayers, AttentionSeesOnlyThePast) {
  torch::manual_seed(4);
  const int64_t heads = 2;
  const int64_t head_width = 3;
  const int64_t width = heads * head_width;
  const auto qkv = random({2, 5, 3 * width});
  const auto actual = causal_self_attention(qkv, heads);
  ASSERT_EQ(actual.sizes(), (std::vector<int64_t>{2, 5, width}));
  for (int64_t batch = 0; batch < 2; ++batch) {
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t now = 0; now < 5; ++now) {
        const auto part = [&](int64_t which) {
          return qkv[batch].narrow(1, which * width + head * head_width, head_width);
        };
        const auto scores =
            torch::mv(part(1).narrow(0, 0, now + 1), part(0)[now]) / std::sqrt(double(head_width));
        const auto expected = torch::mv(part(2).narrow(0, 0, now + 1).t(), scores.softmax(0));
        expect_close(actual[batch][now].narrow(0, head * head_width, head_width), expected,
                     "a head's position");
      }
    }
  }
}

TEST(FusedLayers, MeanSquaredErrorIsComputedInFloat32) {
  const auto x = torch::randn({7, 5}).to(torch::kBFloat16).requires_grad_();
  const auto target = torch::randn({7, 5});
  const auto loss = mean_squared_error(x, target);
  EXPECT_EQ(loss.scalar_type(), torch::kFloat32);
  EXPECT_TRUE(torch::equal(loss, torch::mse_loss(x.to(torch::kFloat32), target)));
  loss.backward();
  EXPECT_EQ(x.grad().scalar_type(), torch::kBFloat16);
  EXPECT_THROW(mean_squared_error(x, target.narrow(0, 0, 3)), Error);
}

TEST(FusedLayers, CrossEntropyLeavesPaddingOut) {
  torch::manual_seed(5);
  const auto x = random({6, 4});
  const auto weight = random({8, 4});
  const auto targets = torch::tensor({0, 1, 2, 3, 4, 4}, torch::kLong);
  const auto loss = linear_cross_entropy(x, weight, targets, 5);
  const auto logits = torch::matmul(x, weight.narrow(0, 0, 5).t());
  expect_close(loss,
               (logits.logsumexp(1) - logits.gather(1, targets.unsqueeze(1)).squeeze(1)).mean(),
               "loss");
  loss.backward();
  EXPECT_EQ(weight.grad().narrow(0, 5, 3).abs().sum().item<double>(), 0);
  EXPECT_GT(weight.grad().narrow(0, 0, 5).abs().sum().item<double>(), 0);
  const auto all = linear_cross_entropy(x, weight, targets);
  EXPECT_GT(all.item<double>(), loss.item<double>()) << "more classes, less probability each";
}

TEST(FusedLayers, AutocastCastsAsForTorchLinear) {
  torch::manual_seed(6);
  const auto x = torch::randn({4, 8});
  const auto weight = torch::randn({8, 8});
  const Autocast amp(torch::kCPU, torch::kBFloat16);
  const auto actual = lockstep::linear(x, weight, {}, Activation::kRelu);
  EXPECT_EQ(actual.scalar_type(), torch::kBFloat16);
  EXPECT_TRUE(torch::equal(actual, torch::relu(torch::linear(x, weight))));
}

TEST(FusedLayers, WhatDoesNotFitIsNamed) {
  const auto x = torch::ones({2, 6});
  const auto weight = torch::ones({3, 6});
  test::expect_error(Code::kTensorMismatch, {"linear", "5 values", "[3, 6]"}, [&] {
    lockstep::linear(torch::ones({2, 5}), weight, {});
  });
  test::expect_error(Code::kTensorMismatch, {"bias is [4]", "[3, 6]"},
                     [&] { lockstep::linear(x, weight, torch::ones({4})); });
  test::expect_error(Code::kTensorMismatch, {"layer 1", "3 values", "[2, 4]"}, [&] {
    multi_layer(x, {weight, torch::ones({2, 4})}, {{}, {}}, Activation::kRelu);
  });
  test::expect_error(Code::kTensorMismatch, {"1 weights and 0 biases"},
                     [&] { multi_layer(x, {weight}, {}, Activation::kRelu); });
  test::expect_error(Code::kTensorMismatch, {"branch is [6]"}, [&] {
    add_layer_norm(x, torch::ones({6}), torch::ones({6}), torch::ones({6}));
  });
  test::expect_error(Code::kTensorMismatch, {"5 heads", "[2, 3, 12]"}, [&] {
    causal_self_attention(torch::ones({2, 3, 12}), 5);
  });
  const auto targets = torch::zeros({2}, torch::kLong);
  test::expect_error(Code::kTensorMismatch, {"4 valid classes of 3"},
                     [&] { linear_cross_entropy(x, weight, targets, 4); });
  test::expect_error(Code::kTensorMismatch, {"targets are [1]"},
                     [&] { linear_cross_entropy(x, weight, targets.narrow(0, 0, 1)); });
}

}  // namespace
}  // namespace lockstep::test::fused_layers_test
