// Learning-rate schedules and averages of weights against closed forms, in checkpoints, and
// together with other features. tests/parity/train_parity.py compares both with PyTorch.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <optional>
#include <vector>

#include "lockstep/lockstep.hpp"
#include "ranks/ddp_nets.hpp"
#include "ranks/rank_threads.hpp"
#include "tensor_support.hpp"

namespace lockstep::test::schedule_average_test {
namespace {

using Rates = std::vector<double>;

Rates rates_of(const LrSchedule& schedule, int64_t count, double base = 1) {
  Rates rates;
  for (int64_t i = 0; i < count; ++i) rates.push_back(schedule(i, base));
  return rates;
}

void expect_rates(const Rates& actual, const Rates& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) EXPECT_NEAR(actual[i], expected[i], 1e-15) << i;
}

TEST(LrSchedule, ClosedForms) {
  expect_rates(rates_of(constant_lr(0.5), 2, 4), {2, 2});
  expect_rates(rates_of(linear_lr(0.25, 1, 3), 5, 4), {1, 2, 3, 4, 4});
  expect_rates(rates_of(step_lr(2, 0.5), 5), {1, 1, 0.5, 0.5, 0.25});
  expect_rates(rates_of(cosine_lr(2, 0.5), 3, 1.5), {1.5, 1, 0.5});
  expect_rates(rates_of(warmup_cosine_lr(2, 4, 0.25), 6, 1.25),
               {0.625, 0.9375, 1.25, 0.75, 0.25, 0.25});
  expect_rates(rates_of(warmup_cosine_lr(0, 2), 4), {1, 0.5, 0, 0});
  expect_rates(rates_of(sequential_lr({constant_lr(2), step_lr(1, 0.5)}, {2}), 5),
               {2, 2, 1, 0.5, 0.25});
}

TEST(LrSchedule, RefusesWhatCannotBe) {
  expect_error(Code::kUsage, {"linear_lr over 0 updates"}, [] { linear_lr(0, 1, 0); });
  expect_error(Code::kUsage, {"2 schedules with 0 milestones"}, [] {
    sequential_lr({constant_lr(), constant_lr()}, {});
  });
  expect_error(Code::kUsage, {"do not ascend"}, [] {
    sequential_lr({constant_lr(), constant_lr(), constant_lr()}, {5, 5});
  });
  expect_error(Code::kUsage, {"4 of 4 updates"}, [] { warmup_cosine_lr(4, 4); });
}

std::vector<torch::optim::OptimizerParamGroup> two_groups(const torch::nn::Linear& net,
                                                          double first, double second) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<torch::Tensor>{net->weight},
                      std::make_unique<torch::optim::SGDOptions>(first));
  groups.emplace_back(std::vector<torch::Tensor>{net->bias},
                      std::make_unique<torch::optim::SGDOptions>(second));
  return groups;
}

TEST(LrScheduler, EachGroupHasItsOwnBase) {
  torch::nn::Linear net(2, 2);
  Sgd optimizer(two_groups(net, 0.4, 0.8), {});
  LrScheduler scheduler(optimizer, linear_lr(0.5, 1, 2));
  EXPECT_EQ(scheduler.rates(), (Rates{0.2, 0.4}));
  scheduler.step();
  scheduler.step();
  EXPECT_EQ(scheduler.rates(), (Rates{0.4, 0.8}));
  EXPECT_EQ(scheduler.updates(), 2);
}

TEST(LrScheduler, AnyOptimizerOfTorch) {
  torch::nn::Linear net(2, 2);
  torch::optim::AdamW adam(net->parameters(), torch::optim::AdamWOptions(0.5));
  torch::optim::RMSprop rms(net->parameters(), torch::optim::RMSpropOptions(0.5));
  torch::optim::Adagrad adagrad(net->parameters(), torch::optim::AdagradOptions(0.5));
  for (torch::optim::Optimizer* each :
       std::vector<torch::optim::Optimizer*>{&adam, &rms, &adagrad}) {
    LrScheduler scheduler(*each, step_lr(1, 0.5));
    scheduler.step();
    EXPECT_EQ(each->param_groups()[0].options().get_lr(), 0.25);
  }
}

// Trains with everything that this file is about; stops and resumes where told.
struct Training {
  explicit Training(bool low_precision) {
    if (low_precision) masters.emplace(*net, MasterWeightsOptions{.dtype = torch::kBFloat16});
    optimizer.emplace(net->parameters(), AdamWOptions{.lr = 0.05, .masters = masters});
    scheduler.emplace(*optimizer, warmup_cosine_lr(3, 12));
    average.emplace(*net, WeightAverageOptions{.decay = 0.9, .warmup = true});
  }

  void step(int64_t number) {
    auto x = rows(5, 6, static_cast<double>(number));
    if (masters) x = x.to(torch::kBFloat16);
    net->forward(x).to(torch::kFloat).square().mean().backward();
    optimizer->step({.zero_grad = true});
    scheduler->step();
    average->update();
  }

  torch::Tensor averages() const {
    std::vector<torch::Tensor> all;
    for (const auto& entry : average->entries()) all.push_back(entry.average);
    return flat_weights(all);
  }

