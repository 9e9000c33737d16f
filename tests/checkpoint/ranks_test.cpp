#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/running_clock.hpp"
#include "checkpoint/reader.hpp"
#include "comm/backend.hpp"
#include "comm/network/transport_loader.hpp"
#include "fault_files.hpp"
#include "ranks/gloo_threads.hpp"
#include "ranks/rank_threads.hpp"
#include "training.hpp"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using test::dropout_net;
using test::expect_error;
using test::expect_exact_resume;
using test::expect_same_bits;
using test::Rows;
using test::run_gloo_ranks;
using test::run_ranks;
using test::ScratchFolder;
using test::Weights;
using test::weights_of;

torch::Tensor mse(const torch::Tensor& output, const torch::Tensor& target) {
  return torch::mse_loss(output, target);
}

// Each rank trains on a device of its own, whose worker has random numbers of its own.
Weights train_ddp(int ranks, const std::string& folder, int64_t until, uint64_t seed) {
  torch::manual_seed(seed);
  std::mutex mutex;
  Weights result;
  run_ranks(ranks, [&](const Communicator& comm) {
    const Devices devices("cpu:1");
    devices[0].run("train", [&] {
      auto net = dropout_net();
      DistributedDataParallel ddp(net, comm);
      torch::rand({comm.rank() + 1});  // ranks draw different numbers from here on
      AdamW optimizer(ddp.parameters(), {.lr = 0.01});
      const Rows rows(31);
      DistributedSampler sampler(31, comm.size(), comm.rank());
      int64_t seen = 0;
      Checkpoint checkpoint(folder, comm, {.every = 1, .keep = 2});
      checkpoint.add("model", *net).add("optimizer", optimizer, *net).add("sampler", sampler);
      checkpoint.add("seen", seen);
      for (int64_t step = checkpoint.resume() + 1; step <= until; ++step) {
        const auto [x, y] = rows.at(sampler.next_batch(4));
        mse(ddp(x), y).backward();
        optimizer.step(StepExtras{.zero_grad = true});
        seen += comm.rank();
        EXPECT_TRUE(checkpoint.step(step));
      }
      checkpoint.finish();
      EXPECT_EQ(seen, until * comm.rank());
      if (comm.rank() == 0) {
        const std::lock_guard lock(mutex);
        result = weights_of(*net);
      }
    });
  });
  return result;
}

TEST(RankCheckpoint, DdpResumesExactly) {
  for (const int ranks : {1, 2, 3, 5}) {
    SCOPED_TRACE(testing::Message() << ranks << " ranks");
    expect_exact_resume([&](const std::string& folder, int64_t until, uint64_t seed) {
      return train_ddp(ranks, folder, until, seed);
    });
  }
}

TEST(RankCheckpoint, AReplicatedModelLoadsOnAnyNumberOfRanks) {
  const ScratchFolder scratch;
  const std::string folder = scratch.file("run");
  const auto saved = train_ddp(3, folder, 4, 1);
  const std::string path = folder + "/step-00000004";
  EXPECT_TRUE(fs::exists(path + "/model.safetensors"));
  EXPECT_TRUE(fs::exists(path + "/optimizer.safetensors"));
  EXPECT_TRUE(fs::exists(path + "/random.rank2.safetensors"));
  EXPECT_FALSE(fs::exists(path + "/model.rank0.safetensors"));
  auto plain = dropout_net();
  load_weights(*plain, path + "/model.safetensors");
  expect_same_bits(weights_of(*plain), saved);
  for (const int ranks : {1, 2, 5}) {
    run_ranks(ranks, [&](const Communicator& comm) {
      auto net = dropout_net();
      AdamW optimizer(net->parameters(), {.lr = 0.5});
      DistributedSampler sampler(31, comm.size(), comm.rank());
      Checkpoint checkpoint(folder, comm);
      checkpoint.add("model", *net).add("optimizer", optimizer, *net).add("sampler", sampler);
      EXPECT_EQ(checkpoint.resume(), 4);
      expect_same_bits(weights_of(*net), saved);
      // 3 ranks x (4 + 4 + 3) rows of epoch 0, then 4 of epoch 1.
      EXPECT_EQ(sampler.epoch(), 1);
      EXPECT_EQ(sampler.position(), 12 / comm.size());
    });
  }
}

