#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <thread>

#include "backend_gpu_view.hpp"
#include "ranks/backend_elements.hpp"
#include "ranks/backend_world.hpp"

// What only GPU backends have: memory that is not the host's, streams, and work that is queued.

namespace lockstep::test {
namespace {

GpuView& view_of(const Rank& rank) {
  return dynamic_cast<GpuView&>(*rank.comm);
}

CallContext on_stream(const Rank& rank, std::string_view label = "") {
  CallContext context = rank.in_time(label);
  context.stream = view_of(rank).stream();
  return context;
}

void finish(const Rank& rank) {
  check_cuda(cudaStreamSynchronize(view_of(rank).stream()), "cudaStreamSynchronize");
}

void to_gpu(const Rank& rank, void* gpu, const Elements& host) {
  gpu_copy(gpu, host.buffer().data, host.buffer().bytes(), view_of(rank).stream());
}

void to_host(const Rank& rank, const Elements& host, const void* gpu) {
  gpu_copy(host.buffer().data, gpu, host.buffer().bytes(), view_of(rank).stream());
  finish(rank);
}

double colored(int rank, int64_t i) {
  return static_cast<double>(i % 7 + 10 * rank);
}

double sum_of_colors(int size, int64_t i) {
  return static_cast<double>(size * (i % 7)) + 10 * size * (size - 1) / 2.0;
}

// Elements of F32: processes that share a GPU move the first through the host's memory.
constexpr int64_t kHostStaged = 100'003;
constexpr int64_t kNotHostStaged = 1'100'003;

std::vector<WorldCase> ipc_cases(const std::vector<int>& sizes) {
  std::vector<WorldCase> cases = world_cases(sizes);
  std::erase_if(cases, [](const WorldCase& world) { return world.backend != "ipc"; });
  return cases;
}

using GpuBackends = BackendTest;

// Inside registered memory, at offsets that are aligned, aligned alike on all ranks, and not alike;
// what lies around stays as it was.
TEST_P(GpuBackends, AllReduceWritesExactlyItsPartOfRegisteredMemory) {
  const auto check = [](Rank& rank, int64_t count) {
    constexpr int64_t kRoom = 64;
    const auto memory = view_of(rank).gpu().allocate((count + 2 * kRoom) * 4, on_stream(rank));
    const OwnElements all(count + 2 * kRoom, Dtype::kF32);
    for (const int64_t offset : {kRoom, kRoom + 1, kRoom + 1 + rank.rank % 3}) {
      const auto inside = [&](int64_t i) { return i >= offset && i < offset + count; };
      all->fill([&](int64_t i) { return inside(i) ? colored(rank.rank, i - offset) : -5; });
      to_gpu(rank, memory->data(), *all);
      const Buffer part{static_cast<float*>(memory->data()) + offset, count, Dtype::kF32};
      view_of(rank).gpu().all_reduce(part, ReduceOp::kSum, 1, on_stream(rank))->wait();
      to_host(rank, *all, memory->data());
      const auto expected = [&](int64_t i) {
        return inside(i) ? sum_of_colors(rank.size, i - offset) : -5;
      };
      EXPECT_EQ(all->first_wrong(expected), -1) << "rank " << rank.rank << ", offset " << offset;
      rank.comm->barrier(rank.in_time());
    }
  };
  run_ranks(GetParam(), [&](Rank& rank) {
    check(rank, kHostStaged);
    check(rank, kNotHostStaged);
  });
}

// More than the staging areas hold: pieces follow each other through two slots. What fits into
// both together is one piece.
TEST_P(GpuBackends, PrivateMemoryOfAnySizeGoesThroughStaging) {
  run_ranks(GetParam(), [](Rank& rank) {
    constexpr int64_t kCount =
        (2 * (32 << 20) + (5 << 20)) / 4 + 3;  // three pieces, the last short
    const OwnElements elements(kCount, Dtype::kF32);
    const auto sum = [&](int64_t i) { return sum_of_colors(rank.size, i); };
    for (const int64_t count : {kCount, kCount - (10 << 20) / 4}) {
      elements->fill([&](int64_t i) { return colored(rank.rank, i); });
      const Buffer part{elements->buffer().data, count, Dtype::kF32};
      rank.comm->all_reduce(part, ReduceOp::kSum, 1, rank.in_time())->wait();
      const auto expected = [&](int64_t i) { return i < count ? sum(i) : colored(rank.rank, i); };
      EXPECT_EQ(elements->first_wrong(expected), -1) << count;
    }
    elements->fill([&](int64_t i) { return colored(rank.rank, i); });
    rank.comm->broadcast(elements->buffer(), rank.size - 1, rank.in_time())->wait();
    EXPECT_EQ(elements->first_wrong([&](int64_t i) { return colored(rank.size - 1, i); }), -1);
    const int64_t block = kCount / rank.size;
    const OwnElements part(block, Dtype::kF32);
    rank.comm
        ->reduce_scatter({elements->buffer().data, block * rank.size, Dtype::kF32}, part->buffer(),
                         ReduceOp::kMax, 1, rank.in_time())
        ->wait();
    const auto own_block = [&](int64_t i) { return elements->get(rank.rank * block + i); };
    EXPECT_EQ(part->first_wrong(own_block), -1);
    const OwnElements whole(block * rank.size, Dtype::kF32);
    rank.comm->all_gather(part->const_buffer(), whole->buffer(), rank.in_time())->wait();
    EXPECT_EQ(whole->first_wrong([&](int64_t i) { return elements->get(i); }), -1);
    if (rank.size == 1) return;
    if (rank.rank == 0) rank.comm->send(elements->const_buffer(), 1, 3, rank.in_time())->wait();
    if (rank.rank == 1) {
      elements->fill([](int64_t) { return 0; });
      rank.comm->recv(elements->buffer(), 0, 3, rank.in_time())->wait();
      EXPECT_EQ(elements->first_wrong([&](int64_t i) { return colored(rank.size - 1, i); }), -1);
    }
  });
}

// More in flight than the ring of events has entries, waited for from the end, twice with the same
// bits: values whose sum depends on its order.
TEST_P(GpuBackends, ManyInFlightGiveTheSameBitsInEveryRun) {
  const auto check = [](Rank& rank, int buckets, int64_t count) {
    const int64_t stride = count + 5;
    const auto memory = view_of(rank).gpu().allocate(buckets * stride * 4, on_stream(rank));
    const OwnElements values(buckets * stride, Dtype::kF32);
    const auto run = [&] {
      values->fill([&](int64_t i) { return std::sin(static_cast<double>(i * 3 + rank.rank)); });
      to_gpu(rank, memory->data(), *values);
      std::vector<std::unique_ptr<Backend::Work>> work;
      for (int bucket = 0; bucket < buckets; ++bucket) {
        const Buffer part{static_cast<float*>(memory->data()) + bucket * stride, count,
                          Dtype::kF32};
        work.push_back(view_of(rank).gpu().all_reduce(part, ReduceOp::kMean, rank.rank + 1,
                                                      on_stream(rank, "bucket")));
        if (bucket % 3 == 0) work.front()->advance();
      }
      for (size_t i = work.size(); i > 0; --i) work[i - 1]->wait();
      to_host(rank, *values, memory->data());
      return values.bytes();
    };
    const auto first = run();
    rank.comm->barrier(rank.in_time());
    EXPECT_TRUE(run() == first) << "rank " << rank.rank << ", " << count << " elements each";
  };
  run_ranks(GetParam(), [&](Rank& rank) {
    check(rank, 40, 20'011);
    check(rank, 18, kNotHostStaged);
  });
}

// What a stream waits for until the test lets it go on, but not for ever.
struct Gate {
  std::atomic<bool> open = false;
  std::atomic<bool> gave_up = false;

  static void wait(void* self) {
    auto* gate = static_cast<Gate*>(self);
    for (int ms = 0; ms < 20'000 && !gate->open; ++ms) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (!gate->open) gate->gave_up = true;
  }
};

// Rank 0's stream is busy before it writes the buffer. No host may wait for it in the call, and
// every GPU must.
TEST_P(GpuBackends, CallsWaitForTheStreamAndNotForTheHost) {
  run_ranks(GetParam(), [](Rank& rank) {
    constexpr int64_t kCount = kNotHostStaged;
    const auto memory = view_of(rank).gpu().allocate(kCount * 4, on_stream(rank));
    const Buffer buffer{memory->data(), kCount, Dtype::kF32};
    const OwnElements values(kCount, Dtype::kF32);
    values->fill([&](int64_t i) { return colored(rank.rank, i); });
    const auto all_reduce = [&] {
      view_of(rank).gpu().all_reduce(buffer, ReduceOp::kSum, 1, on_stream(rank))->wait();
    };
    // What the timed part needs lies ready: kernels are loaded, and the values are on the GPU.
    const GpuMemory ready(kCount * 4);
    to_gpu(rank, ready.data(), *values);
    for (int i = 0; i < rank.size; ++i) all_reduce();  // each time another rank's kernel
    finish(rank);
    rank.sync();
    Gate gate;
    if (rank.rank == 0) {
      check_cuda(cudaLaunchHostFunc(view_of(rank).stream(), Gate::wait, &gate),
                 "cudaLaunchHostFunc");
    }
    gpu_copy(memory->data(), ready.data(), kCount * 4, view_of(rank).stream());
    all_reduce();
    // All ranks' calls are done on the host before rank 0's stream goes on.
    rank.shared->numbers[0].fetch_add(1);
    EXPECT_TRUE(wait_until_at_least(rank.shared->numbers[0], rank.size));
    gate.open = true;
    to_host(rank, *values, memory->data());
    EXPECT_FALSE(gate.gave_up) << "a host waited for the GPU";
    EXPECT_EQ(values->first_wrong([&](int64_t i) { return sum_of_colors(rank.size, i); }), -1);
  });
}

// Memory that was dropped is given again, and is zero again.
TEST_P(GpuBackends, DroppedMemoryComesBackZeroed) {
  run_ranks(GetParam(), [](Rank& rank) {
    constexpr int64_t kCount = 3'000'000;
    for (int round = 0; round < 4; ++round) {
      const auto memory = view_of(rank).gpu().allocate(kCount, on_stream(rank));
      const OwnElements bytes(kCount, Dtype::kU8);
      bytes->fill([](int64_t) { return 9; });
      to_host(rank, *bytes, memory->data());
      EXPECT_EQ(bytes->first_wrong([](int64_t) { return 0; }), -1) << "round " << round;
      check_cuda(cudaMemsetAsync(memory->data(), 7, kCount, view_of(rank).stream()),
                 "cudaMemsetAsync");
      finish(rank);
    }
  });
}

TEST_P(GpuBackends, ACapturedStreamIsRefusedAndNothingIsLost) {
  const bool of_ipc = GetParam().backend == "ipc";
  run_ranks(GetParam(), [&](Rank& rank) {
    const auto memory = view_of(rank).gpu().allocate(4096, on_stream(rank));
    const CudaStream stream = view_of(rank).stream();
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
               "cudaStreamBeginCapture");
    const auto caught = catch_error([&] {
      view_of(rank)
          .gpu()
          .all_reduce({memory->data(), 1024, Dtype::kF32}, ReduceOp::kSum, 1, on_stream(rank))
          ->wait();
    });
    cudaGraph_t graph = nullptr;
    check_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
    caught.expect(Code::kCapture, {of_ipc ? "all_reduce of ipc" : "all_reduce"});
    rank.comm->barrier(rank.in_time());
  });
}

INSTANTIATE_TEST_SUITE_P(All, GpuBackends, testing::ValuesIn(world_cases({1, 2, 3})), case_name);

using IpcBackends = BackendTest;

// Rank 0 needs the others in the all_reduce before it sends; they wait for the message first.
TEST_P(IpcBackends, CollectivesGoOnWhileARankWaitsForAMessage) {
  run_ranks(GetParam(), [](Rank& rank) {
    const OwnElements sum(5003, Dtype::kF32);
    const OwnElements note(3, Dtype::kI64);
    sum->fill([](int64_t) { return 1; });
    note->fill([&](int64_t i) { return static_cast<double>(rank.rank == 0 ? i + 40 : 0); });
    const auto work = rank.comm->all_reduce(sum->buffer(), ReduceOp::kSum, 1, rank.in_time());
    if (rank.rank == 0) {
      work->wait();
      for (int to = 1; to < rank.size; ++to) {
        rank.comm->send(note->const_buffer(), to, 0, rank.in_time())->wait();
      }
    } else {
      rank.comm->recv(note->buffer(), 0, 0, rank.in_time())->wait();
      work->wait();
    }
    EXPECT_EQ(note->first_wrong([](int64_t i) { return static_cast<double>(i + 40); }), -1);
    EXPECT_EQ(sum->first_wrong([&](int64_t) { return static_cast<double>(rank.size); }), -1);
  });
}

// Both send more than the slots hold, one after the other, many times: slots are used again only
// when they were taken.
TEST_P(IpcBackends, MessagesInBothDirectionsKeepTheirBytes) {
  run_ranks(GetParam(), [](Rank& rank) {
    if (rank.rank > 1) return;
    const int other = 1 - rank.rank;
    constexpr int64_t kCount = (20 << 20) / 4 + 1;
    const OwnElements elements(kCount, Dtype::kF32);
    for (int round = 0; round < 3; ++round) {
      const auto value = [&](int from) {
        return [from, round](int64_t i) { return colored(from, i + round); };
      };
      for (const int sender : {0, 1}) {
        if (rank.rank == sender) {
          elements->fill(value(sender));
          rank.comm->send(elements->const_buffer(), other, round, rank.in_time())->wait();
        } else {
          rank.comm->recv(elements->buffer(), other, round, rank.in_time())->wait();
          EXPECT_EQ(elements->first_wrong(value(sender)), -1) << "round " << round;
        }
      }
    }
  });
}

// Each rank begins to send to the next one more than the slots hold, and waits for its sends first:
// those are over only when the next rank has taken them, though it waits for a send itself.
TEST_P(IpcBackends, BegunMessagesGoRoundARingWhileAllWaitForTheirSends) {
  run_ranks(GetParam(), [](Rank& rank) {
    const int next = (rank.rank + 1) % rank.size;
    const int before = (rank.rank + rank.size - 1) % rank.size;
    constexpr int64_t kCount = (40 << 20) / 4 + 3;
    constexpr int kMessages = 2;
    std::vector<OwnElements> elements;
    std::vector<std::unique_ptr<Backend::Work>> sends;
    std::vector<std::unique_ptr<Backend::Work>> receives;
    for (int i = 0; i < kMessages; ++i) {
      elements.emplace_back(kCount, Dtype::kF32);
      elements.back()->fill([&](int64_t at) { return colored(rank.rank, at + i); });
      sends.push_back(rank.comm->send(elements.back()->const_buffer(), next, i, rank.in_time()));
    }
    for (int i = 0; i < kMessages; ++i) {
      elements.emplace_back(kCount, Dtype::kF32);
      receives.push_back(rank.comm->recv(elements.back()->buffer(), before, i, rank.in_time()));
    }
    for (const auto& work : sends) work->wait();
    for (const auto& work : receives) work->wait();
    for (int i = 0; i < kMessages; ++i) {
      const auto& received = elements[static_cast<size_t>(kMessages + i)];
      EXPECT_EQ(received->first_wrong([&](int64_t at) { return colored(before, at + i); }), -1);
    }
  });
}

// Rank 0 waits in a collective, to which the others come only when they have its messages.
TEST_P(IpcBackends, BegunMessagesGoOnWhileTheirSenderWaitsInACollective) {
  run_ranks(GetParam(), [](Rank& rank) {
    constexpr int64_t kCount = (40 << 20) / 4 + 3;
    const OwnElements elements(kCount, Dtype::kF32);
    const OwnElements sum(5003, Dtype::kF32);
    sum->fill([](int64_t) { return 1; });
    std::vector<std::unique_ptr<Backend::Work>> sends;
    if (rank.rank == 0) {
      elements->fill([](int64_t i) { return colored(0, i); });
      for (int to = 1; to < rank.size; ++to) {
        sends.push_back(rank.comm->send(elements->const_buffer(), to, 0, rank.in_time()));
      }
    } else {
      rank.comm->recv(elements->buffer(), 0, 0, rank.in_time())->wait();
      EXPECT_EQ(elements->first_wrong([](int64_t i) { return colored(0, i); }), -1);
    }
    rank.comm->all_reduce(sum->buffer(), ReduceOp::kSum, 1, rank.in_time())->wait();
    EXPECT_EQ(sum->first_wrong([&](int64_t) { return static_cast<double>(rank.size); }), -1);
    for (const auto& work : sends) work->wait();
  });
}

INSTANTIATE_TEST_SUITE_P(All, IpcBackends, testing::ValuesIn(ipc_cases({2, 3})), case_name);

}  // namespace
}  // namespace lockstep::test
