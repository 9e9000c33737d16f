// Training over ranks that share a GPU: replicas, stages and divided layers give the numbers of one
// rank alone.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "gpu_ranks.hpp"
#include "lockstep/device_event.hpp"
#include "lockstep/distributed_data_parallel.hpp"
#include "lockstep/optim.hpp"
#include "lockstep/pipeline.hpp"
#include "lockstep/schedule.hpp"
#include "lockstep/tensor_parallel.hpp"

namespace lockstep::test::communicator_training_cuda_test {
namespace {

using CudaCommunicator = GpuTest;

// Layers wide enough to keep a GPU busy, the same in every thread.
torch::nn::Sequential make_net(int64_t width = 256, int layers = 4) {
  torch::nn::Sequential net;
  for (int i = 0; i < layers; ++i) {
    net->push_back(torch::nn::Linear(width, width));
    net->push_back(torch::nn::Tanh());
  }
  const torch::NoGradGuard no_grad;
  double phase = 0;
  for (auto& parameter : net->parameters()) {
    parameter.copy_(torch::arange(parameter.numel())
                        .view(parameter.sizes())
                        .mul(0.37)
                        .add(phase)  //
                        .sin()
                        .mul(1.0 / static_cast<double>(width)));
    phase += 1;
  }
  net->to(kGpu);
  return net;
}

std::pair<torch::Tensor, torch::Tensor> batch_of(int step, int64_t width = 256) {
  constexpr int64_t kRows = 64;
  const auto x = torch::arange(kRows * width).view({kRows, width}).mul(0.61).add(step).cos();
  return {x.to(kGpu), x.mul(0.5).to(kGpu)};
}

std::vector<torch::Tensor> weights_of(const std::vector<torch::Tensor>& parameters) {
  std::vector<torch::Tensor> weights;
  for (const auto& parameter : parameters) weights.push_back(parameter.detach().cpu());
  return weights;
}

std::vector<torch::Tensor> train_alone(int steps) {
  auto net = make_net();
  Sgd optimizer(net->parameters(), {.lr = 0.1});
  for (int step = 0; step < steps; ++step) {
    const auto [x, y] = batch_of(step);
    torch::mse_loss(net->forward(x), y).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  return weights_of(net->parameters());
}

// Buckets of a layer each, so that several travel while backward computes.
DdpOptions small_buckets() {
  return {.first_bucket_bytes = 64 << 10, .bucket_cap_bytes = 256 << 10};
}

// [rank] -> its weights after some steps on its part of the rows. Each rank makes options of its
// own: a hook serves one rank.
std::vector<std::vector<torch::Tensor>> train_ranks(
    int size, int steps, const std::function<DdpOptions()>& options = small_buckets) {
  std::vector<std::vector<torch::Tensor>> weights(static_cast<size_t>(size));
  run_on_gpu(size, [&](const Communicator& comm, Device&) {
    auto net = make_net();
    DistributedDataParallel ddp(net, comm, options());
    Sgd optimizer(ddp.parameters(), {.lr = 0.1});
    for (int step = 0; step < steps; ++step) {
      const auto [x, y] = batch_of(step);
      const auto mine = [&](const torch::Tensor& rows) { return rows.chunk(size)[comm.rank()]; };
      torch::mse_loss(ddp(mine(x)), mine(y)).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    weights[static_cast<size_t>(comm.rank())] = weights_of(ddp.parameters());
  });
  return weights;
}

void expect_same_bits(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b,
                      const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(torch::equal(a[i], b[i])) << what << ", " << i;
}

void expect_within(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b,
                   double tolerance) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_LE((a[i] - b[i]).abs().max().item<double>(), tolerance) << "parameter " << i;
  }
}

// In backward all ranks wait for each other here.
struct Rendezvous : torch::autograd::Function<Rendezvous> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& x,
                               const Communicator* comm) {
    context->saved_data["comm"] = reinterpret_cast<int64_t>(comm);
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    reinterpret_cast<const Communicator*>(context->saved_data["comm"].toInt())->barrier();
    return {gradients[0], torch::Tensor()};
  }
};

