// Communicators on GPUs: ranks as threads that share one, each on a stream of its own, over ipc;
// NCCL with one rank; and GPU tensors where only the host has a backend.

#include "lockstep/communicator.hpp"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <thread>

#include "lockstep/distributed_data_parallel.hpp"
#include "lockstep/mesh.hpp"
#include "lockstep/pipeline.hpp"
#include "lockstep/schedule.hpp"
#include "lockstep/sgd.hpp"
#include "lockstep/stages.hpp"
#include "lockstep/tensor_parallel.hpp"
#include "lockstep/world.hpp"
#include "ranks/rank_threads.hpp"
#include "torch_compat.hpp"

namespace lockstep::test {
namespace {

using RankBody = std::function<void(const Communicator&, Device&)>;

class CudaCommunicator : public testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "needs a GPU";
  }
};

const torch::Device kGpu(torch::kCUDA, 0);

// Every rank a thread on a slot of the GPU, with that slot's stream.
std::vector<RankOutcome> outcomes_on_gpu(std::vector<Communicator> comms, const RankBody& body) {
  const Devices devices("cuda:0*" + std::to_string(comms.size()));
  std::vector<RankOutcome> outcomes(comms.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < comms.size(); ++rank) {
    threads.emplace_back([&, rank, comm = std::move(comms[rank])]() mutable {
      const UseDevice home(devices[rank]);
      const compat::BackwardOnThisThread on_this_thread;
      try {
        const Communicator mine = std::move(comm);
        body(mine, devices[rank]);
      } catch (...) {
        outcomes[rank].error = std::current_exception();
      }
    });
  }
  comms.clear();
  for (auto& thread : threads) thread.join();
  return outcomes;
}

void run_on_gpu(std::vector<Communicator> comms, const RankBody& body) {
  const auto outcomes = outcomes_on_gpu(std::move(comms), body);
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    EXPECT_FALSE(outcomes[rank].failed()) << "rank " << rank << ": " << outcomes[rank].text();
  }
}

void run_on_gpu(int size, const RankBody& body) {
  run_on_gpu(Communicator::threads(size, kGpu), body);
}

torch::TensorOptions on_gpu(torch::ScalarType dtype) {
  return torch::TensorOptions(dtype).device(kGpu);
}

// A scalar that is `value`, but that the current stream has long to wait for.
torch::Tensor late(double value) {
  const auto square = torch::full({2048, 2048}, 1.0 / 2048, on_gpu(torch::kFloat32));
  auto product = square;
  for (int i = 0; i < 20; ++i) product = product.mm(square);
  return product[0][0] * 0 + value;
}

