// Corners of a pipeline in which a step once gave other gradients than one device, or left others
// waiting.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <future>
#include <stdexcept>

#include "lockstep/autocast.hpp"
#include "lockstep/error.hpp"
#include "lockstep/tensor_parallel.hpp"
#include "ranks/pipeline_support.hpp"
#include "ranks/rank_threads.hpp"

namespace lockstep {
namespace {

torch::nn::Functional step_of(std::function<torch::Tensor(const torch::Tensor&)> work) {
  return torch::nn::Functional(std::move(work));
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

// libtorch keeps casts of weights until the outermost Autocast ends, also those that were made
// without gradients.
TEST(PipelineReview, AutocastFindsNoCastsWithoutHistory) {
  const auto batch = test::draw_rows(8, 3);
  const auto train = [&](const torch::nn::Sequential& net, PipelineOptions options, bool evaluate) {
    options.loss = test::mse;
    const Devices devices("cpu:1");
    Pipeline pipeline(test::cut(net, 2), Communicator::self(), devices[0],
                      on_places(one_f_one_b(2, 2), std::vector<int>{0, 0}), options);
    const Autocast amp(torch::kCPU, torch::kBFloat16);
    if (evaluate) pipeline.evaluate(batch.x);
    pipeline.step(batch.x, batch.y);
  };
  const auto plain = test::deep_mlp(4);
  train(plain, {}, false);
  const auto again = test::deep_mlp(4);
  train(again, {.recompute = {0, 1}}, false);
  expect_gradients(again, plain, "computed again");
  const auto after = test::deep_mlp(4);
  train(after, {}, true);
  expect_gradients(after, plain, "after an evaluation");
}

TEST(PipelineReview, RanksEvaluateOutsideAutocastWhatTheyTrainInside) {
  // Made before the ranks, which are threads, would draw from one generator.
  const std::vector<torch::nn::Sequential> nets = {test::deep_mlp(2), test::deep_mlp(2)};
  const auto batch = test::draw_rows(8, 3);
  const auto expected = test::deep_mlp(2)->forward(batch.x).detach();
  test::run_ranks(2, [&](const Communicator& comm) {
    const Devices devices("cpu:1");
    const auto& net = nets[static_cast<size_t>(comm.rank())];
    // Cut behind a Linear: what travels has the precision of its product.
    Pipeline pipeline(split_stages(net, std::vector<int64_t>{1, 3}), comm, devices[0], gpipe(2, 2),
                      {.loss = test::mse});
    for (int round = 0; round < 2; ++round) {
      {
        const Autocast amp(torch::kCPU, torch::kBFloat16);
        pipeline.step(batch.x, batch.y);
      }
      const auto out = pipeline.evaluate(batch.x);
      if (comm.rank() == 0) continue;
      test::expect_close(out, expected, "in full precision");
    }
  });
}

TEST(PipelineReview, ComplexActivationsCarryGradients) {
  const auto make = [] {
    torch::manual_seed(3);
    return torch::nn::Sequential(
        torch::nn::Linear(test::kWidth, test::kWidth),
        step_of([](const torch::Tensor& x) { return torch::complex(x, 2 * x); }),
        step_of([](const torch::Tensor& x) { return torch::abs(x); }),
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

TEST(PipelineReview, AStageComputedAgainMayNotChangeItsInput) {
  const torch::nn::Sequential net(step_of([](torch::Tensor x) { return x.mul_(2); }),
                                  torch::nn::Linear(test::kWidth, test::kWidth));
  Pipeline pipeline({net}, Devices("cpu:1"), gpipe(1, 1), {.loss = test::mse, .recompute = {0}});
  const auto batch = test::draw_rows(8, 3);
  test::expect_error(Code::kStageFailed, {"changed its input in place"},
                     [&] { pipeline.step(batch.x, batch.y); });
}

TEST(PipelineReview, LayersThatWorkInPlaceAreMeasured) {
  const torch::nn::Sequential net(torch::nn::Linear(test::kWidth, test::kWidth),
                                  torch::nn::ReLU(torch::nn::ReLUOptions(true)));
  EXPECT_EQ(measure_layers(net, test::draw_rows(8, 3).x).size(), 2U);
}

TEST(PipelineReview, StagesOfRanksShareNoWeight) {
  const auto outcomes = test::outcomes_of_ranks(2, [](const Communicator& comm) {
    const Devices devices("cpu:1");
    const torch::nn::Linear shared(test::kWidth, test::kWidth);
    const std::vector<torch::nn::Sequential> stages = {
        torch::nn::Sequential(shared, torch::nn::Tanh()), torch::nn::Sequential(shared)};
    const Pipeline pipeline(stages, comm, devices[0], gpipe(2, 2), {.loss = test::mse});
  });
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.code(), Code::kPlacement) << outcome.text();
  }
}

TEST(PipelineReview, AMissingStageIsNamed) {
  const std::vector<torch::nn::Sequential> stages = {
      torch::nn::Sequential(torch::nn::Linear(test::kWidth, test::kWidth)),
      torch::nn::Sequential(nullptr)};
  test::expect_error(Code::kStageMismatch, {"stage 1 has no module"}, [&] {
    const Pipeline pipeline(stages, Devices("cpu:2"), gpipe(2, 2), {.loss = test::mse});
  });
}

// The rank that failed stays alive until the other has learned of it.
class UntilOthersEnded {
 public:
  void ended() { others_.set_value(); }
  void wait() {
    EXPECT_EQ(others_.get_future().wait_for(std::chrono::seconds(60)), std::future_status::ready);
  }

 private:
  std::promise<void> others_;
};

TEST(PipelineReview, ARankWithoutItsStageStopsTheOthers) {
  UntilOthersEnded others;
  const auto outcomes = test::outcomes_of_ranks(2, [&](const Communicator& comm) {
    const Devices devices("cpu:1");
    const std::vector<torch::nn::Sequential> stages = {
        torch::nn::Sequential(torch::nn::Linear(test::kWidth, test::kWidth)),
        torch::nn::Sequential(nullptr)};
    const auto batch = test::draw_rows(8, 3);
    try {
      Pipeline pipeline(stages, comm, devices[0], gpipe(2, 2), {.loss = test::mse});
      pipeline.step(batch.x, batch.y);
    } catch (const Error&) {
      if (comm.rank() == 0) others.ended();
      if (comm.rank() == 1) others.wait();
      throw;
    }
  });
  EXPECT_EQ(outcomes[0].code(), Code::kRankFailed) << outcomes[0].text();
  EXPECT_EQ(outcomes[1].code(), Code::kStageMismatch) << outcomes[1].text();
}

TEST(PipelineReview, AFailedStageStopsItsTensorRanks) {
  UntilOthersEnded others;
  const auto outcomes = test::outcomes_of_ranks(2, [&](const Communicator& comm) {
    const bool fails = comm.rank() == 1;
    const Communicator stages = comm.split(comm.rank(), 0, "pp");
    const Communicator shards = comm.split(0, comm.rank(), "tp");
    torch::manual_seed(1);
    const torch::nn::Linear up(test::kWidth, test::kWidth);
    const torch::nn::Linear down(test::kWidth, test::kWidth);
    const torch::nn::Sequential net(ColumnLinear(up, shards),
                                    step_of([fails](const torch::Tensor& x) {
                                      if (fails) throw std::runtime_error("planted");
                                      return x;
                                    }),
                                    RowLinear(down, shards));
    const Devices devices("cpu:1");
    Pipeline pipeline({net}, stages, devices[0], gpipe(1, 2), {.loss = test::mse});
    const auto batch = test::draw_rows(8, 3);
    try {
      pipeline.step(batch.x, batch.y);
    } catch (const Error&) {
      EXPECT_TRUE(pipeline.last_step().actions.empty());
      if (fails) others.wait();
      if (!fails) others.ended();
      throw;
    }
  });
  EXPECT_EQ(outcomes[0].code(), Code::kRankFailed) << outcomes[0].text();
  EXPECT_NE(outcomes[0].text().find("planted"), std::string::npos) << outcomes[0].text();
  EXPECT_EQ(outcomes[1].code(), Code::kStageFailed) << outcomes[1].text();
}

}  // namespace
}  // namespace lockstep
