#include <cstdint>
#include <tuple>

#include "backend_elements.hpp"
#include "backend_world.hpp"

// Every operation of every backend, with values whose results are known in closed form.

namespace lockstep::test {
namespace {

constexpr Dtype kDtypes[] = {Dtype::kF32, Dtype::kF64, Dtype::kBF16, Dtype::kF16, Dtype::kI64};
constexpr int64_t kSizes[] = {0, 1, 1027};
constexpr int64_t kLarge = 1'310'723;  // 5 MiB of F32, and no multiple of anything

// Rank r's element i: colored by the rank, and so small that sums are exact in every type.
double colored(int rank, int64_t i) {
  return static_cast<double>(i % 5 + rank);
}

double sum_of_colors(int size, int64_t i) {
  return static_cast<double>(size * (i % 5)) + size * (size - 1) / 2.0;
}

// Rank r weighs r + 1.
double weighted_mean(int size, int64_t i) {
  double sum = 0;
  double weights = 0;
  for (int rank = 0; rank < size; ++rank) {
    sum += (rank + 1) * colored(rank, i);
    weights += rank + 1;
  }
  return sum / weights;
}

double reduced(ReduceOp op, int size, int64_t i) {
  switch (op) {
    case ReduceOp::kSum:
      return sum_of_colors(size, i);
    case ReduceOp::kMax:
      return colored(size - 1, i);
    case ReduceOp::kMin:
      return colored(0, i);
    case ReduceOp::kMean:
      return weighted_mean(size, i);
  }
  return 0;
}

// Sums, maxima and minima of these values are exact; each rank's share of a mean is rounded.
double allowed_ulps(ReduceOp op, int size) {
  return op == ReduceOp::kMean && size > 1 ? 2.0 * size : 0;
}

std::vector<ReduceOp> ops_of(Dtype dtype) {
  if (dtype == Dtype::kI64) return {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin};
  return {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin, ReduceOp::kMean};
}

void all_reduce(Rank& rank, const Elements& elements, ReduceOp op) {
  rank.comm->all_reduce(elements.buffer(), op, rank.rank + 1, rank.in_time())->wait();
}

void expect_all_reduces(Rank& rank, const Elements& elements, ReduceOp op) {
  elements.fill([&](int64_t i) { return colored(rank.rank, i); });
  all_reduce(rank, elements, op);
  const auto expected = [&](int64_t i) { return reduced(op, rank.size, i); };
  const int64_t wrong = elements.first_wrong(expected, allowed_ulps(op, rank.size));
  EXPECT_EQ(wrong, -1) << "rank " << rank.rank << ", " << elements.count() << " x "
                       << dtype_name(elements.buffer().dtype) << ", op " << static_cast<int>(op)
                       << ": " << elements.get(wrong) << " for " << expected(wrong);
}

using BackendOperations = BackendTest;

TEST_P(BackendOperations, AllReduceReducesEveryDtypeSizeAndOp) {
  run_ranks(GetParam(), [](Rank& rank) {
    for (const Dtype dtype : kDtypes) {
      for (const int64_t count : kSizes) {
        for (const ReduceOp op : ops_of(dtype)) {
          rank.note("all_reduce " + std::to_string(count) + std::string(dtype_name(dtype)));
          const OwnElements elements(count, dtype);
          expect_all_reduces(rank, *elements, op);
        }
      }
    }
    const OwnElements large(kLarge, Dtype::kF32);
    expect_all_reduces(rank, *large, ReduceOp::kSum);
    expect_all_reduces(rank, *large, ReduceOp::kMean);
    const OwnElements large_half(kLarge, Dtype::kBF16);
    expect_all_reduces(rank, *large_half, ReduceOp::kSum);
  });
}

// Memory that peers reach on all ranks, on every second one, and at odd offsets inside.
TEST_P(BackendOperations, AllReduceTakesReachableAndPrivateMemoryMixed) {
  run_ranks(GetParam(), [](Rank& rank) {
    for (const int64_t count : {int64_t{1027}, kLarge}) {
      const auto memory = rank.comm->allocate((count + 3) * 4, rank.in_time());
      const Elements registered(memory->data(), count, Dtype::kF32);
      const OwnElements own(count, Dtype::kF32);
      expect_all_reduces(rank, registered, ReduceOp::kSum);
      expect_all_reduces(rank, rank.rank % 2 == 0 ? registered : *own, ReduceOp::kSum);
      expect_all_reduces(rank, rank.rank % 2 == 0 ? *own : registered, ReduceOp::kMean);
      const Elements inside(static_cast<std::byte*>(memory->data()) + 4 * (rank.rank % 3), count,
                            Dtype::kF32);
      expect_all_reduces(rank, inside, ReduceOp::kMax);
    }
  });
}

TEST_P(BackendOperations, ManyAllReducesAreInFlightWhileOtherCallsAreMade) {
  run_ranks(GetParam(), [](Rank& rank) {
    const std::vector<int64_t> counts = {1, 70'001, 0, 1027, 300'007, 3};
    const auto memory = rank.comm->allocate(400'000 * 4, rank.in_time());
    std::vector<OwnElements> own;
    std::vector<Elements> flying;
    for (const int64_t count : counts) own.emplace_back(count, Dtype::kF32);
    for (size_t i = 0; i < counts.size(); ++i) {
      flying.push_back(i == 4 ? Elements(memory->data(), counts[i], Dtype::kF32) : *own[i]);
    }
    std::vector<std::unique_ptr<Backend::Work>> work;
    for (const Elements& elements : flying) {
      elements.fill([&](int64_t i) { return colored(rank.rank, i); });
      work.push_back(
          rank.comm->all_reduce(elements.buffer(), ReduceOp::kSum, 1, rank.in_time("flying")));
      if (work.size() == 2) work.front()->advance();
    }
    rank.note("broadcasts while six all_reduces fly");
    const OwnElements told(11, Dtype::kI64);
    told->fill([&](int64_t i) { return colored(rank.rank, i); });
    rank.comm->broadcast(told->buffer(), rank.size - 1, rank.in_time())->wait();
    EXPECT_EQ(told->first_wrong([&](int64_t i) { return colored(rank.size - 1, i); }), -1);
    rank.comm->barrier(rank.in_time());
    rank.note("advances");
    while (!work[3]->advance()) {
    }
    for (size_t i = work.size(); i > 0; --i) work[i - 1]->wait();
    for (const auto& one : work) EXPECT_TRUE(one->advance());
    for (const Elements& elements : flying) {
      EXPECT_EQ(elements.first_wrong([&](int64_t i) { return sum_of_colors(rank.size, i); }), -1);
    }
  });
}

TEST_P(BackendOperations, BroadcastGivesTheRootsElementsToAll) {
  run_ranks(GetParam(), [](Rank& rank) {
    const auto expect_broadcast = [&](int64_t count, Dtype dtype, int root) {
      const OwnElements elements(count, dtype);
      elements->fill([&](int64_t i) { return colored(rank.rank, i); });
      rank.comm->broadcast(elements->buffer(), root, rank.in_time())->wait();
      EXPECT_EQ(elements->first_wrong([&](int64_t i) { return colored(root, i); }), -1)
          << "rank " << rank.rank << ", root " << root << ", count " << count;
    };
    for (int root = 0; root < rank.size; ++root) {
      for (const Dtype dtype : kDtypes) {
        for (const int64_t count : kSizes) expect_broadcast(count, dtype, root);
      }
    }
    expect_broadcast(kLarge, Dtype::kF32, rank.size - 1);
    const auto memory = rank.comm->allocate(kLarge * 4, rank.in_time());
    const Elements registered(memory->data(), kLarge, Dtype::kF32);
    registered.fill([&](int64_t i) { return colored(rank.rank, i); });
    rank.comm->broadcast(registered.buffer(), 0, rank.in_time())->wait();
    EXPECT_EQ(registered.first_wrong([&](int64_t i) { return colored(0, i); }), -1);
  });
}

// Block b of rank r holds colored(r, i) + b, so that a block in the wrong position shows.
TEST_P(BackendOperations, ReduceScatterGivesEachRankItsBlock) {
  run_ranks(GetParam(), [](Rank& rank) {
    const auto expect_reduce_scatter = [&](int64_t count, Dtype dtype, ReduceOp op) {
      const OwnElements input(count * rank.size, dtype);
      const OwnElements output(count, dtype);
      input->fill([&](int64_t i) {
        return colored(rank.rank, i % std::max<int64_t>(count, 1)) +
               static_cast<double>(i / std::max<int64_t>(count, 1));
      });
      const auto before = input.bytes();
      rank.comm
          ->reduce_scatter(input->const_buffer(), output->buffer(), op, rank.rank + 1,
                           rank.in_time())
          ->wait();
      const double shift = op == ReduceOp::kSum ? rank.rank * rank.size : rank.rank;
      const auto expected = [&](int64_t i) { return reduced(op, rank.size, i) + shift; };
      EXPECT_EQ(output->first_wrong(expected, allowed_ulps(op, rank.size)), -1)
          << "rank " << rank.rank << ", count " << count << " " << dtype_name(dtype);
      EXPECT_EQ(input.bytes(), before) << "the input was written";
    };
    for (const Dtype dtype : kDtypes) {
      for (const int64_t count : kSizes) {
        for (const ReduceOp op : ops_of(dtype)) expect_reduce_scatter(count, dtype, op);
      }
    }
    expect_reduce_scatter(kLarge / rank.size, Dtype::kF32, ReduceOp::kSum);
  });
}

TEST_P(BackendOperations, AllGatherGivesEveryRanksBlockToAll) {
  run_ranks(GetParam(), [](Rank& rank) {
    const auto expect_all_gather = [&](int64_t count, Dtype dtype) {
      const OwnElements input(count, dtype);
      const OwnElements output(count * rank.size, dtype);
      input->fill([&](int64_t i) { return colored(rank.rank, i); });
      rank.comm->all_gather(input->const_buffer(), output->buffer(), rank.in_time())->wait();
      const auto expected = [&](int64_t i) {
        return colored(static_cast<int>(i / count), i % count);
      };
      EXPECT_EQ(output->first_wrong(expected), -1) << "rank " << rank.rank << ", count " << count;
    };
    for (const Dtype dtype : kDtypes) {
      for (const int64_t count : kSizes) expect_all_gather(count, dtype);
    }
    expect_all_gather(kLarge / rank.size, Dtype::kF32);
  });
}

TEST_P(BackendOperations, ReduceGivesTheRootTheResultAndLeavesTheOthersAlone) {
  run_ranks(GetParam(), [](Rank& rank) {
    const auto expect_reduce = [&](const Elements& elements, ReduceOp op, int root) {
      elements.fill([&](int64_t i) { return colored(rank.rank, i); });
      rank.comm->reduce(elements.buffer(), root, op, rank.rank + 1, rank.in_time())->wait();
      const bool is_root = rank.rank == root;
      const auto expected = [&](int64_t i) {
        return is_root ? reduced(op, rank.size, i) : colored(rank.rank, i);
      };
      EXPECT_EQ(elements.first_wrong(expected, is_root ? allowed_ulps(op, rank.size) : 0), -1)
          << "rank " << rank.rank << ", root " << root << ", " << elements.count() << " x "
          << dtype_name(elements.buffer().dtype);
    };
    for (const Dtype dtype : kDtypes) {
      for (const int64_t count : kSizes) {
        const OwnElements elements(count, dtype);
        for (const ReduceOp op : ops_of(dtype)) {
          expect_reduce(*elements, op, static_cast<int>(count) % rank.size);
        }
      }
    }
    const OwnElements large(kLarge, Dtype::kF32);
    expect_reduce(*large, ReduceOp::kSum, rank.size - 1);
    const auto memory = rank.comm->allocate(kLarge * 4, rank.in_time());
    const Elements registered(memory->data(), kLarge, Dtype::kF32);
    expect_reduce(registered, ReduceOp::kSum, 0);
    expect_reduce(rank.rank % 2 == 0 ? registered : *large, ReduceOp::kMax, 0);
  });
}

// Rank r's element i for rank p.
double addressed(int from, int to, int64_t i) {
  return static_cast<double>((from * 7 + to * 3 + i) % 100);
}

// What ranks give each other depends on both: from nothing to several chunks.
TEST_P(BackendOperations, ExchangeMovesBlocksOfAnyCounts) {
  run_ranks(GetParam(), [](Rank& rank) {
    const auto counts_between = [&](int from, int to, int64_t scale) {
      return (from + 2 * to) % 3 * scale + (from == 0 ? 1 : 0);
    };
    const auto expect_exchange = [&](Dtype dtype, int64_t scale, bool registered) {
      std::vector<int64_t> given;
      std::vector<int64_t> taken;
      for (int peer = 0; peer < rank.size; ++peer) {
        given.push_back(counts_between(rank.rank, peer, scale));
        taken.push_back(counts_between(peer, rank.rank, scale));
      }
      const BlockExchange blocks = BlockExchange::all_to_all(given, taken);
      const auto memory = rank.comm->allocate(
          static_cast<int64_t>(rank.size) * 3 * (scale + 1) * dtype_bytes(dtype), rank.in_time());
      const OwnElements own(blocks.given_count(), dtype);
      const Elements input =
          registered ? Elements(memory->data(), blocks.given_count(), dtype) : *own;
      const OwnElements output(blocks.taken_count(), dtype);
      int to = 0;
      input.fill([&](int64_t i) {
        while (i >= blocks.given_offset(to) + given[static_cast<size_t>(to)]) ++to;
        return addressed(rank.rank, to, i - blocks.given_offset(to));
      });
      rank.comm->exchange(input.const_buffer(), output->buffer(), blocks, rank.in_time())->wait();
      int from = 0;
      EXPECT_EQ(output->first_wrong([&](int64_t i) {
        while (i >= blocks.taken_offset(from) + taken[static_cast<size_t>(from)]) ++from;
        return addressed(from, rank.rank, i - blocks.taken_offset(from));
      }),
                -1)
          << "rank " << rank.rank << ", scale " << scale;
    };
    for (const Dtype dtype : kDtypes) {
      for (const int64_t scale : {0, 1, 40, 3000}) expect_exchange(dtype, scale, false);
    }
    for (const bool registered : {false, true}) {
      expect_exchange(Dtype::kF32, 200'003, registered);
      expect_exchange(Dtype::kF32, 5, registered);
    }
  });
}

TEST_P(BackendOperations, GatherAndScatterAndAllGatherOfDifferentCounts) {
  run_ranks(GetParam(), [](Rank& rank) {
    const auto exchange = [&](const Elements& input, const Elements& output,
                              const BlockExchange& blocks) {
      rank.comm->exchange(input.const_buffer(), output.buffer(), blocks, rank.in_time())->wait();
    };
    for (int root = 0; root < rank.size; ++root) {
      for (const int64_t count : {int64_t{0}, int64_t{5}, int64_t{100'003}}) {
        const bool is_root = rank.rank == root;
        const OwnElements block(count, Dtype::kF32);
        const OwnElements blocks(is_root ? count * rank.size : 0, Dtype::kF32);
        block->fill([&](int64_t i) { return colored(rank.rank, i); });
        exchange(*block, *blocks, BlockExchange::gather(rank.comm->group(), count, root));
        EXPECT_EQ(blocks->first_wrong(
                      [&](int64_t i) { return colored(static_cast<int>(i / count), i % count); }),
                  -1);
        if (is_root)
          blocks->fill([&](int64_t i) { return colored(static_cast<int>(i / count), i); });
        exchange(*blocks, *block, BlockExchange::scatter(rank.comm->group(), count, root));
        EXPECT_EQ(block->first_wrong(
                      [&](int64_t i) { return colored(rank.rank, rank.rank * count + i); }),
                  -1);
      }
    }
    for (const int64_t scale : {int64_t{0}, int64_t{3}, int64_t{90'001}}) {
      std::vector<int64_t> counts;
      for (int peer = 0; peer < rank.size; ++peer) counts.push_back(peer * scale);
      const BlockExchange blocks = BlockExchange::all_gather(rank.comm->group(), counts);
      const OwnElements input(blocks.given_count(), Dtype::kI64);
      const OwnElements output(blocks.taken_count(), Dtype::kI64);
      input->fill([&](int64_t i) { return colored(rank.rank, i); });
      exchange(*input, *output, blocks);
      int from = 0;
      EXPECT_EQ(output->first_wrong([&](int64_t i) {
        while (i >= blocks.taken_offset(from) + counts[static_cast<size_t>(from)]) ++from;
        return colored(from, i - blocks.taken_offset(from));
      }),
                -1);
    }
  });
}

// The smaller side is this rank's block of the larger one, in memory that peers reach and in
// private memory, and on every second rank in the one or the other.
TEST_P(BackendOperations, ReduceScatterAndAllGatherWorkInPlace) {
  run_ranks(GetParam(), [](Rank& rank) {
    const auto expect_in_place = [&](const Elements& blocks, int64_t count, Dtype dtype) {
      const Elements own(
          static_cast<std::byte*>(blocks.buffer().data) + rank.rank * count * dtype_bytes(dtype),
          count, dtype);
      const auto block_of = [&](int64_t i) { return static_cast<int>(i / count); };
      blocks.fill([&](int64_t i) { return colored(rank.rank, i % count) + block_of(i); });
      rank.comm
          ->reduce_scatter(blocks.const_buffer(), own.buffer(), ReduceOp::kSum, 1, rank.in_time())
          ->wait();
      const auto scattered = [&](int64_t i) {
        if (block_of(i) != rank.rank) return colored(rank.rank, i % count) + block_of(i);
        return sum_of_colors(rank.size, i % count) + rank.rank * rank.size;
      };
      EXPECT_EQ(blocks.first_wrong(scattered), -1) << "rank " << rank.rank << ", count " << count;
      rank.comm->all_gather(own.const_buffer(), blocks.buffer(), rank.in_time())->wait();
      const auto gathered = [&](int64_t i) {
        return sum_of_colors(rank.size, i % count) + block_of(i) * rank.size;
      };
      EXPECT_EQ(blocks.first_wrong(gathered), -1) << "rank " << rank.rank << ", count " << count;
    };
    for (const int64_t count : {int64_t{1}, int64_t{100}, int64_t{1027}, kLarge / rank.size}) {
      const auto memory = rank.comm->allocate(count * rank.size * 4, rank.in_time());
      const Elements registered(memory->data(), count * rank.size, Dtype::kF32);
      const OwnElements own(count * rank.size, Dtype::kF32);
      expect_in_place(registered, count, Dtype::kF32);
      expect_in_place(*own, count, Dtype::kF32);
      expect_in_place(rank.rank % 2 == 0 ? registered : *own, count, Dtype::kF32);
    }
  });
}

TEST_P(BackendOperations, CollectivesOfAllKindsAreInFlightTogether) {
  run_ranks(GetParam(), [](Rank& rank) {
    constexpr int64_t kCounts[] = {0, 3, 1027, 50'003};
    std::vector<OwnElements> inputs;
    std::vector<OwnElements> scattered;
    std::vector<OwnElements> gathered;
    std::vector<OwnElements> told;
    for (const int64_t count : kCounts) {
      inputs.emplace_back(count * rank.size, Dtype::kF32);
      inputs.back()->fill([&](int64_t i) { return colored(rank.rank, i % count) + i / count; });
      scattered.emplace_back(count, Dtype::kF32);
      gathered.emplace_back(count * rank.size, Dtype::kF32);
      told.emplace_back(count, Dtype::kF32);
      told.back()->fill([&](int64_t i) { return colored(rank.rank, i); });
    }
    std::vector<std::unique_ptr<Backend::Work>> work;
    for (size_t i = 0; i < std::size(kCounts); ++i) {
      const ConstBuffer block{inputs[i]->buffer().data, kCounts[i], Dtype::kF32};
      work.push_back(rank.comm->reduce_scatter(inputs[i]->const_buffer(), scattered[i]->buffer(),
                                               ReduceOp::kSum, 1, rank.in_time()));
      work.push_back(rank.comm->all_gather(block, gathered[i]->buffer(), rank.in_time()));
      work.push_back(rank.comm->broadcast(told[i]->buffer(), rank.size - 1, rank.in_time()));
    }
    rank.note("advances");
    while (!work[4]->advance()) {
    }
    for (size_t i = work.size(); i > 0; --i) work[i - 1]->wait();
    for (size_t i = 0; i < std::size(kCounts); ++i) {
      const int64_t count = kCounts[i];
      EXPECT_EQ(scattered[i]->first_wrong([&](int64_t at) {
        return sum_of_colors(rank.size, at) + rank.rank * rank.size;
      }),
                -1);
      EXPECT_EQ(gathered[i]->first_wrong(
                    [&](int64_t at) { return colored(static_cast<int>(at / count), at % count); }),
                -1);
      EXPECT_EQ(told[i]->first_wrong([&](int64_t at) { return colored(rank.size - 1, at); }), -1);
    }
  });
}

// Nobody leaves before all have come: the number counts those who came.
TEST_P(BackendOperations, BarrierLetsNobodyThroughBeforeAllAreThere) {
  run_ranks(GetParam(), [](Rank& rank) {
    for (int round = 1; round <= 20; ++round) {
      rank.shared->numbers[0].fetch_add(1);
      rank.comm->barrier(rank.in_time());
      EXPECT_GE(rank.shared->numbers[0].load(), round * rank.size);
      rank.comm->barrier(rank.in_time());
    }
  });
}

TEST_P(BackendOperations, AllocateGivesZeroedPages) {
  run_ranks(GetParam(), [](Rank& rank) {
    for (const int64_t bytes : {int64_t{0}, int64_t{1}, int64_t{4096}, int64_t{3'000'001}}) {
      const auto memory = rank.comm->allocate(bytes, rank.in_time());
      EXPECT_EQ(memory->bytes(), bytes);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(memory->data()) % 4096, 0u);
      const Elements elements(memory->data(), bytes, Dtype::kU8);
      EXPECT_EQ(elements.first_wrong([](int64_t) { return 0; }), -1);
      elements.fill([](int64_t) { return 7; });
    }
    // What was freed and is given again is zeroed again.
    for (int round = 0; round < 3; ++round) {
      const auto memory = rank.comm->allocate(100'000, rank.in_time());
      const Elements elements(memory->data(), 100'000, Dtype::kU8);
      EXPECT_EQ(elements.first_wrong([](int64_t) { return 0; }), -1);
      elements.fill([](int64_t) { return 9; });
    }
  });
}

// Every rank writes its own part and reads the others'.
TEST_P(BackendOperations, SharedMemoryIsTheSameOnAllRanks) {
  run_ranks(GetParam(), [](Rank& rank) {
    if (!rank.comm->can_share()) return;
    for (const int64_t count : {int64_t{1}, int64_t{1027}, kLarge}) {
      const auto memory = rank.comm->allocate_shared(count * 4, rank.in_time());
      EXPECT_EQ(memory->bytes(), count * 4);
      const Elements all(memory->data(), count, Dtype::kF32);
      EXPECT_EQ(all.first_wrong([](int64_t) { return 0; }), -1);
      rank.comm->barrier(rank.in_time());
      const int64_t begin = rank.rank * count / rank.size;
      const int64_t end = (rank.rank + 1) * count / rank.size;
      const Elements own(static_cast<float*>(memory->data()) + begin, end - begin, Dtype::kF32);
      own.fill([&](int64_t i) { return colored(rank.rank, begin + i); });
      rank.comm->barrier(rank.in_time());
      int owner = 0;
      const auto expected = [&](int64_t i) {
        while (i >= (owner + 1) * count / rank.size) ++owner;
        return colored(owner, i);
      };
      EXPECT_EQ(all.first_wrong(expected), -1) << "rank " << rank.rank << ", count " << count;
      // A part of it is memory that peers reach, like any other.
      const OwnElements gathered(rank.size, Dtype::kF32);
      rank.comm->barrier(rank.in_time());
      rank.comm->all_gather({memory->data(), 1, Dtype::kF32}, gathered->buffer(), rank.in_time())
          ->wait();
      const double first = colored(rank.size > count ? rank.size - 1 : 0, 0);
      EXPECT_EQ(gathered->first_wrong([&](int64_t) { return first; }), -1);
    }
    EXPECT_EQ(rank.comm->allocate_shared(0, rank.in_time())->bytes(), 0);
  });
}

uint64_t hash_of(const std::vector<std::byte>& bytes) {
  uint64_t hash = 1469598103934665603u;
  for (const std::byte byte : bytes) hash = (hash ^ static_cast<uint64_t>(byte)) * 1099511628211u;
  return hash;
}

// Values whose sum depends on the order of summation in every bit.
TEST_P(BackendOperations, ResultsAreTheSameBitsOnAllRanksAndInEveryRun) {
  const auto hash_once = [](Rank& rank, Dtype dtype, ReduceOp op) {
    const OwnElements elements(100'003, dtype);
    elements->fill([&](int64_t i) {
      return std::sin(static_cast<double>(i * 7 + rank.rank * 1009 + 1)) * std::exp2(i % 9 - 4);
    });
    all_reduce(rank, *elements, op);
    return static_cast<int64_t>(hash_of(elements.bytes()));
  };
  const auto hash_of_run = [&] {
    return run_ranks(GetParam(), [&](Rank& rank) {
      size_t slot = 0;
      for (const auto& [dtype, op] :
           {std::pair{Dtype::kF32, ReduceOp::kSum}, std::pair{Dtype::kF64, ReduceOp::kMean},
            std::pair{Dtype::kBF16, ReduceOp::kMean}}) {
        const int64_t own = hash_once(rank, dtype, op);
        std::vector<int64_t> all(static_cast<size_t>(rank.size));
        rank.comm
            ->all_gather({&own, 1, Dtype::kI64}, {all.data(), rank.size, Dtype::kI64},
                         rank.in_time())
            ->wait();
        EXPECT_EQ(all, std::vector<int64_t>(all.size(), own)) << "ranks differ";
        rank.shared->numbers[slot++] = own;
      }
    });
  };
  const auto first = hash_of_run();
  EXPECT_NE(first[0], 0);
  EXPECT_EQ(hash_of_run(), first) << "the same all_reduces gave other bits";
}

INSTANTIATE_TEST_SUITE_P(All, BackendOperations, testing::ValuesIn(world_cases({1, 2, 3, 5})),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Hosts, BackendOperations, testing::ValuesIn(host_cases()), case_name);

}  // namespace
}  // namespace lockstep::test
