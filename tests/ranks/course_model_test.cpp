// The course's nets, whole and as lists of layers. That their numbers are PyTorch's is tested in
// tests/parity.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <mutex>
#include <set>

#include "course/layers.hpp"
#include "course/model.hpp"
#include "lockstep/mesh.hpp"
#include "rank_threads.hpp"
#include "tensor_support.hpp"

namespace lockstep::test::course_model_test {
namespace {

course::Options sizes(const char* model, int64_t dim, int64_t hidden, int64_t depth) {
  course::Options options;
  options.model = model;
  options.dim = dim;
  options.hidden = hidden;
  options.depth = depth;
  options.seed = 5;
  return options;
}

std::vector<std::string> names_of(const torch::nn::Module& module) {
  return module.named_parameters().keys();
}

TEST(Transformer, NamesItsParametersAsPyTorchWould) {
  const course::Transformer net(sizes("transformer", 32, 8, 1));
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
    course::Transformer net(sizes("transformer", 32, hidden, 2));
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
  course::Transformer net(sizes("transformer", 16, 64, 1));
  const auto x = torch::randn({4, 16});
  expect_close(net->forward(x).narrow(0, 1, 2), net->forward(x.narrow(0, 1, 2)), "two rows");
}

TEST(Transformer, ACloneGivesTheSameAndIsItsOwn) {
  course::Transformer net(sizes("transformer", 16, 8, 2));
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
  course::Model net(sizes("transformer", 16, 8, 1));
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
    return [=] { course::Transformer(sizes("transformer", dim, hidden, depth)); };
  };
  expect_error(Code::kUsage, {"--dim 24", "such as 32"}, of(24, 8, 1));
  expect_error(Code::kUsage, {"--dim 1 "}, of(1, 8, 1));
  expect_error(Code::kUsage, {"--hidden 100", "such as 128"}, of(32, 100, 1));
  expect_error(Code::kUsage, {"--depth 0"}, of(32, 8, 0));
}

// The holder must not change what the net is called: files of weights are exchanged with PyTorch.
TEST(CourseModel, HasTheNamesAndNumbersOfItsNet) {
  for (const char* model : {"mlp", "transformer"}) {
    course::Options options = sizes("transformer", 16, 8, 1);
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
  course::Model net(sizes("transformer", 16, 8, 1));
  const auto x = torch::randn({2, 16});
  const auto before = net->forward(x);
  net->to(torch::kFloat64);
  const auto after = net->forward(x.to(torch::kFloat64));
  EXPECT_EQ(after.scalar_type(), torch::kFloat64);
  expect_close(after.to(torch::kFloat32), before, "in double precision");
}

// Ranks that are threads share the generator that --seed sets.
course::Layers make_layers(const course::Options& options, const Communicator& axis) {
  static std::mutex one_at_a_time;
  const std::scoped_lock lock(one_at_a_time);
  return {options, axis};
}

torch::Tensor rows(int64_t count, int64_t dim, uint64_t seed) {
  return torch::randn({count, dim}, at::detail::createCPUGenerator(seed));
}

template <class Net>
void train(Net& net, int64_t dim, int steps) {
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05));
  for (int step = 0; step < steps; ++step) {
    net->zero_grad();
    const auto seed = static_cast<uint64_t>(step);
    torch::mse_loss(net->forward(rows(6, dim, seed)), rows(6, dim, seed + 100)).backward();
    optimizer.step();
  }
}

void expect_same_weights(const course::Model& actual, const course::Model& expected) {
  ASSERT_EQ(actual->named_parameters().keys(), expected->named_parameters().keys());
  for (const auto& each : expected->named_parameters()) {
    expect_close(actual->named_parameters()[each.key()], each.value(), each.key());
  }
}