// Stages on ranks: trains `until`, with layers cut as given.
Weights train_stages(const std::vector<int64_t>& cut, const std::string& folder, int64_t until,
                     uint64_t seed) {
  torch::manual_seed(seed);
  std::mutex mutex;
  std::map<std::string, torch::Tensor> weights;
  const int ranks = static_cast<int>(cut.size());
  run_ranks(ranks, [&](const Communicator& comm) {
    const Devices devices("cpu:1");
    devices[0].run("train", [&] {
      auto net = dropout_net();
      Pipeline pipeline(split_stages(net, cut), comm, devices[0], one_f_one_b(ranks, 4),
                        {.loss = mse});
      AdamW optimizer(pipeline.parameters(), {.lr = 0.01});
      const Rows rows;
      Checkpoint checkpoint(folder, comm, {.every = 1});
      checkpoint.add("model", pipeline).add("optimizer", optimizer, pipeline);
      for (int64_t step = checkpoint.resume() + 1; step <= until; ++step) {
        pipeline.step(rows.x, rows.y);
        optimizer.step(StepExtras{.zero_grad = true});
        EXPECT_TRUE(checkpoint.step(step));
      }
      checkpoint.finish();
      const std::lock_guard lock(mutex);
      for (const int stage : pipeline.local_stages()) {
        for (auto& [name, tensor] : weights_of(*pipeline.stage(stage))) weights[name] = tensor;
      }
    });
  });
  return {weights.begin(), weights.end()};
}

TEST(RankCheckpoint, StagesOnRanksResumeExactly) {
  for (const auto& cut : {std::vector<int64_t>{3, 2}, std::vector<int64_t>{1, 3, 1}}) {
    expect_exact_resume([&](const std::string& folder, int64_t until, uint64_t seed) {
      return train_stages(cut, folder, until, seed);
    });
  }
}

