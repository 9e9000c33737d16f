// Sharded models in programs that do more than one forward, backward and update per step.
#include <gtest/gtest.h>
#include <torch/script.h>

#include <chrono>
#include <thread>

#include "lockstep/checkpoint.hpp"
#include "lockstep/lr_schedule.hpp"
#include "lockstep/master_weights.hpp"
#include "lockstep/script_module.hpp"
#include "lockstep/sync_batch_norm.hpp"
#include "lockstep/tensor_file.hpp"
#include "lockstep/weight_average.hpp"
#include "sharding_support.hpp"

namespace lockstep::test::features_test {
namespace {

constexpr int64_t kRows = 30;

class ShardedFeatures : public testing::TestWithParam<std::tuple<ShardStage, int, bool>> {
 protected:
  ShardStage stage() const { return std::get<0>(GetParam()); }
  int ranks() const { return std::get<1>(GetParam()); }
  ShardOptions options() const {
    return {.stage = stage(), .min_unit_bytes = 0, .share_on_host = std::get<2>(GetParam())};
  }
};
INSTANTIATE_TEST_SUITE_P(Stages, ShardedFeatures,
                         testing::Combine(testing::ValuesIn(kStages), testing::Values(2, 5),
                                          testing::Bool()),
                         [](const auto& test) {
                           return "Stage" +
                                  std::to_string(static_cast<int>(std::get<0>(test.param))) + "On" +
                                  std::to_string(std::get<1>(test.param)) +
                                  (std::get<2>(test.param) ? "Shared" : "Gathered");
                         });

// Every rank halves all weights: they are halved once, whoever has the memory.
TEST_P(ShardedFeatures, ChangesInsideGatheredParametersAreEachRanksOwn) {
  run_ranks(ranks(), [&](const Communicator& comm) {
    auto net = three_layers();
    FullyShardedDataParallel fsdp(net, comm, options());
    const auto wanted = weights_of(*three_layers()) * 0.125;
    for (int i = 0; i < 3; ++i) {
      const GatheredParameters gathered(fsdp);
      const torch::NoGradGuard no_grad;
      for (auto& each : net->parameters()) each.mul_(0.5);
      if (i == 1) {  // what is nested changes nothing
        const GatheredParameters again(fsdp);
        expect_near_all(weights_of(*net), wanted * 2, "inside");
      }
    }
    expect_near_all(whole_weights(fsdp), wanted, "halved weights");
    fsdp(wave({4, 6}, 0)).sum().backward();  // and training goes on
    Sgd(fsdp.parameters(), {.lr = 0}).step();
    expect_near_all(whole_weights(fsdp), wanted, "weights after a step");
  });
}

// What ranks share they must not read before all have written their parts, trained or not.
TEST_P(ShardedFeatures, ChangesOfFrozenParametersReachAllRanks) {
  run_ranks(ranks(), [&](const Communicator& comm) {
    torch::nn::Linear frozen(torch::nn::LinearOptions(8, 8 * ranks()).bias(false));
    torch::nn::Sequential net(frozen, torch::nn::Linear(8 * ranks(), 1));
    for (auto& parameter : net->parameters()) torch::nn::init::ones_(parameter);
    frozen->weight.requires_grad_(false);
    FullyShardedDataParallel fsdp(net, comm, options());
    const torch::NoGradGuard no_grad;
    const auto x = torch::ones({2, 8});
    const auto before = fsdp(x).clone();
    {
      const GatheredParameters gathered(fsdp);
      frozen->weight.fill_(2);
      if (comm.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    EXPECT_TRUE(torch::equal(fsdp(x) - 1, 2 * (before - 1)));
  });
}

// Ranks that share memory all write the initial weights there, one maybe after another has begun to
// use them.
TEST_P(ShardedFeatures, EvaluationRightAfterConstruction) {
  auto one = three_layers();
  const auto x = wave({4, 6}, 0);
  const auto wanted = one->forward(x).detach();
  run_ranks(ranks(), [&](const Communicator& comm) {
    for (int i = 0; i < 20; ++i) {
      auto net = three_layers();
      FullyShardedDataParallel fsdp(net, comm, options());
      const torch::NoGradGuard no_grad;
      expect_near_all(fsdp(x), wanted, "output");
    }
  });
}

TEST_P(ShardedFeatures, TwoForwardsAndOneBackward) {
  auto one = three_layers();
  Sgd alone(one->parameters(), {.lr = 0.1});
  const auto loss_of = [](auto& model, const torch::Tensor& x) {
    const auto first = model(x);
    return (first.pow(2) + 2 * model(torch::sin(x)) * first.detach()).mean();
  };
  for (int step = 0; step < 3; ++step) {
    const auto call = [&](const torch::Tensor& x) { return one->forward(x); };
    loss_of(call, wave({kRows, 6}, step)).backward();
    alone.step(StepExtras{.zero_grad = true});
  }
  run_ranks(ranks(), [&](const Communicator& comm) {
    auto net = three_layers();
    FullyShardedDataParallel fsdp(net, comm, options());
    Sgd optimizer(fsdp.parameters(), {.lr = 0.1});
    for (int step = 0; step < 3; ++step) {
      loss_of(fsdp, own_rows(wave({kRows, 6}, step), comm)).backward();
      optimizer.step(StepExtras{.zero_grad = true});
    }
    expect_near_all(whole_weights(fsdp), weights_of(*one), "weights");
  });
}

// torch::optim changes no version counter, and the first weights get no gradient here. Before the
// update weights are used by an evaluation, or by a loss that is only looked at, or kept.
TEST_P(ShardedFeatures, AnUpdateAfterAForwardWithoutBackwardIsSeen) {
  enum class Look { kEvaluation, kLoss, kKeptLoss };
  const auto train = [](auto& model, const std::vector<torch::Tensor>& parameters,
                        const Communicator& comm, Look look) {
    torch::optim::SGD optimizer(parameters, 0.5);
    torch::Tensor kept;
    for (int step = 0; step < 3; ++step) {
      auto x = own_rows(wave({kRows, 6}, step), comm).clone();
      x.select(1, 0).zero_();  // the first column of each weight gets no gradient
      optimizer.zero_grad();
      model(x).pow(2).mean().backward();
      {
        const torch::AutoGradMode gradients(look != Look::kEvaluation);
        const auto loss = model(x).pow(2).mean();
        if (look == Look::kKeptLoss) kept = loss;
      }
      if (look != Look::kEvaluation) comm.barrier();  // other ranks look at the same weights
      optimizer.step();
    }
  };
  const auto make = [] {
    torch::nn::Sequential net(torch::nn::Linear(torch::nn::LinearOptions(6, 5).bias(false)));
    net->to(torch::kDouble);
    fill_weights(*net);
    return net;
  };
  for (const auto look : {Look::kEvaluation, Look::kLoss, Look::kKeptLoss}) {
    auto one = make();
    const auto call_one = [&](const torch::Tensor& x) { return one->forward(x); };
    train(call_one, one->parameters(), Communicator::self(), look);
    run_ranks(ranks(), [&](const Communicator& comm) {
      auto net = make();
      FullyShardedDataParallel fsdp(net, comm, options());
      train(fsdp, fsdp.parameters(), comm, look);
      expect_near_all(whole_weights(fsdp), weights_of(*one), "weights");
    });
  }
}

// An evaluation before and one after an update that changes no first element of a rank's shards; in
// a program that forgets to disable gradients, too.
TEST_P(ShardedFeatures, AnEvaluationAfterAnUpdateSeesIt) {
  for (const bool gradients : {false, true}) {
    run_ranks(ranks(), [&](const Communicator& comm) {
      torch::nn::Sequential net(torch::nn::Linear(torch::nn::LinearOptions(8, 15).bias(false)));
      net->to(torch::kDouble);
      fill_weights(*net);
      FullyShardedDataParallel fsdp(net, comm, options());
      torch::optim::SGD optimizer(fsdp.parameters(), 0.5);
      auto x = wave({4, 8}, 0).clone();
      x.select(1, 0).zero_();
      const auto evaluate = [&] {
        const torch::AutoGradMode mode(gradients);
        net->eval();
        const auto output = fsdp(x).detach().clone();
        net->train();
        return output;
      };
      for (int step = 0; step < 2; ++step) {
        fsdp.zero_grad();
        fsdp(x).pow(2).mean().backward();
        evaluate();
        optimizer.step();
        const auto result = evaluate();
        const GatheredParameters gathered(fsdp);
        expect_near_all(result, net->forward(x).detach(), "an evaluation");
      }
    });
  }
}

torch::nn::Sequential small_net(int64_t in, int64_t out, double phase) {
  torch::nn::Sequential net(torch::nn::Linear(in, 9), torch::nn::Tanh(), torch::nn::Linear(9, out));
  net->to(torch::kDouble);
  fill_weights(*net);
  const torch::NoGradGuard no_grad;
  for (auto& each : net->parameters()) each.mul_(phase);
  return net;
}

// Generator and discriminator in turn; the generator's loss goes backward through both.
template <class G, class D>
void train_gan(G& generator, D& discriminator,
               const std::function<torch::Tensor(torch::Tensor)>& own,
               std::vector<torch::Tensor> of_generator, std::vector<torch::Tensor> of_discriminator,
               const std::function<void()>& drop_discriminator) {
  AdamW g_optimizer(of_generator, {.lr = 0.01});
  AdamW d_optimizer(of_discriminator, {.lr = 0.01});
  for (int step = 0; step < 3; ++step) {
    const auto noise = own(wave({kRows, 4}, step));
    const auto real = own(wave({kRows, 6}, step + 0.5));
    const auto fake = generator(noise);
    const auto d_loss = torch::softplus(-discriminator(real)).mean() +
                        torch::softplus(discriminator(fake.detach())).mean();
    d_loss.backward();
    d_optimizer.step();
    d_optimizer.zero_grad();
    torch::softplus(-discriminator(fake)).mean().backward();
    g_optimizer.step();
    g_optimizer.zero_grad();
    drop_discriminator();
  }
}

TEST_P(ShardedFeatures, AdversarialPair) {
  auto g_one = small_net(4, 6, 1), d_one = small_net(6, 1, 0.8);
  const auto g_call = [&](const torch::Tensor& x) { return g_one->forward(x); };
  const auto d_call = [&](const torch::Tensor& x) { return d_one->forward(x); };
  train_gan(
      g_call, d_call, [](torch::Tensor x) { return x; }, g_one->parameters(), d_one->parameters(),
      [&] { d_one->zero_grad(); });
  run_ranks(ranks(), [&](const Communicator& comm) {
    auto g_net = small_net(4, 6, 1), d_net = small_net(6, 1, 0.8);
    FullyShardedDataParallel generator(g_net, comm, options());
    FullyShardedDataParallel discriminator(d_net, comm, options());
    train_gan(
        generator, discriminator, [&](torch::Tensor x) { return own_rows(x, comm); },
        generator.parameters(), discriminator.parameters(), [&] { discriminator.zero_grad(); });
    expect_near_all(whole_weights(generator), weights_of(*g_one), "generator");
    expect_near_all(whole_weights(discriminator), weights_of(*d_one), "discriminator");
  });
}

// Evaluation between the micro-steps of a window, in a program with groups and a schedule.
TEST_P(ShardedFeatures, EvaluationInsideAWindowOfGroupsWithASchedule) {
  const auto groups_of = [](const std::vector<torch::Tensor>& all) {
    std::vector<torch::optim::OptimizerParamGroup> groups;
    for (const size_t parity : {0U, 1U}) {
      std::vector<torch::Tensor> members;
      for (size_t i = parity; i < all.size(); i += 2) members.push_back(all[i]);
      groups.emplace_back(members, std::make_unique<torch::optim::SGDOptions>(
                                       torch::optim::SGDOptions(parity == 0 ? 0.1 : 0.02)));
    }
    return groups;
  };
  const auto train = [&](auto& model, const std::vector<torch::Tensor>& parameters,
                         const Communicator& comm, const auto& enter_no_sync) {
    Sgd optimizer(groups_of(parameters), {.lr = 0.1});
    LrScheduler scheduler(optimizer, warmup_cosine_lr(2, 6));
    torch::Tensor seen;
    for (int step = 0; step < 4; ++step) {
      for (int micro = 0; micro < 2; ++micro) {
        {
          std::optional<NoSync> no_sync;
          if (micro == 0) enter_no_sync(no_sync);
          const auto x = own_rows(wave({kRows, 6}, step + 0.4 * micro), comm);
          model(x).pow(2).mean().div(2).backward();
        }
        const torch::NoGradGuard no_grad;
        seen = model(wave({3, 6}, step));
      }
      optimizer.step(StepExtras{.max_norm = 0.02, .zero_grad = true});
      scheduler.step();
    }
    return seen;
  };
  auto one = three_layers();
  const auto call_one = [&](const torch::Tensor& x) { return one->forward(x); };
  const auto wanted = train(call_one, one->parameters(), Communicator::self(), [](auto&) {});
  run_ranks(ranks(), [&](const Communicator& comm) {
    auto net = three_layers();
    FullyShardedDataParallel fsdp(net, comm, options());
    const auto seen = train(fsdp, fsdp.parameters(), comm,
                            [&](std::optional<NoSync>& no_sync) { no_sync.emplace(fsdp); });
    expect_near_all(seen, wanted, "evaluated");
    expect_near_all(whole_weights(fsdp), weights_of(*one), "weights");
  });
}

// Trains the module that `make` makes, alone and sharded.
template <class Make>
void expect_same_training(const Make& make, int ranks, const ShardOptions& options) {
  const auto train = [](auto& model, const std::vector<torch::Tensor>& parameters,
                        const Communicator& comm) {
    Sgd optimizer(parameters, {.lr = 0.1, .momentum = 0.9});
    for (int step = 0; step < 3; ++step) {
      model(own_rows(wave({kRows, 6}, step), comm)).pow(2).mean().backward();
      optimizer.step(StepExtras{.zero_grad = true});
    }
  };
  const auto one = make(Communicator::self());
  const auto call_one = [&](const torch::Tensor& x) { return one->forward(x); };
  train(call_one, one->parameters(), Communicator::self());
  run_ranks(ranks, [&](const Communicator& comm) {
    const auto net = make(comm);
    FullyShardedDataParallel fsdp(net, comm, options);
    train(fsdp, fsdp.parameters(), comm);
    expect_near_all(whole_weights(fsdp), weights_of(*one), "weights");
    for (const auto& item : net->named_buffers()) {
      expect_near_all(item.value().to(torch::kDouble),
                      one->named_buffers()[item.key()].to(torch::kDouble), item.key());
    }
  });
}

TEST_P(ShardedFeatures, SyncBatchNormBetweenUnits) {
  const auto make = [](const Communicator& comm) {
    std::shared_ptr<torch::nn::SequentialImpl> net =
        torch::nn::Sequential(torch::nn::Linear(6, 8), torch::nn::BatchNorm1d(8), torch::nn::Tanh(),
                              torch::nn::Linear(8, 3))
            .ptr();
    net->to(torch::kDouble);
    fill_weights(*net);
    convert_sync_batchnorm(*net, comm);
    return net;
  };
  expect_same_training(make, ranks(), options());
}

// Rank r has r + 2 rows, and its loss is the mean over them.
TEST_P(ShardedFeatures, SyncBatchNormOfUnevenRows) {
  const auto make = [] {
    torch::nn::Sequential net(torch::nn::Linear(6, 8), torch::nn::BatchNorm1d(8), torch::nn::Tanh(),
                              torch::nn::Linear(8, 3));
    net->to(torch::kDouble);
    fill_weights(*net);
    return net;
  };
  const int64_t all = int64_t{ranks()} * (ranks() + 3) / 2;
  auto one = make();
  Sgd alone(one->parameters(), {.lr = 0.5});
  for (int step = 0; step < 2; ++step) {
    one->forward(wave({all, 6}, step)).pow(2).mean().backward();
    alone.step(StepExtras{.zero_grad = true});
  }
  run_ranks(ranks(), [&](const Communicator& comm) {
    auto net = make();
    convert_sync_batchnorm(*net, comm);
    FullyShardedDataParallel fsdp(net, comm, options());
    Sgd optimizer(fsdp.parameters(), {.lr = 0.5});
    const int64_t rows = comm.rank() + 2;
    const int64_t first = int64_t{comm.rank()} * (comm.rank() + 3) / 2;
    fsdp.set_weight(static_cast<double>(rows));
    for (int step = 0; step < 2; ++step) {
      fsdp(wave({all, 6}, step).narrow(0, first, rows)).pow(2).mean().backward();
      optimizer.step(StepExtras{.zero_grad = true});
    }
    expect_near_all(whole_weights(fsdp), weights_of(*one), "weights");
  });
}

TEST_P(ShardedFeatures, ScriptModules) {
  const auto make = [](const Communicator&) {
    torch::jit::Module script("net");
    script.register_parameter("up", wave({6, 9}, 0.3) * 0.3, /*is_buffer=*/false);
    script.register_parameter("down", wave({9, 2}, 0.9) * 0.3, /*is_buffer=*/false);
    script.define(R"(
      def forward(self, x):
          return torch.matmul(torch.tanh(torch.matmul(x, self.up)), self.down)
    )");
    auto net = std::make_shared<ScriptModule<>>(script);
    for (auto& each : net->parameters()) each.set_requires_grad(true);
    return net;
  };
  expect_same_training(make, ranks(), options());
  run_ranks(ranks(), [&](const Communicator& comm) {
    const ScratchFolder folder;
    const auto net = make(comm);
    FullyShardedDataParallel fsdp(net, comm, options());
    expect_error(Code::kUsage, {"save_script", "GatheredParameters"},
                 [&] { net->save_script(folder.file("net.pt")); });
    const GatheredParameters gathered(fsdp);
    net->save_script(folder.file("net.pt"));
    EXPECT_TRUE(torch::equal(torch::jit::load(folder.file("net.pt")).attr("up").toTensor(),
                             wave({6, 9}, 0.3) * 0.3));
  });
}

// The averages of the shards are those of the whole weights, in use and in a checkpoint.
TEST_P(ShardedFeatures, AveragesOfWeights) {
  const WeightAverageOptions how{.decay = 0.7};
  auto one = three_layers();
  Sgd alone(one->parameters(), {.lr = 0.5});
  WeightAverage wanted(*one, how);
  const auto probe = wave({4, 6}, 3);
  std::vector<torch::Tensor> averaged_out;
  for (int step = 0; step < 4; ++step) {
    one->forward(wave({kRows, 6}, step)).pow(2).mean().backward();
    alone.step(StepExtras{.zero_grad = true});
    wanted.update();
    const torch::NoGradGuard no_grad;
    const UseAverage averaged(wanted);
    averaged_out.push_back(one->forward(probe));
  }
  const ScratchFolder scratch;
  for (const bool resumed : {false, true}) {
    run_ranks(ranks(), [&](const Communicator& comm) {
      auto net = three_layers();
      FullyShardedDataParallel fsdp(net, comm, options());
      Sgd optimizer(fsdp.parameters(), {.lr = 0.5});
      WeightAverage average(fsdp, how);
      Checkpoint checkpoint(scratch.file("run"), comm, {.preemption = false});
      checkpoint.add("model", fsdp).add("optimizer", optimizer, fsdp).add("average", average);
      const auto first = static_cast<int>(checkpoint.resume());
      EXPECT_EQ(first, resumed ? 2 : 0);
      for (int step = first; step < (resumed ? 4 : 2); ++step) {
        fsdp(own_rows(wave({kRows, 6}, step), comm)).pow(2).mean().backward();
        optimizer.step(StepExtras{.zero_grad = true});
        average.update();
        const auto before = whole_weights(fsdp);
        {
          const torch::NoGradGuard no_grad;
          const UseAverage averaged(average);
          expect_near_all(fsdp(probe), averaged_out[static_cast<size_t>(step)], "averaged");
          const GatheredParameters gathered(fsdp);
          expect_near_all(net->forward(probe), averaged_out[static_cast<size_t>(step)], "gathered");
        }
        EXPECT_TRUE(torch::equal(before, whole_weights(fsdp)));
      }
      if (!resumed) checkpoint.save(2);
      checkpoint.finish();
    });
  }
}

// Master weights come back as they were, whatever reads the averages meanwhile.
TEST_P(ShardedFeatures, AveragesLeaveMasterWeightsAsTheyAre) {
  const ScratchFolder folder;
  run_ranks(ranks(), [&](const Communicator& comm) {
    torch::nn::Sequential net(torch::nn::Linear(6, 20), torch::nn::Linear(20, 3));
    fill_weights(*net);
    MasterWeights masters(*net);
    FullyShardedDataParallel fsdp(net, comm, options());
    Sgd optimizer(fsdp.parameters(), {.lr = 0.5, .masters = masters});
    WeightAverage average(fsdp, {.decay = 0.9});
    for (int step = 0; step < 3; ++step) {
      const auto x = own_rows(wave({kRows, 6}, step), comm).to(torch::kBFloat16);
      fsdp(x).to(torch::kFloat).pow(2).mean().backward();
      optimizer.step(StepExtras{.zero_grad = true});
      average.update();
    }
    const auto weights = [&] {
      std::vector<torch::Tensor> all;
      for (const auto& each : fsdp.parameters()) all.push_back(masters.of(each).clone());
      return torch::cat(all);
    };
    const auto before = weights();
    const auto rounded = whole_weights(fsdp);
    {
      const UseAverage averaged(average);
      save_weights(fsdp, folder.file("averages"));
    }
    EXPECT_TRUE(torch::equal(weights(), before));
    EXPECT_TRUE(torch::equal(whole_weights(fsdp), rounded));
  });
}

// A rank that fails inside backward is named by the others, which do not hang.
TEST_P(ShardedFeatures, AFailureInsideBackwardReachesAllRanks) {
  const auto outcomes = outcomes_of_ranks(ranks(), [&](const Communicator& comm) {
    auto net = three_layers();
    FullyShardedDataParallel fsdp(net, comm, options());
    Sgd optimizer(fsdp.parameters(), {.lr = 0.1});
    for (int step = 0; step < 3; ++step) {
      auto x = own_rows(wave({kRows, 6}, step), comm).clone().set_requires_grad(true);
      if (step == 1 && comm.rank() == 1) {
        x.register_hook([](const torch::Tensor&) -> torch::Tensor {
          throw std::runtime_error("the loss fell over");
        });
      }
      fsdp(x).pow(2).mean().backward();
      optimizer.step(StepExtras{.zero_grad = true});
    }
  });
  EXPECT_NE(outcomes[1].text().find("fell over"), std::string::npos);
  for (const auto& outcome : outcomes) EXPECT_TRUE(outcome.failed());
}

TEST_P(ShardedFeatures, EmbeddingsThatAreLimitedInForwardAreRefused) {
  run_ranks(ranks(), [&](const Communicator& comm) {
    torch::nn::Sequential net(
        torch::nn::Embedding(torch::nn::EmbeddingOptions(6, 3).max_norm(1.0)));
    expect_error(Code::kUsage, {"embedding 0", "max_norm", "DistributedDataParallel"},
                 [&] { FullyShardedDataParallel fsdp(net, comm, options()); });
    comm.barrier();
  });
}

}  // namespace
}  // namespace lockstep::test::features_test
