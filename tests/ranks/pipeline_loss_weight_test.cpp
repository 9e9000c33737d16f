// Losses that are means of something other than rows, and gradients that continue beyond the
// pipeline, give the numbers of one device.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <future>
#include <map>
#include <mutex>

#include "lockstep/autocast.hpp"
#include "lockstep/grad_scaler.hpp"
#include "lockstep/mesh.hpp"
#include "lockstep/optim.hpp"
#include "lockstep/pipeline.hpp"
#include "ranks/pipeline_support.hpp"
#include "ranks/rank_threads.hpp"

namespace lockstep::test::pipeline_loss_weight_test {
namespace {

constexpr int64_t kIgnored = -100;
constexpr int kSteps = 4;

torch::nn::Sequential make_net(int64_t layers = 4) {
  const std::lock_guard lock(seeding());
  return test::deep_mlp(layers);
}

torch::Tensor cross_entropy(const torch::Tensor& out, const torch::Tensor& y) {
  return torch::cross_entropy_loss(out, y, {}, at::Reduction::Mean, kIgnored);
}

/// Every third target is ignored, and all of rows 0, 1 and 2: some micro-batches have no target.
test::Rows draw(int64_t rows, int number) {
  const std::lock_guard lock(seeding());
  torch::manual_seed(static_cast<uint64_t>(100 + number));
  const auto x = torch::randn({rows, test::kWidth});
  auto y = torch::randint(test::kWidth, {rows}, torch::kLong);
  for (int64_t row = 0; row < rows; ++row) {
    if (row < 3 || (row + number) % 3 == 0) y[row] = kIgnored;
  }
  return {x, y};
}

test::Rows part_of(const test::Rows& whole, const Communicator& data) {
  const auto rank = static_cast<size_t>(data.rank());
  return {whole.x.tensor_split(data.size())[rank], whole.y.tensor_split(data.size())[rank]};
}

/// Weights and losses of one device that takes `accumulate` batches in each step.
test::Trained train_alone(const std::vector<test::Rows>& batches, int accumulate) {
  auto net = make_net();
  torch::optim::SGD optimizer(net->parameters(), 0.5);
  test::Trained trained;
  for (size_t i = 0; i < batches.size(); ++i) {
    const auto loss = cross_entropy(net->forward(batches[i].x), batches[i].y);
    trained.losses.push_back(loss.item<double>());
    (loss / accumulate).backward();
    if ((i + 1) % static_cast<size_t>(accumulate) != 0) continue;
    optimizer.step();
    optimizer.zero_grad();
  }
  trained.weights = test::copies(net->parameters());
  return trained;
}

struct Shape {
  std::string schedule;
  int data, stages, micro_batches;
  int64_t rows;
  int accumulate = 1;
  std::vector<int> recompute = {};
};

std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << s.schedule << ", data " << s.data << ", " << s.stages << " stages, "
             << s.micro_batches << " micro-batches, " << s.rows << " rows, " << s.accumulate
             << " calls" << (s.recompute.empty() ? "" : ", recomputed");
}

class IgnoredTargets : public ::testing::TestWithParam<Shape> {
 protected:
  static std::vector<test::Rows> batches_of(const Shape& shape) {
    std::vector<test::Rows> batches;
    for (int i = 0; i < kSteps * shape.accumulate; ++i) {
      // The second batch of a step has other rows, divided differently over the ranks.
      batches.push_back(draw(shape.rows + (i % shape.accumulate) * 3, i));
    }
    return batches;
  }