TEST(CourseLayers, OnOneRankAreTheNetItself) {
  for (const auto& options : {sizes("mlp", 6, 8, 0), sizes("mlp", 6, 8, 3),
                              sizes("transformer", 32, 8, 2), sizes("transformer", 16, 128, 1)}) {
    auto made = make_layers(options, Communicator::self());
    torch::manual_seed(options.seed);
    course::Model net(options);
    const auto x = rows(3, options.dim, 1);
    auto layers = made.layers();
    EXPECT_EQ(layers->size(), static_cast<size_t>(options.model == "mlp" ? 2 * options.depth + 3
                                                                         : options.depth + 2));
    EXPECT_EQ(course::count_layers(options, 1), static_cast<int64_t>(layers->size()));
    EXPECT_TRUE(torch::equal(layers->forward(x), net->forward(x)));
    EXPECT_EQ(layers->parameters().size(), net->parameters().size());
    train(layers, options.dim, 2);
    train(net, options.dim, 2);
    const std::vector<int64_t> stages = {static_cast<int64_t>(layers->size())};
    made.collect(Communicator::self(), stages, std::vector<int>{3});
    for (const auto& each : net->named_parameters()) {
      EXPECT_TRUE(torch::equal(made.net()->named_parameters()[each.key()], each.value()))
          << each.key();
    }
    layers->to(torch::kFloat64);
    for (const auto& each : made.net()->parameters()) {
      EXPECT_EQ(each.scalar_type(), torch::kFloat64);
    }
    EXPECT_EQ(made.tensor_traffic().calls, 0);
  }
}

struct Divided {
  course::Options options;
  int ranks;
  size_t layers;
};

TEST(CourseLayers, DividedTrainAsOneDevice) {
  const std::vector<Divided> all = {
      {sizes("mlp", 5, 8, 0), 2, 1},            // one pair
      {sizes("mlp", 5, 8, 1), 2, 3},            // a pair, ReLU, one left over
      {sizes("mlp", 5, 12, 2), 3, 3},           // two pairs
      {sizes("mlp", 5, 12, 3), 2, 5},           // two pairs and one left over
      {sizes("transformer", 32, 128, 2), 2, 4}  // a head each
  };
  for (const auto& each : all) {
    torch::manual_seed(each.options.seed);
    course::Model expected(each.options);
    const auto initial = expected->parameters()[0].detach().clone();
    train(expected, each.options.dim, 5);
    EXPECT_FALSE(torch::allclose(expected->parameters()[0], initial));
    run_ranks(each.ranks, [&](const Communicator& axis) {
      auto made = make_layers(each.options, axis);
      auto layers = made.layers();
      ASSERT_EQ(layers->size(), each.layers);
      EXPECT_EQ(course::count_layers(each.options, each.ranks), static_cast<int64_t>(each.layers));
      train(layers, each.options.dim, 5);
      EXPECT_GT(made.tensor_traffic().all_reduces, 0);
      const std::vector<int64_t> stages = {static_cast<int64_t>(each.layers)};
      made.collect(Communicator::self(), stages, std::vector<int>{0});
      expect_same_weights(made.net(), expected);
    });
  }
}

// Weights that ranks have in common need no sum of their own to stay the same.
TEST(CourseLayers, WeightsThatAreNotDividedStayTheSameToTheBit) {
  const auto options = sizes("transformer", 32, 128, 1);
  run_ranks(2, [&](const Communicator& axis) {
    auto made = make_layers(options, axis);
    auto layers = made.layers();
    train(layers, options.dim, 5);
    for (const char* name : {"positions", "input.weight", "blocks.0.norm1.weight",
                             "blocks.0.norm2.bias", "norm.weight", "output.weight"}) {
      const auto mine = made.net()->named_parameters()[name].detach();
      const auto first = mine.clone();
      axis.broadcast(first, 0);
      EXPECT_TRUE(torch::equal(mine, first)) << name;
    }
  });
}

