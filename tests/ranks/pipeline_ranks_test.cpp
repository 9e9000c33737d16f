// Pipelines whose stages are ranks, and several pipelines on a data axis.

#include <torch/torch.h>

#include "lockstep/autocast.hpp"
#include "lockstep/grad_scaler.hpp"
#include "lockstep/mesh.hpp"
#include "lockstep/optim.hpp"
#include "lockstep/pipeline.hpp"
#include "ranks/pipeline_support.hpp"
#include "ranks/rank_threads.hpp"

namespace lockstep::test::pipeline_ranks_test {
namespace {

using test::Trained;

constexpr int kSteps = 10;

/// This data rank's block of the rows; the first ranks take one more.
test::Rows rows_of(const test::Rows& whole, const Communicator& data) {
  const auto xs = whole.x.tensor_split(data.size());
  const auto ys = whole.y.tensor_split(data.size());
  return {xs[static_cast<size_t>(data.rank())], ys[static_cast<size_t>(data.rank())]};
}

struct Shape {
  std::string schedule;
  int data, stages, micro_batches;
  int64_t rows;
  bool transformer = false;
  int accumulate = 1;
};

std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << s.schedule << ", data " << s.data << ", " << s.stages << " stages, "
             << s.micro_batches << " micro-batches, " << s.rows << " rows"
             << (s.transformer ? ", transformer" : "") << ", " << s.accumulate << " calls";
}

torch::nn::Sequential make_net(const Shape& shape) {
  const std::lock_guard lock(seeding());
  return shape.transformer ? test::small_transformer(4) : test::deep_mlp(4);
}

test::Rows draw(int64_t rows, int number) {
  const std::lock_guard lock(seeding());
  return test::draw_rows(rows, static_cast<uint64_t>(100 + number));
}

void train(Pipeline& pipeline, const Communicator& data, const Shape& shape,
           std::vector<double>& losses) {
  torch::optim::SGD optimizer(pipeline.parameters(), 0.1);
  for (int step = 0; step < kSteps; ++step) {
    double sum = 0;
    for (int micro = 0; micro < shape.accumulate; ++micro) {
      const auto whole = draw(shape.rows, step * shape.accumulate + micro);
      const auto mine = rows_of(whole, data);
      const auto loss = pipeline.step(
          mine.x, mine.y,
          {.loss_factor = 1.0 / shape.accumulate, .synchronise = micro + 1 == shape.accumulate});
      // The batch's loss is the mean over all data ranks, by rows.
      auto share = (loss.to(torch::kFloat64) *
                    (static_cast<double>(mine.x.size(0)) / static_cast<double>(shape.rows)))
                       .reshape({1})
                       .contiguous();
      data.all_reduce(share);
      sum += share.item<double>() / shape.accumulate;
    }
    losses.push_back(sum);
    optimizer.step();
    optimizer.zero_grad();
  }
}

class HybridParity : public ::testing::TestWithParam<Shape> {};

// Stages are ranks of one axis, batches are divided over the other.
TEST_P(HybridParity, RanksOfAMeshTrainAsOneDevice) {
  const Shape& shape = GetParam();
  const auto schedule = make_schedule(shape.schedule, shape.stages, shape.micro_batches);
  const Trained alone = test::train_alone(make_net(shape), kSteps, shape.rows, shape.accumulate);
  test::run_ranks(shape.data * schedule.ranks(), [&](const Communicator& world) {
    const Mesh mesh(world, {{"dp", shape.data}, {"pp", schedule.ranks()}});
    const Devices devices("cpu:1");
    const auto net = make_net(shape);
    Pipeline pipeline(test::cut(net, shape.stages), mesh.axis("pp"), devices[0], schedule,
                      {.loss = test::mse, .data = mesh.axis("dp")});
    std::vector<double> losses;
    train(pipeline, mesh.axis("dp"), shape, losses);
    for (size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(losses[i], alone.losses[i], 1e-5) << i;
    expect_stage_weights(pipeline, net, alone);
  });
}

// The course's hybrid: stages inside each rank, batches divided over the ranks.
TEST_P(HybridParity, RanksWithTheirOwnStagesTrainAsOneDevice) {
  const Shape& shape = GetParam();
  const auto schedule = make_schedule(shape.schedule, shape.stages, shape.micro_batches);
  const Trained alone = test::train_alone(make_net(shape), kSteps, shape.rows, shape.accumulate);
  test::run_ranks(shape.data, [&](const Communicator& world) {
    const Devices devices("cpu:" + std::to_string(schedule.ranks()));
    const auto net = make_net(shape);
    Pipeline pipeline(test::cut(net, shape.stages), devices, schedule,
                      {.loss = test::mse, .data = world});
    std::vector<double> losses;
    train(pipeline, world, shape, losses);
    for (size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(losses[i], alone.losses[i], 1e-5) << i;
    expect_stage_weights(pipeline, net, alone);
    const auto& syncs = pipeline.last_step().syncs;
    EXPECT_EQ(syncs.size(), world.size() > 1 ? static_cast<size_t>(shape.stages) : 0u);
    for (const auto& sync : syncs) {
      int64_t last_ns = 0;
      for (const auto& [action, rank, begin_ns, end_ns] : pipeline.last_step().actions) {
        if (action.stage == sync.stage) last_ns = std::max(last_ns, end_ns);
      }
      EXPECT_GE(sync.begin_ns, last_ns) << "a stage is averaged after its last backward";
      EXPECT_GE(sync.all_reduces, 1);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, HybridParity,
    ::testing::Values(Shape{"1f1b", 1, 2, 4, 8}, Shape{"1f1b", 1, 3, 4, 9},
                      Shape{"1f1b", 1, 4, 8, 16}, Shape{"1f1b", 2, 2, 1, 8},
                      Shape{"1f1b", 2, 2, 2, 8}, Shape{"1f1b", 2, 2, 4, 8},
                      Shape{"1f1b", 2, 2, 8, 16}, Shape{"1f1b", 2, 2, 3, 11},
                      Shape{"gpipe", 2, 2, 4, 9}, Shape{"gpipe", 3, 2, 2, 8, true},
                      Shape{"zero-bubble", 2, 2, 4, 8}, Shape{"zero-bubble", 1, 3, 5, 10, true},
                      Shape{"interleaved", 2, 4, 4, 8}, Shape{"interleaved", 1, 6, 6, 12, true},
                      Shape{"sequential", 2, 2, 3, 8}, Shape{"1f1b", 2, 2, 4, 8, true},
                      Shape{"1f1b", 2, 2, 4, 8, false, 3}, Shape{"gpipe", 2, 2, 2, 9, true, 2}));

// Messages far larger than a transport buffers, in both directions at once.
TEST(PipelineRanks, LargeMessagesDoNotWaitForEachOther) {
  test::run_ranks(3, [](const Communicator& comm) {
    const Devices devices("cpu:1");
    torch::nn::Sequential net;
    {
      const std::lock_guard lock(seeding());
      torch::manual_seed(1);
      for (int i = 0; i < 3; ++i) net->push_back(torch::nn::Linear(512, 512));
    }
    Pipeline pipeline(test::cut(net, 3), comm, devices[0], one_f_one_b(3, 6), {.loss = test::mse});
    const auto x = torch::ones({6 * 2048, 512});
    EXPECT_GT(pipeline.step(x, x).item<double>(), 0);
    const int64_t neighbours = comm.rank() == 1 ? 2 : 1;
    EXPECT_EQ(pipeline.links().messages, 6 * neighbours);
    EXPECT_EQ(pipeline.links().bytes, neighbours * x.numel() * 4);
  });
}

TEST(PipelineRanks, OnlyTheEndsNeedTheBatch) {
  test::run_ranks(3, [](const Communicator& comm) {
    const Devices devices("cpu:1");
    torch::nn::Sequential net = make_net({"1f1b", 1, 3, 4, 8});
    auto stages = test::cut(net, 3);
    for (int stage = 0; stage < 3; ++stage) {
      if (stage != comm.rank()) stages[static_cast<size_t>(stage)] = nullptr;
    }
    Pipeline pipeline(stages, comm, devices[0], one_f_one_b(3, 4), {.loss = test::mse});
    for (const int64_t rows : {8, 6, 8, 7}) {  // shapes are agreed on as they come
      const auto batch = draw(rows, 0);
      const auto loss = pipeline.step(comm.rank() == 0 ? batch.x : torch::Tensor(),
                                      comm.rank() == 2 ? batch.y : torch::Tensor());
      EXPECT_GT(loss.item<double>(), 0) << "every rank knows the loss";
      const auto out = pipeline.evaluate(comm.rank() == 0 ? batch.x : torch::Tensor());
      EXPECT_EQ(out.defined(), comm.rank() == 2);
      EXPECT_EQ(out.defined() ? out.size(0) : rows, rows);
    }
  });
}

TEST(PipelineRanks, RanksEvaluateOutsideAutocastWhatTheyTrainInside) {
  // Made here because the ranks are threads and would draw from one generator.
  const std::vector<torch::nn::Sequential> nets = {test::deep_mlp(2), test::deep_mlp(2)};
  const auto batch = test::draw_rows(8, 3);
  const auto expected = test::deep_mlp(2)->forward(batch.x).detach();
  test::run_ranks(2, [&](const Communicator& comm) {
    const Devices devices("cpu:1");
    const auto& net = nets[static_cast<size_t>(comm.rank())];
    // Cut after a Linear: messages have the precision of its product.
    Pipeline pipeline(split_stages(net, std::vector<int64_t>{1, 3}), comm, devices[0], gpipe(2, 2),
                      {.loss = test::mse});
    for (int repeat = 0; repeat < 2; ++repeat) {
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

// An overflow in one stage skips the step in all.
TEST(PipelineRanks, StagesSkipAStepTogether) {
  test::run_ranks(2, [](const Communicator& comm) {
    const Devices devices("cpu:1");
    auto net = make_net({"1f1b", 1, 2, 2, 8});
    Pipeline pipeline(test::cut(net, 2), comm, devices[0], one_f_one_b(2, 2), {.loss = test::mse});
    Sgd optimizer(pipeline.parameters(), {.lr = 0.1});
    GradScaler scaler({.init_scale = 8, .model_parallel = comm});
    const auto before = test::copies(pipeline.parameters());
    const auto batch = draw(8, 0);
    pipeline.step(batch.x, batch.y, {.scaler = &scaler});
    if (comm.rank() == 0) {
      pipeline.parameters()[0].mutable_grad().view(-1)[0] = std::numeric_limits<float>::infinity();
    }
    scaler.step(optimizer);
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 4);
    const auto after = pipeline.parameters();
    for (size_t i = 0; i < after.size(); ++i) EXPECT_TRUE(after[i].equal(before[i])) << i;
  });
}

TEST(PipelineRanks, AnUpdateFromUnaveragedGradientsIsRefused) {
  const auto outcomes = test::outcomes_of_ranks(2, [](const Communicator& comm) {
    const Devices devices("cpu:2");
    auto net = make_net({"1f1b", 2, 2, 2, 8});
    Pipeline pipeline(test::cut(net, 2), devices, one_f_one_b(2, 2),
                      {.loss = test::mse, .data = comm});
    torch::optim::SGD optimizer(pipeline.parameters(), 0.1);
    const auto batch = draw(8, 0);
    pipeline.step(batch.x, batch.y, {.synchronise = false});
    optimizer.step();
    pipeline.step(batch.x, batch.y);
  });
  for (const auto& outcome : outcomes) {
    EXPECT_TRUE(outcome.failed());
  }
  EXPECT_TRUE(outcomes[0].code() == Code::kSyncMisuse || outcomes[1].code() == Code::kSyncMisuse);
}

TEST(PipelineRanks, GradientsAreInBuckets) {
  test::run_ranks(2, [](const Communicator& comm) {
    const Devices devices("cpu:1");
    auto net = make_net({"gpipe", 2, 2, 2, 8});
    Pipeline pipeline(test::cut(net, 1), devices, gpipe(1, 2),
                      {.loss = test::mse, .data = comm, .bucket_cap_bytes = 64});
    const auto batch = draw(8, comm.rank());
    pipeline.step(batch.x, batch.y);
    const auto& syncs = pipeline.last_step().syncs;
    ASSERT_EQ(syncs.size(), 1u);
    EXPECT_GE(syncs[0].all_reduces, 4) << "a small cap makes many buckets";
    std::set<const void*> addresses;
    for (const auto& parameter : pipeline.parameters())
      addresses.insert(parameter.grad().data_ptr());
    pipeline.step(batch.x, batch.y);
    for (const auto& parameter : pipeline.parameters()) {
      EXPECT_TRUE(addresses.contains(parameter.grad().data_ptr())) << "accumulated in place";
    }
  });
}

}  // namespace
}  // namespace lockstep::test::pipeline_ranks_test