// In backward the GPU is given much more to do than the host needs time to queue it.
struct LongBackward : torch::autograd::Function<LongBackward> {
  static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    const auto large = torch::ones({4096, 4096}, gradients[0].options());
    for (int i = 0; i < 16; ++i) torch::mm(large, large);
    return {gradients[0]};
  }
};

// The last layer's gradients come long before all others, at whose hooks buckets move on.
struct EarlyBucket : torch::nn::Module {
  explicit EarlyBucket(const Communicator& comm) : ranks(&comm) {
    first = register_module("first", torch::nn::Linear(256, 256));
    for (int i = 0; i < 8; ++i) {
      scales.push_back(register_parameter("scale" + std::to_string(i), torch::ones({1})));
    }
    last = register_module("last", torch::nn::Linear(256, 256));
    to(kGpu);
  }

  torch::Tensor forward(torch::Tensor x) {
    x = first(x);
    for (const auto& scale : scales) x = Rendezvous::apply(x * scale, ranks);
    return last(LongBackward::apply(x));
  }

  const Communicator* ranks;
  torch::nn::Linear first = nullptr;
  std::vector<torch::Tensor> scales;
  torch::nn::Linear last = nullptr;
};

// The host has queued a step long before the GPU does it.
void expect_times_of_the_gpu(std::vector<Communicator> comms) {
  run_on_gpu(std::move(comms), [](const Communicator& comm, Device& device) {
    auto net = make_net();
    DistributedDataParallel ddp(net, comm, small_buckets());
    const auto [x, y] = batch_of(0);
    const auto large = torch::ones({8192, 8192}, kGpu);
    torch::mm(large, large);
    torch::mse_loss(ddp(x), y).backward();
    const DdpStats before = ddp.stats();
    device.synchronize();
    comm.barrier();
    const DeviceEvent early = DeviceEvent::now(kGpu);
    for (int i = 0; i < 6; ++i) torch::mm(large, large);
    const DeviceEvent late = DeviceEvent::now(kGpu);
    torch::mse_loss(ddp(x), y).backward();
    const DdpStats stats = ddp.stats();
    ASSERT_EQ(stats.last_step.size(), before.last_step.size());
    ASSERT_GT(stats.last_step.size(), 1U);
    const int64_t half_ns = late.since(early) / 2;
    for (const auto& bucket : stats.last_step) {
      EXPECT_GT(bucket.launched_ns, early.ns() + half_ns) << "bucket " << bucket.index;
      EXPECT_GT(bucket.finished_ns, bucket.launched_ns) << "bucket " << bucket.index;
    }
    EXPECT_GT(stats.backward_started_ns, early.ns() + half_ns);
    EXPECT_GE(stats.backward_finished_ns, stats.last_step.back().launched_ns);
    const int64_t communication_ns = stats.communication_ns - before.communication_ns;
    EXPECT_GT(communication_ns, 0);
    EXPECT_LT(communication_ns, half_ns);
    EXPECT_LT(stats.exposed_ns - before.exposed_ns, half_ns);
  });
}

TEST_F(CudaCommunicator, DdpTellsWhenTheGpuMovedItsBuckets) {
  expect_times_of_the_gpu(Communicator::threads(2, kGpu));
}

TEST_F(CudaCommunicator, DdpTellsWhenBucketsWentThroughTheHost) {
  expect_times_of_the_gpu(Communicator::threads(2));
}

TEST_F(CudaCommunicator, ABucketThatArrivesEarlyIsNotUnderWayUntilTheLast) {
  run_on_gpu(2, [](const Communicator& comm, Device&) {
    DistributedDataParallel ddp(std::make_shared<EarlyBucket>(comm), comm, small_buckets());
    const auto [x, y] = batch_of(0);
    DdpStats before;
    for (int step = 0; step < 3; ++step) {
      before = ddp.stats();
      torch::mse_loss(ddp(x), y).backward();
    }
    const DdpStats stats = ddp.stats();
    ASSERT_EQ(stats.last_step.size(), 2U);
    const BucketTiming& early = stats.last_step[0];
    const BucketTiming& late = stats.last_step[1];
    EXPECT_LT(early.finished_ns, late.launched_ns);
    EXPECT_LT(stats.communication_ns - before.communication_ns,
              late.launched_ns - early.launched_ns);
  });
}