  TwoLayers net;
  std::optional<MasterWeights> masters;
  std::optional<AdamW> optimizer;
  std::optional<LrScheduler> scheduler;
  std::optional<WeightAverage> average;
};

TEST(LrScheduler, AndAveragesResumeWithTheSameBits) {
  for (const bool low_precision : {false, true}) {
    ScratchFolder folder;
    Training whole(low_precision);
    for (int64_t step = 1; step <= 8; ++step) whole.step(step);
    for (int run = 0; run < 2; ++run) {
      Training part(low_precision);
      Checkpoint checkpoint(folder.file("run"), {.asynchronous = false});
      checkpoint.add("model", *part.net).add("optimizer", *part.optimizer, *part.net);
      checkpoint.add("scheduler", *part.scheduler).add("average", *part.average);
      if (part.masters) checkpoint.add("masters", *part.masters, *part.net);
      int64_t step = checkpoint.resume();
      EXPECT_EQ(step, run == 0 ? 0 : 4);
      while (step < (run == 0 ? 4 : 8)) part.step(++step);
      checkpoint.save(step);
      checkpoint.finish();
      if (run == 0) continue;
      EXPECT_EQ(part.scheduler->rates(), whole.scheduler->rates());
      EXPECT_EQ(part.average->updates(), 8);
      EXPECT_TRUE(torch::equal(flat_weights(part.net->parameters()),
                               flat_weights(whole.net->parameters())));
      EXPECT_TRUE(torch::equal(part.averages(), whole.averages()));
    }
  }
}

TEST(LrScheduler, RefusesACheckpointOfOtherGroups) {
  ScratchFolder folder;
  torch::nn::Linear net(2, 2);
  {
    Sgd optimizer(two_groups(net, 0.1, 0.2), {});
    LrScheduler scheduler(optimizer, constant_lr());
    Checkpoint checkpoint(folder.file("run"), {.asynchronous = false});
    checkpoint.add("scheduler", scheduler).save(1);
    checkpoint.finish();
  }
  Sgd optimizer(net->parameters(), {.lr = 0.1});
  LrScheduler scheduler(optimizer, constant_lr());
  Checkpoint checkpoint(folder.file("run"));
  checkpoint.add("scheduler", scheduler);
  expect_error(Code::kTensorMismatch, {"2 groups", "has 1"}, [&] { checkpoint.resume(); });
  expect_error(Code::kUsage, {"another group"}, [&] {
    optimizer.add_param_group(std::vector<torch::Tensor>{torch::zeros({1}).requires_grad_()});
    scheduler.step();
  });
}

TEST(WeightAverage, FollowsTheFormula) {
  torch::nn::Linear net(3, 2);
  WeightAverage average(*net, {.decay = 0.75});
  torch::Tensor expected;
  for (int step = 0; step < 5; ++step) {
    const torch::NoGradGuard no_grad;
    net->weight.fill_(step);
    average.update();
    expected = step == 0 ? net->weight.clone() : 0.75 * expected + 0.25 * net->weight;
    expect_close(average.entries()[0].average, expected, "average");
  }
}

TEST(WeightAverage, WarmsUp) {
  torch::nn::Linear net(1, 1);
  WeightAverage average(*net, {.decay = 0.5, .warmup = true});
  Rates decays;
  for (int step = 0; step < 12; ++step) {
    decays.push_back(average.decay());
    average.update();
  }
  EXPECT_EQ(decays[0], 0);
  EXPECT_DOUBLE_EQ(decays[1], 2.0 / 11);
  EXPECT_DOUBLE_EQ(decays[7], 8.0 / 17);
  EXPECT_EQ(decays[9], 0.5);
  EXPECT_EQ(decays[11], 0.5);
}

TEST(WeightAverage, AGuardPutsTheAveragesInPlaceAndTheWeightsBack) {
  for (const bool low_precision : {false, true}) {
    Training training(low_precision);
    for (int64_t step = 1; step <= 4; ++step) training.step(step);
    const auto weights = flat_weights(training.net->parameters()).clone();
    const auto averages = training.averages().clone();
    const auto versions = training.net->first->weight._version();
    {
      const UseAverage averaged(*training.average);
      const auto inside = flat_weights(training.net->parameters());
      EXPECT_FALSE(torch::equal(inside, weights));
      const double tolerance = low_precision ? 1e-2 : 0;
      EXPECT_TRUE(torch::allclose(inside, averages, tolerance, tolerance));
      expect_error(Code::kUsage, {"update()", "UseAverage"}, [&] { training.average->update(); });
      expect_error(Code::kUsage, {"inside UseAverage"}, [&] { (void)training.average->entries(); });
      expect_error(Code::kUsage, {"UseAverage inside"},
                   [&] { const UseAverage again(*training.average); });
    }
    EXPECT_TRUE(torch::equal(flat_weights(training.net->parameters()), weights));
    EXPECT_TRUE(torch::equal(training.averages(), averages));
    EXPECT_EQ(training.net->first->weight._version(), versions);
    Training other(low_precision);  // the guard leaves no trace in what follows
    for (int64_t step = 1; step <= 6; ++step) other.step(step);
    training.step(5);
    training.step(6);
    EXPECT_TRUE(torch::equal(flat_weights(training.net->parameters()),
                             flat_weights(other.net->parameters())));
  }
}