  static void train(Pipeline& pipeline, const Communicator& data, const Shape& shape,
                    const std::vector<test::Rows>& batches, const test::Trained& alone) {
    Sgd optimizer(pipeline.parameters(), {.lr = 0.5});
    for (size_t i = 0; i < batches.size(); ++i) {
      const auto mine = part_of(batches[i], data);
      const bool last = (i + 1) % static_cast<size_t>(shape.accumulate) == 0;
      const auto loss = pipeline.step(mine.x, mine.y,
                                      {.loss_factor = 1.0 / shape.accumulate, .synchronise = last});
      const auto kept = mine.y.ne(kIgnored).sum().item<double>();
      auto sum = torch::tensor({loss.item<double>() * kept, kept}, torch::kFloat64);
      data.all_reduce(sum);
      EXPECT_NEAR((sum[0] / sum[1]).item<double>(), alone.losses[i], 1e-5) << "loss " << i;
      if (!last) continue;
      optimizer.step();
      optimizer.zero_grad();
    }
  }
};

TEST_P(IgnoredTargets, RanksOfAMeshTrainAsOneDevice) {
  const Shape& shape = GetParam();
  const auto batches = batches_of(shape);
  const auto alone = train_alone(batches, shape.accumulate);
  const auto schedule = make_schedule(shape.schedule, shape.stages, shape.micro_batches);
  test::run_ranks(shape.data * schedule.ranks(), [&](const Communicator& world) {
    const Mesh mesh(world, {{"dp", shape.data}, {"pp", schedule.ranks()}});
    const Devices devices("cpu:1");
    const auto net = make_net();
    Pipeline pipeline(test::cut(net, shape.stages), mesh.axis("pp"), devices[0], schedule,
                      {.loss = cross_entropy,
                       .loss_weight = count_targets(kIgnored),
                       .recompute = shape.recompute,
                       .data = mesh.axis("dp")});
    train(pipeline, mesh.axis("dp"), shape, batches, alone);
    expect_stage_weights(pipeline, net, alone);
  });
}

TEST_P(IgnoredTargets, RanksWithTheirOwnStagesTrainAsOneDevice) {
  const Shape& shape = GetParam();
  const auto batches = batches_of(shape);
  const auto alone = train_alone(batches, shape.accumulate);
  const auto schedule = make_schedule(shape.schedule, shape.stages, shape.micro_batches);
  test::run_ranks(shape.data, [&](const Communicator& world) {
    const Devices devices("cpu:" + std::to_string(schedule.ranks()));
    const auto net = make_net();
    Pipeline pipeline(test::cut(net, shape.stages), devices, schedule,
                      {.loss = cross_entropy,
                       .loss_weight = count_targets(kIgnored),
                       .recompute = shape.recompute,
                       .data = world});
    train(pipeline, world, shape, batches, alone);
    expect_stage_weights(pipeline, net, alone);
  });
}

// 9 rows over 3 ranks: rank 0 has ignored targets only.
INSTANTIATE_TEST_SUITE_P(
    Shapes, IgnoredTargets,
    ::testing::Values(Shape{"gpipe", 1, 2, 4, 8}, Shape{"1f1b", 1, 3, 3, 7},
                      Shape{"interleaved", 1, 4, 4, 9}, Shape{"zero-bubble", 1, 2, 4, 8},
                      Shape{"zero-bubble", 1, 3, 5, 11, 1, {0, 2}}, Shape{"1f1b", 1, 1, 4, 8},
                      Shape{"1f1b", 2, 2, 4, 9}, Shape{"gpipe", 3, 2, 3, 9},
                      Shape{"zero-bubble", 3, 2, 2, 9}, Shape{"interleaved", 2, 4, 2, 9},
                      Shape{"1f1b", 2, 2, 3, 9, 1, {0, 1}}, Shape{"1f1b", 1, 2, 2, 8, 2},
                      Shape{"1f1b", 3, 2, 2, 9, 2}, Shape{"zero-bubble", 2, 2, 2, 7, 3}));

// The last call of a window alone does not determine the weight of a rank's gradients.
TEST(PipelineLossWeight, AccumulatedGradientsCountByTheRowsOfTheirOwnCall) {
  const std::vector<int64_t> rows_of_rank_0 = {6, 2};  // of 8
  const auto batches = [] {
    std::vector<test::Rows> made;
    for (uint64_t i = 0; i < 2; ++i) made.push_back(test::draw_rows(8, i));
    return made;
  }();
  auto alone = make_net();
  for (const auto& [x, y] : batches) (test::mse(alone->forward(x), y) / 2).backward();
  test::run_ranks(2, [&](const Communicator& comm) {
    const Devices devices("cpu:2");
    auto net = make_net();
    Pipeline pipeline(test::cut(net, 2), devices, one_f_one_b(2, 2),
                      {.loss = test::mse, .data = comm});
    for (size_t i = 0; i < 2; ++i) {
      const int64_t first = rows_of_rank_0[i];
      const auto mine = [&](const torch::Tensor& whole) {
        return comm.rank() == 0 ? whole.narrow(0, 0, first) : whole.narrow(0, first, 8 - first);
      };
      pipeline.step(mine(batches[i].x), mine(batches[i].y),
                    {.loss_factor = 0.5, .synchronise = i == 1});
    }
    const auto expected = alone->parameters();
    const auto actual = net->parameters();
    for (size_t i = 0; i < expected.size(); ++i) {
      test::expect_close(actual[i].grad(), expected[i].grad(), "weight " + std::to_string(i));
    }
  });
}

TEST(PipelineLossWeight, ABatchWithoutAnyTargetGivesZeros) {
  test::run_ranks(2, [](const Communicator& comm) {
    const Devices devices("cpu:2");
    auto net = make_net();
    Pipeline pipeline(
        test::cut(net, 2), devices, zero_bubble(2, 2),
        {.loss = cross_entropy, .loss_weight = count_targets(kIgnored), .data = comm});
    const auto x = torch::ones({4, test::kWidth});
    const auto loss = pipeline.step(x, torch::full({4}, kIgnored, torch::kLong));
    EXPECT_EQ(loss.item<double>(), 0);
    for (const auto& parameter : net->parameters()) {
      EXPECT_TRUE(parameter.grad().equal(torch::zeros_like(parameter)));
    }
  });
}

// With class weights the mean is divided by their sum.
TEST(PipelineLossWeight, WeightsNeedNotBeCounts) {
  const auto classes = torch::linspace(0.1, 2, test::kWidth);
  const auto loss_of = [&](const torch::Tensor& out, const torch::Tensor& y) {
    return torch::cross_entropy_loss(out, y, classes);
  };
  const auto batch = draw(9, 0);
  const auto y = batch.y.clamp_min(0);
  auto alone = make_net();
  const auto expected = loss_of(alone->forward(batch.x), y);
  expected.backward();
  auto net = make_net();
  Pipeline pipeline(test::cut(net, 2), Devices("cpu:2"), one_f_one_b(2, 4),
                    {.loss = loss_of, .loss_weight = [&](const torch::Tensor& target) {
                       return classes.index({target}).sum().item<double>();
                     }});
  EXPECT_NEAR(pipeline.step(batch.x, y).item<double>(), expected.item<double>(), 1e-5);
  for (size_t i = 0; i < net->parameters().size(); ++i) {
    test::expect_close(net->parameters()[i].grad(), alone->parameters()[i].grad(), "weight");
  }
}

TEST(PipelineLossWeight, WhatCannotWeighIsRefused) {
  const auto make = [](PipelineOptions options) {
    return std::make_unique<Pipeline>(test::cut(make_net(), 2), Devices("cpu:2"), gpipe(2, 2),
                                      std::move(options));
  };
  test::expect_error(Code::kUsage, {"loss_weight", "sum"}, [&] {
    make({.loss = cross_entropy,
          .reduction = LossReduction::kSum,
          .loss_weight = count_targets(kIgnored)});
  });
  for (const double weight : {-1.0, std::numeric_limits<double>::quiet_NaN()}) {
    const auto pipeline =
        make({.loss = cross_entropy, .loss_weight = [=](const torch::Tensor&) { return weight; }});
    const auto batch = draw(8, 0);
    test::expect_error(Code::kUsage, {"micro-batch 0"}, [&] { pipeline->step(batch.x, batch.y); });
  }
  const auto outcomes = test::outcomes_of_ranks(2, [](const Communicator& comm) {
    PipelineOptions options{.loss = cross_entropy, .data = comm};
    if (comm.rank() == 1) options.loss_weight = count_targets(kIgnored);
    const Pipeline pipeline(test::cut(make_net(), 2), Devices("cpu:2"), gpipe(2, 2), options);
  });
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.code(), Code::kStageMismatch) << outcome.text();
  }
}

