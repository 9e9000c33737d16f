// What lockstep's optimizers refuse: the parameter is named, and nothing has changed.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "optim_support.hpp"
#include "tensor_support.hpp"

namespace lockstep::test {
namespace {

using torch::optim::OptimizerParamGroup;

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
}  // namespace lockstep::test