// Every stage's owner adds to its own weights what nobody else can know.
TEST(CourseLayers, CollectBringsEveryStageToEveryRank) {
  const std::vector<int> rank_of_stage = {1, 0, 1};
  for (const auto& [options, layers_per_stage] :
       std::vector<std::pair<course::Options, std::vector<int64_t>>>{
           {sizes("mlp", 5, 8, 3), {1, 3, 1}}, {sizes("transformer", 32, 128, 3), {2, 1, 2}}}) {
    torch::manual_seed(options.seed);
    const course::Model initial(options);
    run_ranks(4, [&, &options = options,
                  &layers_per_stage = layers_per_stage](const Communicator& world) {
      const Mesh mesh(world, {{"pp", 2}, {"tp", 2}});
      auto made = make_layers(options, mesh.axis("tp"));
      {
        const torch::NoGradGuard no_grad;
        size_t layer = 0;
        for (size_t stage = 0; stage < 3; ++stage) {
          const bool mine = rank_of_stage[stage] == mesh.coordinate("pp");
          for (int64_t i = 0; i < layers_per_stage[stage]; ++i, ++layer) {
            for (auto& weight : made.layers()->ptr(layer)->parameters()) {
              weight += mine ? static_cast<double>(stage + 1) : -100.0;
            }
          }
        }
      }
      made.collect(mesh.axis("pp"), layers_per_stage, rank_of_stage);
      for (const auto& each : initial->named_parameters()) {
        const auto change = made.net()->named_parameters()[each.key()] - each.value();
        const auto stage = change.flatten()[0].item<double>();
        EXPECT_TRUE(stage > 0.5 && stage < 3.5) << each.key() << ": " << stage;
        EXPECT_LT((change - std::round(stage)).abs().max().item<double>(), 1e-5) << each.key();
      }
      const auto first = made.net()->parameters().front() - initial->parameters().front();
      EXPECT_NEAR(first.flatten()[0].item<double>(), 1, 1e-5);
      const auto last = made.net()->parameters().back() - initial->parameters().back();
      EXPECT_NEAR(last.flatten()[0].item<double>(), 3, 1e-5);
    });
  }
}

TEST(CourseLayers, StagesMayHaveATensorAxisEach) {
  const auto options = sizes("mlp", 5, 8, 2);
  torch::manual_seed(options.seed);
  course::Model expected(options);
  train(expected, options.dim, 3);
  run_ranks(2, [&](const Communicator& axis) {
    auto made = make_layers(options, axis);
    const std::vector<int64_t> stages = {1, 2};
    made.separate_stages(stages);
    const auto calls = axis.stats().calls;
    auto layers = made.layers();
    train(layers, options.dim, 3);
    // Two sums forward and, as the first layer's input needs no gradient, one backward.
    EXPECT_EQ(made.tensor_traffic().all_reduces, 3 * 3);
    EXPECT_EQ(axis.stats().calls, calls);
    made.collect(Communicator::self(), stages, std::vector<int>{0, 1});
    expect_same_weights(made.net(), expected);
  });
}

TEST(CourseLayers, RefusesSizesThatCannotBeDivided) {
  course::require_tensor_parallel_sizes(sizes("mlp", 5, 7, 1), 1);
  course::require_tensor_parallel_sizes(sizes("transformer", 32, 8, 1), 1);
  course::require_tensor_parallel_sizes(sizes("transformer", 32, 256, 1), 4);
  expect_error(Code::kUsage, {"--hidden 10", "3 ranks", "such as 12"},
               [] { course::require_tensor_parallel_sizes(sizes("mlp", 5, 10, 1), 3); });
  expect_error(Code::kUsage, {"the 1 head of --hidden 64", "2 ranks", "such as 128"},
               [] { course::require_tensor_parallel_sizes(sizes("transformer", 32, 64, 1), 2); });
  expect_error(Code::kUsage, {"the 4 heads of --hidden 256", "3 ranks", "such as 384"},
               [] { course::require_tensor_parallel_sizes(sizes("transformer", 32, 256, 1), 3); });
  run_ranks(3, [](const Communicator& axis) {
    expect_error(Code::kUsage, {"--hidden 10"}, [&] { make_layers(sizes("mlp", 5, 10, 1), axis); });
  });
}

TEST(CourseLayers, RefusesStagesOfAnotherCut) {
  auto made = make_layers(sizes("mlp", 5, 8, 1), Communicator::self());  // 5 layers
  const std::vector<int64_t> short_of_one = {2, 2};
  expect_error(Code::kStageMismatch, {"stages have 4 layers", "model has 5"},
               [&] { made.separate_stages(short_of_one); });
  expect_error(Code::kStageMismatch, {"4 layers"}, [&] {
    made.collect(Communicator::self(), short_of_one, std::vector<int>{0, 0});
  });
  run_ranks(2, [](const Communicator& pipeline) {
    auto layers = make_layers(sizes("mlp", 5, 8, 1), Communicator::self());
    const std::vector<int64_t> stages = {2, 3};
    expect_error(Code::kStageMismatch, {"1 rank was", "2 stages"},
                 [&] { layers.collect(pipeline, stages, std::vector<int>{0}); });
    expect_error(Code::kStageMismatch, {"rank 2", "2 ranks"}, [&] {
      layers.collect(pipeline, stages, std::vector<int>{0, 2});
    });
  });
}

}  // namespace
}  // namespace lockstep::test::course_model_test
