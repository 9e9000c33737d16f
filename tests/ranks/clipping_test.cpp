// Clipping where ranks hold parts of a model: by the norm of the whole, as one device does.

#include <torch/torch.h>

#include "ddp_nets.hpp"
#include "lockstep/distributed_data_parallel.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad_scaler.hpp"
#include "lockstep/mesh.hpp"
#include "lockstep/optim.hpp"
#include "lockstep/pipeline.hpp"
#include "lockstep/tensor_parallel.hpp"
#include "rank_threads.hpp"

namespace lockstep::test::clipping_test {
namespace {

class ClippedModel : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, ClippedModel, testing::Values(1, 2, 3, 5),
                         [](const auto& ranks) { return std::to_string(ranks.param); });

constexpr double kMaxNorm = 0.05;  // far below the norms here: every step is clipped

// Layers whose weights are the same in every process: whole, or divided over an axis.
torch::nn::Linear linear(int64_t in, int64_t out) {
  torch::nn::Linear made(in, out);
  const torch::NoGradGuard no_grad;
  for (auto& each : made->parameters()) {
    each.copy_(torch::arange(each.numel()).view(each.sizes()).mul(0.41).sin().mul(0.5));
  }
  return made;
}

torch::nn::Sequential divided_block(const Communicator& axis) {
  return torch::nn::Sequential(ColumnLinear(linear(6, 30), axis), torch::nn::Tanh(),
                               RowLinear(linear(30, 6), axis),
                               torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})));
}

torch::Tensor block_loss(const torch::Tensor& out) {
  return torch::mse_loss(out, rows(out.size(0), 6, 2)) * 10;
}

// How a step clips.
enum class Clip { kOptimizer, kScaler, kScalerWithGroup, kScalerAfterUnscale };
constexpr Clip kClips[] = {Clip::kOptimizer, Clip::kScaler, Clip::kScalerWithGroup,
                           Clip::kScalerAfterUnscale};

template <class Optimizer>
double clipped_step(Clip clip, Optimizer& optimizer, GradScaler& scaler) {
  torch::Tensor norm;
  if (clip == Clip::kOptimizer) {
    norm = optimizer.step(StepExtras{.max_norm = kMaxNorm, .zero_grad = true});
  } else {
    if (clip == Clip::kScalerAfterUnscale) scaler.unscale_(optimizer);
    norm = scaler.step(optimizer, {.max_norm = kMaxNorm, .zero_grad = true});
    scaler.update();
  }
  return norm.template item<double>();
}

GradScaler scaler_for(Clip clip, const Communicator& group) {
  GradScalerOptions options{.init_scale = 1024};
  if (clip == Clip::kScalerWithGroup) options.model_parallel = group;
  return GradScaler(options);
}

torch::Tensor scaled(Clip clip, GradScaler& scaler, const torch::Tensor& loss) {
  return clip == Clip::kOptimizer ? loss : scaler.scale(loss);
}

struct Trained {
  std::vector<double> norms;
  torch::Tensor column, row, bias, norm_weight;
};

Trained train_block(Clip clip, const Communicator& axis) {
  auto block = divided_block(axis);
  Sgd optimizer(block->parameters(), {.lr = 1, .momentum = 0.9});
  GradScaler scaler = scaler_for(clip, axis);
  Trained trained;
  for (int step = 0; step < 4; ++step) {
    scaled(clip, scaler, block_loss(block->forward(rows(5, 6, step)))).backward();
    trained.norms.push_back(clipped_step(clip, optimizer, scaler));
  }
  trained.column = block[0]->as<ColumnLinear>()->whole_weight();
  trained.row = block[2]->as<RowLinear>()->whole_weight();
  trained.bias = block[2]->as<RowLinear>()->bias.detach();
  trained.norm_weight = block[3]->as<torch::nn::LayerNorm>()->weight.detach();
  return trained;
}

