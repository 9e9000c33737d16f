#include "backend_elements.hpp"
#include "backend_world.hpp"

// Messages between two ranks, and groups within groups.

namespace lockstep::test {
namespace {

using BackendMessages = BackendTest;

double value_of(int rank, int64_t i, int round) {
  return static_cast<double>((i + rank * 3 + round) % 100);
}

// Once round: each rank adds one and passes it on.
TEST_P(BackendMessages, ARingPassesLargeMessagesOn) {
  run_ranks(GetParam(), [](Rank& rank) {
    const int next = (rank.rank + 1) % rank.size;
    const int before = (rank.rank + rank.size - 1) % rank.size;
    for (const int64_t count : {int64_t{0}, int64_t{1}, int64_t{1027}, int64_t{1'310'723}}) {
      const OwnElements elements(count, Dtype::kF32);
      rank.note("passes on " + std::to_string(count));
      if (rank.rank == 0) {
        elements->fill([](int64_t i) { return value_of(0, i, 0); });
        rank.comm->send(elements->const_buffer(), next, 5, rank.in_time())->wait();
        rank.comm->recv(elements->buffer(), before, 5, rank.in_time())->wait();
        const double added = rank.size - 1;
        EXPECT_EQ(elements->first_wrong([&](int64_t i) { return value_of(0, i, 0) + added; }), -1);
      } else {
        rank.comm->recv(elements->buffer(), before, 5, rank.in_time())->wait();
        for (int64_t i = 0; i < count; ++i) elements->set(i, elements->get(i) + 1);
        rank.comm->send(elements->const_buffer(), next, 5, rank.in_time())->wait();
      }
    }
  });
}

// Rank 0 hears from everybody, in an order of its own; each sender's messages keep their order.
TEST_P(BackendMessages, MessagesKeepTheirOrderTagAndType) {
  run_ranks(GetParam(), [](Rank& rank) {
    const std::vector<Dtype> dtypes = {Dtype::kF32, Dtype::kI64, Dtype::kBF16, Dtype::kF64};
    if (rank.rank != 0) {
      for (int round = 0; round < 4; ++round) {
        const OwnElements elements(100 + round, dtypes[static_cast<size_t>(round)]);
        elements->fill([&](int64_t i) { return value_of(rank.rank, i, round); });
        rank.comm->send(elements->const_buffer(), 0, 10 + round, rank.in_time())->wait();
      }
      return;
    }
    for (int from = rank.size - 1; from > 0; --from) {
      for (int round = 0; round < 4; ++round) {
        const OwnElements elements(100 + round, dtypes[static_cast<size_t>(round)]);
        rank.comm->recv(elements->buffer(), from, 10 + round, rank.in_time())->wait();
        EXPECT_EQ(elements->first_wrong([&](int64_t i) { return value_of(from, i, round); }), -1);
      }
    }
  });
}

// A message does not wait behind collectives that its receiver has not come to yet.
TEST_P(BackendMessages, MessagesPassCollectivesThatAreInFlight) {
  run_ranks(GetParam(), [](Rank& rank) {
    const OwnElements sum(5003, Dtype::kF32);
    const OwnElements note(3, Dtype::kI64);
    sum->fill([](int64_t) { return 1; });
    std::unique_ptr<Backend::Work> work;
    const auto begin = [&] {
      work = rank.comm->all_reduce(sum->buffer(), ReduceOp::kSum, 1, rank.in_time());
    };
    if (rank.rank == 0) {
      begin();
      note->fill([](int64_t i) { return static_cast<double>(i + 40); });
      for (int to = 1; to < rank.size; ++to) {
        rank.comm->send(note->const_buffer(), to, 0, rank.in_time())->wait();
      }
    } else {
      rank.comm->recv(note->buffer(), 0, 0, rank.in_time())->wait();
      EXPECT_EQ(note->first_wrong([](int64_t i) { return static_cast<double>(i + 40); }), -1);
      begin();
    }
    work->wait();
    EXPECT_EQ(sum->first_wrong([&](int64_t) { return static_cast<double>(rank.size); }), -1);
  });
}

// All ranks send to all before anyone receives, large messages too.
TEST_P(BackendMessages, MessagesInFlightNeitherWaitForEachOtherNorLoseTheirOrder) {
  run_ranks(GetParam(), [](Rank& rank) {
    constexpr int64_t kCounts[] = {3, 700'001, 0, 1027};
    std::vector<OwnElements> sent;
    std::vector<OwnElements> received;
    std::vector<std::unique_ptr<Backend::Work>> work;
    for (int peer = 0; peer < rank.size; ++peer) {
      if (peer == rank.rank) continue;
      for (int round = 0; round < 4; ++round) {
        sent.emplace_back(kCounts[round], Dtype::kF32);
        sent.back()->fill([&](int64_t i) { return value_of(rank.rank, i, round); });
        work.push_back(
            rank.comm->send(sent.back()->const_buffer(), peer, round, rank.in_time("flying")));
      }
    }
    rank.note("begins to receive");
    for (int peer = 0; peer < rank.size; ++peer) {
      if (peer == rank.rank) continue;
      for (int round = 0; round < 4; ++round) {
        received.emplace_back(kCounts[round], Dtype::kF32);
        work.push_back(rank.comm->recv(received.back()->buffer(), peer, round, rank.in_time()));
      }
    }
    const OwnElements sum(2003, Dtype::kF32);
    sum->fill([](int64_t) { return 1; });
    rank.comm->all_reduce(sum->buffer(), ReduceOp::kSum, 1, rank.in_time())->wait();
    EXPECT_EQ(sum->first_wrong([&](int64_t) { return static_cast<double>(rank.size); }), -1);
    rank.note("waits in the opposite order");
    if (!work.empty()) {
      while (!work.back()->advance()) {
      }
    }
    for (size_t i = work.size(); i > 0; --i) work[i - 1]->wait();
    size_t next = 0;
    for (int peer = 0; peer < rank.size; ++peer) {
      if (peer == rank.rank) continue;
      for (int round = 0; round < 4; ++round) {
        EXPECT_EQ(
            received[next++]->first_wrong([&](int64_t i) { return value_of(peer, i, round); }), -1)
            << "rank " << rank.rank << ", from " << peer << ", round " << round;
      }
    }
  });
}

TEST_P(BackendMessages, ARankKeepsMessagesToItself) {
  run_ranks(GetParam(), [](Rank& rank) {
    const OwnElements sent(17, Dtype::kF64);
    const OwnElements received(17, Dtype::kF64);
    sent->fill([&](int64_t i) { return value_of(rank.rank, i, 1); });
    rank.comm->send(sent->const_buffer(), rank.rank, 3, rank.in_time())->wait();
    rank.comm->recv(received->buffer(), rank.rank, 3, rank.in_time())->wait();
    EXPECT_EQ(received->first_wrong([&](int64_t i) { return value_of(rank.rank, i, 1); }), -1);
  });
}

// The sum of world ranks over a group tells who is in it.
double sum_of_ranks(Backend& group, const Rank& rank, int64_t count = 1001) {
  const OwnElements elements(count, Dtype::kF64);
  elements->fill([&](int64_t) { return rank.rank; });
  group.all_reduce(elements->buffer(), ReduceOp::kSum, 1, rank.in_time())->wait();
  EXPECT_EQ(elements->first_wrong([&](int64_t) { return elements->get(0); }), -1);
  return elements->get(0);
}

TEST_P(BackendMessages, SplitMakesGroupsByColourOrderedByKey) {
  run_ranks(GetParam(), [](Rank& rank) {
    const int color = rank.rank % 2;
    // Keys count down, so that the order of ranks is turned round.
    const auto part = rank.comm->split(color, -rank.rank, "parity", rank.in_time());
    std::vector<int> expected;
    for (int other = rank.size - 1; other >= 0; --other) {
      if (other % 2 == color) expected.push_back(other);
    }
    EXPECT_EQ(part->group().world_ranks, expected);
    EXPECT_EQ(part->group().name, "parity");
    EXPECT_EQ(expected.at(static_cast<size_t>(part->rank())), rank.rank);
    double sum = 0;
    for (const int other : expected) sum += other;
    // Both groups work at the same time, and the world between them.
    for (int round = 0; round < 5; ++round) {
      EXPECT_EQ(sum_of_ranks(*part, rank), sum);
      EXPECT_EQ(sum_of_ranks(*rank.comm, rank), rank.size * (rank.size - 1) / 2.0);
    }
  });
}

TEST_P(BackendMessages, EqualKeysKeepTheOrderAndGroupsNest) {
  run_ranks(GetParam(), [](Rank& rank) {
    const auto all = rank.comm->split(0, 0, "all", rank.in_time());
    EXPECT_EQ(all->rank(), rank.rank);
    EXPECT_EQ(all->size(), rank.size);
    const auto halves = all->split(rank.rank * 2 / rank.size, 0, "half", rank.in_time());
    const auto alone = halves->split(halves->rank(), 0, "alone", rank.in_time());
    EXPECT_EQ(alone->size(), 1);
    EXPECT_EQ(alone->group().world_ranks, std::vector<int>{rank.rank});
    EXPECT_EQ(sum_of_ranks(*alone, rank), rank.rank);
    double sum = 0;
    for (const int other : halves->group().world_ranks) sum += other;
    EXPECT_EQ(sum_of_ranks(*halves, rank, 300'001), sum);
    // A group outlives its parent.
    const auto memory = halves->allocate(8000, rank.in_time());
    const Elements elements(memory->data(), 1000, Dtype::kF64);
    elements.fill([&](int64_t) { return rank.rank; });
    rank.comm->barrier(rank.in_time());
    rank.comm.reset();
    halves->all_reduce(elements.buffer(), ReduceOp::kSum, 1, rank.in_time())->wait();
    EXPECT_EQ(elements.first_wrong([&](int64_t) { return sum; }), -1);
  });
}

INSTANTIATE_TEST_SUITE_P(All, BackendMessages, testing::ValuesIn(world_cases({1, 2, 3, 5})),
                         case_name);

}  // namespace
}  // namespace lockstep::test
