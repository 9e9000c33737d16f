// The course's transformer. That its numbers are PyTorch's is tested in
// tests/parity/practical6_parity.py.

#include "course/transformer.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <set>

#include "course/mlp.hpp"
#include "course/model.hpp"
#include "tensor_support.hpp"

namespace lockstep {
namespace {

course::Options sizes(int64_t dim, int64_t hidden, int64_t depth) {
  course::Options options;
  options.model = "transformer";
  options.dim = dim;
  options.hidden = hidden;
  options.depth = depth;
  return options;
}

std::vector<std::string> names_of(const torch::nn::Module& module) {
  return module.named_parameters().keys();
}

TEST(Transformer, NamesItsParametersAsPyTorchWould) {
  const course::Transformer net(sizes(32, 8, 1));
  const std::set<std::string> expected = {"positions",
                                          "input.weight",
                                          "input.bias",
                                          "blocks.0.norm1.weight",
                                          "blocks.0.norm1.bias",
                                          "blocks.0.attention.qkv.weight",
                                          "blocks.0.attention.qkv.bias",
                                          "blocks.0.attention.out.weight",
                                          "blocks.0.attention.out.bias",
                                          "blocks.0.norm2.weight",
                                          "blocks.0.norm2.bias",
                                          "blocks.0.mlp.0.weight",
                                          "blocks.0.mlp.0.bias",
                                          "blocks.0.mlp.2.weight",
                                          "blocks.0.mlp.2.bias",
                                          "norm.weight",
                                          "norm.bias",
                                          "output.weight",
                                          "output.bias"};
  const auto names = names_of(*net);
  EXPECT_EQ(std::set<std::string>(names.begin(), names.end()), expected);
  EXPECT_EQ(net->named_parameters()["blocks.0.mlp.0.weight"].sizes(), torch::IntArrayRef({32, 8}));
  EXPECT_EQ(net->named_parameters()["positions"].sizes(), torch::IntArrayRef({16, 8}));
}

// A change of position t changes the outputs from t on, and none before.
TEST(Transformer, APositionSeesOnlyItselfAndThoseBefore) {
  torch::manual_seed(1);
  for (const int64_t hidden : {8, 128}) {
    course::Transformer net(sizes(32, hidden, 2));
    const auto x = torch::randn({3, 32});
    for (const int64_t position : {0, 5, 15}) {
      auto changed = x.clone();
      changed.narrow(1, position * 2, 2) += 1;
      const auto difference =
          (net->forward(changed) - net->forward(x)).abs().view({3, 16, 2}).amax({0, 2});
      for (int64_t i = 0; i < 16; ++i) {
        if (i < position) {
          EXPECT_EQ(difference[i].item<float>(), 0) << "of " << position << " at " << i;
        } else {
          EXPECT_GT(difference[i].item<float>(), 0) << "of " << position << " at " << i;
        }
      }
    }
  }
}

TEST(Transformer, RowsDoNotSeeEachOther) {
  torch::manual_seed(1);
  course::Transformer net(sizes(16, 64, 1));
  const auto x = torch::randn({4, 16});
  test::expect_close(net->forward(x).narrow(0, 1, 2), net->forward(x.narrow(0, 1, 2)), "two rows");
}

TEST(Transformer, ACloneGivesTheSameAndIsItsOwn) {
  course::Transformer net(sizes(16, 8, 2));
  const auto x = torch::randn({4, 16});
  const auto copy = std::dynamic_pointer_cast<course::TransformerImpl>(net->clone());
  ASSERT_NE(copy, nullptr);
  const auto before = net->forward(x);
  EXPECT_TRUE(torch::equal(copy->forward(x), before));
  const torch::NoGradGuard no_grad;
  for (auto& parameter : copy->parameters()) parameter += 0.5;
  EXPECT_FALSE(torch::equal(copy->forward(x), before));
  EXPECT_TRUE(torch::equal(net->forward(x), before));
}

TEST(Transformer, LearnsTheWholeModel) {
  torch::manual_seed(1);
  course::Model net(sizes(16, 8, 1));
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2));
  const auto x = torch::randn({32, 16});
  const auto y = torch::tanh(x.cumsum(1));  // what comes depends on what came
  double first = 0;
  double last = 0;
  for (int step = 0; step < 60; ++step) {
    net->zero_grad(true);
    const auto loss = torch::mse_loss(net->forward(x), y);
    loss.backward();
    for (const auto& parameter : net->named_parameters()) {
      ASSERT_TRUE(parameter.value().grad().defined()) << parameter.key();
    }
    optimizer.step();
    (step == 0 ? first : last) = loss.item<double>();
  }
  EXPECT_LT(last, 0.5 * first);
}

TEST(Transformer, RefusesSizesThatDoNotFitWithOnesThatDo) {
  const auto of = [](int64_t dim, int64_t hidden, int64_t depth) {
    return [=] { course::Transformer(sizes(dim, hidden, depth)); };
  };
  test::expect_error(Code::kUsage, {"--dim 24", "such as 32"}, of(24, 8, 1));
  test::expect_error(Code::kUsage, {"--dim 1 "}, of(1, 8, 1));
  test::expect_error(Code::kUsage, {"--hidden 100", "such as 128"}, of(32, 100, 1));
  test::expect_error(Code::kUsage, {"--depth 0"}, of(32, 8, 0));
}

// The holder must not change what the net is called: files of weights are exchanged with PyTorch.
TEST(CourseModel, HasTheNamesAndNumbersOfItsNet) {
  for (const char* model : {"mlp", "transformer"}) {
    course::Options options = sizes(16, 8, 1);
    options.model = model;
    torch::manual_seed(3);
    course::Model held(options);
    torch::manual_seed(3);
    const auto x = torch::randn({2, 16}, at::detail::createCPUGenerator(9));
    torch::Tensor expected;
    std::vector<std::string> names;
    if (options.model == "mlp") {
      course::Mlp net(options);
      names = names_of(*net);
      expected = net->forward(x);
    } else {
      course::Transformer net(options);
      names = names_of(*net);
      expected = net->forward(x);
    }
    EXPECT_EQ(names_of(*held), names) << model;
    EXPECT_TRUE(torch::equal(held->forward(x), expected)) << model;
  }
}

TEST(CourseModel, MovesAsOne) {
  course::Model net(sizes(16, 8, 1));
  const auto x = torch::randn({2, 16});
  const auto before = net->forward(x);
  net->to(torch::kFloat64);
  const auto after = net->forward(x.to(torch::kFloat64));
  EXPECT_EQ(after.scalar_type(), torch::kFloat64);
  test::expect_close(after.to(torch::kFloat32), before, "in double precision");
}

}  // namespace
}  // namespace lockstep
