#include <signal.h>
#include <unistd.h>

#include <algorithm>

#include "backend_elements.hpp"
#include "backend_world.hpp"

// Ranks that are processes, and what can happen to a process.

namespace lockstep::test {
namespace {

constexpr int64_t kShortMs = 1000;

using BackendProcesses = BackendTest;

// All_reduces without end, of a size per round, until one throws.
Caught storm(Rank& rank, const std::vector<int64_t>& counts, int64_t deadline_ms) {
  OwnElements elements(*std::max_element(counts.begin(), counts.end()), Dtype::kF32);
  return catch_error([&] {
    for (size_t round = 0;; ++round) {
      Buffer buffer = elements->buffer();
      buffer.count = counts[round % counts.size()];
      rank.comm->all_reduce(buffer, ReduceOp::kSum, 1, rank.within_ms(deadline_ms, "storm"))
          ->wait();
      rank.shared->numbers[static_cast<size_t>(rank.rank)].fetch_add(1);
    }
  });
}

// The parent strikes once all ranks are in the middle of it.
RunOptions strike(int victim, int signal, bool killed) {
  RunOptions options;
  if (killed) options.killed = {victim};
  options.meanwhile = [=](const std::vector<pid_t>& pids, SharedFacts& shared) {
    EXPECT_TRUE(wait_until_at_least(shared.numbers[static_cast<size_t>(victim)], 20));
    ::kill(pids[static_cast<size_t>(victim)], signal);
    shared.numbers[15] = monotonic_ns();
    if (signal == SIGKILL) return;
    // A stopped rank lives until the others have given up.
    EXPECT_TRUE(wait_until_at_least(shared.numbers[14], static_cast<int64_t>(pids.size()) - 1));
    ::kill(pids[static_cast<size_t>(victim)], SIGKILL);
  };
  return options;
}

TEST_P(BackendProcesses, AKilledRankIsNamedByAllOthersAtOnce) {
  const int victim = GetParam().size / 2;
  for (const std::vector<int64_t>& counts :
       {std::vector<int64_t>{1024}, std::vector<int64_t>{1'000'003, 7}}) {
    run_ranks(
        GetParam(),
        [&](Rank& rank) {
          rank.note("storms");
          const auto caught = storm(rank, counts, 40'000);
          const int64_t took_ns = monotonic_ns() - rank.shared->numbers[15].load();
          caught.expect(Code::kRankFailed,
                        {"rank " + std::to_string(victim), "all_reduce #", "(storm)"});
          EXPECT_EQ(caught.blamed, victim) << caught.text;
          EXPECT_LT(took_ns, 20'000'000'000) << "long before the deadline";
        },
        strike(victim, SIGKILL, true));
  }
}

TEST_P(BackendProcesses, AStoppedRankIsNamedAtTheDeadline) {
  const int victim = GetParam().size - 1;
  for (const std::vector<int64_t>& counts :
       {std::vector<int64_t>{1024}, std::vector<int64_t>{1'000'003}}) {
    run_ranks(
        GetParam(),
        [&](Rank& rank) {
          rank.note("storms");
          const auto caught = storm(rank, counts, 2 * kShortMs);
          rank.shared->numbers[14].fetch_add(1);
          caught.expect(Code::kRankAbsent, {"rank " + std::to_string(victim), "all_reduce #"});
          EXPECT_EQ(caught.blamed, victim) << caught.text;
          if (GetParam().backend == "shm") {
            EXPECT_NE(caught.text.find("stopped"), std::string::npos) << caught.text;
          }
        },
        strike(victim, SIGSTOP, true));
  }
}

TEST_P(BackendProcesses, ARankThatExitsWithoutAWordIsNamed) {
  const RunOptions options{.killed = {}, .gone = GetParam().size - 1, .meanwhile = {}};
  const auto body = [&](Rank& rank) {
    rank.sync();
    const int gone = rank.size - 1;
    if (rank.rank == gone) ::_exit(0);
    const OwnElements elements(100, Dtype::kF32);
    const auto caught = catch_error([&] {
      rank.comm->all_reduce(elements->buffer(), ReduceOp::kSum, 1, rank.in_time())->wait();
    });
    caught.expect(Code::kRankFailed, {"rank " + std::to_string(gone)});
    EXPECT_EQ(caught.blamed, gone);
  };
  run_ranks(GetParam(), body, options);
}

// A rank may end as soon as its own last call is done; the others still get their result.
TEST_P(BackendProcesses, RanksMayEndRightAfterTheirLastCall) {
  run_ranks(GetParam(), [&](Rank& rank) {
    const OwnElements elements(300'007, Dtype::kF32);
    elements->fill([&](int64_t) { return rank.rank; });
    rank.comm->all_reduce(elements->buffer(), ReduceOp::kSum, 1, rank.in_time())->wait();
    const double sum = rank.size * (rank.size - 1) / 2.0;
    if (rank.rank % 2 == 0) rank.comm.reset();
    EXPECT_EQ(elements->first_wrong([&](int64_t) { return sum; }), -1);
  });
}

INSTANTIATE_TEST_SUITE_P(All, BackendProcesses,
                         testing::ValuesIn(world_cases({2, 5}, {Ranks::kProcesses})), case_name);

}  // namespace
}  // namespace lockstep::test