// The other ranks wait for its weight and learn of the failure.
TEST(PipelineLossWeight, ARankThatCannotWeighStopsTheOthers) {
  std::promise<void> told;
  const auto outcomes = test::outcomes_of_ranks(2, [&](const Communicator& comm) {
    const double weight = comm.rank() == 0 ? 1 : -1;
    Pipeline pipeline(test::cut(make_net(), 2), Devices("cpu:2"), gpipe(2, 2),
                      {.loss = cross_entropy,
                       .loss_weight = [=](const torch::Tensor&) { return weight; },
                       .data = comm});
    const auto batch = draw(8, 0);
    try {
      pipeline.step(batch.x, batch.y);
    } catch (const Error&) {
      if (comm.rank() == 0) told.set_value();
      if (comm.rank() == 1) {  // stays alive until the other has learned of it
        EXPECT_EQ(told.get_future().wait_for(std::chrono::seconds(60)), std::future_status::ready);
      }
      throw;
    }
  });
  EXPECT_EQ(outcomes[0].code(), Code::kRankFailed) << outcomes[0].text();
  EXPECT_EQ(outcomes[1].code(), Code::kUsage) << outcomes[1].text();
}

// Nothing is known of the caller's loss function, but a wrong mean is not silent.
TEST(PipelineLossWeight, AMeanThatIsNotTheBatchsIsToldOnce) {
  const auto told_by = [](const PipelineOptions& options, const test::Rows& batch) {
    Pipeline pipeline(test::cut(make_net(), 2), Devices("cpu:2"), gpipe(2, 4), options);
    ::testing::internal::CaptureStderr();
    pipeline.step(batch.x, batch.y);
    const std::string first = ::testing::internal::GetCapturedStderr();
    ::testing::internal::CaptureStderr();
    pipeline.step(batch.x, batch.y);
    EXPECT_EQ(::testing::internal::GetCapturedStderr(), "") << "told once";
    return first;
  };
  const auto batch = draw(8, 0);
  const auto ignored = told_by({.loss = cross_entropy}, batch);
  EXPECT_NE(ignored.find("warning[LS0030]"), std::string::npos) << ignored;
  EXPECT_NE(ignored.find("-100"), std::string::npos) << ignored;
  EXPECT_NE(ignored.find("count_targets"), std::string::npos) << ignored;
  EXPECT_EQ(told_by({.loss = cross_entropy, .loss_weight = count_targets()}, batch), "");

  const auto pad = [](const torch::Tensor& out, const torch::Tensor& y) {
    return torch::cross_entropy_loss(out, y, {}, at::Reduction::Mean, /*ignore_index=*/0);
  };
  const auto padded = told_by({.loss = pad}, {batch.x, batch.y.clamp_min(0)});
  EXPECT_NE(padded.find("micro-batch 0 is NaN"), std::string::npos) << padded;

  // Padding that leaves something of every micro-batch: only the loss itself tells.
  auto uneven = torch::ones({8}, torch::kLong);
  uneven[0] = 0;
  const auto told = told_by({.loss = pad}, {batch.x, uneven});
  EXPECT_NE(told.find("of two micro-batches together"), std::string::npos) << told;
  EXPECT_EQ(told_by({.loss = pad}, {batch.x, torch::ones({8}, torch::kLong)}), "");

  auto even = batch.y.clone();
  for (int64_t i = 0; i < 8; ++i) even[i] = i % 2 == 0 ? kIgnored : 1;
  EXPECT_EQ(told_by({.loss = cross_entropy}, {batch.x, even}), "") << "each micro-batch alike";
}