TEST(RankCheckpoint, AnotherCutLoadsTheSameModel) {
  const ScratchFolder scratch;
  const std::string folder = scratch.file("run");
  const auto saved = train_stages({3, 2}, folder, 3, 1);
  EXPECT_TRUE(fs::exists(folder + "/step-00000003/model.rank1.safetensors"));
  EXPECT_TRUE(fs::exists(folder + "/step-00000003/optimizer.rank0.safetensors"));
  // No step is left to do: the weights are those that were loaded.
  expect_same_bits(train_stages({1, 3, 1}, folder, 3, 2), saved);
  expect_same_bits(train_stages({2, 2, 1}, folder, 3, 2), saved);  // rank 1 trains nothing
  train_stages({2, 2, 1}, scratch.file("saved so"), 1, 1);
  expect_same_bits(train_stages({5}, folder, 3, 3), saved);
  auto net = dropout_net();
  AdamW optimizer(net->parameters());
  Checkpoint checkpoint(folder);
  checkpoint.add("model", *net).add("optimizer", optimizer, *net);
  EXPECT_EQ(checkpoint.resume(), 3);
  auto loaded = weights_of(*net);
  std::sort(loaded.begin(), loaded.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  expect_same_bits(loaded, saved);
}

// All tensors of a checkpoint but the random numbers, whole.
std::map<std::string, std::vector<std::byte>> tensors_of(const std::string& path) {
  std::map<std::string, std::vector<std::byte>> tensors;
  const CheckpointReader reader(path);
  reader.verify();
  for (const auto& tensor : reader.manifest().tensors) {
    if (tensor.section != "random") tensors[tensor.name] = reader.read(tensor);
  }
  return tensors;
}

// Loads the latest checkpoint of `from` on this many tensor-parallel ranks, does `steps` steps, and
// saves to `to`.
void train_slices(int ranks, const std::string& from, const std::string& to, int64_t steps) {
  run_ranks(ranks, [&](const Communicator& comm) {
    const Devices devices("cpu:1");
    devices[0].run("train", [&] {
      torch::nn::Linear up(8, 30), down(10, 4);
      const torch::NoGradGuard no_grad;
      torch::nn::init::constant_(up->weight, 0.1);
      torch::nn::init::constant_(down->weight, 0.2);
      torch::nn::Sequential net(ColumnLinear(up, comm, ColumnLinearOptions{.parts = 3}),
                                RowLinear(down, comm));
      const at::AutoGradMode with_grad(true);
      Adam optimizer(net->parameters(), {.lr = 0.01});
      const auto add_all = [&](Checkpoint& checkpoint) {
        checkpoint.add("model", *net).add("optimizer", optimizer, *net);
      };
      const Rows rows;
      if (!from.empty()) {
        Checkpoint checkpoint(from, comm);
        add_all(checkpoint);
        EXPECT_EQ(checkpoint.resume(), 5);
      }
      Checkpoint checkpoint(to, comm);
      add_all(checkpoint);
      for (int64_t step = 1; step <= steps; ++step) {
        const auto hidden = net[0]->as<ColumnLinear>()->forward(rows.x);
        const auto own = hidden.size(1) / 3;
        const auto mixed =
            hidden.narrow(1, 0, own) * hidden.narrow(1, own, own) + hidden.narrow(1, 2 * own, own);
        mse(net[1]->as<RowLinear>()->forward(mixed), rows.y).backward();
        optimizer.step(StepExtras{.zero_grad = true});
      }
      checkpoint.save(5);
      checkpoint.finish();
    });
  });
}

TEST(RankCheckpoint, SlicesLoadOnAnyNumberOfTensorParallelRanks) {
  const ScratchFolder scratch;
  train_slices(2, "", scratch.file("two"), 5);
  const auto saved = tensors_of(scratch.file("two/step-00000005"));
  EXPECT_EQ(saved.size(), 4U + 12U);
  for (const int ranks : {1, 2, 3, 5}) {
    SCOPED_TRACE(testing::Message() << ranks << " ranks");
    const std::string again = scratch.file("again" + std::to_string(ranks));
    train_slices(ranks, scratch.file("two"), again, 0);
    EXPECT_EQ(tensors_of(again + "/step-00000005"), saved);
  }
}

TEST(RankCheckpoint, ThereIsOneForAllRanksOrForNone) {
  for (int call = 2; call <= 12; ++call) {  // the first removes an old draft, if any
    SCOPED_TRACE(testing::Message() << "call " << call);
    const ScratchFolder scratch;
    const std::string folder = scratch.file("run");
    std::atomic<int> failed{0};
    test::FaultFiles files(scratch.file(""));
    const ReplaceFileSystem replaced(files);
    testing::internal::CaptureStderr();
    run_ranks(3, [&](const Communicator& comm) {
      torch::nn::Linear net(2, 2);
      Checkpoint checkpoint(folder, comm, {.every = 1});
      checkpoint.add("model", *net);
      EXPECT_TRUE(checkpoint.step(1));
      checkpoint.finish();
      comm.barrier();
      if (comm.rank() == 0) {
        files.fail_at = files.calls() + call;
        files.error = EIO;
      }
      comm.barrier();
      EXPECT_TRUE(checkpoint.step(2));
      try {
        checkpoint.finish();
      } catch (const Error&) {
        ++failed;
      }
      EXPECT_TRUE(checkpoint.step(3));
      EXPECT_EQ(checkpoint.resume(), 3);
    });
    testing::internal::GetCapturedStderr();
    EXPECT_EQ(failed, 3);
    EXPECT_EQ(test::list_steps(folder), (std::vector<int64_t>{1, 3}));
  }
}

TEST(RankCheckpoint, AnotherModelOnOneRankIsAnErrorOnAll) {
  const ScratchFolder scratch;
  const std::string folder = scratch.file("run");
  train_ddp(2, folder, 1, 1);
  const auto outcomes = test::outcomes_of_ranks(2, [&](const Communicator& comm) {
    torch::nn::Linear other(3, 3);
    auto net = dropout_net();
    Checkpoint checkpoint(folder, comm);
    if (comm.rank() == 1) {
      checkpoint.add("model", *other);
    } else {
      checkpoint.add("model", *net);
    }
    checkpoint.resume();
  });
  EXPECT_EQ(outcomes[0].code(), Code::kTensorMismatch);
  EXPECT_EQ(outcomes[1].code(), Code::kTensorMismatch);
  EXPECT_NE(outcomes[0].text().find("rank 1"), std::string::npos) << outcomes[0].text();
}

TEST(RankCheckpoint, ASignalToOneRankStopsAllAfterTheSameStep) {
  const ScratchFolder scratch;
  const std::string folder = scratch.file("run");
  std::vector<int64_t> stopped(3, 0);
  run_ranks(3, [&](const Communicator& comm) {
    torch::nn::Linear net(2, 2);
    Checkpoint checkpoint(folder, comm, {.every = 1000});
    checkpoint.add("model", *net);
    for (int64_t step = 1; step <= 50; ++step) {
      if (comm.rank() == 1 && step == 7) ::raise(SIGUSR1);
      if (checkpoint.step(step)) continue;
      stopped[static_cast<size_t>(comm.rank())] = step;
      break;
    }
    checkpoint.finish();
  });
  EXPECT_GE(stopped[0], 6);
  EXPECT_LE(stopped[0], 9);
  EXPECT_EQ(stopped, (std::vector<int64_t>(3, stopped[0])));
  EXPECT_EQ(test::list_steps(folder), (std::vector<int64_t>{stopped[0]}));
}

// Files that cannot be flushed until they are let go, so that a save stays under way.
class HeldFiles final : public test::FaultFiles {
 public:
  using FaultFiles::FaultFiles;

  int sync(int file) override {
    std::unique_lock lock(held_mutex_);
    if (!changed_.wait_for(lock, std::chrono::seconds(30), [&] { return !holds_; }))
      gave_up_ = true;
    lock.unlock();
    return FaultFiles::sync(file);
  }
  void hold(bool holds) {
    const std::lock_guard lock(held_mutex_);
    holds_ = holds;
    changed_.notify_all();
  }
  bool gave_up() {
    const std::lock_guard lock(held_mutex_);
    return gave_up_;
  }

 private:
  std::mutex held_mutex_;
  std::condition_variable changed_;
  bool holds_ = false;
  bool gave_up_ = false;
};

// The next step's collectives are made and done while the files of a save are still being written.
void expect_training_goes_on_during_a_save(
    const std::function<void(const std::function<void(const Communicator&)>&)>& run) {
  const ScratchFolder scratch;
  const std::string folder = scratch.file("run");
  HeldFiles files(scratch.file(""));
  const ReplaceFileSystem replaced(files);
  run([&](const Communicator& comm) {
    torch::nn::Linear net(8, 8);
    Checkpoint checkpoint(folder, comm, {.every = 1});
    checkpoint.add("model", *net);
    comm.barrier();
    if (comm.rank() == 0) files.hold(true);
    comm.barrier();
    EXPECT_TRUE(checkpoint.step(1));
    for (int call = 0; call < 20; ++call) {
      const auto sum = torch::ones({1000});
      comm.all_reduce(sum);
      EXPECT_EQ(sum[999].item<float>(), static_cast<float>(comm.size()));
    }
    EXPECT_TRUE(test::list_steps(folder).empty());
    comm.barrier();
    files.hold(false);
    checkpoint.finish();
    EXPECT_EQ(test::list_steps(folder), (std::vector<int64_t>{1}));
  });
  EXPECT_FALSE(files.gave_up());
}

TEST(RankCheckpoint, TrainingGoesOnDuringASave) {
  expect_training_goes_on_during_a_save([](const auto& body) { run_ranks(3, body); });
}

TEST(RankCheckpoint, TrainingGoesOnDuringASaveOverGloo) {
  if (find_module("lockstep-gloo.so").empty()) GTEST_SKIP() << "lockstep-gloo.so was not built";
  expect_training_goes_on_during_a_save([](const auto& body) { run_gloo_ranks(3, body); });
}

TEST(RankCheckpoint, TextThatIsNotUtf8OnOneRankIsAnErrorOnAll) {
  const ScratchFolder scratch;
  const auto outcomes = test::outcomes_of_ranks(2, [&](const Communicator& comm) {
    std::string text = comm.rank() == 1 ? "\xff" : "good";
    Checkpoint checkpoint(scratch.file("run"), comm, {.every = 1});
    checkpoint.add("name", text);
    (void)checkpoint.step(1);
  });
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.code(), Code::kUsage);
    EXPECT_NE(outcome.text().find("name has text that is not UTF-8"), std::string::npos)
        << outcome.text();
  }
  EXPECT_NE(outcomes[0].text().find("rank 1"), std::string::npos) << outcomes[0].text();
}