TEST_F(CudaCommunicator, DdpTrainsAsOneRankDoes) {
  const auto alone = train_alone(10);
  for (const int size : {2, 4}) {
    const auto ranks = train_ranks(size, 10);
    expect_within(ranks[0], alone, 1e-6);
    for (const auto& rank : ranks) expect_same_bits(rank, ranks[0], "ranks of one run");
  }
}

TEST_F(CudaCommunicator, DdpGivesTheSameBitsEveryTime) {
  const auto first = train_ranks(2, 3);
  for (int run = 1; run < 20; ++run) {
    expect_same_bits(train_ranks(2, 3)[0], first[0], "run " + std::to_string(run));
  }
}

TEST_F(CudaCommunicator, CompressedGradientsStayTheSameOnAllRanks) {
  const auto ranks = train_ranks(2, 5, [] {
    auto options = small_buckets();
    options.hook = compress_gradients(torch::kBFloat16);
    return options;
  });
  expect_same_bits(ranks[0], ranks[1], "ranks");
  expect_within(ranks[0], train_alone(5), 1e-3);
}

TEST_F(CudaCommunicator, APipelineOverRanksTrainsAsOneDeviceDoes) {
  const auto alone = train_alone(5);
  for (const char* name : {"gpipe", "1f1b"}) {
    const auto schedule = make_schedule(name, 2, 4);
    std::vector<torch::Tensor> weights(alone.size());
    run_on_gpu(2, [&](const Communicator& comm, Device& device) {
      auto net = make_net();
      Pipeline pipeline(split_stages(net, cut_by_count(static_cast<int64_t>(net->size()), 2)), comm,
                        device, schedule,
                        {.loss = [](const torch::Tensor& out, const torch::Tensor& y) {
                          return torch::mse_loss(out, y);
                        }});
      Sgd optimizer(pipeline.parameters(), {.lr = 0.1});
      for (int step = 0; step < 5; ++step) {
        const auto [x, y] = batch_of(step);
        EXPECT_TRUE(pipeline.step(x, y).isfinite().item<bool>());
        optimizer.step();
        optimizer.zero_grad();
      }
      const auto mine = weights_of(pipeline.parameters());
      const size_t first = comm.rank() == 0 ? 0 : alone.size() - mine.size();
      std::copy(mine.begin(), mine.end(), weights.begin() + static_cast<std::ptrdiff_t>(first));
    });
    expect_within(weights, alone, 1e-6);
  }
}

TEST_F(CudaCommunicator, LayersDividedOverRanksGiveTheWholeOnesResult) {
  run_on_gpu(2, [](const Communicator& comm, Device&) {
    const auto whole = make_net(64, 2);
    torch::nn::Linear up(std::dynamic_pointer_cast<torch::nn::LinearImpl>(whole->ptr(0)));
    torch::nn::Linear down(std::dynamic_pointer_cast<torch::nn::LinearImpl>(whole->ptr(2)));
    ColumnLinear column(up, comm);
    RowLinear row(down, comm);
    const auto x = std::get<0>(batch_of(1, 64)).requires_grad_();
    const auto expected = down(torch::tanh(up(x)));
    expected.pow(2).sum().backward();
    const auto expected_gradient = x.grad().clone();
    x.mutable_grad() = torch::Tensor();
    const auto result = row(torch::tanh(column(x)));
    result.pow(2).sum().backward();
    expect_close(result.detach(), expected.detach(), "result");
    expect_close(x.grad(), expected_gradient, "gradient");
  });
}

}  // namespace
}  // namespace lockstep::test::communicator_training_cuda_test
