// What a pipeline's data axis refuses, as DistributedDataParallel does, and what it leaves alone.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <mutex>

#include "lockstep/mesh.hpp"
#include "lockstep/optim.hpp"
#include "lockstep/pipeline.hpp"
#include "ranks/pipeline_support.hpp"
#include "ranks/rank_threads.hpp"

namespace lockstep::test::pipeline_data_axis_test {
namespace {

torch::nn::Sequential make_net() {
  const std::lock_guard lock(seeding());
  return test::deep_mlp(4);
}

test::Rows draw(int number) {
  const std::lock_guard lock(seeding());
  return test::draw_rows(8, static_cast<uint64_t>(number));
}

test::Rows half_of(const test::Rows& whole, const Communicator& comm) {
  const auto rank = static_cast<size_t>(comm.rank());
  return {whole.x.tensor_split(2)[rank], whole.y.tensor_split(2)[rank]};
}

/// Two data ranks with two stages each, as devices.
struct Replica {
  explicit Replica(const Communicator& data, torch::nn::Sequential model = make_net(),
                   bool check_updates = true)
      : comm(data),
        net(std::move(model)),
        pipeline(test::cut(net, 2), Devices("cpu:2"), one_f_one_b(2, 2),
                 {.loss = test::mse, .data = data, .check_unaveraged_updates = check_updates}) {}

  void step(int number, const PipelineStep& how = {}) {
    const auto mine = half_of(draw(number), comm);
    pipeline.step(mine.x, mine.y, how);
  }