TEST_P(ClippedModel, ATensorParallelModelIsClippedByTheNormOfTheWhole) {
  for (const Clip clip : kClips) {
    const Trained expected = train_block(clip, Communicator::self());
    run_ranks(GetParam(), [&](const Communicator& axis) {
      const Trained trained = train_block(clip, axis);
      expect_close(trained.column, expected.column, "column weight");
      expect_close(trained.row, expected.row, "row weight");
      expect_close(trained.bias, expected.bias, "bias");
      expect_close(trained.norm_weight, expected.norm_weight, "norm");
      expect_same_on_all(axis, trained.bias, "the whole bias");
      expect_same_on_all(axis, trained.norm_weight, "the whole norm");
      for (size_t i = 0; i < expected.norms.size(); ++i) {
        EXPECT_NEAR(trained.norms[i], expected.norms[i], 1e-5 * expected.norms[i]);
      }
    });
  }
}

// Only one rank's slice overflows, and no model-parallel group was given.
TEST_P(ClippedModel, ATensorParallelStepIsSkippedByAllRanksOrNone) {
  run_ranks(GetParam(), [](const Communicator& axis) {
    auto block = divided_block(axis);
    Sgd optimizer(block->parameters(), {.lr = 1});
    GradScaler scaler({.init_scale = 1024});
    for (int step = 0; step < 3; ++step) {
      const auto before = flat_weights(block->parameters()).clone();
      scaler.scale(block_loss(block->forward(rows(5, 6, step)))).backward();
      if (step == 1 && axis.rank() == axis.size() - 1) {
        block->parameters()[0].grad().fill_(std::numeric_limits<float>::infinity());
      }
      scaler.step(optimizer, {.zero_grad = true});
      scaler.update();
      EXPECT_EQ(torch::equal(flat_weights(block->parameters()), before), step == 1) << step;
    }
    EXPECT_EQ(scaler.get_scale(), 512);
  });
}

// Parts of different lengths, so that each rank's own norm differs.
std::vector<torch::nn::Sequential> pipeline_stages(int stages, const Communicator& tensor) {
  std::vector<torch::nn::Sequential> all;
  for (int i = 0; i < stages; ++i) {
    all.push_back(i == 1 ? divided_block(tensor)
                         : torch::nn::Sequential(linear(6, 6), torch::nn::Tanh()));
  }
  return all;
}

std::vector<torch::Tensor> one_device(Clip clip, int stages) {
  auto modules = pipeline_stages(stages, Communicator::self());
  std::vector<torch::Tensor> parameters;
  for (const auto& module : modules) {
    for (const auto& each : module->parameters()) parameters.push_back(each);
  }
  Sgd optimizer(parameters, {.lr = 1});
  GradScaler scaler = scaler_for(clip, Communicator::self());
  for (int step = 0; step < 3; ++step) {
    auto out = rows(8, 6, step);
    for (auto& module : modules) out = module->forward(out);
    scaled(clip, scaler, block_loss(out)).backward();
    clipped_step(clip, optimizer, scaler);
  }
  return parameters;
}

// A pipeline with tensor ranks; with one tensor rank it is the plain pipeline.
TEST(ClippedPipeline, IsClippedByTheNormOfTheWhole) {
  for (const int stages : {2, 3}) {
    for (const int tensor_ranks : {1, 2}) {
      for (const Clip clip : kClips) {
        const auto expected = one_device(clip, stages);
        run_ranks(stages * tensor_ranks, [&](const Communicator& world) {
          const Mesh mesh(world, {{"pp", stages}, {"tp", tensor_ranks}});
          Devices devices("cpu:1");
          Pipeline pipeline(pipeline_stages(stages, mesh.axis("tp")), mesh.axis("pp"), devices[0],
                            gpipe(stages, 2),
                            {.loss = [](const torch::Tensor& out, const torch::Tensor& y) {
                              return torch::mse_loss(out, y) * 10;
                            }});
          Sgd optimizer(pipeline.parameters(), {.lr = 1});
          GradScaler scaler = scaler_for(clip, mesh.plane({"pp", "tp"}));
          for (int step = 0; step < 3; ++step) {
            pipeline.step(rows(8, 6, step), rows(8, 6, 2),
                          {.scaler = clip == Clip::kOptimizer ? nullptr : &scaler});
            clipped_step(clip, optimizer, scaler);
          }
          // The divided block is compared in ATensorParallelModelIsClippedByTheNormOfTheWhole.
          const int stage = mesh.axis("pp").rank();
          if (stage == 1 && tensor_ranks > 1) return;
          const size_t begin = stage == 2 ? expected.size() - 2 : (stage == 1 ? 2 : 0);
          const auto mine = pipeline.stage(stage)->parameters();
          for (size_t i = 0; i < mine.size(); ++i) {
            expect_close(mine[i], expected[begin + i], "stage " + std::to_string(stage));
          }
        });
      }
    }
  }
}

