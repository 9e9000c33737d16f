#include "comm/call.hpp"

#include <type_traits>

#include "support.hpp"

namespace lockstep {
namespace {

using test::expect_error;

Group world(int size) {
  Group group;
  for (int rank = 0; rank < size; ++rank) group.world_ranks.push_back(rank);
  return group;
}

Call all_reduce_call() {
  Call call;
  call.sequence = 17;
  call.count = 1024;
  call.operation = Operation::kAllReduce;
  call.dtype = Dtype::kF32;
  call.set_label("bucket 3");
  return call;
}

template <class Action>
int blamed_by(Action&& action) {
  try {
    action();
  } catch (const RankError& error) {
    return error.blamed_rank();
  }
  ADD_FAILURE() << "no RankError";
  return -2;
}

TEST(Call, IsPlainBytes) {
  EXPECT_TRUE(std::is_trivially_copyable_v<Call>);
  EXPECT_EQ(sizeof(Call), 64U);
}

TEST(Call, DescribesEveryOperation) {
  Call call = all_reduce_call();
  EXPECT_EQ(describe(call), "all_reduce #17 (bucket 3): 1024 x F32, sum");
  call.reduce = ReduceOp::kMean;
  call.operation = Operation::kReduceScatter;
  call.set_label("");
  EXPECT_EQ(describe(call), "reduce_scatter #17: 1024 x F32, mean");
  call.operation = Operation::kBroadcast;
  call.root = 2;
  EXPECT_EQ(describe(call), "broadcast #17: 1024 x F32, root 2");
  call.operation = Operation::kSend;
  EXPECT_EQ(describe(call), "send #17: 1024 x F32, tag 2");
  call.operation = Operation::kRecv;
  EXPECT_EQ(describe(call), "recv #17: 1024 x F32, tag 2");
  call.operation = Operation::kAllGather;
  EXPECT_EQ(describe(call), "all_gather #17: 1024 x F32");
  call.operation = Operation::kAllocate;
  EXPECT_EQ(describe(call), "allocate #17: 1.00 KiB");
  call.operation = Operation::kBarrier;
  EXPECT_EQ(describe(call), "barrier #17");
  call.operation = Operation::kSplit;
  EXPECT_EQ(describe(call), "split #17");
}

TEST(Call, LabelsAreCutAndReplaced) {
  Call call;
  call.set_label(std::string(100, 'x'));
  EXPECT_EQ(std::string(call.label), std::string(31, 'x'));
  call.set_label("y");
  EXPECT_EQ(describe(call), "barrier #0 (y)");
}

TEST(Call, AgreesInAllButTheWeight) {
  const Call call = all_reduce_call();
  Call other = call;
  other.weight = 5;
  EXPECT_TRUE(agree(call, other));
  const auto differs = [&](auto&& change) {
    Call changed = call;
    change(changed);
    return !agree(call, changed) && !agree(changed, call);
  };
  EXPECT_TRUE(differs([](Call& c) { c.sequence = 18; }));
  EXPECT_TRUE(differs([](Call& c) { c.count = 1023; }));
  EXPECT_TRUE(differs([](Call& c) { c.operation = Operation::kBroadcast; }));
  EXPECT_TRUE(differs([](Call& c) { c.dtype = Dtype::kF64; }));
  EXPECT_TRUE(differs([](Call& c) { c.reduce = ReduceOp::kMax; }));
  EXPECT_TRUE(differs([](Call& c) { c.root = 0; }));
  EXPECT_TRUE(differs([](Call& c) { c.set_label("bucket 4"); }));
}

TEST(Call, ASendAgreesWithItsReceiveOnly) {
  Call send = all_reduce_call();
  send.operation = Operation::kSend;
  send.root = 3;
  Call recv = send;
  recv.operation = Operation::kRecv;
  recv.set_label("named differently");
  EXPECT_TRUE(agree(send, recv));
  EXPECT_TRUE(agree(recv, send));
  EXPECT_FALSE(agree(send, send));
  recv.root = 4;
  EXPECT_FALSE(agree(send, recv));
}

TEST(Call, AMismatchSaysWhatEachRankCalledAndBlamesTheMinority) {
  std::vector<Call> calls(4, all_reduce_call());
  calls[2].operation = Operation::kBarrier;
  const auto mismatch = [&] { throw_mismatch(world(4), calls); };
  expect_error(Code::kCallMismatch,
               {"rank 2 called barrier #17 (bucket 3)",
                "ranks 0, 1, 3 called all_reduce #17 (bucket 3): 1024 x F32, sum"},
               mismatch);
  EXPECT_EQ(blamed_by(mismatch), 2);
  calls[3].operation = Operation::kBarrier;
  EXPECT_EQ(blamed_by(mismatch), -1) << "two against two";
}

TEST(Call, AMismatchOfManyStaysShort) {
  std::vector<Call> calls(40, all_reduce_call());
  for (size_t place = 0; place < calls.size(); ++place)
    calls[place].count = static_cast<int>(place);
  try {
    throw_mismatch(world(40), calls);
    FAIL();
  } catch (const Error& error) {
    EXPECT_LE(error.notes().size(), 6U);
    EXPECT_NE(error.block().find("34 more different calls"), std::string::npos) << error.block();
  }
}

TEST(Call, AbsenceNamesTheCallTheRanksAndTheirState) {
  const std::vector<MissingRank> missing = {{2, "process 1234 is stopped by a signal (state T)"},
                                            {3, ""}};
  const auto absent = [&] { throw_absent(world(4), all_reduce_call(), missing, 30'000'000'000); };
  expect_error(Code::kRankAbsent,
               {"all_reduce #17 (bucket 3): 1024 x F32, sum: ranks 2, 3 of 4 absent after 30.0 s",
                "note: rank 2: process 1234 is stopped by a signal (state T)", "--timeout"},
               absent);
  EXPECT_EQ(blamed_by(absent), 2);
}

TEST(Call, GroupsAreNamedByWorldRanks) {
  const Group group{.rank = 0, .world_ranks = {1, 5}, .name = "dp 1"};
  const auto failed = [&] { throw_rank_failed(group, all_reduce_call(), 1, "died"); };
  expect_error(Code::kRankFailed, {"all_reduce #17", "in group dp 1: rank 5 died"}, failed);
  EXPECT_EQ(blamed_by(failed), 5);
}

}  // namespace
}  // namespace lockstep
