// Communicators on GPUs: ranks as threads that share one, each on a stream of its own, over ipc;
// NCCL with one rank; and GPU tensors where only the host has a backend.

#include "lockstep/communicator.hpp"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "gpu_ranks.hpp"
#include "lockstep/mesh.hpp"
#include "lockstep/world.hpp"

namespace lockstep::test::communicator_cuda_test {
namespace {

using CudaCommunicator = GpuTest;

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
    comm.all_gather(all, torch::full({3}, comm.rank(), on_gpu(torch::kInt64)));
    EXPECT_TRUE(torch::equal(all.cpu(), torch::tensor({{0, 0, 0}, {1, 1, 1}})));
    const auto part = torch::empty({3}, on_gpu(torch::kInt64));
    comm.reduce_scatter(part, all);
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

// The barrier waits on the host, to which the others come only when they have the message.
TEST_F(CudaCommunicator, BegunMessagesGoOnWhileTheirSenderIsInABarrier) {
  run_on_gpu(3, [](const Communicator& comm, Device&) {
    for (const int64_t count : {1000, 10'000'003}) {
      std::vector<Work> works;
      const auto sent = torch::arange(count, on_gpu(torch::kFloat32)) + 1;
      if (comm.rank() == 0) {
        for (int to = 1; to < comm.size(); ++to) works.push_back(comm.begin_send(sent, to));
      } else {
        const auto received = torch::zeros_like(sent);
        comm.recv(received, 0);
        EXPECT_TRUE(received.equal(sent)) << count;
      }
      comm.barrier();
      for (auto& work : works) work.wait();
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
    comm.all_gather(mixed, gpu);
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
    comm.all_gather(all, torch::full({4}, comm.rank(), on_gpu(torch::kFloat32)));
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
  comm.all_gather(out, tensor);
  EXPECT_TRUE(out.eq(3).all().item<bool>());
  const auto scattered = torch::zeros({1000}, on_gpu(torch::kFloat32));
  comm.reduce_scatter(scattered, tensor);
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
  comm.all_gather(out, tensors[4]);
  EXPECT_TRUE(out.eq(4).all().item<bool>());
  comm.reduce_scatter(out, tensors[2], ReduceOp::kMean);
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
}  // namespace lockstep::test::communicator_cuda_test