// A rank whose stage is frozen, or has no parameter, clips and skips steps with the others,
// whatever the optimizer.
TEST(ClippedPipeline, ARankMayHaveNothingToTrain) {
  const auto stages_of = [](bool frozen) {
    torch::nn::Sequential last{torch::nn::Tanh()};
    if (frozen) last->push_back(linear(6, 6));
    for (auto& each : last->parameters()) each.requires_grad_(false);
    return std::vector<torch::nn::Sequential>{torch::nn::Sequential(linear(6, 6)), last};
  };
  const auto loss = [](const torch::Tensor& out, const torch::Tensor& y) {
    return torch::mse_loss(out, y) * 10;
  };
  for (const bool frozen : {false, true}) {
    for (const Clip clip : kClips) {
      auto whole = stages_of(frozen);
      Sgd reference(whole[0]->parameters(), {.lr = 1});
      GradScaler unused = scaler_for(Clip::kOptimizer, Communicator::self());
      std::vector<double> norms;
      for (int step = 0; step < 3; ++step) {
        loss(whole[1]->forward(whole[0]->forward(rows(8, 6, step))), rows(8, 6, 2)).backward();
        norms.push_back(clipped_step(Clip::kOptimizer, reference, unused));
      }
      run_ranks(2, [&](const Communicator& axis) {
        const Devices devices("cpu:1");
        Pipeline pipeline(stages_of(frozen), axis, devices[0], gpipe(2, 2), {.loss = loss});
        std::vector<torch::Tensor> expected;  // after training
        for (const auto& each :
             axis.rank() == 0 ? whole[0]->parameters() : pipeline.stage(1)->parameters()) {
          expected.push_back(each.detach().clone());
        }
        Sgd optimizer(pipeline.parameters(), {.lr = 1, .weight_decay = axis.rank() * 0.1});
        GradScaler scaler = scaler_for(clip, axis);
        for (int step = 0; step < 3; ++step) {
          pipeline.step(rows(8, 6, step), rows(8, 6, 2),
                        {.scaler = clip == Clip::kOptimizer ? nullptr : &scaler});
          EXPECT_NEAR(clipped_step(clip, optimizer, scaler), norms[static_cast<size_t>(step)],
                      1e-5 * norms[static_cast<size_t>(step)]);
        }
        const auto after = pipeline.stage(axis.rank())->parameters();
        for (size_t i = 0; i < after.size(); ++i) {
          expect_close(after[i], expected[i], "a weight");
        }
      });
    }
  }
}

TEST(ClippedPipeline, ARankThatTrainsNothingSkipsStepsWithTheOthers) {
  run_ranks(2, [&](const Communicator& axis) {
    const Devices devices("cpu:1");
    Pipeline pipeline(
        {torch::nn::Sequential(linear(6, 6)), torch::nn::Sequential(torch::nn::Tanh())}, axis,
        devices[0], gpipe(2, 2),
        {.loss = [](auto& out, auto& y) { return torch::mse_loss(out, y); }});
    torch::optim::AdamW optimizer(pipeline.parameters());
    GradScaler scaler({.init_scale = 1024});
    for (int step = 0; step < 3; ++step) {
      pipeline.step(rows(8, 6, step), rows(8, 6, 2), {.scaler = &scaler});
      if (step == 1 && axis.rank() == 0) {
        pipeline.parameters()[0].grad().fill_(std::numeric_limits<float>::infinity());
      }
      scaler.step(optimizer);
      scaler.update();
      optimizer.zero_grad();
    }
    EXPECT_EQ(scaler.get_scale(), 512);
    EXPECT_EQ(scaler.skipped_steps().size(), 1);
  });
}