// Ranks that are threads have one folder; each of them writes to it before training begins.
TEST(RankCheckpoint, AFolderThatOneRankCannotWriteToIsRefusedAtOnce) {
  const ScratchFolder scratch;
  const std::string folder = scratch.file("run");
  test::FaultFiles files(scratch.file(""));
  const ReplaceFileSystem replaced(files);
  { const Checkpoint first(folder, {.every = 1}); }
  const int calls = files.calls();
  { const Checkpoint second(folder, {.every = 1}); }
  // Rank 0 opens the folder, writes a probe (create, write, sync, close), and then ranks do too.
  files.fail_at = files.calls() + (files.calls() - calls) + 4 + 1;
  files.fails_for_good = true;
  files.error = EROFS;
  const auto outcomes = test::outcomes_of_ranks(2, [&](const Communicator& comm) {
    const Checkpoint checkpoint(folder, comm, {.every = 1});
  });
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.code(), Code::kFileWrite);
    EXPECT_NE(outcome.text().find(std::strerror(EROFS)), std::string::npos) << outcome.text();
  }
}

// Rank 0's error, of two ranks that are processes. Rank 1 is one that stops itself.
std::string error_without_rank_1(const std::function<void(const Communicator&)>& body) {
  const ScratchFolder scratch;
  std::array<pid_t, 2> ranks{};
  std::fflush(nullptr);
  for (int rank = 0; rank < 2; ++rank) {
    const pid_t pid = ::fork();
    ranks[static_cast<size_t>(rank)] = pid;
    if (pid != 0) continue;
    std::string error;
    try {
      torch::manual_seed(1);
      const Communicator comm(make_shm_backend({.session = "checkpoint" + scratch.file(""),
                                                .rank = rank,
                                                .size = 2,
                                                .deadline_ns = running_ns() + 60'000'000'000}),
                              std::chrono::seconds(2));
      body(comm);
    } catch (const std::exception& caught) {
      error = describe(caught);
    }
    test::write_bytes(scratch.file("error" + std::to_string(rank)), error);
    ::_exit(0);
  }
  ::waitpid(ranks[0], nullptr, 0);
  ::kill(ranks[1], SIGKILL);
  ::waitpid(ranks[1], nullptr, 0);
  return test::read_bytes(scratch.file("error0"));
}

void expect_rank_1_is_named(const std::string& error) {
  EXPECT_NE(error.find("LS0021"), std::string::npos) << error;
  EXPECT_NE(error.find("rank 1"), std::string::npos) << error;
}

TEST(StoppedRank, IsNamedWhenItStopsBeforeASave) {
  const ScratchFolder scratch;
  expect_rank_1_is_named(error_without_rank_1([&](const Communicator& comm) {
    torch::nn::Linear net(2, 2);
    Checkpoint checkpoint(scratch.file("run"), comm, {.every = 1, .preemption = false});
    checkpoint.add("model", *net);
    comm.barrier();
    if (comm.rank() == 1) ::raise(SIGSTOP);
    (void)checkpoint.step(1);
  }));
}

// Stops its process when it begins to write a file.
struct StoppingFiles final : test::FaultFiles {
  using FaultFiles::FaultFiles;
  int create(const std::string& /*path*/, int& /*file*/) override { return ::raise(SIGSTOP); }
};

// Training notices it, and the rank that has failed does not wait for the save.
TEST(StoppedRank, IsNamedWhenItStopsDuringASave) {
  const ScratchFolder scratch;
  expect_rank_1_is_named(error_without_rank_1([&](const Communicator& comm) {
    torch::nn::Linear net(2, 2);
    Checkpoint checkpoint(scratch.file("run"), comm, {.every = 1, .preemption = false});
    checkpoint.add("model", *net);
    comm.barrier();
    StoppingFiles files(scratch.file(""));
    std::optional<ReplaceFileSystem> replaced;
    if (comm.rank() == 1) replaced.emplace(files);
    (void)checkpoint.step(1);
    while (comm.rank() == 1) ::pause();
    comm.all_reduce(torch::ones({4}));
  }));
}

}  // namespace
}  // namespace lockstep
