// Errors of a pipeline name stage, micro-batch and rank, and nothing hangs.

#include <torch/torch.h>

#include <chrono>
#include <future>
#include <stdexcept>

#include "lockstep/mesh.hpp"
#include "lockstep/pipeline.hpp"
#include "lockstep/tensor_parallel.hpp"
#include "ranks/pipeline_support.hpp"
#include "ranks/rank_threads.hpp"

namespace lockstep::test::pipeline_errors_test {
namespace {

/// Throws in call number `at`, counted from 0, or in its backward.
torch::nn::Functional thrower(int at, bool backward = false) {
  return torch::nn::Functional(
      [at, backward, calls = std::make_shared<int>(0)](const torch::Tensor& x) {
        if ((*calls)++ != at) return x;
        if (!backward) throw std::runtime_error("planted");
        const torch::Tensor out = x * 1;
        out.register_hook([](const torch::Tensor& gradient) -> torch::Tensor {
          throw std::runtime_error("planted");
          return gradient;
        });
        return out;
      });
}

torch::nn::Sequential net_with(const torch::nn::Functional& part) {
  torch::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Linear(test::kWidth, test::kWidth),
                               torch::nn::Linear(test::kWidth, test::kWidth), part,
                               torch::nn::Linear(test::kWidth, test::kWidth));
}

TEST(PipelineErrors, AForwardThatThrowsIsNamed) {
  for (const std::string name : {"gpipe", "1f1b", "zero-bubble"}) {
    Pipeline pipeline(test::cut(net_with(thrower(2)), 2), Devices("cpu:2"),
                      make_schedule(name, 2, 4), {.loss = test::mse});
    const auto batch = test::draw_rows(8, 1);
    test::expect_error(Code::kStageFailed,
                       {"forward of micro-batch 2 in stage 1 on cpu:1 of rank 0", "[2, 12] float32",
                        "planted", "cpu:1 |", "F2"},
                       [&] { pipeline.step(batch.x, batch.y); });
    for (auto& parameter : pipeline.parameters()) parameter.mutable_grad().reset();
    EXPECT_GT(pipeline.step(batch.x, batch.y).item<double>(), 0) << "continues after an error";
  }
}

TEST(PipelineErrors, ABackwardThatThrowsIsNamed) {
  Pipeline pipeline(test::cut(net_with(thrower(1, true)), 2), Devices("cpu:2"), gpipe(2, 4),
                    {.loss = test::mse});
  const auto batch = test::draw_rows(8, 1);
  test::expect_error(Code::kStageFailed, {"backward of micro-batch 1 in stage 1 on cpu:1"},
                     [&] { pipeline.step(batch.x, batch.y); });
}

TEST(PipelineErrors, StagesThatDoNotFitAreNamedWithTheShape) {
  torch::nn::Sequential net(torch::nn::Linear(test::kWidth, 5), torch::nn::Linear(6, test::kWidth));
  Pipeline pipeline(test::cut(net, 2), Devices("cpu:2"), one_f_one_b(2, 2), {.loss = test::mse});
  const auto batch = test::draw_rows(8, 1);
  test::expect_error(Code::kStageFailed, {"forward of micro-batch 0 in stage 1", "[4, 5] float32"},
                     [&] { pipeline.step(batch.x, batch.y); });
  test::expect_error(Code::kStageFailed, {"forward of micro-batch 0 in stage 1"},
                     [&] { pipeline.evaluate(batch.x); });
}

TEST(PipelineErrors, ImpossibleRequestsAreRefused) {
  const auto make = [](std::vector<torch::nn::Sequential> stages, const std::string& devices,
                       Schedule schedule, PipelineOptions options) {
    Pipeline pipeline(std::move(stages), Devices(devices), std::move(schedule), std::move(options));
  };
  const auto stages = [] { return test::cut(test::deep_mlp(2), 2); };
  test::expect_error(Code::kUsage, {"without a loss"},
                     [&] { make(stages(), "cpu:2", gpipe(2, 2), {}); });
  test::expect_error(Code::kPlacement, {"2 ranks", "1 device"},
                     [&] { make(stages(), "cpu:1", gpipe(2, 2), {.loss = test::mse}); });
  test::expect_error(Code::kStageMismatch, {"3 stages", "2 modules"},
                     [&] { make(stages(), "cpu:3", gpipe(3, 2), {.loss = test::mse}); });
  test::expect_error(Code::kUsage, {"stage 2"}, [&] {
    make(stages(), "cpu:2", gpipe(2, 2), {.loss = test::mse, .recompute = {2}});
  });
  Schedule broken = gpipe(2, 2);
  broken.actions[0].pop_back();
  test::expect_error(Code::kSchedule, {},
                     [&] { make(stages(), "cpu:2", broken, {.loss = test::mse}); });
  const torch::nn::Linear shared(test::kWidth, test::kWidth);
  const torch::nn::Sequential tied(shared, torch::nn::Tanh(), shared);
  test::expect_error(Code::kPlacement, {"2.weight", "stages 0 and 1"}, [&] {
    make(split_stages(tied, std::vector<int64_t>{1, 2}), "cpu:2", gpipe(2, 2), {.loss = test::mse});
  });
  test::expect_error(Code::kStageMismatch, {"4 layers", "3 layers in all"}, [&] {
    split_stages(test::deep_mlp(2), std::vector<int64_t>{1, 2});
  });
}

TEST(PipelineErrors, BatchesThatDoNotFitAreRefused) {
  Pipeline pipeline(test::cut(test::deep_mlp(2), 2), Devices("cpu:2"), gpipe(2, 4),
                    {.loss = test::mse});
  const auto few = test::draw_rows(3, 1);
  const auto some = test::draw_rows(8, 1);
  test::expect_error(Code::kStageMismatch, {"3 rows", "4 micro-batches"},
                     [&] { pipeline.step(few.x, few.y); });
  test::expect_error(Code::kStageMismatch, {"x has 8 rows and y 3"},
                     [&] { pipeline.step(some.x, few.y); });
  test::expect_error(Code::kUsage, {"no target"}, [&] { pipeline.step(some.x, {}); });
  test::expect_error(Code::kUsage, {"no input"}, [&] { pipeline.step({}, some.y); });
  test::expect_error(Code::kUsage, {"stage 5"}, [&] { pipeline.stage(5); });
}

// On an axis, the failed rank reports the error and the others name that rank.
TEST(PipelineErrors, AFailedStageStopsAllRanks) {
  const auto outcomes = test::outcomes_of_ranks(3, [](const Communicator& comm) {
    const Devices devices("cpu:1");
    auto net = net_with(thrower(1));
    Pipeline pipeline(split_stages(net, std::vector<int64_t>{1, 2, 1}), comm, devices[0],
                      one_f_one_b(3, 4), {.loss = test::mse});
    const auto batch = test::draw_rows(8, 1);
    pipeline.step(batch.x, batch.y);
  });
  EXPECT_EQ(outcomes[1].code(), Code::kStageFailed) << outcomes[1].text();
  for (const char* part : {"micro-batch 1 in stage 1 on cpu:0 of rank 1", "rank 1 |"}) {
    EXPECT_NE(outcomes[1].text().find(part), std::string::npos) << outcomes[1].text();
  }
  for (const size_t rank : {size_t{0}, size_t{2}}) {
    EXPECT_EQ(outcomes[rank].code(), Code::kRankFailed) << outcomes[rank].text();
    EXPECT_NE(outcomes[rank].text().find("stage 1"), std::string::npos) << outcomes[rank].text();
  }
}

TEST(PipelineErrors, ARankThatLeavesStopsTheOthers) {
  const auto outcomes = test::outcomes_of_ranks(2, [](const Communicator& comm) {
    const Devices devices("cpu:1");
    Pipeline pipeline(test::cut(test::deep_mlp(4), 2), comm, devices[0], one_f_one_b(2, 4),
                      {.loss = test::mse});
    const auto batch = test::draw_rows(8, 1);
    pipeline.step(batch.x, batch.y);
    if (comm.rank() == 1) throw std::runtime_error("gone");
    pipeline.step(batch.x, batch.y);
  });
  EXPECT_TRUE(outcomes[0].failed());
  EXPECT_EQ(outcomes[0].code(), Code::kRankFailed) << outcomes[0].text();
}

TEST(PipelineErrors, AShapeThatChangesBetweenRanksIsNamed) {
  const auto outcomes = test::outcomes_of_ranks(2, [](const Communicator& comm) {
    const Devices devices("cpu:1");
    auto calls = std::make_shared<int>(0);
    torch::nn::Sequential net(torch::nn::Linear(test::kWidth, test::kWidth),
                              torch::nn::Functional([calls](const torch::Tensor& x) {
                                return (*calls)++ < 3 ? x : x.reshape({x.size(0), 2, -1});
                              }),
                              torch::nn::Flatten(), torch::nn::Linear(test::kWidth, test::kWidth));
    Pipeline pipeline(test::cut(net, 2), comm, devices[0], gpipe(2, 4), {.loss = test::mse});
    const auto batch = test::draw_rows(8, 1);
    pipeline.step(batch.x, batch.y);
  });
  EXPECT_EQ(outcomes[0].code(), Code::kStageMismatch) << outcomes[0].text();
  EXPECT_NE(outcomes[0].text().find("output of stage 0, micro-batch 3"), std::string::npos)
      << outcomes[0].text();
  EXPECT_TRUE(outcomes[1].failed());
}

TEST(PipelineErrors, RanksWithDifferentSchedulesAreRefused) {
  const auto outcomes = test::outcomes_of_ranks(2, [](const Communicator& comm) {
    const Devices devices("cpu:1");
    Pipeline pipeline(test::cut(test::deep_mlp(2), 2), comm, devices[0], gpipe(2, 2 + comm.rank()),
                      {.loss = test::mse});
  });
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.code(), Code::kStageMismatch) << outcome.text();
    EXPECT_NE(outcome.text().find("ranks 0 and 1"), std::string::npos) << outcome.text();
  }
}

