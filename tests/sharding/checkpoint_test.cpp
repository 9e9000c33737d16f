// A sharded run resumes with the same bits, and its checkpoints fit other ranks, stages and
// wrappers.
#include <gtest/gtest.h>

#include "lockstep/checkpoint.hpp"
#include "lockstep/distributed_data_parallel.hpp"
#include "sharding_support.hpp"

namespace lockstep::test::checkpoint_test {
namespace {

constexpr int64_t kRows = 30;

// How a run trains: a stage, or 0 for DistributedDataParallel.
struct Way {
  int stage = 0;
  int ranks = 1;
  bool masters = false;
};

std::string text(const Way& way) {
  return "stage " + std::to_string(way.stage) + " on " + std::to_string(way.ranks);
}

torch::nn::Sequential make_net(bool masters) {
  auto net = three_layers();
  if (masters) net->to(torch::kFloat);
  return net;
}

// Trains up to step `until` from the folder's latest checkpoint; returns the weights.
torch::Tensor train(const std::string& folder, const Way& way, int64_t until) {
  torch::Tensor result;
  run_ranks(way.ranks, [&](const Communicator& comm) {
    auto net = make_net(way.masters);
    std::optional<MasterWeights> masters;
    if (way.masters) masters.emplace(*net, MasterWeightsOptions{});
    const auto dtype = way.masters ? torch::kBFloat16 : torch::kDouble;
    const auto loop = [&](auto& wrapper, torch::optim::Optimizer& optimizer,
                          Checkpoint& checkpoint) {
      for (int64_t step = checkpoint.resume() + 1; step <= until; ++step) {
        optimizer.zero_grad();
        const auto x = own_rows(wave({kRows, 6}, static_cast<double>(step)), comm).to(dtype);
        wrapper(x).pow(2).mean().backward();
        optimizer.step();
        EXPECT_TRUE(checkpoint.step(step));
      }
      checkpoint.finish();
    };
    Checkpoint checkpoint(folder, comm, {.every = 2, .keep = 9, .preemption = false});
    if (way.stage == 0) {
      DistributedDataParallel ddp(net, comm);
      AdamW optimizer(ddp.parameters(), {.lr = 0.01, .masters = masters});
      checkpoint.add("model", *net).add("optimizer", optimizer, *net);
      if (masters) checkpoint.add("masters", *masters, *net);
      loop(ddp, optimizer, checkpoint);
      if (comm.rank() == 0) result = weights_of(*net);
    } else {
      FullyShardedDataParallel fsdp(
          net, comm, {.stage = static_cast<ShardStage>(way.stage), .min_unit_bytes = 0});
      AdamW optimizer(fsdp.parameters(), {.lr = 0.01, .masters = masters});
      checkpoint.add("model", fsdp).add("optimizer", optimizer, fsdp);
      if (masters) checkpoint.add("masters", *masters, fsdp);
      loop(fsdp, optimizer, checkpoint);
      const auto weights = whole_weights(fsdp);
      if (comm.rank() == 0) result = weights;
    }
  });
  return result;
}

TEST(ShardedCheckpoint, ResumesWithTheSameBits) {
  for (const bool masters : {false, true}) {
    for (int stage = 1; stage <= 3; ++stage) {
      const Way way{stage, 3, masters};
      const ScratchFolder folder;
      const auto whole = train(folder.file("whole"), way, 6);
      train(folder.file("parts"), way, 2);
      train(folder.file("parts"), way, 4);
      EXPECT_TRUE(torch::equal(train(folder.file("parts"), way, 6), whole)) << text(way);
    }
  }
}

TEST(ShardedCheckpoint, FitsOtherRanksStagesAndWrappers) {
  const ScratchFolder folder;
  const auto wanted = train(folder.file("alone"), {0, 1}, 6);
  const std::vector<Way> ways = {{3, 2}, {1, 3}, {0, 2}, {2, 5}, {3, 5}, {0, 1}, {3, 1}, {2, 2}};
  for (size_t i = 0; i < ways.size(); ++i) {
    const Way& to = ways[(i + 1) % ways.size()];
    const std::string path = folder.file(std::to_string(i));
    train(path, ways[i], 4);
    expect_near_all(train(path, to, 6), wanted, text(ways[i]) + ", then " + text(to), 1e-9);
  }
}

TEST(ShardedCheckpoint, ModuleItselfIsRefused) {
  run_ranks(2, [](const Communicator& comm) {
    const ScratchFolder folder;
    auto net = three_layers();
    FullyShardedDataParallel fsdp(net, comm, {.min_unit_bytes = 0});
    Checkpoint checkpoint(folder.file("x"));
    checkpoint.add("model", *net);
    expect_error(Code::kUsage, {"Checkpoint::add()", "0.weight"}, [&] { checkpoint.save(1); });
    comm.barrier();
  });
}

}  // namespace
}  // namespace lockstep::test::checkpoint_test