TEST(WeightAverage, AveragesMastersAndNotTheirRoundedCopies) {
  torch::nn::Linear net(4, 4);
  const MasterWeights masters(*net, {.dtype = torch::kBFloat16});
  WeightAverage average(*net, {.decay = 0.5});
  EXPECT_EQ(average.entries()[0].average.scalar_type(), torch::kFloat);
  average.update();
  EXPECT_TRUE(torch::equal(average.entries()[0].average, masters.of(net->weight)));
}

TEST(WeightAverage, BuffersWhereAskedFor) {
  torch::nn::BatchNorm1d norm(3);
  WeightAverage parameters_only(*norm), all(*norm, {.decay = 0.5, .buffers = true});
  EXPECT_EQ(parameters_only.entries().size(), 2U);
  ASSERT_EQ(all.entries().size(), 4U) << "the count of batches is no weight";
  all.update();
  norm(rows(6, 3, 0));
  const auto running = norm->running_mean.clone();
  all.update();
  {
    const UseAverage averaged(all);
    expect_close(norm->running_mean, running * 0.5, "running mean");
  }
  EXPECT_TRUE(torch::equal(norm->running_mean, running));
}

// A norm that the module has under two names is averaged once, and comes back.
TEST(WeightAverage, ASharedBufferIsOne) {
  torch::nn::BatchNorm1d norm(3);
  torch::nn::Sequential net(norm, norm);
  WeightAverage average(*net, {.decay = 0.5, .buffers = true});
  EXPECT_EQ(average.entries().size(), 4U);
  average.update();
  net->forward(rows(6, 3, 0));
  const auto running = norm->running_mean.clone();
  {
    const UseAverage averaged(average);
    EXPECT_FALSE(torch::equal(norm->running_mean, running));
  }
  EXPECT_TRUE(torch::equal(norm->running_mean, running));
}

TEST(WeightAverage, OfLowPrecisionIsFloat32) {
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    const torch::NoGradGuard no_grad;
    torch::nn::Linear net(4, 4);
    net->to(dtype);
    net->weight.fill_(1);
    WeightAverage average(*net, {.decay = 0.999});
    average.update();
    net->weight.fill_(2);
    for (int i = 0; i < 1000; ++i) average.update();
    const double expected = 2 - std::pow(0.999, 1000);
    const auto& values = average.entries()[0].average;
    EXPECT_NEAR(values.mean().item<double>(), expected, 1e-4);
    const auto before = values.clone();
    {
      const UseAverage averaged(average);
      EXPECT_EQ(net->weight.scalar_type(), dtype);
      EXPECT_NEAR(net->weight.to(torch::kFloat).mean().item<double>(), expected, 0.01);
    }
    EXPECT_TRUE(torch::equal(net->weight, torch::full_like(net->weight, 2)));
    EXPECT_TRUE(torch::equal(average.entries()[0].average, before));
  }
}

TEST(WeightAverage, IsTheSameOnAllRanksWithoutCommunication) {
  run_ranks(3, [](const Communicator& comm) {
    TwoLayers net;
    DistributedDataParallel ddp(net, comm);
    Sgd optimizer(ddp.parameters(), {.lr = 0.1});
    WeightAverage average(*net, {.decay = 0.8});
    for (int step = 0; step < 3; ++step) {
      for (auto [batch, steps, is_last] : accumulate(
               std::vector<torch::Tensor>{rows(2, 6, comm.rank()), rows(2, 6, step)}, 2, ddp)) {
        (ddp(batch).square().mean() / steps).backward();
        if (!is_last) {  // evaluation between two micro-steps changes no weight for DDP
          const UseAverage averaged(average);
          const torch::NoGradGuard no_grad;
          net->forward(batch);
        }
        if (is_last) optimizer.step({.zero_grad = true});
      }
      average.update();
    }
    std::vector<torch::Tensor> all;
    for (const auto& entry : average.entries()) all.push_back(entry.average);
    expect_same_on_all(comm, flat_weights(all), "averages");
  });
}

TEST(WeightAverage, RefusesTheModuleOfAShardedModel) {
  run_ranks(2, [](const Communicator& comm) {
    TwoLayers net;
    WeightAverage before(*net);
    FullyShardedDataParallel fsdp(net, comm);
    expect_error(Code::kUsage, {"WeightAverage", "FullyShardedDataParallel"},
                 [&] { WeightAverage after(*net); });
    expect_error(Code::kUsage, {"WeightAverage"}, [&] { before.update(); });
  });
}

TEST(WeightAverage, RefusesADecayOutOfRange) {
  torch::nn::Linear net(1, 1);
  expect_error(Code::kUsage, {"decay of 1.5"}, [&] { WeightAverage(*net, {.decay = 1.5}); });
}

}  // namespace
}  // namespace lockstep::test::schedule_average_test