TEST_F(CudaCommunicator, ReducesEveryTypeAndSize) {
  for (const int size : {1, 2, 3, 4}) {
    run_on_gpu(size, [&](const Communicator& comm, Device&) {
      EXPECT_EQ(comm.backend(), "ipc");
      for (const auto dtype : {torch::kFloat32, torch::kFloat64, torch::kBFloat16, torch::kFloat16,
                               torch::kInt64, torch::kInt32, torch::kInt16, torch::kUInt8}) {
        for (const int64_t count : {0, 1, 3, 1025, 300'001}) {
          const auto tensor = torch::full({count}, comm.rank() + 1, on_gpu(dtype));
          comm.all_reduce(tensor);
          EXPECT_TRUE(
              torch::equal(tensor.cpu(), torch::full({count}, size * (size + 1) / 2, dtype)))
              << dtype << " x " << count;
        }
      }
      const auto flag = torch::full({5}, comm.rank() == 0, on_gpu(torch::kBool));
      comm.all_reduce(flag, ReduceOp::kMax);
      EXPECT_TRUE(flag.all().item<bool>());
      const auto weighted =
          torch::full({5}, static_cast<float>(comm.rank()), on_gpu(torch::kFloat32));
      comm.all_reduce(weighted, ReduceOp::kMean,
                      {.weight = comm.rank() == 0 ? 0.0 + (size == 1) : 1.0});
      EXPECT_FLOAT_EQ(weighted[4].item<float>(), size == 1 ? 0.0F : static_cast<float>(size) / 2);
    });
  }
}

TEST_F(CudaCommunicator, GathersScattersBroadcastsAndSends) {
  run_on_gpu(2, [](const Communicator& comm, Device&) {
    const auto all = torch::empty({2, 3}, on_gpu(torch::kInt64));
    comm.all_gather(torch::full({3}, comm.rank(), on_gpu(torch::kInt64)), all);
    EXPECT_TRUE(torch::equal(all.cpu(), torch::tensor({{0, 0, 0}, {1, 1, 1}})));
    const auto part = torch::empty({3}, on_gpu(torch::kInt64));
    comm.reduce_scatter(all, part);
    EXPECT_TRUE(torch::equal(part.cpu(), torch::full({3}, 2 * comm.rank(), torch::kInt64)));
    const auto everybody =
        torch::full({100'003}, static_cast<float>(comm.rank()), on_gpu(torch::kFloat32));
    comm.broadcast(everybody, 1);
    EXPECT_TRUE(everybody.eq(1).all().item<bool>());
    const auto message = torch::full({70'001}, comm.rank() + 5, on_gpu(torch::kInt32));
    const auto came = torch::zeros({70'001}, on_gpu(torch::kInt32));
    if (comm.rank() == 0) {
      comm.send(message, 1, {.tag = 7});
      comm.recv(came, 1, {.tag = 8});
    } else {
      comm.recv(came, 0, {.tag = 7});
      comm.send(message, 0, {.tag = 8});
    }
    message.zero_();  // it was sent: nobody may see this
    EXPECT_TRUE(came.eq(6 - comm.rank()).all().item<bool>());
    comm.barrier();
    EXPECT_EQ(comm.stats().calls, 6);
  });
}

TEST_F(CudaCommunicator, CallsHappenInTheOrderOfABusyStream) {
  run_on_gpu(2, [](const Communicator& comm, Device&) {
    std::vector<torch::Tensor> results;
    const auto reached = comm.allocate(50'000, on_gpu(torch::kFloat32));
    for (int i = 0; i < 10; ++i) {
      for (const auto& tensor : {reached, torch::empty({50'000}, on_gpu(torch::kFloat32))}) {
        tensor.copy_(late(i + comm.rank()).expand({50'000}));
        comm.all_reduce(tensor);
        results.push_back(tensor.clone());
        tensor.fill_(-1);  // queued after the call: the peer must not get this
      }
    }
    for (size_t i = 0; i < results.size(); ++i) {
      EXPECT_TRUE(results[i].eq(static_cast<double>(2 * (i / 2) + 1)).all().item<bool>()) << i;
    }
  });
}

TEST_F(CudaCommunicator, BegunReductionsMayBeWaitedForOnAnotherStream) {
  run_on_gpu(2, [](const Communicator& comm, Device& device) {
    std::vector<torch::Tensor> tensors;
    std::vector<Work> works;
    for (int i = 0; i < 8; ++i) {
      tensors.push_back(i % 2 == 0 ? comm.allocate(10'000, on_gpu(torch::kFloat32))
                                   : torch::empty({10'000}, on_gpu(torch::kFloat32)));
      tensors.back().copy_(late(i + comm.rank()).expand({10'000}));
      works.push_back(comm.begin_all_reduce(tensors.back()));
      EXPECT_FALSE(works.front().advance());  // whatever it did, no stream waits for it yet
    }
    const c10::impl::VirtualGuardImpl gpu(c10::DeviceType::CUDA);
    const c10::StreamGuard elsewhere(gpu.getStreamFromGlobalPool(device.torch_device()));
    for (size_t i = 0; i < works.size(); ++i) {
      works[i].wait();
      EXPECT_TRUE(works[i].advance());
      EXPECT_TRUE(tensors[i].eq(static_cast<double>(2 * i + 1)).all().item<bool>()) << i;
    }
  });
}

TEST_F(CudaCommunicator, AllocatedMemoryIsZeroAndChargedToTheSlot) {
  run_on_gpu(2, [](const Communicator& comm, Device& device) {
    const int64_t before = device.memory().live_bytes;
    {
      const auto memory = comm.allocate(1 << 20, on_gpu(torch::kFloat32));
      EXPECT_EQ(device.memory().live_bytes - before, 4 << 20);
      EXPECT_EQ(memory.abs().sum().item<float>(), 0.0F);
      EXPECT_EQ(comm.allocate(0, on_gpu(torch::kFloat32)).numel(), 0);
    }
    EXPECT_EQ(device.memory().live_bytes, before);
    comm.barrier();
  });
}

TEST_F(CudaCommunicator, TensorsOnTheCpuStillGoToTheHostsBackend) {
  run_on_gpu(2, [](const Communicator& comm, Device&) {
    const auto gpu = torch::full({1000}, 1.0F, on_gpu(torch::kFloat32));
    const auto host = torch::full({1000}, 10.0F);
    auto on_its_way = comm.begin_all_reduce(gpu);
    comm.all_reduce(host);
    on_its_way.wait();
    EXPECT_EQ(host[999].item<float>(), 20.0F);
    EXPECT_EQ(gpu[999].item<float>(), 2.0F);
    const auto mixed = torch::empty({2, 1000});
    comm.all_gather(gpu, mixed);
    EXPECT_TRUE(mixed.eq(2).all().item<bool>());
  });
}

TEST_F(CudaCommunicator, GroupsOfASplitHaveTheBackendToo) {
  run_on_gpu(4, [](const Communicator& world, Device&) {
    const Mesh mesh(world, {{"dp", 2}, {"tp", 2}});
    for (const char* axis : {"dp", "tp"}) {
      EXPECT_EQ(mesh.axis(axis).backend(), "ipc");
      const auto sum = torch::full({33}, world.rank(), on_gpu(torch::kInt64));
      mesh.axis(axis).all_reduce(sum);
      const int64_t expected =
          axis == std::string("tp") ? (world.rank() < 2 ? 1 : 5) : 2 * (world.rank() % 2) + 2;
      EXPECT_EQ(sum[32].item<int64_t>(), expected);
    }
  });
}

TEST_F(CudaCommunicator, WithoutAGpuBackendTensorsGoThroughTheHost) {
  run_on_gpu(Communicator::threads(2), [](const Communicator& comm, Device&) {
    EXPECT_EQ(comm.backend(), "shm");
    const auto sum = late(comm.rank() + 1).expand({1000}).contiguous();
    comm.all_reduce(sum);
    EXPECT_TRUE(sum.eq(3).all().item<bool>());
    const auto all = torch::empty({2, 4}, on_gpu(torch::kFloat32));
    comm.all_gather(torch::full({4}, comm.rank(), on_gpu(torch::kFloat32)), all);
    EXPECT_TRUE(
        torch::equal(all.cpu(), torch::tensor({{0.F, 0.F, 0.F, 0.F}, {1.F, 1.F, 1.F, 1.F}})));
    comm.broadcast(all, 0);
    EXPECT_TRUE(comm.allocate(5, on_gpu(torch::kFloat32)).is_cuda());
  });
}

TEST_F(CudaCommunicator, ARankAloneKeepsItsTensors) {
  const auto comm = Communicator::self();
  const auto tensor = late(3).expand({1000}).contiguous();
  comm.all_reduce(tensor, ReduceOp::kMean, {.weight = 5});
  comm.broadcast(tensor, 0);
  const auto out = torch::zeros({1000}, on_gpu(torch::kFloat32));
  comm.all_gather(tensor, out);
  EXPECT_TRUE(out.eq(3).all().item<bool>());
  const auto scattered = torch::zeros({1000}, on_gpu(torch::kFloat32));
  comm.reduce_scatter(tensor, scattered);
  EXPECT_TRUE(scattered.eq(3).all().item<bool>());
  comm.send(tensor, 0, {.tag = 4});
  const auto came = torch::zeros({1000}, on_gpu(torch::kFloat32));
  comm.recv(came, 0, {.tag = 4});
  EXPECT_TRUE(came.eq(3).all().item<bool>());
  expect_error(Code::kUsage, {"zero"},
               [&] { comm.all_reduce(tensor, ReduceOp::kMean, {.weight = 0}); });
}

TEST_F(CudaCommunicator, DifferentCallsAreNamedOnEveryRank) {
  const auto outcomes =
      outcomes_on_gpu(Communicator::threads(2, kGpu), [](const Communicator& comm, Device&) {
        const auto tensor = torch::ones({comm.rank() == 1 ? 7 : 8}, on_gpu(torch::kFloat32));
        comm.all_reduce(tensor, ReduceOp::kSum, {.label = "bucket 3"});
      });
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.code(), Code::kCallMismatch) << outcome.text();
    EXPECT_NE(outcome.text().find("bucket 3"), std::string::npos) << outcome.text();
  }
}

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

TEST_F(CudaCommunicator, NcclServesOneRank) {
  const auto world = World::from_env({.devices = "cuda:0", .backend = "nccl"});
  const auto& comm = world.comm();
  EXPECT_EQ(comm.backend(), "nccl");
  for (const auto dtype : {torch::kFloat32, torch::kBFloat16, torch::kInt16, torch::kBool}) {
    const auto tensor = torch::ones({100'003}, on_gpu(dtype));
    comm.all_reduce(tensor, ReduceOp::kMax);
    EXPECT_TRUE(torch::equal(tensor.cpu(), torch::ones({100'003}, dtype)));
  }
  std::vector<Work> works;
  std::vector<torch::Tensor> tensors;
  for (int i = 0; i < 6; ++i) {
    tensors.push_back(comm.allocate(1000, on_gpu(i % 2 == 0 ? torch::kFloat32 : torch::kFloat16)));
    tensors.back().copy_(late(i).expand({1000}));
    works.push_back(comm.begin_all_reduce(tensors.back(), ReduceOp::kMean, {.weight = 3}));
  }
  for (size_t i = 0; i < works.size(); ++i) {
    works[i].wait();
    EXPECT_TRUE(tensors[i].eq(static_cast<double>(i)).all().item<bool>()) << i;
  }
  const auto out = torch::zeros({1000}, on_gpu(torch::kFloat32));
  comm.all_gather(tensors[4], out);
  EXPECT_TRUE(out.eq(4).all().item<bool>());
  comm.reduce_scatter(tensors[2], out, ReduceOp::kMean);
  EXPECT_TRUE(out.eq(2).all().item<bool>());
  comm.broadcast(out, 0);
  comm.send(out, 0, {.tag = 1});
  const auto came = torch::zeros({1000}, on_gpu(torch::kFloat32));
  comm.recv(came, 0, {.tag = 1});
  EXPECT_TRUE(came.eq(2).all().item<bool>());
  const auto part = comm.split(0, 0, "part");
  EXPECT_EQ(part.backend(), "nccl");
  part.all_reduce(out);
  part.abort("the test is over");
  expect_error(Code::kRankFailed, {"the test is over"}, [&] { part.all_reduce(out); });
  comm.barrier();
}

TEST_F(CudaCommunicator, GpuBackendsThatCannotBeAreRefused) {
  for (const char* backend : {"nccl", "ipc"}) {
    expect_error(Code::kBackend, {backend, "rank 0", "CPU"},
                 [&] { World::from_env({.devices = "cpu:1", .backend = backend}); });
  }
}

}  // namespace
}  // namespace lockstep::test
