// Gradients over several micro-steps: the sums, what is sent, and what is refused.

#include <torch/torch.h>

#include "ddp_nets.hpp"
#include "lockstep/distributed_data_parallel.hpp"
#include "lockstep/error.hpp"
#include "lockstep/optim.hpp"
#include "rank_threads.hpp"

namespace lockstep::test::accumulation_test {
namespace {

constexpr int64_t kRowsPerMicroStep = 30;  // divided by 1, 2, 3 and 5 ranks

enum class Window { kNoSync, kSyncEveryStep };

// The gradients of `net` after one window on this rank's rows of the batch.
void accumulate(DistributedDataParallel<TwoLayersImpl>& ddp, const Communicator& comm,
                int64_t micro_steps, Window window, double divisor) {
  const torch::Tensor x = rows(micro_steps * kRowsPerMicroStep, 6, 0.2);
  const torch::Tensor y = rows(micro_steps * kRowsPerMicroStep, 3, 0.9);
  const int64_t mine = kRowsPerMicroStep / comm.size();
  for (int64_t micro = 0; micro < micro_steps; ++micro) {
    std::optional<NoSync> no_sync;
    if (window == Window::kNoSync && micro + 1 < micro_steps) no_sync.emplace(ddp);
    const int64_t first = micro * kRowsPerMicroStep + comm.rank() * mine;
    const auto loss = torch::mse_loss(ddp(x.narrow(0, first, mine)), y.narrow(0, first, mine));
    (loss / divisor).backward();
  }
}

// The gradients of one process and one batch of all rows.
std::vector<torch::Tensor> whole_batch(int64_t micro_steps) {
  TwoLayers net;
  const auto loss = torch::mse_loss(net(rows(micro_steps * kRowsPerMicroStep, 6, 0.2)),
                                    rows(micro_steps * kRowsPerMicroStep, 3, 0.9));
  loss.backward();
  std::vector<torch::Tensor> gradients;
  for (const auto& parameter : net->parameters()) gradients.push_back(parameter.grad());
  return gradients;
}

void expect_gradients(const TwoLayers& net, const std::vector<torch::Tensor>& expected,
                      double factor) {
  const auto parameters = net->parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_TRUE(torch::allclose(parameters[i].grad(), expected[i] * factor, 1e-5, 1e-6)) << i;
  }
}

class Accumulation : public testing::TestWithParam<int> {};

TEST_P(Accumulation, GivesTheGradientOfOneLargeBatch) {
  for (const int64_t micro_steps : {1, 2, 4, 8}) {
    const auto expected = whole_batch(micro_steps);
    run_ranks(GetParam(), [&](const Communicator& comm) {
      TwoLayers net;
      DistributedDataParallel ddp(net, comm);
      const auto divisor = static_cast<double>(micro_steps);
      accumulate(ddp, comm, micro_steps, Window::kNoSync, divisor);
      expect_gradients(net, expected, 1);
    });
  }
}

TEST_P(Accumulation, WithoutNoSyncTheGradientIsTheSameAndMoreIsSent) {
  constexpr int64_t kMicroSteps = 4;
  const auto expected = whole_batch(kMicroSteps);
  run_ranks(GetParam(), [&](const Communicator& comm) {
    std::array<DdpStats, 2> stats;
    for (const Window window : {Window::kNoSync, Window::kSyncEveryStep}) {
      TwoLayers net;
      // The smallest buckets, so that a set has several.
      DistributedDataParallel ddp(net, comm, {.first_bucket_bytes = 64, .bucket_cap_bytes = 64});
      accumulate(ddp, comm, kMicroSteps, window, kMicroSteps);
      expect_gradients(net, expected, 1);
      stats[static_cast<size_t>(window)] = ddp.stats();
      if (comm.size() > 1) {
        EXPECT_EQ(ddp.stats().all_reduces % static_cast<int64_t>(ddp.buckets().size()), 0);
      }
    }
    EXPECT_EQ(stats[1].all_reduces, kMicroSteps * stats[0].all_reduces);
    EXPECT_EQ(stats[1].bytes, kMicroSteps * stats[0].bytes);
    if (comm.size() > 1) {
      EXPECT_GT(stats[0].all_reduces, 1);
    } else {
      EXPECT_EQ(stats[0].all_reduces, 0);
    }
  });
}

TEST_P(Accumulation, AnUndividedLossGivesAGradientThatManyTimesTooLarge) {
  constexpr int64_t kMicroSteps = 4;
  const auto expected = whole_batch(kMicroSteps);
  run_ranks(GetParam(), [&](const Communicator& comm) {
    TwoLayers net;
    DistributedDataParallel ddp(net, comm);
    accumulate(ddp, comm, kMicroSteps, Window::kNoSync, 1);
    expect_gradients(net, expected, kMicroSteps);
  });
}

TEST_P(Accumulation, KeepsGradientsInTheBuckets) {
  run_ranks(GetParam(), [](const Communicator& comm) {
    TwoLayers net;
    DistributedDataParallel ddp(net, comm);
    accumulate(ddp, comm, 1, Window::kNoSync, 1);  // the first window may rebuild the buckets
    net->zero_grad(true);
    const NoSync no_sync(ddp);
    for (int micro = 0; micro < 3; ++micro) {
      ddp(rows(2, 6, micro)).sum().backward();
      for (const auto& bucket : ddp.buckets()) {
        const auto* begin = static_cast<const char*>(bucket.gradients.data_ptr());
        for (const auto& name : bucket.parameters) {
          const torch::Tensor gradient = net->named_parameters()[name].grad();
          const auto* place = static_cast<const char*>(gradient.data_ptr());
          EXPECT_GE(place, begin) << name;
          EXPECT_LT(place, begin + bucket.gradients.nbytes()) << name;
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Accumulation, testing::Values(1, 2, 3, 5),
                         [](const auto& ranks) { return std::to_string(ranks.param); });

TEST(AccumulationMisuse, RanksThatDisagreeAboutTheWindowAreStopped) {
  run_ranks(2, [](const Communicator& comm) {
    Scale net;
    DistributedDataParallel ddp(net, comm);
    try {
      for (int micro = 0; micro < 2; ++micro) {
        std::optional<NoSync> no_sync;
        if (micro == 0 && comm.rank() == 1) no_sync.emplace(ddp);
        ddp(value(1)).sum().backward();
      }
      ADD_FAILURE() << "rank " << comm.rank() << " noticed nothing";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kCallMismatch);
      EXPECT_NE(error.message().find("(bucket 0)"), std::string::npos) << error.message();
      EXPECT_NE(error.message().find("(bucket 0 of 2 micro-steps)"), std::string::npos);
    }
  });
}

TEST(AccumulationMisuse, RanksThatDisagreeInAJoinAreStopped) {
  run_ranks(3, [](const Communicator& comm) {
    Scale net;
    DistributedDataParallel ddp(net, comm);
    try {
      join(ddp, [&] {
        std::optional<NoSync> no_sync;
        if (comm.rank() == 2) no_sync.emplace(ddp);
        ddp(value(1)).sum().backward();
      });
      ADD_FAILURE() << "rank " << comm.rank() << " noticed nothing";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kSyncMisuse);
      EXPECT_NE(error.message().find("rank 2 is inside NoSync"), std::string::npos)
          << error.message();
    }
  });
}

template <class Optimizer, class Options>
void step_inside_window(const Communicator& comm, const Options& options) {
  Scale net;
  DistributedDataParallel ddp(net, comm);
  Optimizer optimizer(ddp.parameters(), options);
  for (int micro = 0; micro < 3; ++micro) {
    const NoSync no_sync(ddp);
    ddp(value(1.0 + comm.rank())).sum().backward();
  }
  optimizer.step();  // a partial window: the gradients of this rank alone
  net->zero_grad(true);
  ddp(value(1)).sum().backward();  // a perturbation to be undone would look the same so far
  optimizer.step();
  net->zero_grad(true);
  ddp(value(1)).sum().backward();
}

TEST(AccumulationMisuse, AnUpdateFromAPartialWindowIsRefused) {
  run_ranks(2, [](const Communicator& comm) {
    try {
      step_inside_window<torch::optim::SGD>(comm, torch::optim::SGDOptions(0.1));
      ADD_FAILURE() << "an update with gradients that were not averaged went unnoticed";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kSyncMisuse);
      EXPECT_NE(error.message().find("3 micro-steps"), std::string::npos) << error.message();
    }
  });
  // One rank has nobody to differ from.
  step_inside_window<torch::optim::AdamW>(Communicator::self(), torch::optim::AdamWOptions(0.1));
}

TEST(AccumulationMisuse, AtTheEndOfTrainingAPartialWindowIsWarnedOf) {
  testing::internal::CaptureStderr();
  run_ranks(2, [](const Communicator& comm) {
    Scale net;
    DistributedDataParallel ddp(net, comm);
    torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(0.1));
    {
      const NoSync no_sync(ddp);
      ddp(value(1.0 + comm.rank())).sum().backward();
    }
    optimizer.step();
  });
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("warning[LS0024]"), std::string::npos) << said;
  EXPECT_NE(said.find("1 micro-step"), std::string::npos) << said;
}

TEST(AccumulationMisuse, AWindowMayBeDropped) {
  run_ranks(2, [](const Communicator& comm) {
    Scale net;
    DistributedDataParallel ddp(net, comm);
    // Only rank 1 drops a micro-step and starts its window again.
    for (int micro = 0; micro < 1 + comm.rank(); ++micro) {
      const NoSync no_sync(ddp);
      net->zero_grad(true);
      ddp(value(1)).sum().backward();
    }
    ddp(value(1)).sum().backward();
    EXPECT_FLOAT_EQ(net->weight.grad().item<float>(), 2.0F);
  });
}

TEST(AccumulationMisuse, AWindowMayBeDroppedAfterOthersHaveJoined) {
  run_ranks(3, [](const Communicator& comm) {
    Scale net;
    DistributedDataParallel ddp(net, comm);
    const auto micro_step = [&] {
      const NoSync no_sync(ddp);
      ddp(value(1)).sum().backward();
    };
    join(ddp, [&] {
      micro_step();
      if (comm.rank() == 0) return;  // inside a window, which the others finish
      net->zero_grad(true);
      for (int window = 0; window < 2; ++window) {
        micro_step();
        ddp(value(1)).sum().backward();
        EXPECT_FLOAT_EQ(net->weight.grad().item<float>(), 4.0F / 3);
        net->zero_grad(true);
      }
    });
  });
}

// One weight with two owners, such as an embedding tied to the output layer.
struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    weight = register_parameter("encoder", torch::ones({64}));
    register_parameter("decoder", weight);
  }
  torch::Tensor forward(const torch::Tensor& x) { return x * weight; }
  torch::Tensor weight;
};
TORCH_MODULE(Tied);