  Communicator comm;
  torch::nn::Sequential net;
  Pipeline pipeline;
};

void expect_refused(Code code, const std::string& fragment,
                    const std::function<void(const Communicator&)>& body) {
  const auto outcomes = test::outcomes_of_ranks(2, body);
  bool told = false;
  for (const auto& outcome : outcomes) {
    EXPECT_TRUE(outcome.failed());
    told = told || (outcome.code() == code && outcome.text().find(fragment) != std::string::npos);
  }
  EXPECT_TRUE(told) << outcomes[0].text() << "\n" << outcomes[1].text();
}

// The gradients are gone, but the weights were updated with them.
TEST(PipelineDataAxis, AnUpdateFromUnaveragedGradientsIsRefusedAlsoOnceTheyAreCleared) {
  for (const bool fused : {false, true}) {
    expect_refused(
        Code::kSyncMisuse, "changed after 1 step without", [&](const Communicator& comm) {
          Replica replica(comm);
          std::unique_ptr<torch::optim::Optimizer> optimizer;
          if (fused) {
            optimizer = std::make_unique<Sgd>(replica.pipeline.parameters(), SgdOptions{.lr = 0.1});
          } else {
            optimizer = std::make_unique<torch::optim::SGD>(replica.pipeline.parameters(), 0.1);
          }
          replica.step(0, {.synchronise = false});
          optimizer->step();
          for (auto& parameter : replica.pipeline.parameters()) parameter.mutable_grad().reset();
          replica.step(1);
        });
  }
}

TEST(PipelineDataAxis, StagesOfRanksRefuseItToo) {
  const auto outcomes = test::outcomes_of_ranks(4, [](const Communicator& world) {
    const Mesh mesh(world, {{"dp", 2}, {"pp", 2}});
    const Devices devices("cpu:1");
    Pipeline pipeline(test::cut(make_net(), 2), mesh.axis("pp"), devices[0], one_f_one_b(2, 2),
                      {.loss = test::mse, .data = mesh.axis("dp")});
    Sgd optimizer(pipeline.parameters(), {.lr = 0.1});
    const auto mine = half_of(draw(0), mesh.axis("dp"));
    pipeline.step(mine.x, mine.y, {.synchronise = false});
    optimizer.step();
    optimizer.zero_grad();
    pipeline.step(mine.x, mine.y);
  });
  for (const auto& outcome : outcomes) EXPECT_TRUE(outcome.failed());
}

TEST(PipelineDataAxis, GradientsMayBeDroppedWithoutAnUpdate) {
  std::vector<torch::Tensor> expected;
  {
    auto net = make_net();
    const auto batch = draw(1);
    test::mse(net->forward(batch.x), batch.y).backward();
    for (const auto& parameter : net->parameters()) expected.push_back(parameter.grad());
  }
  test::run_ranks(2, [&](const Communicator& comm) {
    Replica replica(comm);
    replica.step(0, {.synchronise = false});
    for (auto& parameter : replica.pipeline.parameters()) parameter.mutable_grad().reset();
    replica.step(1);
    const auto parameters = replica.net->parameters();
    for (size_t i = 0; i < expected.size(); ++i) {
      test::expect_close(parameters[i].grad(), expected[i], std::to_string(i));
    }
  });
}

// A first gradient moves the weights, a second one is computed there, and they are moved back: the
// update uses averaged gradients only.
TEST(PipelineDataAxis, PerturbedWeightsAreAllowedOnDemand) {
  test::run_ranks(2, [](const Communicator& comm) {
    Replica replica(comm, make_net(), /*check_updates=*/false);
    Sgd optimizer(replica.pipeline.parameters(), {.lr = 0.1});
    for (int step = 0; step < 3; ++step) {
      replica.step(step, {.synchronise = false});
      const auto before = test::copies(replica.pipeline.parameters());
      for (auto& parameter : replica.pipeline.parameters()) {
        const torch::NoGradGuard no_grad;
        parameter.add_(parameter.grad(), 0.05);
        parameter.mutable_grad().reset();
      }
      replica.step(step);
      for (size_t i = 0; i < before.size(); ++i) {
        const torch::NoGradGuard no_grad;
        replica.pipeline.parameters()[i].copy_(before[i]);
      }
      optimizer.step();
      optimizer.zero_grad();
    }
    for (const auto& parameter : replica.pipeline.parameters()) {
      auto first = parameter.detach().clone();
      comm.broadcast(first, 0);
      EXPECT_TRUE(first.equal(parameter));
    }
  });
}

// No further step could refuse it.
TEST(PipelineDataAxis, ALastUpdateFromUnaveragedGradientsIsToldAtTheEnd) {
  for (const bool averages : {false, true}) {
    ::testing::internal::CaptureStderr();
    test::run_ranks(2, [&](const Communicator& comm) {
      Replica replica(comm);
      Sgd optimizer(replica.pipeline.parameters(), {.lr = 0.1});
      replica.step(0, {.synchronise = averages});
      optimizer.step();
      optimizer.zero_grad();
    });
    const auto text = ::testing::internal::GetCapturedStderr();
    EXPECT_EQ(text.find("warning[LS0024]") != std::string::npos, !averages) << text;
  }
}

TEST(PipelineDataAxis, AParameterThatIsThawedLaterIsRefused) {
  for (const size_t layer : {size_t{0}, size_t{6}}) {
    expect_refused(Code::kSyncMisuse, "made trainable", [&](const Communicator& comm) {
      auto net = make_net();
      auto weight = net->children()[layer]->parameters()[0];
      weight.requires_grad_(false);
      Replica replica(comm, net);
      replica.step(0);
      weight.requires_grad_(true);
      replica.step(1);
    });
  }
  expect_refused(Code::kSyncMisuse, "made trainable", [&](const Communicator& comm) {
    auto net = make_net();  // nothing of stage 0 is trained at first
    for (size_t i = 0; i < 4; ++i) {
      for (auto& parameter : net->children()[i]->parameters()) parameter.requires_grad_(false);
    }
    Replica replica(comm, net);
    net->parameters()[0].requires_grad_(true);
    replica.step(0);
  });
}

TEST(PipelineDataAxis, AParameterThatIsResizedOrConvertedIsRefused) {
  expect_refused(Code::kSyncMisuse, "was resized", [](const Communicator& comm) {
    Replica replica(comm);
    auto* linear = replica.net->children()[0]->as<torch::nn::Linear>();
    linear->weight.set_data(torch::zeros({5, test::kWidth}));
    replica.step(0);
  });
  expect_refused(Code::kSyncMisuse, "was moved or converted", [](const Communicator& comm) {
    Replica replica(comm);
    replica.net->to(torch::kFloat64);
    replica.step(0);
  });
}

// As on one device: a frozen parameter has no gradient, and weight decay skips it.
TEST(PipelineDataAxis, AParameterThatIsFrozenLaterStaysAsItIs) {
  const SgdOptions how{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.3};
  const auto freeze = [](const torch::nn::Sequential& net, int step) {
    net->children()[0]->parameters()[0].requires_grad_(step < 2 || step >= 4);
    net->children()[6]->parameters()[1].requires_grad_(step < 1);
  };
  auto alone = make_net();
  Sgd optimizer(alone->parameters(), how);
  std::vector<std::vector<torch::Tensor>> expected;
  for (int step = 0; step < 6; ++step) {
    freeze(alone, step);
    const auto batch = draw(step);
    test::mse(alone->forward(batch.x), batch.y).backward();
    optimizer.step();
    optimizer.zero_grad();
    expected.push_back(test::copies(alone->parameters()));
  }
  test::run_ranks(2, [&](const Communicator& comm) {
    Replica replica(comm);
    Sgd staged(replica.net->parameters(), how);
    for (int step = 0; step < 6; ++step) {
      freeze(replica.net, step);
      replica.step(step);
      const auto parameters = replica.net->parameters();
      EXPECT_EQ(parameters[0].grad().defined(), step < 2 || step >= 4) << step;
      staged.step();
      staged.zero_grad();
      for (size_t i = 0; i < parameters.size(); ++i) {
        test::expect_close(parameters[i].detach(), expected[static_cast<size_t>(step)][i],
                           fmt::format("step {}, weight {}", step, i));
      }
    }
  });
}

// What it has accumulated is averaged with the rest; a gradient averaged before does not change.
TEST(PipelineDataAxis, AFrozenParameterKeepsTheGradientItHas) {
  auto alone = make_net();
  const auto batch = draw(0);
  test::mse(alone->forward(batch.x), batch.y).backward();
  const auto expected = alone->parameters()[0].grad();
  test::run_ranks(2, [&](const Communicator& comm) {
    Replica replica(comm);
    replica.step(0, {.synchronise = false});
    auto weight = replica.net->parameters()[0];
    weight.requires_grad_(false);
    replica.step(1);
    test::expect_close(weight.grad(), expected, "accumulated");
    const auto averaged = weight.grad().clone();
    replica.step(2);
    EXPECT_TRUE(weight.grad().equal(averaged));
  });
}

TEST(PipelineDataAxis, RanksFreezeTogether) {
  expect_refused(Code::kReplicasDiffer, "frozen on some data ranks", [](const Communicator& comm) {
    Replica replica(comm);
    replica.step(0);
    replica.net->parameters()[comm.rank() == 0 ? 0 : 1].requires_grad_(false);
    replica.step(1);
  });
  const auto outcomes = test::outcomes_of_ranks(2, [](const Communicator& comm) {
    Replica replica(comm);
    replica.step(0);
    if (comm.rank() == 0) replica.net->parameters()[0].requires_grad_(false);
    replica.step(1);
  });
  for (const auto& outcome : outcomes) EXPECT_TRUE(outcome.failed());
}

}  // namespace
}  // namespace lockstep::test::pipeline_data_axis_test