// Shares such as 3 of 11 rows have no exact float32 value.
TEST(PipelineLossWeight, DoubleModelsKeepTheirPrecision) {
  const auto batch = test::draw_rows(11, 1);
  const auto x = batch.x.to(torch::kFloat64);
  const auto y = batch.y.to(torch::kFloat64);
  auto alone = make_net();
  alone->to(torch::kFloat64);
  test::mse(alone->forward(x), y).backward();
  for (const double scale : {0.0, 64.0}) {
    auto net = make_net();
    net->to(torch::kFloat64);
    Pipeline pipeline(test::cut(net, 2), Devices("cpu:2"), one_f_one_b(2, 4), {.loss = test::mse});
    GradScaler scaler({.init_scale = scale == 0 ? 1 : scale});
    pipeline.step(x, y, {.scaler = scale == 0 ? nullptr : &scaler});
    for (size_t i = 0; i < net->parameters().size(); ++i) {
      test::expect_close(net->parameters()[i].grad() / (scale == 0 ? 1 : scale),
                         alone->parameters()[i].grad(), "weight " + std::to_string(i));
    }
  }
}

// Backward continues from the pipeline's input.

torch::Tensor input_gradient_alone(const test::Rows& batch, double factor) {
  auto net = make_net();
  const auto x = batch.x.detach().clone().requires_grad_();
  (test::mse(net->forward(x), batch.y) * factor).backward();
  return x.grad();
}

