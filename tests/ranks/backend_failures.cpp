#include <thread>

#include "backend_elements.hpp"
#include "backend_world.hpp"

// What happens when ranks do not do the same: every wait ends, every rank learns why, and nothing
// is written before all agree. Times are generous: they end a test, and never decide it.

namespace lockstep::test {
namespace {

constexpr int64_t kShortMs = 1000;

std::string rank_name(int rank) {
  return "rank " + std::to_string(rank);
}

using BackendFailures = BackendTest;
using BackendAbsences = BackendTest;  // each waits for a deadline: fewer cases

// The others' calls end at their deadline; the absent rank lives on until they have.
void expect_absent(const WorldCase& world, const std::string& operation,
                   const std::function<void(Rank&, const CallContext&)>& call) {
  run_ranks(world, [&](Rank& rank) {
    rank.sync();
    const int absent = rank.size - 1;
    auto& given_up = rank.shared->numbers[0];
    if (rank.rank == absent) {
      rank.note("stays away from " + operation);
      EXPECT_TRUE(wait_until_at_least(given_up, rank.size - 1));
      // Too late: it must not wait for those who have gone.
      const auto late = catch_error([&] { rank.comm->barrier(rank.in_time()); });
      EXPECT_TRUE(late.thrown);
      return;
    }
    rank.note("waits in " + operation);
    const auto caught = catch_error([&] { call(rank, rank.within_ms(kShortMs, "step 7")); });
    caught.expect(Code::kRankAbsent, {operation + " #", "(step 7)", rank_name(absent), "absent"});
    EXPECT_EQ(caught.blamed, absent);
    const auto again = catch_error([&] { rank.comm->barrier(rank.in_time()); });
    EXPECT_EQ(again.text, caught.text) << "a broken communicator repeats its error";
    given_up.fetch_add(1);
  });
}

TEST_P(BackendFailures, ARankThatNeverComesToAnAllReduceIsNamed) {
  expect_absent(GetParam(), "all_reduce", [](Rank& rank, const CallContext& context) {
    const OwnElements elements(1027, Dtype::kF32);
    rank.comm->all_reduce(elements->buffer(), ReduceOp::kSum, 1, context)->wait();
  });
}

TEST_P(BackendAbsences, ARankThatNeverComesToABarrierIsNamed) {
  expect_absent(GetParam(), "barrier",
                [](Rank& rank, const CallContext& context) { rank.comm->barrier(context); });
}

TEST_P(BackendAbsences, ARankThatNeverSendsIsNamed) {
  WorldCase two = GetParam();
  two.size = 2;
  expect_absent(two, "recv", [](Rank& rank, const CallContext& context) {
    const OwnElements elements(3, Dtype::kF32);
    rank.comm->recv(elements->buffer(), 1, 0, context)->wait();
  });
}

// advance() alone, without a wait, ends at the deadline too.
TEST_P(BackendAbsences, AdvancingEndsAtTheDeadline) {
  expect_absent(GetParam(), "all_reduce", [](Rank& rank, const CallContext& context) {
    const OwnElements elements(9, Dtype::kF32);
    const auto work = rank.comm->all_reduce(elements->buffer(), ReduceOp::kSum, 1, context);
    while (!work->advance()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
}

struct Deviation {
  const char* name;
  std::vector<std::string> sides;  // both in the text of every rank
  std::function<void(Rank&, const Elements&, bool odd_one)> call;
};

// The last rank is the odd one.
const std::vector<Deviation>& deviations() {
  static const auto all_reduce = [](Rank& rank, const Buffer& buffer, ReduceOp op,
                                    std::string_view label) {
    rank.comm->all_reduce(buffer, op, 1, rank.in_time(label))->wait();
  };
  static const std::vector<Deviation> all = {
      {"operation",
       {"barrier #", "all_reduce #"},
       [](Rank& rank, const Elements& elements, bool odd) {
         if (odd) return rank.comm->barrier(rank.in_time());
         all_reduce(rank, elements.buffer(), ReduceOp::kSum, "");
       }},
      {"count",
       {": 1027 x F32", ": 1026 x F32"},
       [](Rank& rank, const Elements& elements, bool odd) {
         Buffer buffer = elements.buffer();
         if (odd) buffer.count -= 1;
         all_reduce(rank, buffer, ReduceOp::kSum, "");
       }},
      {"dtype",
       {": 1027 x F32", ": 1027 x BF16"},
       [](Rank& rank, const Elements& elements, bool odd) {
         Buffer buffer = elements.buffer();
         if (odd) buffer.dtype = Dtype::kBF16;
         all_reduce(rank, buffer, ReduceOp::kSum, "");
       }},
      {"reduction",
       {", sum", ", max"},
       [](Rank& rank, const Elements& elements, bool odd) {
         all_reduce(rank, elements.buffer(), odd ? ReduceOp::kMax : ReduceOp::kSum, "");
       }},
      {"root",
       {"root 0", "root 1"},
       [](Rank& rank, const Elements& elements, bool odd) {
         rank.comm->broadcast(elements.buffer(), odd ? 1 : 0, rank.in_time())->wait();
       }},
      {"order",
       {"(bucket 1)", "(bucket 2)"},
       [](Rank& rank, const Elements& elements, bool odd) {
         const OwnElements other(1027, Dtype::kF32);
         auto first =
             rank.comm->all_reduce(odd ? other->buffer() : elements.buffer(), ReduceOp::kSum, 1,
                                   rank.in_time(odd ? "bucket 2" : "bucket 1"));
         auto second =
             rank.comm->all_reduce(odd ? elements.buffer() : other->buffer(), ReduceOp::kSum, 1,
                                   rank.in_time(odd ? "bucket 1" : "bucket 2"));
         first->wait();
         second->wait();
       }},
      {"gathered count",
       {"all_gather #2: 5 x F32", "all_gather #2: 4 x F32"},
       [](Rank& rank, const Elements& elements, bool odd) {
         const int64_t count = odd ? 4 : 5;
         const OwnElements output(count * rank.size, Dtype::kF32);
         rank.comm
             ->all_gather({elements.buffer().data, count, Dtype::kF32}, output->buffer(),
                          rank.in_time())
             ->wait();
       }},
      {"root of a reduce",
       {"reduce #2: 1027 x F32, sum, root 0", "reduce #2: 1027 x F32, sum, root 1"},
       [](Rank& rank, const Elements& elements, bool odd) {
         rank.comm->reduce(elements.buffer(), odd ? 1 : 0, ReduceOp::kSum, 1, rank.in_time())
             ->wait();
       }},
      {"gather instead of scatter",
       {"gather #2: 0 x F32, root 0", "scatter #2: 0 x F32, root 0"},
       [](Rank& rank, const Elements& elements, bool odd) {
         const Group& group = rank.comm->group();
         const auto blocks =
             odd ? BlockExchange::scatter(group, 0, 0) : BlockExchange::gather(group, 0, 0);
         rank.comm
             ->exchange({elements.buffer().data, 0, Dtype::kF32},
                        {elements.buffer().data, 0, Dtype::kF32}, blocks, rank.in_time())
             ->wait();
       }},
      {"split instead",
       {"split #", "allocate #"},
       [](Rank& rank, const Elements&, bool odd) {
         if (odd) {
           rank.comm->split(0, 0, "part", rank.in_time());
         } else {
           rank.comm->allocate(4096, rank.in_time());
         }
       }},
  };
  return all;
}

TEST_P(BackendFailures, DifferentCallsAreAnErrorOnAllRanksBeforeDataMoves) {
  for (const Deviation& deviation : deviations()) {
    SCOPED_TRACE(deviation.name);
    run_ranks(GetParam(), [&](Rank& rank) {
      rank.sync();
      rank.note(deviation.name);
      const OwnElements elements(1027, Dtype::kF32);
      elements->fill([&](int64_t i) { return static_cast<double>(i % 50 + rank.rank); });
      const auto before = elements.bytes();
      const int odd_one = rank.size - 1;
      const auto caught =
          catch_error([&] { deviation.call(rank, *elements, rank.rank == odd_one); });
      caught.expect(Code::kCallMismatch, deviation.sides);
      caught.expect(Code::kCallMismatch, {rank_name(odd_one) + " called"});
      // Between two nobody can tell who is wrong.
      EXPECT_EQ(caught.blamed, rank.size > 2 ? odd_one : -1);
      EXPECT_EQ(elements.bytes(), before) << "data moved";
      const auto again = catch_error([&] { rank.comm->barrier(rank.in_time()); });
      EXPECT_EQ(again.text, caught.text);
    });
  }
}

// Each of the two counts may be the wrong one: nobody is blamed.
TEST_P(BackendFailures, CountsOfAnExchangeThatDoNotMatchAreNamedOnAllRanks) {
  run_ranks(GetParam(), [](Rank& rank) {
    rank.sync();
    const auto ranks = static_cast<size_t>(rank.size);
    std::vector<int64_t> given(ranks, 2);
    if (rank.rank == 1) given[0] = 3;
    const auto blocks = BlockExchange::all_to_all(given, std::vector<int64_t>(ranks, 2));
    const OwnElements input(blocks.given_count(), Dtype::kF32);
    const OwnElements output(blocks.taken_count(), Dtype::kF32);
    const auto before = output.bytes();
    const auto caught = catch_error([&] {
      rank.comm->exchange(input->const_buffer(), output->buffer(), blocks, rank.in_time())->wait();
    });
    caught.expect(Code::kCallMismatch,
                  {"all_to_all #2", "rank 1 gives 3 elements to rank 0, which takes 2"});
    EXPECT_EQ(caught.blamed, -1);
    EXPECT_EQ(output.bytes(), before) << "data moved";
    const auto again = catch_error([&] { rank.comm->barrier(rank.in_time()); });
    EXPECT_EQ(again.text, caught.text);
  });
}

TEST_P(BackendFailures, MessagesThatDoNotMatchAreAnErrorOnBothSides) {
  struct Case {
    int64_t count;
    Dtype dtype;
    int tag;
    std::string side;
  };
  for (const Case& sent : {Case{10, Dtype::kF32, 8, "tag 8"}, Case{11, Dtype::kF32, 7, "11 x F32"},
                           Case{10, Dtype::kI64, 7, "10 x I64"}}) {
    SCOPED_TRACE(sent.side);
    run_ranks(GetParam(), [&](Rank& rank) {
      rank.sync();
      if (rank.rank > 1) {
        const auto caught = catch_error([&] { rank.comm->barrier(rank.in_time()); });
        EXPECT_TRUE(caught.thrown) << "two ranks of the group are lost";
        return;
      }
      const OwnElements elements(20, Dtype::kI64);
      const auto before = elements.bytes();
      const auto caught = catch_error([&] {
        if (rank.rank == 0) {
          rank.comm
              ->send({elements->buffer().data, sent.count, sent.dtype}, 1, sent.tag, rank.in_time())
              ->wait();
          rank.comm->barrier(rank.in_time());  // where the send was done before it was seen
        } else {
          rank.comm->recv({elements->buffer().data, 10, Dtype::kF32}, 0, 7, rank.in_time())->wait();
        }
      });
      caught.expect(Code::kCallMismatch, {"send #1", "recv #1", sent.side});
      EXPECT_EQ(elements.bytes(), before);
    });
  }
}

TEST_P(BackendFailures, AbortEndsThePeersCallsWithItsReason) {
  run_ranks(GetParam(), [](Rank& rank) {
    rank.sync();
    const int gone = rank.size - 1;
    if (rank.rank == gone) {
      rank.comm->abort("the data loader found a torn file");
      const auto own = catch_error([&] { rank.comm->barrier(rank.in_time()); });
      own.expect(Code::kRankFailed, {"torn file"});
      return;
    }
    const OwnElements elements(1027, Dtype::kF32);
    const auto caught = catch_error([&] {
      rank.comm->all_reduce(elements->buffer(), ReduceOp::kSum, 1, rank.in_time("step 3"))->wait();
    });
    caught.expect(Code::kRankFailed, {rank_name(gone), "the data loader found a torn file"});
    EXPECT_EQ(caught.blamed, gone);
    const auto again = catch_error([&] { rank.comm->barrier(rank.in_time()); });
    EXPECT_EQ(again.text, caught.text);
  });
}

// What an exception does to a rank that is a thread: its communicator is destroyed.
TEST_P(BackendFailures, ARankThatLeavesIsNamed) {
  run_ranks(GetParam(), [](Rank& rank) {
    rank.sync();
    const int gone = rank.size - 1;
    if (rank.rank == gone) {
      rank.comm.reset();
      return;
    }
    const OwnElements elements(1027, Dtype::kF32);
    const auto caught = catch_error([&] {
      rank.comm->all_reduce(elements->buffer(), ReduceOp::kSum, 1, rank.in_time())->wait();
    });
    caught.expect(Code::kRankFailed, {rank_name(gone), "all_reduce #2"});
    EXPECT_EQ(caught.blamed, gone);
  });
}

TEST_P(BackendFailures, DroppingACallThatIsNotDoneGivesUp) {
  run_ranks(GetParam(), [](Rank& rank) {
    rank.sync();
    const OwnElements elements(1'000'001, Dtype::kF32);
    const auto begin = [&] {
      return rank.comm->all_reduce(elements->buffer(), ReduceOp::kSum, 1, rank.in_time());
    };
    if (rank.rank == 0) {
      begin().reset();  // the others do not come before this
      rank.shared->numbers[0] = 1;
    } else {
      EXPECT_TRUE(wait_until_at_least(rank.shared->numbers[0], 1));
      const auto caught = catch_error([&] { begin()->wait(); });
      caught.expect(Code::kRankFailed, {rank_name(0)});
    }
    EXPECT_TRUE(catch_error([&] { rank.comm->barrier(rank.in_time()); }).thrown);
  });
}

// A group that failed takes nobody else with it.
TEST_P(BackendFailures, AGroupThatFailsLeavesItsParentWhole) {
  run_ranks(GetParam(), [](Rank& rank) {
    const auto part = rank.comm->split(0, 0, "part 4", rank.in_time());
    const auto caught = catch_error([&] {
      if (rank.rank == 0) {
        part->barrier(rank.in_time());
      } else {
        part->allocate(64, rank.in_time());
      }
    });
    caught.expect(Code::kCallMismatch, {"part 4", "barrier #1", "allocate #1"});
    const OwnElements elements(33, Dtype::kF32);
    elements->fill([](int64_t) { return 1; });
    rank.comm->all_reduce(elements->buffer(), ReduceOp::kSum, 1, rank.in_time())->wait();
    EXPECT_EQ(elements->first_wrong([&](int64_t) { return static_cast<double>(rank.size); }), -1);
  });
}

// What no rank may ask is refused at once, on that rank alone.
TEST_P(BackendFailures, ImpossibleArgumentsAreRefusedBeforeAnyoneWaits) {
  run_ranks(GetParam(), [](Rank& rank) {
    const OwnElements elements(10, Dtype::kI64);
    const auto context = rank.in_time();
    const auto expect_refused = [](const std::function<void()>& call) {
      catch_error(call).expect(Code::kUsage, {});
    };
    expect_refused(
        [&] { rank.comm->all_reduce(elements->buffer(), ReduceOp::kMean, 1, context)->wait(); });
    expect_refused([&] { rank.comm->broadcast(elements->buffer(), rank.size, context)->wait(); });
    expect_refused([&] { rank.comm->send(elements->const_buffer(), -1, 0, context)->wait(); });
    expect_refused([&] {
      rank.comm
          ->all_gather(elements->const_buffer(),
                       {elements->buffer().data, rank.size * 10 - 1, Dtype::kI64}, context)
          ->wait();
    });
    expect_refused([&] {
      rank.comm->reduce(elements->buffer(), rank.size, ReduceOp::kSum, 1, context)->wait();
    });
    expect_refused([&] {
      rank.comm
          ->exchange(elements->const_buffer(), elements->buffer(),
                     BlockExchange::all_to_all(rank.comm->group(), 11), context)
          ->wait();
    });
    rank.comm->barrier(context);
  });
}

INSTANTIATE_TEST_SUITE_P(All, BackendFailures, testing::ValuesIn(world_cases({2, 3})), case_name);
INSTANTIATE_TEST_SUITE_P(All, BackendAbsences, testing::ValuesIn(world_cases({3})), case_name);

}  // namespace
}  // namespace lockstep::test