TEST(ClippedParts, ThatLockstepDidNotDivideAreNamedInTheStep) {
  std::vector<torch::Tensor> whole;
  for (int rank = 0; rank < 3; ++rank) whole.push_back(torch::ones({1 + rank}).requires_grad_());
  (whole[0].sum() + 2 * whole[1].sum() + 3 * whole[2].sum()).backward();
  Sgd reference(whole, {.lr = 1});
  const auto norm = reference.step(StepExtras{.max_norm = 0.5}).item<double>();
  run_ranks(3, [&](const Communicator& comm) {
    auto part = torch::ones({1 + comm.rank()}).requires_grad_();
    ((comm.rank() + 1) * part.sum()).backward();
    Sgd optimizer({part}, {.lr = 1});
    const auto found = optimizer.step(StepExtras{.max_norm = 0.5, .model_parallel = comm});
    EXPECT_NEAR(found.item<double>(), norm, 1e-9);
    expect_close(part, whole[static_cast<size_t>(comm.rank())], "a part");
  });
}

// A program divides a layer by hand over an axis that lockstep does not know, inside the stages of
// a pipeline that it knows: each weight still counts once.
TEST(ClippedParts, MayLieInsideAPipelineOfRanks) {
  // Every rank of the "hand" axis holds one block of a stage's weight; the model is their sum.
  const auto stage = [](int block) {
    torch::nn::Sequential made(linear(6, 6), torch::nn::Tanh());
    const torch::NoGradGuard no_grad;
    for (auto& each : made->parameters()) each.mul_(1 + 0.5 * block);
    return made;
  };
  const auto loss = [](const torch::Tensor& out, const torch::Tensor& y) {
    return torch::mse_loss(out, y) * 10;
  };
  std::vector<torch::Tensor> whole;  // [block][stage][parameter]
  for (int block = 0; block < 2; ++block) {
    torch::nn::Sequential first = stage(block);
    torch::nn::Sequential second = stage(block);
    loss(second->forward(first->forward(rows(8, 6, block))), rows(8, 6, 2)).backward();
    for (const auto& module : {first, second}) {
      for (const auto& each : module->parameters()) whole.push_back(each);
    }
  }
  Sgd reference(whole, {.lr = 1});
  const auto norm = reference.step(StepExtras{.max_norm = kMaxNorm}).item<double>();
  for (const bool names_both : {false, true}) {
    run_ranks(4, [&](const Communicator& world) {
      const Mesh mesh(world, {{"pp", 2}, {"hand", 2}});
      const int block = mesh.axis("hand").rank();
      Devices devices("cpu:1");
      Pipeline pipeline({stage(block), stage(block)}, mesh.axis("pp"), devices[0], gpipe(2, 2),
                        {.loss = loss});
      Sgd optimizer(pipeline.parameters(), {.lr = 1});
      pipeline.step(rows(8, 6, block), rows(8, 6, 2));
      const auto group = names_both ? mesh.plane({"pp", "hand"}) : mesh.axis("hand");
      const auto found = optimizer.step(StepExtras{.max_norm = kMaxNorm, .model_parallel = group});
      EXPECT_NEAR(found.item<double>(), norm, 1e-5 * norm);
      const int number = mesh.axis("pp").rank();
      const auto mine = pipeline.stage(number)->parameters();
      for (size_t i = 0; i < mine.size(); ++i) {
        expect_close(mine[i], whole[static_cast<size_t>(block * 4 + number * 2) + i], "a part");
      }
    });
  }
}

}  // namespace
}  // namespace lockstep::test::clipping_test