TEST(PipelineInput, ItsGradientIsThatOfOneDevice) {
  const auto batch = test::draw_rows(11, 1);
  const auto expected = input_gradient_alone(batch, 1);
  for (const std::string name : {"gpipe", "1f1b", "interleaved", "zero-bubble", "sequential"}) {
    for (const auto& recompute : {std::vector<int>{}, std::vector<int>{0, 1}}) {
      const auto schedule = make_schedule(name, 4, 4);
      const Devices devices("cpu:" + std::to_string(schedule.ranks()));
      auto net = make_net();
      Pipeline pipeline(test::cut(net, 4), devices, schedule,
                        {.loss = test::mse, .recompute = recompute});
      const auto x = batch.x.detach().clone().requires_grad_();
      pipeline.step(x, batch.y);
      test::expect_close(x.grad(), expected, name);
      auto alone = make_net();
      test::mse(alone->forward(batch.x), batch.y).backward();
      for (size_t i = 0; i < net->parameters().size(); ++i) {
        test::expect_close(net->parameters()[i].grad(), alone->parameters()[i].grad(), name);
      }
      pipeline.step(x, batch.y, {.loss_factor = 0.5});
      test::expect_close(x.grad(), 1.5 * expected, name + ", added");
    }
  }
}

TEST(PipelineInput, WhatMadeItGetsItsGradients) {
  const auto batch = test::draw_rows(8, 1);
  const auto make_first = [] {
    const std::lock_guard lock(seeding());
    torch::manual_seed(1);
    return torch::nn::Linear(test::kWidth, test::kWidth);
  };
  auto first = make_first();
  auto alone = make_net();
  test::mse(alone->forward(torch::tanh(first(batch.x))), batch.y).backward();
  auto before = make_first();
  Pipeline pipeline(test::cut(make_net(), 2), Devices("cpu:2"), one_f_one_b(2, 4),
                    {.loss = test::mse});
  pipeline.step(torch::tanh(before(batch.x)), batch.y);
  test::expect_close(before->weight.grad(), first->weight.grad(), "weight");
  test::expect_close(before->bias.grad(), first->bias.grad(), "bias");
}