TEST(PipelineErrors, RanksWithDifferentBatchesAreRefused) {
  const auto outcomes = test::outcomes_of_ranks(2, [](const Communicator& comm) {
    const Devices devices("cpu:1");
    Pipeline pipeline(test::cut(test::deep_mlp(2), 2), comm, devices[0], gpipe(2, 2),
                      {.loss = test::mse});
    const auto batch = test::draw_rows(8 + comm.rank(), 1);
    pipeline.step(batch.x, batch.y);
  });
  EXPECT_EQ(outcomes[1].code(), Code::kStageMismatch) << outcomes[1].text();
  EXPECT_TRUE(outcomes[0].failed()) << "and the other does not wait forever";
}

TEST(PipelineErrors, ARecomputedStageMayNotChangeItsInput) {
  const torch::nn::Sequential net(torch::nn::Functional([](torch::Tensor x) { return x.mul_(2); }),
                                  torch::nn::Linear(test::kWidth, test::kWidth));
  Pipeline pipeline({net}, Devices("cpu:1"), gpipe(1, 1), {.loss = test::mse, .recompute = {0}});
  const auto batch = test::draw_rows(8, 3);
  test::expect_error(Code::kStageFailed, {"changed its input in place"},
                     [&] { pipeline.step(batch.x, batch.y); });
}

