// GradScaler over ranks: a step that one of them cannot take is skipped on all.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "ddp_nets.hpp"
#include "grad_scaler_support.hpp"
#include "lockstep/distributed_data_parallel.hpp"
#include "lockstep/grad_scaler.hpp"
#include "lockstep/sgd.hpp"
#include "rank_threads.hpp"

namespace lockstep::test {
namespace {

class ScalerRanks : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, ScalerRanks, testing::Values(2, 3));

// The mean over the ranks carries what is not finite to all of them.
TEST_P(ScalerRanks, AnOverflowOnOneRankSkipsThatStepOnAll) {
  const int size = GetParam();
  for (const auto& [name, make] : optimizers_with_state()) {
    SCOPED_TRACE(name);
    run_ranks(size, [&make = make, size](const Communicator& comm) {
      TwoLayers net;
      DistributedDataParallel ddp(net, comm);
      const auto optimizer = make(ddp.parameters(), 0.1);
      GradScaler scaler({.growth_interval = 2});
      scaler.name_parameters(*net);
      for (int step = 1; step <= 6; ++step) {
        const auto before = torch::nn::utils::parameters_to_vector(net->parameters()).clone();
        optimizer->zero_grad();
        auto loss = ddp(rows(4, 6, step + comm.rank())).square().mean();
        // A loss that only this rank's second layer makes infinite.
        if (step == 4 && comm.rank() == size - 1) {
          loss = loss + (net->second->bias * kInfinity).sum();
        }
        scaler.scale(loss).backward();
        scaler.step(*optimizer);
        scaler.update();
        const auto after = torch::nn::utils::parameters_to_vector(net->parameters());
        EXPECT_EQ(torch::equal(after, before), step == 4) << "step " << step;
      }
      const auto skipped = scaler.skipped_steps();
      ASSERT_EQ(skipped.size(), 1U);
      EXPECT_EQ(skipped[0].step, 4);
      EXPECT_EQ(skipped[0].parameter, "second.bias");
      EXPECT_EQ(skipped[0].scale_before, 131072);
      EXPECT_EQ(skipped[0].scale_after, 65536);
      EXPECT_EQ(scaler.get_scale(), 131072);
      ddp.check_replicas();
    });
  }
}

TEST_P(ScalerRanks, PartsOfOneModelSkipTogether) {
  const int size = GetParam();
  for (const bool by_hand : {false, true}) {
    for (const auto& [name, make] : optimizers_with_state()) {
      SCOPED_TRACE(name);
      run_ranks(size, [&make = make, size, by_hand](const Communicator& comm) {
        GradScaler scaler({.model_parallel = comm});
        const auto part = weight_of({1, 2});  // each rank's own
        const auto optimizer = make({part}, 0.1);
        for (int step = 1; step <= 4; ++step) {
          const auto before = part.detach().clone();
          part.mutable_grad().reset();
          const bool overflow = step == 2 && comm.rank() == size - 1;
          backward(scaler, part, overflow ? kInfinity : 0.5 + comm.rank());
          if (by_hand) scaler.unscale_(*optimizer);
          scaler.step(*optimizer);
          scaler.update();
          EXPECT_EQ(torch::equal(part, before), step == 2) << "step " << step;
        }
        EXPECT_EQ(scaler.get_scale(), 32768);
        EXPECT_EQ(scaler.skipped_steps().at(0).parameter,
                  comm.rank() == size - 1 ? "parameter 0 of group 0"
                                          : "a parameter of rank " + std::to_string(size - 1) +
                                                " of the model-parallel group");
      });
    }
  }
}

TEST_P(ScalerRanks, APartWithoutALossOrGradientsTakesPart) {
  run_ranks(GetParam(), [](const Communicator& comm) {
    for (const auto& [name, make] : sgd_optimizers()) {
      GradScaler scaler({.model_parallel = comm});
      const auto part = weight_of({1});
      const auto optimizer = make({part}, 0.1);
      if (comm.rank() == 1) backward(scaler, part, kInfinity);
      scaler.step(*optimizer);
      scaler.update();
      EXPECT_EQ(scaler.get_scale(), 32768) << name;
      if (comm.rank() == 1) backward(scaler, part, kInfinity);
      scaler.unscale_(*optimizer);
      scaler.update();  // without a step: the ranks agree here
      EXPECT_EQ(scaler.get_scale(), 16384) << name;
    }
  });
}

TEST_P(ScalerRanks, PartsOfOneModelAreClippedByTheNormOfTheWhole) {
  const int size = GetParam();
  std::vector<torch::Tensor> whole;
  for (int rank = 0; rank < size; ++rank) whole.push_back(weight_of({1, 2}));
  Sgd whole_optimizer(whole, {.lr = 1});
  auto loss = torch::zeros({});
  for (int rank = 0; rank < size; ++rank) {
    loss = loss + whole[static_cast<size_t>(rank)].sum() * (rank + 1);
  }
  loss.backward();
  whole_optimizer.step(StepExtras{.max_norm = 0.5});
  for (const bool by_hand : {false, true}) {
    run_ranks(size, [&](const Communicator& comm) {
      GradScaler scaler({.model_parallel = comm});
      const auto part = weight_of({1, 2});
      Sgd optimizer({part}, {.lr = 1});
      backward(scaler, part, comm.rank() + 1);
      if (by_hand) scaler.unscale_(optimizer);
      scaler.step(optimizer, {.max_norm = 0.5});
      scaler.update();
      expect_close(part.detach(), whole[static_cast<size_t>(comm.rank())].detach(), "part");
    });
  }
}

}  // namespace
}  // namespace lockstep::test