TEST_P(Accumulation, ASharedWeightIsAveragedOnce) {
  run_ranks(GetParam(), [](const Communicator& comm) {
    Tied net;
    // The smallest buckets, so that nothing else is sent with it.
    DistributedDataParallel ddp(net, comm, {.first_bucket_bytes = 64, .bucket_cap_bytes = 64});
    const auto mean = static_cast<float>(1 + comm.size()) / 2;
    for (int step = 0; step < 20; ++step) {
      ddp(torch::full({64}, 1.0 + comm.rank())).sum().backward();
      EXPECT_TRUE(torch::allclose(net->weight.grad(), torch::full({64}, mean))) << step;
      net->zero_grad(true);
    }
    EXPECT_LE(ddp.buckets().size(), 1U);
  });
}

// libtorch lists it twice, and an optimizer of libtorch updates what it is given as often.
TEST_P(Accumulation, ASharedWeightIsUpdatedOnce) {
  run_ranks(GetParam(), [](const Communicator& comm) {
    Tied net;
    DistributedDataParallel ddp(net, comm);
    EXPECT_EQ(ddp.parameters().size(), 1U);
    torch::optim::SGD optimizer(ddp.parameters(), 0.5);
    ddp(torch::full({64}, 1.0)).sum().backward();
    optimizer.step();
    EXPECT_TRUE(torch::equal(net->weight.detach(), torch::full({64}, 0.5)));
  });
}

// An optimizer that fills gradients with zeros detaches them first, which libtorch refuses for
// views.
TEST(AccumulatedGradients, CanBeZeroedWhereverTheyComeFrom) {
  run_ranks(2, [](const Communicator& comm) {
    Branches net;
    DistributedDataParallel ddp(net, comm, {.find_unused_parameters = true});
    Sgd optimizer(net->parameters(), {.lr = 0.1});
    for (int step = 0; step < 2; ++step) {
      ddp(value(1), comm.rank() == 0, comm.rank() == 1).sum().backward();
      optimizer.zero_grad(/*set_to_none=*/false);
      for (const auto& parameter : net->parameters()) EXPECT_EQ(parameter.grad().item<float>(), 0);
      net->always.mutable_grad() = value(0);  // adopted by its bucket in the next step
    }
  });
}

}  // namespace
}  // namespace lockstep::test::accumulation_test