// One graph behind inputs and targets, which every micro-batch uses.
TEST(PipelineInput, WhatMadeTheTargetsGetsItsGradientsToo) {
  const auto batch = test::draw_rows(8, 1);
  const auto run = [&](const std::function<void(const torch::Tensor&, const torch::Tensor&)>& go) {
    auto scale = torch::ones({test::kWidth}).requires_grad_();
    const auto made = torch::exp(batch.x * scale);
    go(made, torch::tanh(made));
    return scale.grad();
  };
  auto alone = make_net();
  const auto expected = run([&](const torch::Tensor& x, const torch::Tensor& y) {
    test::mse(alone->forward(x), y).backward();
  });
  for (const std::string name : {"1f1b", "zero-bubble"}) {
    for (const auto& recompute : {std::vector<int>{}, std::vector<int>{0, 1}}) {
      Pipeline pipeline(test::cut(make_net(), 2), Devices("cpu:2"), make_schedule(name, 2, 4),
                        {.loss = test::mse, .recompute = recompute});
      const auto found =
          run([&](const torch::Tensor& x, const torch::Tensor& y) { pipeline.step(x, y); });
      test::expect_close(found, expected, name);
    }
  }
}

TEST(PipelineInput, AFrozenPipelineStillPassesGradientsOn) {
  const auto batch = test::draw_rows(8, 1);
  const auto expected = input_gradient_alone(batch, 1);
  for (const std::string name : {"1f1b", "zero-bubble"}) {
    auto net = make_net();
    for (auto& parameter : net->parameters()) parameter.requires_grad_(false);
    Pipeline pipeline(test::cut(net, 2), Devices("cpu:2"), make_schedule(name, 2, 4),
                      {.loss = test::mse});
    const auto x = batch.x.detach().clone().requires_grad_();
    pipeline.step(x, batch.y);
    test::expect_close(x.grad(), expected, name);
  }
}

TEST(PipelineInput, IsScaledAsTheWeightsGradientsAre) {
  const auto batch = test::draw_rows(8, 1);
  Pipeline pipeline(test::cut(make_net(), 2), Devices("cpu:2"), one_f_one_b(2, 4),
                    {.loss = test::mse});
  GradScaler scaler({.init_scale = 64});
  const auto x = batch.x.detach().clone().requires_grad_();
  const Autocast amp(torch::kCPU, torch::kBFloat16, /*enabled=*/false);
  pipeline.step(x, batch.y, {.scaler = &scaler});
  test::expect_close(x.grad(), input_gradient_alone(batch, 64), "scaled");
}

// On a data axis it is the gradient of the rank's own loss, whether the step is averaged or not.
TEST(PipelineInput, RanksGetThatOfTheirOwnLoss) {
  test::run_ranks(4, [](const Communicator& world) {
    const Mesh mesh(world, {{"dp", 2}, {"pp", 2}});
    const Devices devices("cpu:1");
    test::Rows batch;
    torch::Tensor expected;
    {
      const std::lock_guard lock(seeding());
      batch = test::draw_rows(6 + 3 * mesh.coordinate("dp"), 1);
    }
    expected = input_gradient_alone(batch, 1);
    Pipeline pipeline(test::cut(make_net(), 2), mesh.axis("pp"), devices[0], zero_bubble(2, 3),
                      {.loss = test::mse, .data = mesh.axis("dp")});
    for (const bool synchronise : {true, false, true}) {
      const auto x = batch.x.detach().clone().requires_grad_();
      pipeline.step(x, batch.y, {.synchronise = synchronise});
      if (mesh.coordinate("pp") == 0) test::expect_close(x.grad(), expected, "own");
    }
  });
}

}  // namespace
}  // namespace lockstep::test::pipeline_loss_weight_test
