// Gradients that are infinite or NaN on one rank: who is named, who stops, who is silent.

#include <cmath>
#include <mutex>

#include "ddp_nets.hpp"
#include "lockstep/distributed_data_parallel.hpp"
#include "lockstep/grad_scaler.hpp"
#include "rank_threads.hpp"

namespace lockstep::test::ddp_nonfinite_test {
namespace {

size_t count_of(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

// Trains three ranks, of which rank 1's loss is NaN in step 3; returns what they print.
std::string train_with_nan(Nonfinite nonfinite, std::vector<DdpStats>& stats) {
  stats.resize(3);
  testing::internal::CaptureStderr();
  run_ranks(3, [&](const Communicator& comm) {
    TwoLayers net;
    DistributedDataParallel ddp(net, comm, {.nonfinite = nonfinite});
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    for (int step = 1; step <= 15; ++step) {
      optimizer.zero_grad();
      auto loss = ddp(rows(4, 6, comm.rank())).pow(2).mean();
      if (step == 3 && comm.rank() == 1) loss = loss * std::nan("");
      loss.backward();
      optimizer.step();
    }
    stats[static_cast<size_t>(comm.rank())] = ddp.stats();
  });
  return testing::internal::GetCapturedStderr();
}

TEST(DdpNonfinite, TheWarningNamesRankStepAndParameter) {
  std::vector<DdpStats> stats;
  const std::string said = train_with_nan(Nonfinite::kWarn, stats);
  EXPECT_NE(said.find("warning[LS0032]: rank 1, step 3: the gradient of second."),
            std::string::npos)
      << said;
  EXPECT_EQ(count_of(said, "rank 1,"), 1U) << "later steps are rank 1's victims too:\n" << said;
  EXPECT_EQ(count_of(said, "rank 0, step 4:"), 1U) << said;
  EXPECT_EQ(count_of(said, "an earlier step spoiled them"), 1U) << said;
  EXPECT_EQ(count_of(said, "warning"), 2U) << said;
  EXPECT_EQ(stats[1].first_nonfinite_step, 3);
  EXPECT_EQ(stats[1].first_nonfinite_parameter.substr(0, 7), "second.");
  EXPECT_EQ(stats[1].nonfinite_steps, 13);
  for (const size_t rank : {0U, 2U}) EXPECT_EQ(stats[rank].first_nonfinite_step, 4);
}

TEST(DdpNonfinite, IgnoreSaysNothing) {
  std::vector<DdpStats> stats;
  EXPECT_EQ(train_with_nan(Nonfinite::kIgnore, stats), "");
  EXPECT_EQ(stats[1].nonfinite_steps, 0);
}

TEST(DdpNonfinite, AGradScalerOverflowsOnPurpose) {
  const GradScaler scaler;
  std::vector<DdpStats> stats;
  EXPECT_EQ(train_with_nan(Nonfinite::kWarn, stats), "");
}

TEST(DdpNonfinite, ADisabledGradScalerChangesNothing) {
  const GradScaler scaler({.enabled = false});
  std::vector<DdpStats> stats;
  EXPECT_NE(train_with_nan(Nonfinite::kWarn, stats), "");
}

TEST(DdpNonfinite, StopEndsTheStepOnAllRanksBeforeAnyWeightIsSpoiled) {
  std::vector<TwoLayers> nets(3, nullptr);
  const auto outcomes = outcomes_of_ranks(3, [&](const Communicator& comm) {
    TwoLayers& net = nets[static_cast<size_t>(comm.rank())];
    net = TwoLayers();
    DistributedDataParallel ddp(net, comm, {.nonfinite = Nonfinite::kStop});
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    for (int step = 1; step <= 3; ++step) {
      optimizer.zero_grad();
      auto loss = ddp(rows(4, 6, comm.rank())).pow(2).mean();
      if (step == 2 && comm.rank() == 2) loss = loss / 0;
      loss.backward();
      optimizer.step();
    }
  });
  EXPECT_EQ(outcomes[2].code(), Code::kNonfinite);
  for (const auto& outcome : outcomes) {
    ASSERT_TRUE(outcome.failed());
    EXPECT_NE(outcome.text().find("rank 2, step 2: the gradient of second."), std::string::npos)
        << outcome.text();
  }
  for (const auto& net : nets) {
    for (const auto& parameter : net->parameters()) {
      EXPECT_TRUE(torch::isfinite(parameter).all().item<bool>());
    }
  }
}

struct WideImpl : torch::nn::Module {
  WideImpl() { linear = register_module("linear", torch::nn::Linear(200, 300)); }
  torch::Tensor forward(const torch::Tensor& x) { return linear(x); }
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(Wide);

// A backward in which `spoil` has changed rank 1's gradient of a large weight.
int64_t steps_found(Nonfinite nonfinite, const std::function<void(torch::Tensor&)>& spoil) {
  int64_t found = 0;
  testing::internal::CaptureStderr();
  outcomes_of_ranks(2, [&](const Communicator& comm) {
    Wide net;
    DistributedDataParallel ddp(net, comm, {.nonfinite = nonfinite});
    if (comm.rank() == 1) {
      net->linear->weight.register_hook([&](const torch::Tensor& gradient) {
        torch::Tensor changed = gradient.clone();
        spoil(changed);
        return changed;
      });
    }
    const auto backward = [&] { ddp(torch::ones({4, 200})).sum().backward(); };
    try {
      backward();
    } catch (const Error&) {
    }
    if (comm.rank() == 1) found = ddp.stats().nonfinite_steps;
  });
  testing::internal::GetCapturedStderr();
  return found;
}

TEST(DdpNonfinite, RowsColumnsAndElementsOfLargeGradients) {
  const float inf = INFINITY;
  for (const int64_t row : {0, 1, 200, 299}) {
    EXPECT_EQ(steps_found(Nonfinite::kWarn, [&](torch::Tensor& g) { g[row].fill_(inf); }), 1)
        << row;
  }
  for (const int64_t column : {0, 7, 199}) {
    EXPECT_EQ(
        steps_found(Nonfinite::kWarn, [&](torch::Tensor& g) { g.select(1, column).fill_(-inf); }),
        1)
        << column;
  }
  EXPECT_EQ(steps_found(Nonfinite::kStop, [&](torch::Tensor& g) { g[5][17] = NAN; }), 1);
  EXPECT_EQ(steps_found(Nonfinite::kStop, [&](torch::Tensor&) {}), 0);
}

}  // namespace
}  // namespace lockstep::test::ddp_nonfinite_test
