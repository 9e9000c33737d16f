#include <numeric>

#include "backend_elements.hpp"
#include "backend_world.hpp"
#include "comm/two_level/host_map.hpp"

// What only collectives in two levels have: hosts, slices, and groups that lie in one of them.

namespace lockstep::test {
namespace {

using TwoLevel = BackendTest;

TEST(HostMap, NumbersHostsByTheirFirstRanks) {
  const std::vector<std::string> identities = {"b", "a", "b", "c"};
  const HostMap hosts(identities, 2);
  EXPECT_EQ(hosts.hosts(), 3);
  EXPECT_EQ(hosts.members(0), (std::vector{0, 2}));
  EXPECT_EQ(hosts.host(), 0);
  EXPECT_EQ(hosts.local_rank(), 1);
  EXPECT_EQ(hosts.largest(), 2);
  EXPECT_FALSE(hosts.in_order());
  const std::vector<std::string> blocks = {"x", "x", "y"};
  EXPECT_TRUE(HostMap(blocks, 0).in_order());
}

TEST(HostMap, SlicesCoverARegionOnce) {
  for (const int64_t count : {0, 1, 2, 7, 64, 1000}) {
    for (const int owners : {1, 2, 3, 8}) {
      int64_t end = 0;
      for (int owner = 0; owner < owners; ++owner) {
        const ElementRange slice = slice_of(count, owners, owner);
        EXPECT_EQ(slice.begin, end);
        end = slice.end;
      }
      EXPECT_EQ(end, count);
    }
  }
  EXPECT_EQ(overlap({0, 5}, {3, 9}).count(), 2);
  EXPECT_EQ(overlap({0, 5}, {7, 9}).count(), 0);
}

// Groups inside a host, across hosts, with one rank of each host, and of one rank: the parts of a
// split are what their ranks' places make them.
TEST_P(TwoLevel, PartsLieInOneHostOrAcross) {
  run_ranks(GetParam(), [](Rank& rank) {
    const auto expect_sum = [&](Backend& part, const std::vector<int>& ranks) {
      for (const int64_t count : {3, 10'007}) {
        const OwnElements elements(count, Dtype::kF32);
        elements->fill([&](int64_t i) { return static_cast<double>(rank.rank + i % 3); });
        part.all_reduce(elements->buffer(), ReduceOp::kSum, 1, rank.in_time())->wait();
        const int sum = std::accumulate(ranks.begin(), ranks.end(), 0);
        const auto size = static_cast<int64_t>(ranks.size());
        EXPECT_EQ(elements->first_wrong(
                      [&](int64_t i) { return static_cast<double>(sum + size * (i % 3)); }),
                  -1)
            << "rank " << rank.rank << ", " << count;
      }
    };
    const std::string hosts = GetParam().hosts;
    const auto host_of = [&](int number) { return hosts[static_cast<size_t>(number)]; };
    std::vector<int> inside;
    std::vector<int> odd_or_even;
    for (int peer = 0; peer < rank.size; ++peer) {
      if (host_of(peer) == host_of(rank.rank)) inside.push_back(peer);
      if (peer % 2 == rank.rank % 2) odd_or_even.push_back(peer);
    }
    const auto of_host = rank.comm->split(host_of(rank.rank), 0, "of a host", rank.in_time());
    EXPECT_EQ(of_host->group().world_ranks, inside);
    EXPECT_EQ(of_host->name(), inside.size() > 1 ? "shm" : of_host->name());
    expect_sum(*of_host, inside);
    const auto across = rank.comm->split(rank.rank % 2, 0, "across", rank.in_time());
    EXPECT_EQ(across->group().world_ranks, odd_or_even);
    expect_sum(*across, odd_or_even);
    const auto alone = rank.comm->split(rank.rank, 0, "alone", rank.in_time());
    expect_sum(*alone, {rank.rank});
  });
}

// A mean over hosts counts each rank as it weighs, also where all of a host weigh nothing.
TEST_P(TwoLevel, AMeanOfUnequalHostsIsThatOfTheirRanks) {
  run_ranks(GetParam(), [](Rank& rank) {
    for (const bool first_host_counts : {true, false}) {
      const auto weight_of = [&](int number) {
        const bool first = GetParam().hosts[static_cast<size_t>(number)] == '0';
        return first && !first_host_counts ? 0.0 : number + 1.0;
      };
      double sum = 0;
      double weights = 0;
      for (int peer = 0; peer < rank.size; ++peer) {
        sum += weight_of(peer) * (peer + 2);
        weights += weight_of(peer);
      }
      for (const int64_t count : {2, 9'001}) {
        const OwnElements elements(count, Dtype::kF64);
        elements->fill([&](int64_t) { return rank.rank + 2; });
        rank.comm
            ->all_reduce(elements->buffer(), ReduceOp::kMean, weight_of(rank.rank), rank.in_time())
            ->wait();
        EXPECT_EQ(elements->first_wrong([&](int64_t) { return sum / weights; }, 16), -1);
      }
    }
  });
}

// Whether few values travel with the fingerprints, or many in slices, chunk by chunk: an element's
// bits depend on the ranks' values alone.
TEST_P(TwoLevel, AnElementHasTheSameBitsInACallOfAnySize) {
  run_ranks(GetParam(), [](Rank& rank) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean}) {
      const auto reduced = [&](int64_t count) {
        OwnElements elements(count, Dtype::kF32);
        elements->fill([&](int64_t i) { return 1.0 / (rank.rank + 3 + i % 97); });
        rank.comm->all_reduce(elements->buffer(), op, rank.rank + 1, rank.in_time())->wait();
        return elements;
      };
      const auto few = reduced(97);
      for (const int64_t count : {5'003, 300'007}) {
        const auto many = reduced(count);
        EXPECT_EQ(many->first_wrong([&](int64_t i) { return few->get(i % 97); }), -1) << count;
      }
      constexpr int64_t kBlock = 2'003;
      OwnElements all(kBlock * rank.size, Dtype::kF32);
      all->fill([&](int64_t i) { return 1.0 / (rank.rank + 3 + i % 97); });
      OwnElements own(kBlock, Dtype::kF32);
      rank.comm
          ->reduce_scatter(all->const_buffer(), own->buffer(), op, rank.rank + 1, rank.in_time())
          ->wait();
      const int64_t first = kBlock * rank.rank;
      EXPECT_EQ(own->first_wrong([&](int64_t i) { return few->get((first + i) % 97); }), -1);
    }
  });
}

// A message between neighbours that nobody waits for yet moves on while its sender waits in another
// call: the receiver may be why that call is not done.
TEST_P(TwoLevel, AMessageToANeighbourMovesWhileItsSenderWaitsElsewhere) {
  run_ranks(GetParam(), [](Rank& rank) {
    const std::string hosts = GetParam().hosts;
    const int other = static_cast<int>(hosts.find(hosts[0], 1));
    constexpr int64_t kMuch = 4 << 20;  // does not fit into what a pair of ranks has for messages
    const OwnElements elements(rank.rank == 0 || rank.rank == other ? kMuch : 0, Dtype::kF32);
    std::unique_ptr<Backend::Work> sent;
    if (rank.rank == 0) {
      elements->fill([](int64_t i) { return static_cast<double>(i % 1000); });
      sent = rank.comm->send(elements->const_buffer(), other, 3, rank.in_time());
    } else if (rank.rank == other) {
      rank.comm->recv(elements->buffer(), 0, 3, rank.in_time())->wait();
      EXPECT_EQ(elements->first_wrong([](int64_t i) { return static_cast<double>(i % 1000); }), -1);
    }
    rank.comm->barrier(rank.in_time());
    if (sent) sent->wait();
  });
}

INSTANTIATE_TEST_SUITE_P(Hosts, TwoLevel, testing::ValuesIn(host_cases()), case_name);

}  // namespace
}  // namespace lockstep::test
