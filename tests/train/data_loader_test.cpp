// DistributedSampler inside torch::data's loaders: epochs, positions, workers; windows of
// accumulation over what the loader gives.

#include <gtest/gtest.h>
#include <pthread.h>
#include <sched.h>
#include <torch/torch.h>

#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/lockstep.hpp"
#include "ranks/ddp_nets.hpp"
#include "ranks/rank_threads.hpp"
#include "tensor_support.hpp"

namespace lockstep::test::data_loader_test {
namespace {

using Rows = std::vector<int64_t>;

// Row i is the number i.
struct Numbers : torch::data::Dataset<Numbers> {
  explicit Numbers(int64_t count) : rows(count) {}
  torch::data::Example<> get(size_t index) override {
    const auto number = torch::tensor(static_cast<int64_t>(index));
    return {number, number};
  }
  torch::optional<size_t> size() const override { return static_cast<size_t>(rows); }
  int64_t rows;
};

auto loader_of(int64_t rows, const DistributedSampler& sampler, size_t batch, size_t workers,
               bool drop_last = false) {
  return lockstep::make_data_loader(
      Numbers(rows).map(torch::data::transforms::Stack<>()), sampler,
      torch::data::DataLoaderOptions().batch_size(batch).workers(workers).drop_last(drop_last));
}

Rows rows_of(const torch::data::Example<>& batch) {
  const auto* first = batch.data.data_ptr<int64_t>();
  return {first, first + batch.data.numel()};
}

void append(Rows& all, const Rows& more) {
  all.insert(all.end(), more.begin(), more.end());
}

TEST(DataLoader, GivesTheRowsOfTheEpochThatWasSet) {
  for (const size_t workers : {0U, 2U}) {
    for (int rank = 0; rank < 3; ++rank) {
      DistributedSampler sampler(23, 3, rank, {.seed = 5});
      const auto loader = loader_of(23, sampler, 4, workers);
      for (int64_t epoch = 0; epoch < 3; ++epoch) {
        sampler.set_epoch(epoch);
        const Rows expected = sampler.indices();
        Rows seen;
        for (auto& batch : *loader) append(seen, rows_of(batch));
        EXPECT_EQ(seen, expected) << "workers " << workers << ", rank " << rank;
      }
    }
  }
}

TEST(DataLoader, WithoutSetEpochAnEpochIsRepeatedAsInPyTorch) {
  DistributedSampler sampler(8, 1, 0);
  const auto loader = loader_of(8, sampler, 3, 0);
  std::vector<Rows> epochs(2);
  for (auto& epoch : epochs) {
    for (auto& batch : sampler.batches(*loader)) append(epoch, rows_of(batch));
  }
  EXPECT_EQ(epochs[0], epochs[1]);
}

TEST(DataLoader, ThePositionIsWhatHasReachedTheLoop) {
  for (const size_t workers : {0U, 1U, 3U}) {
    DistributedSampler sampler(40, 2, 0, {.seed = 1});
    const auto loader = loader_of(40, sampler, 3, workers);
    int64_t expected = 0;
    auto batches = sampler.batches(*loader);
    EXPECT_EQ(batches.size(), 7);
    int64_t count = 0;
    for (auto& batch : batches) {
      expected += batch.data.numel();
      EXPECT_EQ(sampler.position(), expected) << "workers " << workers;
      ++count;
    }
    EXPECT_EQ(expected, 20);
    EXPECT_EQ(count, 7);
  }
}

TEST(DataLoader, ALoopResumesWithTheNextBatch) {
  for (const size_t workers : {0U, 2U}) {
    for (const int64_t stop_after : {1, 3, 5}) {
      ScratchFolder folder;
      Rows whole;
      {
        DistributedSampler sampler(31, 2, 1, {.seed = 3});
        const auto loader = loader_of(31, sampler, 4, workers);
        for (int64_t epoch = 0; epoch < 3; ++epoch) {
          sampler.set_epoch(epoch);
          for (auto& batch : sampler.batches(*loader)) append(whole, rows_of(batch));
        }
      }
      Rows pieces;
      int64_t step = 0;
      for (int run = 0; run < 2; ++run) {
        DistributedSampler sampler(31, 2, 1, {.seed = 3});
        const auto loader = loader_of(31, sampler, 4, workers);
        Checkpoint checkpoint(folder.file("run"), {.asynchronous = false});
        checkpoint.add("sampler", sampler);
        step = checkpoint.resume();
        bool stopped = false;
        for (int64_t epoch = sampler.epoch(); epoch < 3 && !stopped; ++epoch) {
          sampler.set_epoch(epoch);
          for (auto& batch : sampler.batches(*loader)) {
            append(pieces, rows_of(batch));
            if (++step != stop_after) continue;
            checkpoint.save(step);
            stopped = true;
            break;
          }
        }
        checkpoint.finish();
      }
      EXPECT_EQ(pieces, whole) << "workers " << workers << ", stopped after " << stop_after;
    }
  }
}

TEST(DataLoader, RefusesAPositionThatNobodyCounts) {
  DistributedSampler sampler(10, 1, 0), other(10, 1, 0);
  const auto loader = loader_of(10, sampler, 2, 0);
  for (auto& batch : *loader) {
    (void)batch;
    expect_error(Code::kUsage, {"has taken 2 rows", "sampler.batches(*loader)"},
                 [&] { (void)sampler.position(); });
    break;
  }
  expect_error(Code::kUsage, {"another sampler"}, [&] {
    for (auto& batch : other.batches(*loader)) (void)batch;
  });
  const auto unordered = lockstep::make_data_loader(
      Numbers(10).map(torch::data::transforms::Stack<>()), sampler,
      torch::data::DataLoaderOptions().batch_size(2).workers(2).enforce_ordering(false));
  expect_error(Code::kUsage, {"enforce_ordering"}, [&] {
    for (auto& batch : sampler.batches(*unordered)) (void)batch;
  });
  expect_error(Code::kSplit, {"10 rows", "12"}, [&] { sampler.reset(12); });
}

TEST(DataLoader, DropsAShortBatch) {
  DistributedSampler sampler(10, 1, 0, {.shuffle = false});
  const auto loader = loader_of(10, sampler, 4, 1, /*drop_last=*/true);
  Rows seen;
  auto batches = sampler.batches(*loader);
  EXPECT_EQ(batches.size(), 2);
  for (auto& batch : batches) append(seen, rows_of(batch));
  EXPECT_EQ(seen, (Rows{0, 1, 2, 3, 4, 5, 6, 7}));
}

// Each row is the number of cores that the thread which made it may use.
struct CoresOfThread : torch::data::Dataset<CoresOfThread> {
  torch::data::Example<> get(size_t) override {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    pthread_getaffinity_np(pthread_self(), sizeof(cores), &cores);
    return {torch::tensor(CPU_COUNT(&cores)), torch::tensor(0)};
  }
  torch::optional<size_t> size() const override { return 4; }
};

TEST(DataLoader, WorkersAreNotTiedToTheRanksCore) {
  const Hardware hardware = detect_hardware();
  const Devices devices("cpu:" + std::to_string(hardware.cores.size()));
  const UseDevice home(devices[0]);  // one core
  DistributedSampler sampler(4, 1, 0);
  const auto loader =
      lockstep::make_data_loader(CoresOfThread().map(torch::data::transforms::Stack<>()), sampler,
                                 torch::data::DataLoaderOptions().batch_size(1).workers(2));
  for (auto& batch : *loader) {
    EXPECT_EQ(batch.data.item<int64_t>(), static_cast<int64_t>(hardware.cores.size()));
  }
  cpu_set_t mine;
  CPU_ZERO(&mine);
  pthread_getaffinity_np(pthread_self(), sizeof(mine), &mine);
  EXPECT_EQ(CPU_COUNT(&mine), 1) << "the training thread stays where it was";
}

struct SeenMicroStep {
  int64_t batch;
  int64_t steps;
  bool is_last;
  bool operator==(const SeenMicroStep&) const = default;
};

TEST(Accumulate, TheLastWindowMayBeShorter) {
  const std::vector<int64_t> batches = {10, 11, 12, 13, 14};
  std::vector<SeenMicroStep> seen;
  for (auto [batch, steps, is_last] : accumulate(batches, 2)) {
    seen.push_back({batch, steps, is_last});
  }
  EXPECT_EQ(seen,
            (std::vector<SeenMicroStep>{
                {10, 2, false}, {11, 2, true}, {12, 2, false}, {13, 2, true}, {14, 1, true}}));
  for (auto [batch, steps, is_last] : accumulate(std::vector<int64_t>{7}, 4)) {
    EXPECT_EQ(steps, 1);
    EXPECT_TRUE(is_last);
  }
  for (auto step : accumulate(std::vector<int64_t>(), 4)) FAIL() << step.batch;
  expect_error(Code::kUsage, {"0 micro-steps"}, [&] { accumulate(batches, 0); });
}

class AccumulateOverRanks : public testing::TestWithParam<int> {};

// The same updates as with NoSync and index arithmetic by hand, and as one process on all rows.
TEST_P(AccumulateOverRanks, AveragesOncePerWindow) {
  const int size = GetParam();
  constexpr int64_t kBatches = 5;
  constexpr int64_t kAccum = 2;
  TwoLayers alone;
  Sgd alone_optimizer(alone->parameters(), {.lr = 0.1});
  for (int64_t first = 0; first < kBatches; first += kAccum) {
    const int64_t window = std::min(kAccum, kBatches - first);
    for (int64_t micro = first; micro < first + window; ++micro) {
      for (int rank = 0; rank < size; ++rank) {
        (alone->forward(rows(4, 6, static_cast<double>(micro * 7 + rank))).square().mean() /
         static_cast<double>(window * size))
            .backward();
      }
    }
    alone_optimizer.step({.zero_grad = true});
  }
  run_ranks(size, [&](const Communicator& comm) {
    TwoLayers net;
    DistributedDataParallel ddp(net, comm);
    Sgd optimizer(ddp.parameters(), {.lr = 0.1});
    std::vector<torch::Tensor> batches;
    for (int64_t micro = 0; micro < kBatches; ++micro) {
      batches.push_back(rows(4, 6, static_cast<double>(micro * 7 + comm.rank())));
    }
    for (auto [batch, steps, is_last] : accumulate(batches, kAccum, ddp)) {
      (ddp(batch).square().mean() / steps).backward();
      if (is_last) optimizer.step({.zero_grad = true});
    }
    EXPECT_EQ(ddp.stats().synchronised_backwards, 3);
    expect_close(flat_weights(net->parameters()), flat_weights(alone->parameters()), "weights");
  });
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, AccumulateOverRanks, testing::Values(1, 2, 3, 5));

TEST(Accumulate, OverAShardedModel) {
  run_ranks(3, [&](const Communicator& comm) {
    std::vector<torch::Tensor> whole;
    for (const bool sharded : {false, true}) {
      TwoLayers net;
      std::optional<DistributedDataParallel<TwoLayersImpl>> ddp;
      std::optional<FullyShardedDataParallel<TwoLayersImpl>> fsdp;
      if (sharded) {
        fsdp.emplace(net.ptr(), comm);
      } else {
        ddp.emplace(net.ptr(), comm);
      }
      Sgd optimizer(sharded ? fsdp->parameters() : ddp->parameters(), {.lr = 0.1});
      const auto train = [&](auto& wrapper) {
        std::vector<torch::Tensor> batches;
        for (int micro = 0; micro < 5; ++micro)
          batches.push_back(rows(4, 6, micro * 7 + comm.rank()));
        for (auto [batch, steps, is_last] : accumulate(batches, 2, wrapper)) {
          (wrapper(batch).square().mean() / steps).backward();
          if (is_last) optimizer.step({.zero_grad = true});
        }
      };
      if (sharded) {
        train(*fsdp);
        EXPECT_EQ(fsdp->stats().synchronised_backwards, 3);
        const GatheredParameters gathered(*fsdp);
        whole.push_back(flat_weights(net->parameters()).clone());
      } else {
        train(*ddp);
        whole.push_back(flat_weights(net->parameters()).clone());
      }
    }
    expect_close(whole[1], whole[0], "weights");
  });
}

TEST(Accumulate, ALoopThatIsLeftReleasesNoSync) {
  run_ranks(2, [](const Communicator& comm) {
    TwoLayers net;
    DistributedDataParallel ddp(net, comm);
    for (auto step : accumulate(std::vector<int>{1, 2, 3}, 3, ddp)) {
      if (!step.is_last) break;
    }
    ddp(rows(2, 6, comm.rank())).sum().backward();
    EXPECT_EQ(ddp.stats().synchronised_backwards, 1);
    ddp.zero_grad();
  });
}

TEST(Accumulate, OverTheBatchesOfALoader) {
  DistributedSampler sampler(22, 1, 0, {.shuffle = false});
  const auto loader = loader_of(22, sampler, 4, 2);
  std::vector<SeenMicroStep> seen;
  for (auto [batch, steps, is_last] : accumulate(sampler.batches(*loader), 4)) {
    seen.push_back({batch.data[0].item<int64_t>(), steps, is_last});
    EXPECT_EQ(sampler.position(), std::min<int64_t>(22, static_cast<int64_t>(seen.size()) * 4));
  }
  EXPECT_EQ(seen, (std::vector<SeenMicroStep>{{0, 4, false},
                                              {4, 4, false},
                                              {8, 4, false},
                                              {12, 4, true},
                                              {16, 2, false},
                                              {20, 2, true}}));
}

}  // namespace
}  // namespace lockstep::test::data_loader_test
