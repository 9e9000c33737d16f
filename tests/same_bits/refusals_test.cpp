#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "device/rng.hpp"
#include "gradients/virtual_shards.hpp"
#include "ranks/ddp_nets.hpp"
#include "same_bits_support.hpp"

// What virtual shards refuse, by name, and the options that they work with.

namespace lockstep::test::same_bits_refusals_test {
namespace {

using Ddp = DistributedDataParallel<torch::nn::SequentialImpl>;

Ddp small_ddp(const Communicator& comm, DdpOptions options = {}) {
  if (options.virtual_shards == 0) options.virtual_shards = 4;
  return Ddp(torch::nn::Sequential(torch::nn::Linear(2, 2)), comm, options);
}

torch::Tensor loss_of(Ddp& ddp, const BatchPart& part) {
  return ddp(torch::ones({2, 2}) * static_cast<double>(part.index)).sum();
}

TEST(SameBitsRefusals, PartsThatRanksDoNotDivide) {
  const auto outcomes = outcomes_of_ranks(
      3, [](const Communicator& comm) { small_ddp(comm, {.virtual_shards = 8}); });
  for (const auto& each : outcomes) {
    EXPECT_EQ(each.code(), Code::kUsage);
    EXPECT_NE(each.text().find("8 virtual shards cannot be divided over 3 ranks"),
              std::string::npos)
        << each.text();
  }
}

TEST(SameBitsRefusals, OptionsThatDependOnRanks) {
  const auto self = Communicator::self();
  const auto refused = [&](const std::string& what, DdpOptions options) {
    expect_error(Code::kUsage, {what}, [&] { small_ddp(self, options); });
  };
  refused("a hook", {.hook = compress_gradients(torch::kBFloat16)});
  refused("static_graph", {.static_graph = true});
  refused("a part cannot be computed by 0 threads", {.part_threads = 0});
  refused("-4 virtual shards", {.virtual_shards = -4});
  const auto module_refused = [&](const std::string& what, auto layer, DdpOptions options) {
    options.virtual_shards = 4;
    expect_error(Code::kUsage, {what}, [&] { Ddp(torch::nn::Sequential(layer), self, options); });
  };
  module_refused("is sparse", torch::nn::Embedding(torch::nn::EmbeddingOptions(4, 2).sparse(true)),
                 {});
  module_refused("computes over the rows of all ranks",
                 SyncBatchNorm(torch::nn::BatchNormOptions(2), self), {});
  module_refused("broadcast_buffers is off", torch::nn::BatchNorm1d(2),
                 {.broadcast_buffers = false});
}

TEST(SameBitsRefusals, CallsOutsideOfParts) {
  Ddp ddp = small_ddp(Communicator::self());
  expect_error(Code::kSyncMisuse, {"a forward", "backward_parts()"}, [&] {
    ddp(torch::ones({2, 2}));
  });
  expect_error(Code::kSyncMisuse, {"set_weight()"}, [&] { ddp.set_weight(3); });
  expect_error(Code::kSyncMisuse, {"join()"}, [&] { join(ddp, [] {}); });
  expect_error(Code::kSyncMisuse, {"NoSync inside backward_parts()"}, [&] {
    ddp.backward_parts([&](const BatchPart& part) {
      const NoSync no_sync(ddp);
      return loss_of(ddp, part);
    });
  });
  expect_error(Code::kSyncMisuse, {"backward_parts() inside backward_parts()"}, [&] {
    ddp.backward_parts([&](const BatchPart&) {
      return ddp.backward_parts([&](const BatchPart& part) { return loss_of(ddp, part); });
    });
  });
  const torch::NoGradGuard no_grad;
  EXPECT_EQ(ddp(torch::ones({2, 2})).size(0), 2) << "evaluation is no part of a step";
}

TEST(SameBitsRefusals, BadParts) {
  Ddp ddp = small_ddp(Communicator::self());
  expect_error(Code::kSplit, {"6 rows of this rank cannot be divided evenly into its 4 parts"},
               [&] {
                 ddp.backward_parts(
                     torch::ones({6, 2}), torch::ones({6, 2}),
                     [&](const auto& x, const auto& y) { return torch::mse_loss(ddp(x), y); });
               });
  expect_error(Code::kUsage, {"a loss that is not a scalar"}, [&] {
    ddp.backward_parts([&](const BatchPart&) { return ddp(torch::ones({2, 2})); });
  });
  expect_error(Code::kUsage, {"the weights of all parts are zero"}, [&] {
    ddp.backward_parts([&](const BatchPart& part) {
      ddp.set_weight(0);
      return loss_of(ddp, part);
    });
  });
  Ddp plain(torch::nn::Sequential(torch::nn::Linear(2, 2)), Communicator::self());
  expect_error(Code::kUsage, {"without virtual shards"}, [&] {
    plain.backward_parts([&](const BatchPart&) { return plain(torch::ones({2, 2})).sum(); });
  });
}

TEST(SameBitsRefusals, RanksWithOtherSeeds) {
  const auto outcomes = outcomes_of_ranks(2, [](const Communicator& comm) {
    DeviceRng own(torch::kCPU, 0);
    own.reseed(static_cast<uint64_t>(comm.rank()));
    const UseRng draw_from(own);
    Ddp ddp = small_ddp(comm);
    ddp.backward_parts([&](const BatchPart& part) { return loss_of(ddp, part); });
  });
  for (const auto& each : outcomes) {
    EXPECT_EQ(each.code(), Code::kSyncMisuse);
    EXPECT_NE(each.text().find("have other seeds"), std::string::npos) << each.text();
  }
}

// Otherwise the parts of different batches would be averaged.
TEST(SameBitsRefusals, RanksInOtherSteps) {
  const auto outcomes = outcomes_of_ranks(2, [](const Communicator& comm) {
    Ddp ddp = small_ddp(comm);
    for (int batch = 0; batch < 3; ++batch) {
      try {
        ddp.backward_parts([&](const BatchPart& part) {
          if (comm.rank() == 0 && batch == 1) throw std::runtime_error("a bad row");
          return loss_of(ddp, part);
        });
      } catch (const Error&) {
        throw;
      } catch (const std::runtime_error&) {  // one rank's program leaves the batch out
      }
      ddp.zero_grad();
    }
  });
  for (const auto& each : outcomes) {
    EXPECT_EQ(each.code(), Code::kSyncMisuse);
    EXPECT_NE(each.text().find("are in other steps"), std::string::npos) << each.text();
  }
}

// Which parameters a part uses may depend on the part, but not on the rank that computes it.
TEST(SameBitsRefusals, UnusedParameters) {
  for (const int ranks : {1, 2, 4}) {
    run_ranks(ranks, [](const Communicator& comm) {
      Branches net;
      DistributedDataParallel ddp(net, comm, {.find_unused_parameters = true, .virtual_shards = 4});
      ddp.backward_parts([&](const BatchPart& part) {
        return ddp(value(static_cast<double>(part.index + 1)), part.index == 2, false).sum();
      });
      EXPECT_EQ(net->always.grad().item<double>(), 2.5);
      EXPECT_EQ(net->left.grad().item<double>(), 0.75);
      EXPECT_FALSE(net->right.grad().defined());
    });
    // A rank may learn of it from another one.
    const auto outcomes = outcomes_of_ranks(ranks, [](const Communicator& comm) {
      Branches net;
      DistributedDataParallel ddp(net, comm, {.virtual_shards = 4});
      ddp.backward_parts([&](const BatchPart& part) {
        return ddp(value(1), /*use_left=*/part.local_index > 0, true).sum();
      });
    });
    bool named = false;
    for (const auto& each : outcomes) {
      EXPECT_TRUE(each.failed());
      named = named || (each.code() == Code::kUnusedParameter &&
                        each.text().find("left") != std::string::npos);
    }
    EXPECT_TRUE(named) << outcomes.front().text();
  }
}

TEST(SameBitsRefusals, AGradientThatIsNotFiniteStopsTheJob) {
  for (const auto& each : outcomes_of_ranks(2, [](const Communicator& comm) {
         Ddp ddp = small_ddp(comm, {.nonfinite = Nonfinite::kStop});
         ddp.backward_parts([&](const BatchPart& part) {
           return loss_of(ddp, part) * (part.index == 2 ? NAN : 1.0);
         });
       })) {
    EXPECT_TRUE(each.failed());
    EXPECT_NE(each.text().find("not finite"), std::string::npos) << each.text();
  }
}

TEST(SameBitsRefusals, SeedsDependOnStepAndPart) {
  PartSeeds seeds;
  std::set<uint64_t> seen;
  for (const bool continues : {false, true, true, false}) {
    seeds.begin_step(continues);
    for (int64_t part = 0; part < 4; ++part) seen.insert(seeds.seed_of(part));
  }
  EXPECT_EQ(seen.size(), 16U);
}

using Fsdp = FullyShardedDataParallel<torch::nn::SequentialImpl>;

TEST(SameBitsShardedRefusals, WhatDependsOnRanks) {
  for (const auto& each : outcomes_of_ranks(3, [](const Communicator& comm) {
         torch::nn::Sequential net(torch::nn::Linear(2, 2));
         try {
           Fsdp(net, comm, {.virtual_shards = 8});
         } catch (const Error&) {
           EXPECT_EQ(net->forward(torch::ones({1, 2})).numel(), 2) << "the module is as it was";
           throw;
         }
       })) {
    EXPECT_EQ(each.code(), Code::kUsage);
    EXPECT_NE(each.text().find("8 virtual shards cannot be divided over 3 ranks"),
              std::string::npos)
        << each.text();
  }
  const auto self = Communicator::self();
  const auto refused = [&](const std::string& what, auto layer, ShardOptions options) {
    options.virtual_shards = 4;
    expect_error(Code::kUsage, {"FullyShardedDataParallel with virtual_shards", what},
                 [&] { Fsdp(torch::nn::Sequential(layer), self, options); });
  };
  refused("computes over the rows of all ranks",
          SyncBatchNorm(torch::nn::BatchNormOptions(2), self), {});
  refused("broadcast_buffers is off", torch::nn::BatchNorm1d(2), {.broadcast_buffers = false});
  expect_error(Code::kUsage, {"a part cannot be computed by 0 threads"}, [&] {
    Fsdp(torch::nn::Sequential(torch::nn::Linear(2, 2)), self,
         {.virtual_shards = 4, .part_threads = 0});
  });
}

TEST(SameBitsShardedRefusals, CallsOutsideOfParts) {
  Fsdp fsdp(torch::nn::Sequential(torch::nn::Linear(2, 2)), Communicator::self(),
            {.virtual_shards = 4});
  const auto x = torch::ones({6, 2});
  expect_error(Code::kSyncMisuse, {"a forward", "FullyShardedDataParallel"}, [&] { fsdp(x); });
  expect_error(Code::kSyncMisuse, {"set_weight()"}, [&] { fsdp.set_weight(3); });
  expect_error(Code::kSyncMisuse, {"NoSync inside backward_parts()"}, [&] {
    fsdp.backward_parts([&](const BatchPart&) {
      const NoSync no_sync(fsdp);
      return fsdp(x).sum();
    });
  });
  expect_error(Code::kSplit, {"6 rows of this rank cannot be divided evenly into its 4 parts"},
               [&] {
                 fsdp.backward_parts(x, x, [&](const auto& rows, const auto& wanted) {
                   return torch::mse_loss(fsdp(rows), wanted);
                 });
               });
  Fsdp plain(torch::nn::Sequential(torch::nn::Linear(2, 2)), Communicator::self());
  expect_error(Code::kUsage, {"without virtual shards"},
               [&] { plain.backward_parts([&](const BatchPart&) { return plain(x).sum(); }); });
  const torch::NoGradGuard no_grad;
  EXPECT_EQ(fsdp(x).size(0), 6) << "evaluation is no part of a step";
}

// Nothing of a step that ended with an error is left in the next one.
TEST(SameBitsShardedRefusals, AStepAfterAnErrorBeginsAnew) {
  for (const ShardStage stage : {ShardStage::kOptimizer, ShardStage::kParameters}) {
    run_ranks(2, [stage](const Communicator& comm) {
      Fsdp fsdp(torch::nn::Sequential(torch::nn::Linear(2, 2)), comm,
                {.stage = stage, .virtual_shards = 4});
      const auto gradients_of_step = [&](bool fails) {
        fsdp.backward_parts([&](const BatchPart& part) {
          const auto loss = fsdp(torch::ones({3, 2})).sum() * static_cast<double>(part.index + 1);
          if (fails && part.local_index == 1) {
            loss.backward();
            throw Error(Code::kUsage, "planted", "none");
          }
          return loss;
        });
        std::vector<torch::Tensor> gradients;
        for (const auto& shard : fsdp.parameters()) {
          if (shard.numel() > 0) gradients.push_back(shard.grad().clone());
          shard.mutable_grad().reset();
        }
        return flat_weights(gradients);
      };
      const auto expected = gradients_of_step(false);
      expect_error(Code::kUsage, {"planted"}, [&] { gradients_of_step(true); });
      EXPECT_TRUE(torch::equal(gradients_of_step(false), expected));
    });
  }
}

TEST(SameBitsShardedRefusals, UnusedParameters) {
  for (const int ranks : {1, 2, 4}) {
    run_ranks(ranks, [](const Communicator& comm) {
      Branches net;
      FullyShardedDataParallel fsdp(net, comm,
                                    {.find_unused_parameters = true, .virtual_shards = 4});
      fsdp.backward_parts([&](const BatchPart& part) {
        return fsdp(value(static_cast<double>(part.index + 1)), part.index == 2, false).sum();
      });
      const auto expect_gradient = [&](const torch::Tensor& parameter, std::optional<double> sum) {
        const auto shard = fsdp.sharded().shard_of(parameter);
        if (shard.numel() == 0) return;
        ASSERT_EQ(shard.grad().defined(), sum.has_value());
        EXPECT_TRUE(!sum || shard.grad().item<double>() == *sum);
      };
      expect_gradient(net->always, 2.5);
      expect_gradient(net->left, 0.75);
      expect_gradient(net->right, {});
    });
    bool named = false;
    for (const auto& each : outcomes_of_ranks(ranks, [](const Communicator& comm) {
           Branches net;
           FullyShardedDataParallel fsdp(net, comm, {.virtual_shards = 4});
           fsdp.backward_parts([&](const BatchPart& part) {
             return fsdp(value(1), /*use_left=*/part.local_index > 0, true).sum();
           });
         })) {
      EXPECT_TRUE(each.failed());
      named = named || (each.code() == Code::kUnusedParameter &&
                        each.text().find("left") != std::string::npos);
    }
    EXPECT_TRUE(named);
  }
}

// A pipeline of two stages with two micro-batches.
std::unique_ptr<Pipeline> small_pipeline(const Devices& devices, PipelineOptions options) {
  const torch::nn::Sequential net(torch::nn::Linear(2, 2), torch::nn::Linear(2, 2));
  options.loss = [](const auto& out, const auto& y) { return torch::mse_loss(out, y); };
  return std::make_unique<Pipeline>(split_stages(net, std::vector<int64_t>{1, 1}), devices,
                                    one_f_one_b(2, 2), options);
}

TEST(SameBitsPipelineRefusals, OptionsThatDoNotFit) {
  const Devices devices("cpu:2");
  const auto refused = [&](const std::string& what, const PipelineOptions& options) {
    expect_error(Code::kUsage, {what}, [&] { small_pipeline(devices, options); });
  };
  refused("4 virtual shards, but 1 data rank of 2 micro-batches make 2", {.virtual_shards = 4});
  refused("a part cannot be computed by 0 threads", {.virtual_shards = 2, .part_threads = 0});
  PipelineOptions sharded{.virtual_shards = 2};
  sharded.data = Communicator::self();
  sharded.shard = ShardOptions();
  refused("to shard its stages and to have virtual_shards", sharded);
  sharded.virtual_shards = 0;
  sharded.shard->virtual_shards = 2;
  refused("the ShardOptions of a pipeline have virtual_shards", sharded);
  expect_error(Code::kUsage, {"Pipeline with virtual_shards: broadcast_buffers is off"}, [&] {
    const torch::nn::Sequential net(torch::nn::BatchNorm1d(2), torch::nn::Linear(2, 2));
    PipelineOptions options{.loss = [](const auto& out, const auto&) { return out.sum(); }};
    options.broadcast_buffers = false;
    options.virtual_shards = 2;
    Pipeline(split_stages(net, std::vector<int64_t>{1, 1}), devices, one_f_one_b(2, 2), options);
  });
}

TEST(SameBitsPipelineRefusals, Batches) {
  const Devices devices("cpu:2");
  const auto pipeline = small_pipeline(devices, {.virtual_shards = 2});
  expect_error(Code::kSplit, {"5 rows of this rank cannot be divided evenly into its 2 parts of 2"},
               [&] {
                 pipeline->step(torch::ones({5, 2}), torch::ones({5, 2}));
               });
  expect_error(Code::kUsage, {"rows that require a gradient"}, [&] {
    pipeline->step(torch::ones({4, 2}).requires_grad_(), torch::ones({4, 2}));
  });
  EXPECT_GT(pipeline->step(torch::ones({4, 2}), torch::ones({4, 2})).item<double>(), 0);
}

TEST(SameBitsPipelineRefusals, RanksWithOtherRowsOrSeeds) {
  for (const bool rows_differ : {true, false}) {
    const auto outcomes = outcomes_of_ranks(2, [&](const Communicator& comm) {
      DeviceRng own(torch::kCPU, 0);
      own.reseed(rows_differ ? 0 : static_cast<uint64_t>(comm.rank()));
      const UseRng draw_from(own);
      const Devices devices("cpu:2");
      const auto pipeline = small_pipeline(devices, {.data = comm, .virtual_shards = 4});
      const int64_t rows = rows_differ ? 2 + 2 * comm.rank() : 2;
      pipeline->step(torch::ones({rows, 2}), torch::ones({rows, 2}));
    });
    for (const auto& each : outcomes) {
      EXPECT_EQ(each.code(), rows_differ ? Code::kSplit : Code::kSyncMisuse);
      const char* said = rows_differ ? "a part has 1 row on rank 0 and 2 on rank 1"
                                     : "ranks 1 and 0 have other seeds";
      EXPECT_NE(each.text().find(said), std::string::npos) << each.text();
    }
  }
}

TEST(SameBitsPipelineRefusals, AGradientThatIsNotFiniteStopsTheJob) {
  for (const auto& each : outcomes_of_ranks(2, [](const Communicator& comm) {
         const Devices devices("cpu:2");
         const auto pipeline = small_pipeline(
             devices, {.data = comm, .nonfinite = Nonfinite::kStop, .virtual_shards = 4});
         pipeline->step(torch::ones({2, 2}), torch::full({2, 2}, comm.rank() == 1 ? NAN : 1.0));
       })) {
    EXPECT_TRUE(each.failed());
    EXPECT_NE(each.text().find("not finite"), std::string::npos) << each.text();
  }
}

TEST(SameBitsSampler, AStepHasTheSameRowsOnEveryNumberOfRanks) {
  constexpr int64_t kShards = 6;
  using Batch = std::vector<int64_t>;
  const auto steps_of = [](int ranks) {
    std::vector<std::vector<Batch>> steps;  // [step][part]
    for (int rank = 0; rank < ranks; ++rank) {
      DistributedSampler sampler(50, ranks, rank, {.seed = 3, .virtual_shards = kShards});
      const int64_t own = kShards / ranks;
      for (size_t step = 0; step < 7; ++step) {  // 9 rows of each part: 2, 2, 2, 2, 1, then again
        const Batch batch = sampler.next_batch(2 * own);
        EXPECT_EQ(static_cast<int64_t>(batch.size()), (step == 4 ? 1 : 2) * own);
        if (steps.size() <= step) steps.emplace_back();
        const auto count = static_cast<ptrdiff_t>(batch.size()) / own;
        for (int64_t part = 0; part < own; ++part) {
          const auto first = batch.begin() + part * count;
          steps[step].emplace_back(first, first + count);
        }
      }
    }
    return steps;
  };
  const auto alone = steps_of(1);
  for (const int ranks : {2, 3, 6}) EXPECT_EQ(steps_of(ranks), alone) << ranks;
  DistributedSampler sixth(50, 6, 1, {.seed = 3});
  EXPECT_EQ(sixth.next_batch(2), alone[0][1]) << "part 1 has what rank 1 of 6 has";
}

TEST(SameBitsSampler, RefusesBatchesThatPartsDoNotDivide) {
  DistributedSampler sampler(50, 2, 0, {.virtual_shards = 6});
  expect_error(Code::kSplit, {"a batch of 4 rows", "3 virtual shards"},
               [&] { sampler.next_batch(4); });
  expect_error(Code::kSplit, {"6 virtual shards cannot be divided over 4 ranks"},
               [] { DistributedSampler(50, 4, 0, {.virtual_shards = 6}); });
}

}  // namespace
}  // namespace lockstep::test::same_bits_refusals_test
