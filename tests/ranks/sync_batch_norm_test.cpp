// SyncBatchNorm against one process with all rows, and the conversion of modules.

#include "lockstep/sync_batch_norm.hpp"

#include <torch/torch.h>

#include <mutex>
#include <numeric>

#include "lockstep/autocast.hpp"
#include "lockstep/data_parallel.hpp"
#include "lockstep/distributed_data_parallel.hpp"
#include "rank_threads.hpp"

namespace lockstep::test::sync_batch_norm_test {
namespace {

using torch::nn::BatchNormOptions;

constexpr double kTolerance = 1e-12;

void expect_near(const torch::Tensor& got, const torch::Tensor& wanted, const std::string& what,
                 double tolerance = kTolerance) {
  ASSERT_EQ(got.sizes(), wanted.sizes()) << what;
  if (got.numel() == 0) return;
  const double off =
      (got.to(torch::kFloat64) - wanted.to(torch::kFloat64)).abs().max().item<double>();
  EXPECT_LE(off, tolerance) << what;
}

// Rows of each rank: uneven, and none on rank 1 if there are three or more.
std::vector<int64_t> uneven_rows(int size) {
  std::vector<int64_t> rows;
  for (int rank = 0; rank < size; ++rank) rows.push_back(size >= 3 && rank == 1 ? 0 : rank + 2);
  return rows;
}

torch::Tensor whole_input(const std::vector<int64_t>& rows, int64_t dims) {
  std::vector<int64_t> shape = {std::accumulate(rows.begin(), rows.end(), int64_t{0}), 4};
  for (int64_t dim = 2; dim < dims; ++dim) shape.push_back(dim + 1);
  torch::manual_seed(dims);
  return torch::randn(shape, torch::kFloat64) * 3 + 100;  // a large mean costs digits
}

torch::Tensor rows_of(const torch::Tensor& whole, const std::vector<int64_t>& rows, int rank) {
  const auto before = std::accumulate(rows.begin(), rows.begin() + rank, int64_t{0});
  return whole.narrow(0, before, rows[static_cast<size_t>(rank)]);
}

// A loss that weighs every element differently: that of all ranks is the sum of theirs.
torch::Tensor loss_of(const torch::Tensor& output, const torch::Tensor& colors) {
  return (output * colors).sum() + (output * output * colors).sum();
}

struct OneProcess {
  torch::Tensor output, input_grad, weight_grad, bias_grad, running_mean, running_var;
};

template <class Norm>
void expect_parity_with_one_process(int size, int64_t dims, const BatchNormOptions& options) {
  const auto rows = uneven_rows(size);
  const auto whole = whole_input(rows, dims);
  const auto colors = torch::rand(whole.sizes(), torch::kFloat64);
  Norm norm(options);
  norm->to(torch::kFloat64);
  OneProcess one;
  for (int step = 0; step < 2; ++step) {
    const auto x = (whole * (step + 1)).detach().requires_grad_();
    if (norm->weight.defined()) norm->weight.mutable_grad() = torch::zeros({4}, torch::kFloat64);
    if (norm->bias.defined()) norm->bias.mutable_grad() = torch::zeros({4}, torch::kFloat64);
    one.output = norm(x);
    loss_of(one.output, colors).backward();
    one.input_grad = x.grad();
  }
  norm->eval();
  const auto evaluated = norm(rows_of(whole, rows, 0)).detach();
  run_ranks(size, [&](const Communicator& comm) {
    SyncBatchNorm synced(options, comm.split(0, comm.rank(), "bn"));
    synced->to(torch::kFloat64);
    torch::Tensor x;
    torch::Tensor output;
    for (int step = 0; step < 2; ++step) {
      x = (rows_of(whole, rows, comm.rank()) * (step + 1)).detach().requires_grad_();
      if (synced->weight.defined()) synced->weight.mutable_grad().reset();
      if (synced->bias.defined()) synced->bias.mutable_grad().reset();
      output = synced(x);
      loss_of(output, rows_of(colors, rows, comm.rank())).backward();
    }
    expect_near(output.detach(), rows_of(one.output.detach(), rows, comm.rank()), "output", 1e-10);
    expect_near(x.grad(), rows_of(one.input_grad, rows, comm.rank()), "gradient of the input",
                1e-10);
    for (const auto& [mine, whole_grad] :
         {std::pair(synced->weight, norm->weight), std::pair(synced->bias, norm->bias)}) {
      if (!mine.defined()) continue;
      comm.all_reduce(mine.grad());
      expect_near(mine.grad(), whole_grad.grad(), "gradient of weight or bias", 1e-9);
    }
    if (options.track_running_stats()) {
      expect_near(synced->running_mean, norm->running_mean, "running mean", 1e-10);
      expect_near(synced->running_var, norm->running_var, "running variance", 1e-9);
      EXPECT_EQ(synced->num_batches_tracked.item<int64_t>(), 2);
    }
    synced->eval();
    if (comm.rank() == 0) {  // alone: nothing is collective any more
      expect_near(synced(rows_of(whole, rows, 0)).detach(), evaluated, "evaluation", 1e-9);
    }
  });
}

TEST(SyncBatchNorm, IsTheBatchNormOfAllRows) {
  for (const int size : {1, 2, 3, 5}) {
    SCOPED_TRACE(size);
    expect_parity_with_one_process<torch::nn::BatchNorm1d>(size, 2, BatchNormOptions(4));
    expect_parity_with_one_process<torch::nn::BatchNorm1d>(size, 3,
                                                           BatchNormOptions(4).momentum(0.3));
    expect_parity_with_one_process<torch::nn::BatchNorm2d>(
        size, 4, BatchNormOptions(4).momentum(c10::nullopt));
    expect_parity_with_one_process<torch::nn::BatchNorm3d>(size, 5,
                                                           BatchNormOptions(4).affine(false));
    expect_parity_with_one_process<torch::nn::BatchNorm2d>(
        size, 4, BatchNormOptions(4).track_running_stats(false).eps(1e-3));
  }
}

TEST(SyncBatchNorm, RefusesWhatItCannotNormalise) {
  const auto comm = Communicator::self();
  SyncBatchNorm norm(BatchNormOptions(4), comm);
  expect_error(Code::kTensorMismatch, {"4 features", "[3, 5]"}, [&] { norm(torch::ones({3, 5})); });
  expect_error(Code::kTensorMismatch, {"4 features", "[4]"}, [&] { norm(torch::ones({4})); });
  expect_error(Code::kUsage, {"1 values", "at least 2"}, [&] { norm(torch::ones({1, 4})); });
  expect_error(Code::kUsage, {"0 values"}, [&] { norm(torch::ones({0, 4})); });
  const auto x = torch::randn({3, 4}).requires_grad_();
  expect_error(Code::kEngine, {"SyncBatchNorm", "twice"}, [&] {
    torch::autograd::grad({norm(x).square().sum()}, {x}, {}, true, /*create_graph=*/true);
  });
}

TEST(SyncBatchNorm, ComputesInFloat32ForHalfPrecision) {
  torch::manual_seed(1);
  const auto whole = torch::randn({8, 3}) * 2 + 5;
  run_ranks(2, [&](const Communicator& comm) {
    SyncBatchNorm synced(BatchNormOptions(3), comm);
    const auto mine = whole.narrow(0, 4 * comm.rank(), 4);
    const auto x = mine.to(torch::kBFloat16).requires_grad_();
    const auto output = synced(x);
    EXPECT_EQ(output.scalar_type(), torch::kBFloat16);
    output.to(torch::kFloat).square().sum().backward();
    EXPECT_EQ(x.grad().scalar_type(), torch::kBFloat16);
    EXPECT_EQ(synced->weight.grad().scalar_type(), torch::kFloat);
    torch::nn::BatchNorm1d norm(BatchNormOptions(3));
    const auto expected = norm(whole.to(torch::kBFloat16).to(torch::kFloat));
    expect_near(output.detach(), expected.narrow(0, 4 * comm.rank(), 4).detach(), "bfloat16", 0.02);
  });
}

// Its norms are inside a Sequential, and inside a Sequential of a part.
struct BlockImpl : torch::nn::Module {
  BlockImpl()
      : layers(register_module(
            "layers", torch::nn::Sequential(torch::nn::Linear(6, 6), torch::nn::BatchNorm1d(6),
                                            torch::nn::ReLU()))) {}
  torch::Tensor forward(const torch::Tensor& x) { return layers->forward(x); }
  torch::nn::Sequential layers;
};
TORCH_MODULE(Block);

// All ranks' threads draw from one generator: none may seed it while another one draws.
torch::nn::Sequential net_with_norms() {
  static std::mutex drawing;
  const std::lock_guard lock(drawing);
  torch::manual_seed(3);
  torch::nn::Sequential net(torch::nn::Linear(5, 6), torch::nn::BatchNorm1d(6), Block(),
                            torch::nn::Linear(6, 2));
  net->to(torch::kFloat64);
  return net;
}

// DDP averages over ranks: with equal rows and mean losses that is the gradient of all rows.
TEST(SyncBatchNorm, AConvertedNetTrainsBesideDdpAsOneProcessDoes) {
  for (const int size : {1, 2, 3}) {
    torch::manual_seed(5);
    const auto x = torch::randn({6 * size, 5}, torch::kFloat64);
    const auto y = torch::randn({6 * size, 2}, torch::kFloat64);
    auto one = net_with_norms();
    torch::optim::SGD one_optimizer(one->parameters(), 0.1);
    for (int step = 0; step < 4; ++step) {
      one_optimizer.zero_grad();
      // The second half of the rows is a second micro-step.
      for (int part = 0; part < 2; ++part) {
        std::vector<torch::Tensor> inputs, targets;
        for (int rank = 0; rank < size; ++rank) {
          inputs.push_back(x.narrow(0, 6 * rank + 3 * part, 3));
          targets.push_back(y.narrow(0, 6 * rank + 3 * part, 3));
        }
        (torch::mse_loss(one->forward(torch::cat(inputs)), torch::cat(targets)) / 2).backward();
      }
      one_optimizer.step();
    }
    run_ranks(size, [&](const Communicator& comm) {
      auto net = net_with_norms();
      torch::optim::SGD optimizer(net->parameters(), 0.1);  // before the conversion: it keeps them
      convert_sync_batchnorm(*net, comm);
      EXPECT_EQ(net->parameters().size(), one->parameters().size());
      EXPECT_NE((*net)[1]->as<SyncBatchNorm>(), nullptr);
      EXPECT_NE((*(*net)[2]->as<Block>()->layers)[1]->as<SyncBatchNorm>(), nullptr);
      DistributedDataParallel ddp(net, comm);
      for (int step = 0; step < 4; ++step) {
        ddp.zero_grad();
        for (int part = 0; part < 2; ++part) {
          std::optional<NoSync> accumulate;
          if (part == 0) accumulate.emplace(ddp);
          const auto output = ddp(x.narrow(0, 6 * comm.rank() + 3 * part, 3));
          (torch::mse_loss(output, y.narrow(0, 6 * comm.rank() + 3 * part, 3)) / 2).backward();
        }
        optimizer.step();
      }
      const auto names = one->named_parameters();
      for (const auto& item : net->named_parameters()) {
        expect_near(item.value().detach(), names[item.key()].detach(), item.key(), 1e-10);
      }
      for (const auto& item : net->named_buffers()) {
        expect_near(item.value(), one->named_buffers()[item.key()], item.key(), 1e-10);
      }
    });
  }
}

// With weight 0 a rank may have no rows. Its rows would be in the statistics, and the gradients
// that they have from other ranks' outputs would be lost.
TEST(SyncBatchNorm, ARankOfWeightZeroHasNoRows) {
  for (const int64_t rows : {0, 2}) {
    const auto outcomes = outcomes_of_ranks(2, [&](const Communicator& comm) {
      auto net = net_with_norms();
      convert_sync_batchnorm(*net, comm);
      DistributedDataParallel ddp(net, comm);
      ddp.set_weight(comm.rank() == 0 ? 2 : 0);
      const auto x = torch::arange(15, torch::kFloat64).square().view({3, 5});
      ddp(comm.rank() == 0 ? x : x.narrow(0, 0, rows)).square().sum().backward();
    });
    for (int rank = 0; rank < 2; ++rank) {
      const auto& outcome = outcomes[static_cast<size_t>(rank)];
      EXPECT_EQ(outcome.failed(), rows > 0) << outcome.text();
      if (rows == 0) continue;
      EXPECT_NE(outcome.text().find("a rank of weight 0 that has rows"), std::string::npos)
          << outcome.text();
      if (rank == 1) {
        EXPECT_EQ(outcome.code(), Code::kUsage);
      }
    }
  }
}

struct TypedNetImpl : torch::nn::Module {
  TypedNetImpl() : norm(register_module("norm", torch::nn::BatchNorm2d(3))) {}
  torch::Tensor forward(const torch::Tensor& x) { return norm(x); }
  torch::nn::BatchNorm2d norm;
};
TORCH_MODULE(TypedNet);

TEST(SyncBatchNorm, AMemberThatCannotBeReplacedIsNamedAndNothingChanges) {
  const auto comm = Communicator::self();
  torch::nn::Sequential net(torch::nn::BatchNorm1d(3), TypedNet());
  expect_error(Code::kReplicate, {"'1.norm'", "TypedNet", "SyncBatchNorm"},
               [&] { convert_sync_batchnorm(*net, comm); });
  EXPECT_NE((*net)[0]->as<torch::nn::BatchNorm1d>(), nullptr) << "half of it was replaced";
  torch::nn::BatchNorm1d alone(3);
  expect_error(Code::kReplicate, {"itself"}, [&] { convert_sync_batchnorm(*alone, comm); });
}

TEST(SyncBatchNorm, ANormThatStandsInTwoPlacesStaysOne) {
  const auto comm = Communicator::self();
  torch::nn::BatchNorm1d shared(3);
  torch::nn::Sequential net(shared, shared);
  convert_sync_batchnorm(*net, comm);
  EXPECT_EQ((*net)[0].get(), (*net)[1].get());
  EXPECT_TRUE((*net)[0]->as<SyncBatchNorm>()->weight.is_same(shared->weight));
}

}  // namespace
}  // namespace lockstep::test::sync_batch_norm_test