TEST(PipelineErrors, StagesOfRanksShareNoWeight) {
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

TEST(PipelineErrors, AMissingStageIsNamed) {
  const std::vector<torch::nn::Sequential> stages = {
      torch::nn::Sequential(torch::nn::Linear(test::kWidth, test::kWidth)),
      torch::nn::Sequential(nullptr)};
  test::expect_error(Code::kStageMismatch, {"stage 1 has no module"}, [&] {
    const Pipeline pipeline(stages, Devices("cpu:2"), gpipe(2, 2), {.loss = test::mse});
  });
}

// Keeps the failed rank alive until the other has learned of the failure.
class UntilOthersEnded {
 public:
  void ended() { others_.set_value(); }
  void wait() {
    EXPECT_EQ(others_.get_future().wait_for(std::chrono::seconds(60)), std::future_status::ready);
  }

 private:
  std::promise<void> others_;
};

TEST(PipelineErrors, ARankWithoutItsStageStopsTheOthers) {
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

TEST(PipelineErrors, AFailedStageStopsItsTensorRanks) {
  UntilOthersEnded others;
  const auto outcomes = test::outcomes_of_ranks(2, [&](const Communicator& comm) {
    const bool fails = comm.rank() == 1;
    const Communicator stages = comm.split(comm.rank(), 0, "pp");
    const Communicator shards = comm.split(0, comm.rank(), "tp");
    torch::manual_seed(1);
    const torch::nn::Linear up(test::kWidth, test::kWidth);
    const torch::nn::Linear down(test::kWidth, test::kWidth);
    const torch::nn::Sequential net(ColumnLinear(up, shards),
                                    torch::nn::Functional([fails](const torch::Tensor& x) {
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
}  // namespace lockstep::test::pipeline_errors_test
