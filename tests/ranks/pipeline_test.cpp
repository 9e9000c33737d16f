// Pipelines whose stages are devices of one process: parity with one device, whatever the schedule.

#include "lockstep/pipeline.hpp"

#include <torch/torch.h>

#include <functional>
#include <set>

#include "lockstep/autocast.hpp"
#include "lockstep/grad_scaler.hpp"
#include "lockstep/optim.hpp"
#include "ranks/pipeline_support.hpp"
#include "ranks/rank_threads.hpp"

namespace lockstep::test::pipeline_test {
namespace {

using test::Trained;

constexpr int kSteps = 10;

Trained train(Pipeline& pipeline, int64_t rows, int accumulate = 1) {
  torch::optim::SGD optimizer(pipeline.parameters(), 0.1);
  Trained trained;
  for (int step = 0; step < kSteps; ++step) {
    double sum = 0;
    for (int micro = 0; micro < accumulate; ++micro) {
      const auto batch =
          test::draw_rows(rows, static_cast<uint64_t>(100 + step * accumulate + micro));
      sum += pipeline.step(batch.x, batch.y, {.loss_factor = 1.0 / accumulate}).item<double>();
    }
    trained.losses.push_back(sum / accumulate);
    optimizer.step();
    optimizer.zero_grad();
  }
  trained.weights = test::copies(pipeline.parameters());
  return trained;
}

struct Case {
  std::string schedule;
  int stages;
  int micro_batches;
  int64_t rows;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.schedule << ", " << c.stages << " stages, " << c.micro_batches
             << " micro-batches, " << c.rows << " rows";
}

class PipelineParity : public ::testing::TestWithParam<Case> {};

TEST_P(PipelineParity, WeightsAndLossesAreThoseOfOneDevice) {
  const auto& [name, stages, micro_batches, rows] = GetParam();
  const auto schedule = make_schedule(name, stages, micro_batches);
  for (const bool transformer : {false, true}) {
    const auto make = [&] { return transformer ? test::small_transformer(4) : test::deep_mlp(4); };
    const Trained alone = test::train_alone(make(), kSteps, rows);
    const Devices devices("cpu:" + std::to_string(schedule.ranks()));
    Pipeline pipeline(test::cut(make(), stages), devices, schedule, {.loss = test::mse});
    test::expect_same(train(pipeline, rows), alone, transformer ? "transformer" : "mlp");
  }
}

INSTANTIATE_TEST_SUITE_P(
    Schedules, PipelineParity,
    ::testing::Values(Case{"1f1b", 1, 2, 8}, Case{"1f1b", 2, 1, 8}, Case{"1f1b", 2, 2, 8},
                      Case{"1f1b", 2, 4, 8}, Case{"1f1b", 2, 8, 8}, Case{"1f1b", 2, 3, 8},
                      Case{"1f1b", 3, 4, 9}, Case{"1f1b", 4, 8, 16}, Case{"1f1b", 4, 3, 7},
                      Case{"gpipe", 2, 8, 16}, Case{"gpipe", 3, 3, 8}, Case{"gpipe", 4, 5, 11},
                      Case{"sequential", 2, 4, 8}, Case{"sequential", 3, 2, 7},
                      Case{"interleaved", 4, 4, 8}, Case{"interleaved", 4, 8, 17},
                      Case{"zero-bubble", 2, 8, 16}, Case{"zero-bubble", 3, 4, 9},
                      Case{"zero-bubble", 4, 5, 11}));

// The same work on fewer devices, down to one.
TEST(Pipeline, StagesMayShareADevice) {
  const Trained alone = test::train_alone(test::deep_mlp(4), kSteps, 8);
  for (const std::vector<int>& rank_of_stage : {std::vector<int>{0, 0, 0}, {0, 1, 0}, {1, 0, 0}}) {
    const auto schedule = on_ranks(one_f_one_b(3, 4), rank_of_stage);
    Pipeline pipeline(test::cut(test::deep_mlp(4), 3), Devices("cpu:2"), schedule,
                      {.loss = test::mse});
    test::expect_same(train(pipeline, 8), alone, "shared");
  }
}

TEST(Pipeline, AccumulatesOverCalls) {
  const Trained alone = test::train_alone(test::deep_mlp(4), kSteps, 8, 3);
  Pipeline pipeline(test::cut(test::deep_mlp(4), 2), Devices("cpu:2"), one_f_one_b(2, 4),
                    {.loss = test::mse});
  test::expect_same(train(pipeline, 8, 3), alone, "accumulated");
}

TEST(Pipeline, RecomputedStagesGiveTheSameAndHoldLess) {
  const Trained alone = test::train_alone(test::deep_mlp(4), kSteps, 8);
  for (const std::string name : {"1f1b", "zero-bubble"}) {
    Pipeline pipeline(test::cut(test::deep_mlp(4), 2), Devices("cpu:2"), make_schedule(name, 2, 4),
                      {.loss = test::mse, .recompute = {0, 1}});
    test::expect_same(train(pipeline, 8), alone, "recomputed, " + name);
  }
  const auto peak_of = [](const std::vector<int>& recompute) {
    const Devices devices("cpu:2");
    Pipeline pipeline(test::cut(test::deep_mlp(12), 2), devices, gpipe(2, 8),
                      {.loss = test::mse, .recompute = recompute});
    const auto batch = test::draw_rows(512, 1);
    pipeline.step(batch.x, batch.y);
    devices[0].reset_peak_memory();
    pipeline.step(batch.x, batch.y);
    return devices[0].memory().peak_bytes;
  };
  EXPECT_LT(peak_of({0, 1}) * 2, peak_of({}));
}

TEST(Pipeline, OneFOneBHoldsLessThanGpipe) {
  const auto peak_of = [](const Schedule& schedule) {
    const Devices devices("cpu:2");
    Pipeline pipeline(test::cut(test::deep_mlp(8), 2), devices, schedule, {.loss = test::mse});
    const auto batch = test::draw_rows(1024, 1);
    pipeline.step(batch.x, batch.y);
    devices[0].reset_peak_memory();
    devices[1].reset_peak_memory();
    pipeline.step(batch.x, batch.y);
    return std::pair(devices[0].memory().peak_bytes, devices[1].memory().peak_bytes);
  };
  const auto [gpipe_first, gpipe_second] = peak_of(gpipe(2, 8));
  const auto [early_first, early_second] = peak_of(one_f_one_b(2, 8));
  EXPECT_LT(early_first * 2, gpipe_first);
  EXPECT_LT(early_second * 3, gpipe_second);
}

// Dropout's masks depend on seed, call, stage and micro-batch only.
TEST(Pipeline, RandomNumbersDoNotDependOnTheSchedule) {
  const auto run = [](const Schedule& schedule, const std::vector<int>& recompute) {
    torch::manual_seed(3);
    torch::nn::Sequential net;
    for (int i = 0; i < 4; ++i) {
      net->push_back(torch::nn::Linear(test::kWidth, test::kWidth));
      net->push_back(torch::nn::Dropout(0.5));
    }
    const Devices devices("cpu:2");
    Pipeline pipeline(test::cut(net, 2), devices, schedule,
                      {.loss = test::mse, .recompute = recompute});
    torch::manual_seed(11);
    Trained trained;
    torch::optim::SGD optimizer(pipeline.parameters(), 0.1);
    const auto x = torch::ones({8, test::kWidth});
    for (int step = 0; step < 3; ++step) {
      trained.losses.push_back(pipeline.step(x, x).item<double>());
      optimizer.step();
      optimizer.zero_grad();
    }
    trained.weights = test::copies(pipeline.parameters());
    return trained;
  };
  const Trained expected = run(gpipe(2, 4), {});
  EXPECT_NE(expected.losses[0], expected.losses[1]);
  test::expect_same(run(one_f_one_b(2, 4), {}), expected, "1f1b");
  test::expect_same(run(zero_bubble(2, 4), {}), expected, "zero-bubble");
  test::expect_same(run(on_ranks(gpipe(2, 4), std::vector<int>{0, 0}), {}), expected, "one device");
  test::expect_same(run(one_f_one_b(2, 4), {0, 1}), expected, "recomputed");
}

TEST(Pipeline, DropoutIsTheSameAfterEverySeeding) {
  torch::nn::Sequential net(torch::nn::Linear(test::kWidth, test::kWidth), torch::nn::Dropout(0.5),
                            torch::nn::Linear(test::kWidth, test::kWidth));
  Pipeline pipeline(test::cut(net, 2), Devices("cpu:2"), gpipe(2, 2), {.loss = test::mse});
  const auto x = torch::ones({4, test::kWidth});
  const auto two_losses = [&] {
    torch::manual_seed(11);
    const double first = pipeline.step(x, x).item<double>();
    return std::pair(first, pipeline.step(x, x).item<double>());
  };
  const auto expected = two_losses();
  EXPECT_NE(expected.first, expected.second) << "each step drops other units";
  EXPECT_EQ(two_losses(), expected) << "nothing drawn in between";
  torch::rand({4});
  EXPECT_EQ(two_losses(), expected) << "numbers drawn in between";
}

// As in DistributedDataParallel: the data axis would spread one rank's NaN to all.
TEST(Pipeline, AGradientThatIsNotFiniteIsNamedBeforeItIsAveraged) {
  for (const auto nonfinite : {Nonfinite::kWarn, Nonfinite::kStop}) {
    testing::internal::CaptureStderr();
    const auto outcomes = test::outcomes_of_ranks(2, [&](const Communicator& comm) {
      torch::nn::Sequential net(torch::nn::Linear(test::kWidth, test::kWidth),
                                torch::nn::Linear(test::kWidth, test::kWidth));
      Pipeline pipeline(test::cut(net, 2), Devices("cpu:2"), gpipe(2, 2),
                        {.loss = test::mse, .data = comm, .nonfinite = nonfinite});
      const auto x = torch::ones({4, test::kWidth});
      pipeline.step(x, x);
      pipeline.step(x, comm.rank() == 1 ? x / 0 : x);
    });
    const std::string said = testing::internal::GetCapturedStderr();
    if (nonfinite == Nonfinite::kWarn) {
      EXPECT_NE(said.find("rank 1, step 2: stage 1: the gradient of 1."), std::string::npos)
          << said;
      EXPECT_EQ(said.find("rank 0"), std::string::npos) << said;
    } else {
      for (const auto& outcome : outcomes) {
        EXPECT_NE(outcome.text().find("rank 1, step 2: stage"), std::string::npos)
            << outcome.text();
      }
    }
  }
}

// BatchNorm sees micro-batches: its statistics are those of running them one after the other, and
// recomputation does not update them twice.
TEST(Pipeline, BatchNormSeesEachMicroBatchOnce) {
  const auto make = [] {
    torch::manual_seed(5);
    return torch::nn::Sequential(torch::nn::Linear(test::kWidth, test::kWidth),
                                 torch::nn::BatchNorm1d(test::kWidth),
                                 torch::nn::Linear(test::kWidth, test::kWidth));
  };
  const auto batch = test::draw_rows(12, 2);
  auto expected = make();
  for (const auto& part : batch.x.tensor_split(3)) expected->forward(part);
  for (const auto& recompute : {std::vector<int>{}, std::vector<int>{0}}) {
    auto net = make();
    Pipeline pipeline(test::cut(net, 2), Devices("cpu:2"), gpipe(2, 3),
                      {.loss = test::mse, .recompute = recompute});
    pipeline.step(batch.x, batch.y);
    for (const auto& item : expected->named_buffers()) {
      test::expect_close(net->named_buffers()[item.key()], item.value(), item.key());
    }
  }
}

TEST(Pipeline, AutocastHoldsInEveryForward) {
  std::set<torch::ScalarType> dtypes;
  std::mutex mutex;
  const auto spy = [&](const torch::Tensor& x) {
    const std::lock_guard lock(mutex);
    dtypes.insert(x.scalar_type());
    return x;
  };
  torch::manual_seed(7);
  torch::nn::Sequential net(
      torch::nn::Linear(test::kWidth, test::kWidth), torch::nn::Functional(spy),
      torch::nn::Linear(test::kWidth, test::kWidth), torch::nn::Functional(spy));
  Pipeline pipeline(test::cut(net, 2), Devices("cpu:2"), one_f_one_b(2, 4), {.loss = test::mse});
  const auto batch = test::draw_rows(8, 3);
  torch::Tensor loss;
  {
    const Autocast amp(torch::kCPU, torch::kBFloat16);
    loss = pipeline.step(batch.x, batch.y);
  }
  EXPECT_EQ(dtypes, std::set<torch::ScalarType>{torch::kBFloat16});
  EXPECT_EQ(loss.scalar_type(), torch::kFloat);
  auto alone = net;
  for (auto& parameter : pipeline.parameters()) {
    EXPECT_EQ(parameter.grad().scalar_type(), torch::kFloat);
  }
}

TEST(Pipeline, Bf16GradientsAreThoseOfOneDevice) {
  for (const std::string name : {"1f1b", "zero-bubble"}) {
    auto net = test::deep_mlp(4);
    const auto batch = test::draw_rows(16, 3);
    {
      torch::Tensor loss;
      {
        const Autocast amp(torch::kCPU, torch::kBFloat16);
        loss = test::mse(net->forward(batch.x), batch.y);
      }
      loss.backward();
    }
    auto other = test::deep_mlp(4);
    Pipeline pipeline(test::cut(other, 2), Devices("cpu:2"), make_schedule(name, 2, 1),
                      {.loss = test::mse});
    {
      const Autocast amp(torch::kCPU, torch::kBFloat16);
      pipeline.step(batch.x, batch.y);
    }
    const auto expected = net->parameters();
    const auto actual = other->parameters();
    for (size_t i = 0; i < expected.size(); ++i) {
      test::expect_close(actual[i].grad(), expected[i].grad(), name + std::to_string(i));
    }
  }
}

TEST(Pipeline, AScalerScalesWhatGoesBackwardOnly) {
  Pipeline pipeline(test::cut(test::deep_mlp(4), 2), Devices("cpu:2"), one_f_one_b(2, 4),
                    {.loss = test::mse});
  GradScaler scaler({.init_scale = 1024});
  Sgd optimizer(pipeline.parameters(), {.lr = 0.1});
  Trained trained;
  for (int step = 0; step < kSteps; ++step) {
    const auto batch = test::draw_rows(8, static_cast<uint64_t>(100 + step));
    trained.losses.push_back(pipeline.step(batch.x, batch.y, {.scaler = &scaler}).item<double>());
    scaler.step(optimizer);
    scaler.update();
    optimizer.zero_grad();
  }
  trained.weights = test::copies(pipeline.parameters());
  test::expect_same(trained, test::train_alone(test::deep_mlp(4), kSteps, 8), "scaled");
}

TEST(Pipeline, OptimizersMayRunOnTheStagesDevices) {
  const Trained alone = test::train_alone(test::deep_mlp(4), kSteps, 8);
  const Devices devices("cpu:2");
  Pipeline pipeline(test::cut(test::deep_mlp(4), 2), devices, one_f_one_b(2, 4),
                    {.loss = test::mse});
  std::vector<std::unique_ptr<Sgd>> optimizers;
  for (const int stage : pipeline.local_stages()) {
    optimizers.push_back(
        std::make_unique<Sgd>(pipeline.stage(stage)->parameters(), SgdOptions{.lr = 0.1}));
  }
  Trained trained;
  std::vector<const Device*> used(2);
  for (int step = 0; step < kSteps; ++step) {
    const auto batch = test::draw_rows(8, static_cast<uint64_t>(100 + step));
    trained.losses.push_back(pipeline.step(batch.x, batch.y).item<double>());
    pipeline.for_each_stage("optimizer", [&](int stage) {
      used[static_cast<size_t>(stage)] = current_device();
      optimizers[static_cast<size_t>(stage)]->step();
      optimizers[static_cast<size_t>(stage)]->zero_grad();
    });
  }
  trained.weights = test::copies(pipeline.parameters());
  test::expect_same(trained, alone, "an optimizer per stage");
  EXPECT_EQ(used, (std::vector<const Device*>{&devices[0], &devices[1]}));
}

TEST(Pipeline, EvaluatesWithoutGradients) {
  auto net = test::deep_mlp(4);
  const auto batch = test::draw_rows(10, 4);
  const auto expected = net->forward(batch.x).detach();
  Pipeline pipeline(test::cut(net, 3), Devices("cpu:3"), one_f_one_b(3, 4), {.loss = test::mse});
  const auto out = pipeline.evaluate(batch.x);
  EXPECT_FALSE(out.requires_grad());
  test::expect_close(out, expected, "output");
  for (const auto& parameter : pipeline.parameters()) EXPECT_FALSE(parameter.grad().defined());
}

TEST(Pipeline, SumsOfRowsAreNotWeighted) {
  const auto sum = [](const torch::Tensor& out, const torch::Tensor& y) {
    return (out - y).square().sum();
  };
  auto net = test::deep_mlp(4);
  const auto batch = test::draw_rows(7, 4);
  const auto loss = sum(net->forward(batch.x), batch.y);
  loss.backward();
  auto other = test::deep_mlp(4);
  Pipeline pipeline(test::cut(other, 2), Devices("cpu:2"), one_f_one_b(2, 3),
                    {.loss = sum, .reduction = LossReduction::kSum});
  EXPECT_NEAR(pipeline.step(batch.x, batch.y).item<double>(), loss.item<double>(), 1e-4);
  const auto expected = net->parameters();
  const auto actual = other->parameters();
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(torch::allclose(actual[i].grad(), expected[i].grad(), 1e-4, 1e-4)) << i;
  }
}

// The table printed, the table tested and the table run are one object.
TEST(Pipeline, RunsExactlyTheScheduleGiven) {
  for (const std::string& name : schedule_names()) {
    const auto schedule = make_schedule(name, 4, 4);
    const Devices devices("cpu:" + std::to_string(schedule.ranks()));
    Pipeline pipeline(test::cut(test::deep_mlp(4), 4), devices, schedule, {.loss = test::mse});
    const auto batch = test::draw_rows(8, 4);
    pipeline.step(batch.x, batch.y);
    std::vector<std::vector<Action>> ran(schedule.actions.size());
    int64_t before_ns = 0;
    for (const auto& [action, rank, begin_ns, end_ns] : pipeline.last_step().actions) {
      ran[static_cast<size_t>(rank)].push_back(action);
      EXPECT_LE(before_ns, begin_ns);
      EXPECT_LE(begin_ns, end_ns);
      before_ns = begin_ns;
    }
    EXPECT_EQ(ran, schedule.actions) << name;
    EXPECT_TRUE(pipeline.last_step().syncs.empty()) << name;
  }
}

TEST(Pipeline, WeightsAreOnTheirStagesDevices) {
  const Devices devices("cpu:2");
  auto net = test::deep_mlp(4);
  Pipeline pipeline(test::cut(net, 2), devices, one_f_one_b(2, 2), {.loss = test::mse});
  for (const int stage : {0, 1}) {
    EXPECT_EQ(&pipeline.device_of(stage), &devices[static_cast<size_t>(stage)]);
    for (const auto& parameter : pipeline.stage(stage)->parameters()) {
      EXPECT_TRUE(devices[static_cast<size_t>(stage)].owns(parameter));
    }
  }
  const auto batch = test::draw_rows(8, 4);
  pipeline.step(batch.x, batch.y);
  const int64_t message_bytes = 8 * test::kWidth * 4;  // of all micro-batches, one way
  EXPECT_EQ(devices[0].traffic().sent_bytes, message_bytes);
  EXPECT_EQ(devices[1].traffic().sent_bytes, message_bytes);
  EXPECT_EQ(pipeline.links().messages, 4);
  EXPECT_EQ(pipeline.links().bytes, 2 * message_bytes);
}

TEST(Pipeline, FrozenStagesAreLeftAlone) {
  auto net = test::deep_mlp(4);
  for (size_t i = 0; i < 4; ++i) {
    for (auto& parameter : net->children()[i]->parameters()) parameter.requires_grad_(false);
  }
  const auto before = test::copies(net->parameters());
  for (const std::string name : {"1f1b", "zero-bubble"}) {
    Pipeline pipeline(test::cut(net, 2), Devices("cpu:2"), make_schedule(name, 2, 2),
                      {.loss = test::mse});
    EXPECT_EQ(pipeline.parameters().size(), 4u);
    const auto batch = test::draw_rows(8, 4);
    pipeline.step(batch.x, batch.y);
    for (const auto& parameter : pipeline.parameters()) EXPECT_TRUE(parameter.grad().defined());
    for (const auto& parameter : pipeline.stage(0)->parameters()) {
      EXPECT_FALSE(parameter.grad().defined());
    }
  }
}

void expect_gradients(const torch::nn::Sequential& actual, const torch::nn::Sequential& expected,
                      const std::string& what) {
  const auto got = actual->parameters();
  const auto wanted = expected->parameters();
  ASSERT_EQ(got.size(), wanted.size());
  for (size_t i = 0; i < wanted.size(); ++i) {
    ASSERT_TRUE(got[i].grad().defined()) << what << ", parameter " << i;
    test::expect_close(got[i].grad(), wanted[i].grad(), what + ", parameter " + std::to_string(i));
  }
}

// libtorch caches casts of weights until the outermost Autocast ends, even those made without
// gradients.
TEST(Pipeline, AutocastFindsNoCastsWithoutHistory) {
  const auto batch = test::draw_rows(8, 3);
  const auto run = [&](const torch::nn::Sequential& net, PipelineOptions options, bool evaluate) {
    options.loss = test::mse;
    const Devices devices("cpu:1");
    Pipeline pipeline(test::cut(net, 2), Communicator::self(), devices[0],
                      on_ranks(one_f_one_b(2, 2), std::vector<int>{0, 0}), options);
    const Autocast amp(torch::kCPU, torch::kBFloat16);
    if (evaluate) pipeline.evaluate(batch.x);
    pipeline.step(batch.x, batch.y);
  };
  const auto plain = test::deep_mlp(4);
  run(plain, {}, false);
  const auto again = test::deep_mlp(4);
  run(again, {.recompute = {0, 1}}, false);
  expect_gradients(again, plain, "recomputed");
  const auto after = test::deep_mlp(4);
  run(after, {}, true);
  expect_gradients(after, plain, "after an evaluation");
}

TEST(Pipeline, ComplexActivationsCarryGradients) {
  const auto make = [] {
    torch::manual_seed(3);
    return torch::nn::Sequential(
        torch::nn::Linear(test::kWidth, test::kWidth),
        torch::nn::Functional([](const torch::Tensor& x) { return torch::complex(x, 2 * x); }),
        torch::nn::Functional([](const torch::Tensor& x) { return torch::abs(x); }),
        torch::nn::Linear(test::kWidth, test::kWidth));
  };
  const auto batch = test::draw_rows(8, 3);
  auto alone = make();
  test::mse(alone->forward(batch.x), batch.y).backward();
  const auto net = make();
  Pipeline pipeline(test::cut(net, 2), Devices("cpu:2"), gpipe(2, 2), {.loss = test::mse});
  pipeline.step(batch.x, batch.y);
  expect_gradients(net, alone, "complex");
}

TEST(Pipeline, LayersThatWorkInPlaceAreMeasured) {
  const torch::nn::Sequential net(torch::nn::Linear(test::kWidth, test::kWidth),
                                  torch::nn::ReLU(torch::nn::ReLUOptions(true)));
  EXPECT_EQ(measure_layers(net, test::draw_rows(8, 3).x).size(), 2U);
}

}  // namespace
}  // namespace lockstep::test::pipeline_test
