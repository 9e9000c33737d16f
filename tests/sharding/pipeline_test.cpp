// A pipeline whose stages are divided over its data axis trains as one device does.
#include <gtest/gtest.h>

#include "lockstep/checkpoint.hpp"
#include "lockstep/grad_scaler.hpp"
#include "lockstep/master_weights.hpp"
#include "lockstep/mesh.hpp"
#include "lockstep/pipeline.hpp"
#include "lockstep/tied_weight.hpp"
#include "sharding_support.hpp"

namespace lockstep::test::pipeline_test {
namespace {

constexpr int64_t kFeatures = 6;
constexpr int kSteps = 3;
constexpr double kMaxNorm = 0.05;

// Layers with a name of their own in every stage; the second Tanh makes a stage without weights
// possible.
torch::nn::Sequential eight_layers() {
  torch::nn::Sequential net;
  for (int i = 0; i < 4; ++i) {
    net->push_back(torch::nn::Linear(kFeatures, kFeatures));
    net->push_back(torch::nn::Tanh());
  }
  net->to(torch::kDouble);
  fill_weights(*net);
  return net;
}

torch::Tensor target_of(const torch::Tensor& x) {
  return torch::sin(x * 3);
}

torch::Tensor mse(const torch::Tensor& out, const torch::Tensor& y) {
  return torch::mse_loss(out, y);
}

std::vector<torch::nn::Sequential> cut(const torch::nn::Sequential& net, int stages) {
  return split_stages(net, cut_by_count(static_cast<int64_t>(net->size()), stages));
}

// Of an uneven number of rows the first ranks take one more.
torch::Tensor rows_of(const torch::Tensor& all, const Communicator& data) {
  return all.tensor_split(data.size())[static_cast<size_t>(data.rank())];
}

struct Alone {
  std::vector<double> norms;
  std::map<std::string, torch::Tensor> weights;
};

Alone train_alone(torch::nn::Sequential net, int64_t rows, int calls) {
  Sgd optimizer(net->parameters(), {.lr = 0.1, .momentum = 0.9});
  Alone alone;
  for (int step = 0; step < kSteps; ++step) {
    for (int call = 0; call < calls; ++call) {
      const auto x = wave({rows, kFeatures}, step + 0.3 * call);
      (mse(net->forward(x), target_of(x)) / calls).backward();
    }
    const auto norm = optimizer.step(StepExtras{.max_norm = kMaxNorm, .zero_grad = true});
    alone.norms.push_back(norm.item<double>());
  }
  for (const auto& item : net->named_parameters()) {
    alone.weights[item.key()] = item.value().detach().clone();
  }
  return alone;
}

void expect_weights(const Pipeline& pipeline, const Alone& alone, const std::string& what) {
  for (const int stage : pipeline.local_stages()) {
    std::optional<GatheredParameters> gathered;
    if (ShardedModel* model = pipeline.sharded(stage)) gathered.emplace(*model);
    for (const auto& item : pipeline.stage(stage)->named_parameters()) {
      expect_near_all(item.value().detach(), alone.weights.at(item.key()), what + item.key());
    }
  }
}

// Trains with one optimizer over all local stages.
void train(Pipeline& pipeline, const Communicator& data, int64_t rows, int calls,
           const Alone& alone) {
  Sgd optimizer(pipeline.parameters(), {.lr = 0.1, .momentum = 0.9});
  for (int step = 0; step < kSteps; ++step) {
    for (int call = 0; call < calls; ++call) {
      const auto x = rows_of(wave({rows, kFeatures}, step + 0.3 * call), data);
      pipeline.step(x, target_of(x),
                    {.loss_factor = 1.0 / calls, .synchronise = call + 1 == calls});
      if (call == 0) pipeline.evaluate(x);  // in the middle of a window
    }
    const auto norm = optimizer.step(StepExtras{.max_norm = kMaxNorm, .zero_grad = true});
    EXPECT_NEAR(norm.item<double>(), alone.norms[static_cast<size_t>(step)], 1e-9);
  }
}

struct Shape {
  std::string schedule;
  int data, ranks, stages, micro_batches;
  int64_t rows;
  int calls = 1;
  std::vector<int> recompute = {};
};

class ShardedPipeline : public testing::TestWithParam<Shape> {};

std::string shape_name(const testing::TestParamInfo<Shape>& info) {
  const Shape& shape = info.param;
  std::string name = shape.schedule + std::to_string(shape.data) + "x" +
                     std::to_string(shape.ranks) + "Calls" + std::to_string(shape.calls) + "Case" +
                     std::to_string(info.index);
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, ShardedPipeline,
    testing::Values(Shape{"1f1b", 2, 2, 2, 4, 12}, Shape{"1f1b", 3, 2, 2, 2, 13, 2},
                    Shape{"zero-bubble", 2, 2, 2, 3, 12}, Shape{"gpipe", 2, 2, 2, 2, 12, 3, {0, 1}},
                    Shape{"interleaved", 2, 2, 4, 4, 16, 2}, Shape{"1f1b", 1, 2, 2, 2, 12},
                    Shape{"1f1b", 5, 1, 1, 2, 25, 2}, Shape{"1f1b", 2, 2, 8, 4, 16}),
    shape_name);

TEST_P(ShardedPipeline, TrainsAsOneDevice) {
  const Shape& shape = GetParam();
  const Alone alone = train_alone(eight_layers(), shape.rows, shape.calls);
  for (const ShardStage stage : kStages) {
    for (const bool share : {false, true}) {
      run_ranks(shape.data * shape.ranks, [&](const Communicator& world) {
        const Mesh mesh(world, {{"dp", shape.data}, {"pp", shape.ranks}});
        const Devices devices("cpu:1");
        auto schedule = make_schedule(shape.schedule, shape.stages, shape.micro_batches,
                                      shape.stages / shape.ranks);
        if (schedule.ranks() != shape.ranks) {  // the first half of the stages on the first rank
          std::vector<int> rank_of_stage;
          for (int i = 0; i < shape.stages; ++i) {
            rank_of_stage.push_back(i * shape.ranks / shape.stages);
          }
          schedule = on_ranks(schedule, rank_of_stage);
        }
        PipelineOptions options{.loss = mse, .recompute = shape.recompute};
        options.data = mesh.axis("dp");
        options.shard = {.stage = stage, .min_unit_bytes = 0, .share_on_host = share};
        Pipeline pipeline(cut(eight_layers(), shape.stages), mesh.axis("pp"), devices[0], schedule,
                          options);
        train(pipeline, mesh.axis("dp"), shape.rows, shape.calls, alone);
        expect_weights(pipeline, alone, "stage " + std::to_string(static_cast<int>(stage)) + ", ");
      });
    }
  }
}

// Both stages are devices of one process: each gathers and averages on its own worker.
TEST(ShardedPipelines, StagesOfOneProcess) {
  const Alone alone = train_alone(eight_layers(), 12, 2);
  for (const ShardStage stage : kStages) {
    run_ranks(2, [&](const Communicator& data) {
      PipelineOptions options{.loss = mse};
      options.data = data;
      options.shard = {.stage = stage, .min_unit_bytes = 0, .share_on_host = false};
      Pipeline pipeline(cut(eight_layers(), 2), Devices("cpu:2"), one_f_one_b(2, 3), options);
      train(pipeline, data, 12, 2, alone);
      expect_weights(pipeline, alone, "");
      ASSERT_EQ(pipeline.last_step().syncs.size(), 2U);
      for (const auto& sync : pipeline.last_step().syncs) {
        EXPECT_EQ(sync.all_reduces, 2);  // units
        EXPECT_GE(sync.end_ns, sync.begin_ns);
      }
    });
  }
}

torch::nn::Sequential tied_net() {
  torch::nn::Sequential net(torch::nn::Linear(kFeatures, kFeatures), torch::nn::Tanh(),
                            torch::nn::Linear(kFeatures, 5), torch::nn::Linear(5, kFeatures),
                            torch::nn::Tanh(), torch::nn::Linear(kFeatures, kFeatures));
  net->to(torch::kDouble);
  fill_weights(*net);
  return net;
}

// The first and the last layer have one weight.
TEST(ShardedPipelines, TiedWeights) {
  auto one = tied_net();
  const auto first = one->children().front()->as<torch::nn::Linear>();
  const auto last = one->children().back()->as<torch::nn::Linear>();
  Sgd alone(one->parameters(), {.lr = 0.1});
  std::vector<double> norms;
  for (int step = 0; step < kSteps; ++step) {
    const auto x = wave({8, kFeatures}, step);
    {
      const torch::NoGradGuard no_grad;
      last->weight.copy_(first->weight);
    }
    mse(one->forward(x), target_of(x)).backward();
    const auto sum = first->weight.grad() + last->weight.grad();
    first->weight.mutable_grad() = sum.clone();
    last->weight.mutable_grad().zero_();
    const auto norm = alone.step(StepExtras{.max_norm = kMaxNorm, .zero_grad = true});
    norms.push_back(norm.item<double>());
  }
  for (const ShardStage stage : kStages) {
    run_ranks(4, [&](const Communicator& world) {
      const Mesh mesh(world, {{"dp", 2}, {"pp", 2}});
      const Devices devices("cpu:1");
      PipelineOptions options{.loss = mse};
      options.data = mesh.axis("dp");
      options.shard = {.stage = stage, .units = {"0", "5"}};
      Pipeline pipeline(cut(tied_net(), 2), mesh.axis("pp"), devices[0], one_f_one_b(2, 2),
                        options);
      const int own = mesh.axis("pp").rank();
      const auto named = pipeline.stage(own)->named_parameters();
      const auto& copy = *named.find(own == 0 ? "0.weight" : "5.weight");
      const TiedWeight tied(mesh.axis("pp"), 0, 1, pipeline.sharded(own)->shard_of(copy));
      Sgd optimizer(pipeline.parameters(), {.lr = 0.1});
      for (int step = 0; step < kSteps; ++step) {
        const auto x = rows_of(wave({8, kFeatures}, step), mesh.axis("dp"));
        pipeline.step(x, target_of(x));
        tied.sum_gradients();
        const auto norm = optimizer.step(StepExtras{.max_norm = kMaxNorm, .zero_grad = true});
        EXPECT_NEAR(norm.item<double>(), norms[static_cast<size_t>(step)], 1e-9);
      }
      const GatheredParameters gathered(*pipeline.sharded(own));
      expect_near_all(copy.detach(), first->weight.detach(), "tied weight");
    });
  }
}

// The units of the two stages differ, so that the shards are other rows of the weight.
TEST(ShardedPipelines, TiedWeightsWhoseShardsDifferAreRefused) {
  const auto outcomes = outcomes_of_ranks(4, [](const Communicator& world) {
    const Mesh mesh(world, {{"dp", 2}, {"pp", 2}});
    const Devices devices("cpu:1");
    PipelineOptions options{.loss = mse};
    options.data = mesh.axis("dp");
    options.shard = {.stage = ShardStage::kOptimizer};
    Pipeline pipeline(cut(tied_net(), 2), mesh.axis("pp"), devices[0], one_f_one_b(2, 2), options);
    const int own = mesh.axis("pp").rank();
    const auto copy =
        *pipeline.stage(own)->named_parameters().find(own == 0 ? "0.weight" : "5.weight");
    const TiedWeight tied(mesh.axis("pp"), 0, 1, pipeline.sharded(own)->shard_of(copy));
  });
  int named = 0;
  for (const auto& outcome : outcomes) {
    ASSERT_TRUE(outcome.failed());
    named += outcome.text().find("ShardOptions::units") != std::string::npos ? 1 : 0;
  }
  EXPECT_GE(named, 1);
}

// An overflow in one stage of one data rank skips the step everywhere; masters stay in step.
TEST(ShardedPipelines, MasterWeightsAndAScaler) {
  for (const ShardStage stage : kStages) {
    run_ranks(4, [&](const Communicator& world) {
      const Mesh mesh(world, {{"dp", 2}, {"pp", 2}});
      const Devices devices("cpu:1");
      auto net = eight_layers();
      net->to(torch::kFloat);
      const MasterWeights masters(*net);
      PipelineOptions options;
      options.loss = [](const torch::Tensor& out, const torch::Tensor& y) {
        return (out - y).pow(2).mean();
      };
      options.data = mesh.axis("dp");
      options.shard = {.stage = stage, .min_unit_bytes = 0};
      Pipeline pipeline(cut(net, 2), mesh.axis("pp"), devices[0], one_f_one_b(2, 2), options);
      AdamW optimizer(pipeline.parameters(), {.lr = 0.01, .masters = masters});
      GradScaler scaler({.init_scale = 1024});
      std::vector<torch::Tensor> before;
      for (int step = 0; step < 3; ++step) {
        auto x = wave({8, kFeatures}, step + mesh.axis("dp").rank()).to(torch::kBFloat16);
        if (step == 1 && world.rank() == 0) x.fill_(std::numeric_limits<float>::infinity());
        before.clear();
        for (const auto& each : pipeline.parameters()) before.push_back(each.detach().clone());
        pipeline.step(x, torch::zeros_like(x), {.scaler = &scaler});
        scaler.step(optimizer, {.max_norm = 1.0, .zero_grad = true});
        scaler.update();
        bool changed = false;
        for (size_t i = 0; i < before.size(); ++i) {
          changed = changed || !torch::equal(before[i], pipeline.parameters()[i]);
        }
        EXPECT_EQ(changed, step != 1) << "step " << step;
        EXPECT_EQ(scaler.get_scale(), step == 0 ? 1024 : 512);
      }
    });
  }
}

// Folders of sharded pipelines, plain pipelines and one process fit each other.
TEST(ShardedPipelines, CheckpointsFitOtherLayouts) {
  struct Layout {
    int data, ranks, stage;
  };
  const auto run = [](const std::string& folder, const Layout& layout, int64_t until) {
    torch::Tensor result;
    run_ranks(layout.data * layout.ranks, [&](const Communicator& world) {
      const Mesh mesh(world, {{"dp", layout.data}, {"pp", layout.ranks}});
      const Devices devices("cpu:1");
      PipelineOptions options{.loss = mse};
      options.data = mesh.axis("dp");
      if (layout.stage > 0) {
        options.shard = {.stage = static_cast<ShardStage>(layout.stage), .min_unit_bytes = 0};
      }
      Pipeline pipeline(cut(eight_layers(), layout.ranks), mesh.axis("pp"), devices[0],
                        one_f_one_b(layout.ranks, 2), options);
      AdamW optimizer(pipeline.parameters(), {.lr = 0.01});
      Checkpoint checkpoint(folder, world, {.every = 2, .preemption = false});
      checkpoint.add("model", pipeline).add("optimizer", optimizer, pipeline);
      for (int64_t step = checkpoint.resume() + 1; step <= until; ++step) {
        const auto x = rows_of(wave({12, kFeatures}, static_cast<double>(step)), mesh.axis("dp"));
        pipeline.step(x, target_of(x));
        optimizer.step(StepExtras{.zero_grad = true});
        EXPECT_TRUE(checkpoint.step(step));
      }
      checkpoint.finish();
      const auto out = pipeline.evaluate(wave({4, kFeatures}, 0));
      if (out.defined() && mesh.axis("dp").rank() == 0) result = out;
    });
    return result;
  };
  const ScratchFolder scratch;
  const auto wanted = run(scratch.file("alone"), {1, 1, 0}, 4);
  const std::vector<Layout> layouts = {{2, 2, 3}, {3, 1, 1}, {2, 2, 0}, {2, 1, 2}, {1, 2, 1}};
  for (size_t i = 0; i < layouts.size(); ++i) {
    const auto folder = scratch.file(std::to_string(i));
    run(folder, layouts[i], 2);
    const auto found = run(folder, layouts[(i + 1) % layouts.size()], 4);
    expect_near_all(found, wanted, "saved by layout " + std::to_string(i), 1e-9);
  }
}

TEST(ShardedPipelines, RefuseWhatTheyCannotDo) {
  const auto make = [](const PipelineOptions& options) {
    Pipeline pipeline(cut(eight_layers(), 2), Devices("cpu:2"), one_f_one_b(2, 2), options);
  };
  PipelineOptions options{.loss = mse, .shard = ShardOptions()};
  expect_error(Code::kUsage, {"no data axis"}, [&] { make(options); });
  options.data = Communicator::self();
  options.nonfinite = Nonfinite::kStop;
  expect_error(Code::kUsage, {"nonfinite"}, [&] { make(options); });
  options.nonfinite = Nonfinite::kWarn;
  options.check_unaveraged_updates = false;
  expect_error(Code::kUsage, {"check_unaveraged_updates"}, [&] { make(options); });
}

// A step that ends with an error has gradients of some micro-batches, in units that no optimizer
// sees. After it and zero_grad() training goes on as if it had not been made.
TEST(ShardedPipelines, AStepAfterAnErrorBeginsAnew) {
  const Alone alone = train_alone(eight_layers(), 12, 2);
  for (const ShardStage stage : kStages) {
    int calls_of_loss = 0;
    int fails_at = 0;
    PipelineOptions options;
    options.loss = [&](const torch::Tensor& out, const torch::Tensor& y) {
      if (++calls_of_loss == fails_at) throw std::runtime_error("the loss fell over");
      return mse(out, y);
    };
    options.data = Communicator::self();
    options.shard = {.stage = stage, .min_unit_bytes = 0};
    auto net = eight_layers();
    Pipeline pipeline(cut(net, 2), Devices("cpu:2"), one_f_one_b(2, 4), options);
    Sgd optimizer(pipeline.parameters(), {.lr = 0.1, .momentum = 0.9});
    for (const bool accumulates : {true, false}) {
      const auto x = wave({12, kFeatures}, 9);
      fails_at = 0;
      if (accumulates) pipeline.step(x, target_of(x), {.synchronise = false});
      fails_at = calls_of_loss + 3;
      EXPECT_THROW(pipeline.step(x, target_of(x)), std::exception);
      optimizer.zero_grad();
    }
    train(pipeline, Communicator::self(), 12, 2, alone);
    expect_weights(pipeline, alone, "stage " + std::to_string(static_cast<int>(stage)) + ", ");
  }
}

TEST(ShardedPipelines, AnUpdateInsideAWindowAndALateFreezeAreRefused) {
  for (const bool freezes : {false, true}) {
    const auto outcomes = outcomes_of_ranks(2, [&](const Communicator& data) {
      PipelineOptions options{.loss = mse};
      options.data = data;
      options.shard = ShardOptions();
      auto net = eight_layers();
      Pipeline pipeline(cut(net, 2), Devices("cpu:2"), one_f_one_b(2, 2), options);
      Sgd optimizer(pipeline.parameters(), {.lr = 0.1});
      const auto x = wave({4, kFeatures}, 0);
      pipeline.step(x, target_of(x), {.synchronise = freezes});
      optimizer.step();
      if (freezes) net->parameters()[0].set_requires_grad(false);
      pipeline.step(x, target_of(x));
    });
    for (const auto& outcome : outcomes) {
      ASSERT_TRUE(outcome.failed());
      EXPECT_NE(outcome.text().find(freezes ? "0.weight was frozen" : "not averaged"),
                std::string::npos)
          << outcome.text();
    }
  }
}

}  // namespace
}  // namespace lockstep::test::pipeline_test
