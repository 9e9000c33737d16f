#include "backend_elements.hpp"
#include "backend_world.hpp"

// Calls that cannot end although every rank lives: at the deadline all ranks name the same cause,
// which may be a rank that the call itself does not wait for. Of the host's backends: those of a
// GPU have messages and collectives on communicators of their own.

namespace lockstep::test {
namespace {

// A rank must have come to its call before the others' deadlines: on a busy machine, too.
constexpr int64_t kShortMs = 2000;
constexpr int64_t kMuch = 4 << 20;  // elements that no send gets rid of before its receiver comes

using BackendStalls = BackendTest;

std::string rank_name(int rank) {
  return "rank " + std::to_string(rank);
}

// All ranks make their calls, which do not fit together, at the same time.
void expect_two_sides(const WorldCase& world, int odd_one, int64_t count,
                      const std::vector<std::string>& sides,
                      const std::function<void(Rank&, const Elements&, const CallContext&)>& call) {
  run_ranks(world, [&](Rank& rank) {
    const OwnElements elements(count, Dtype::kF32);
    rank.sync();
    const auto caught = catch_error([&] { call(rank, *elements, rank.within_ms(kShortMs)); });
    caught.expect(Code::kCallMismatch, sides);
    // Between two nobody can tell who is wrong.
    EXPECT_EQ(caught.blamed, rank.size > 2 ? odd_one : -1) << caught.text;
    const auto again = catch_error([&] { rank.comm->barrier(rank.in_time()); });
    EXPECT_EQ(again.text, caught.text);
  });
}

TEST_P(BackendStalls, AReceiveAgainstAnAllReduceNamesBothCallsAndBothRanks) {
  const int odd_one = GetParam().size - 1;
  expect_two_sides(GetParam(), odd_one, 3,
                   {rank_name(odd_one) + " called recv #1: 3 x F32, tag 0, from rank 0",
                    " called all_reduce #2: 3 x F32, sum"},
                   [&](Rank& rank, const Elements& elements, const CallContext& context) {
                     if (rank.rank == odd_one)
                       return rank.comm->recv(elements.buffer(), 0, 0, context)->wait();
                     rank.comm->all_reduce(elements.buffer(), ReduceOp::kSum, 1, context)->wait();
                   });
}

TEST_P(BackendStalls, ASendAgainstABroadcastNamesBothCallsAndBothRanks) {
  expect_two_sides(GetParam(), 0, kMuch,
                   {"rank 0 called send #1: 4194304 x F32, tag 5, to rank 1",
                    " called broadcast #2: 4194304 x F32, root 0"},
                   [&](Rank& rank, const Elements& elements, const CallContext& context) {
                     if (rank.rank == 0) {
                       return rank.comm->send(elements.const_buffer(), 1, 5, context)->wait();
                     }
                     rank.comm->broadcast(elements.buffer(), 0, context)->wait();
                   });
}

// The last rank stays away; the others wait, some of them only because of one another.
void expect_last_is_named(const WorldCase& world,
                          const std::function<void(Rank&, const CallContext&)>& call) {
  run_ranks(world, [&](Rank& rank) {
    rank.sync();
    const int absent = rank.size - 1;
    auto& given_up = rank.shared->numbers[0];
    if (rank.rank == absent) {
      EXPECT_TRUE(wait_until_at_least(given_up, rank.size - 1));
      // What the others said before they gave up still counts.
      const auto late = catch_error([&] {
        rank.comm->barrier(rank.in_time());
        rank.comm->barrier(rank.in_time());
      });
      late.expect(Code::kRankFailed, {"gave up"});
      return;
    }
    const auto caught = catch_error([&] { call(rank, rank.within_ms(kShortMs)); });
    caught.expect(Code::kRankAbsent, {rank_name(absent), "absent"});
    EXPECT_EQ(caught.blamed, absent) << caught.text;
    given_up.fetch_add(1);
  });
}

TEST_P(BackendStalls, AChainOfReceivesLeadsToTheRankThatDoesNotSend) {
  expect_last_is_named(GetParam(), [](Rank& rank, const CallContext& context) {
    const OwnElements elements(3, Dtype::kF32);
    rank.comm->recv(elements->buffer(), rank.rank + 1, 0, context)->wait();
  });
}

// Rank 0 is ahead of all others. None of them has come to its call, and only one is to blame.
TEST_P(BackendStalls, ARankThatIsAheadDoesNotBlameThoseThatAreHeldUp) {
  expect_last_is_named(GetParam(), [](Rank& rank, const CallContext& context) {
    const OwnElements elements(3, Dtype::kF32);
    if (rank.rank > 0) rank.comm->recv(elements->buffer(), rank.size - 1, 0, context)->wait();
    rank.comm->barrier(context);
  });
}

INSTANTIATE_TEST_SUITE_P(All, BackendStalls,
                         testing::ValuesIn(world_cases({2, 3, 5}, {Ranks::kProcesses})), case_name);

}  // namespace
}  // namespace lockstep::test
