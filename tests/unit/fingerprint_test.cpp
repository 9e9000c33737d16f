#include "comm/failure.hpp"

#include <functional>
#include <type_traits>

#include "support.hpp"

namespace lockstep::test::fingerprint_test {
namespace {

Group world(int size) {
  Group group;
  for (int rank = 0; rank < size; ++rank) group.world_ranks.push_back(rank);
  return group;
}

Fingerprint all_reduce_call() {
  Fingerprint call;
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

TEST(Fingerprint, IsPlainBytes) {
  EXPECT_TRUE(std::is_trivially_copyable_v<Fingerprint>);
  EXPECT_EQ(sizeof(Fingerprint), 64U);
}

TEST(Fingerprint, DescribesEveryOperation) {
  Fingerprint call = all_reduce_call();
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

TEST(Fingerprint, LabelsAreCutAndReplaced) {
  Fingerprint call;
  call.set_label(std::string(100, 'x'));
  EXPECT_EQ(std::string(call.label), std::string(31, 'x'));
  call.set_label("y");
  EXPECT_EQ(describe(call), "barrier #0 (y)");
}

TEST(Fingerprint, AgreesInAllButTheWeight) {
  const Fingerprint call = all_reduce_call();
  Fingerprint other = call;
  other.weight = 5;
  EXPECT_TRUE(agree(call, other));
  const auto differs = [&](auto&& change) {
    Fingerprint changed = call;
    change(changed);
    return !agree(call, changed) && !agree(changed, call);
  };
  EXPECT_TRUE(differs([](Fingerprint& c) { c.sequence = 18; }));
  EXPECT_TRUE(differs([](Fingerprint& c) { c.count = 1023; }));
  EXPECT_TRUE(differs([](Fingerprint& c) { c.operation = Operation::kBroadcast; }));
  EXPECT_TRUE(differs([](Fingerprint& c) { c.dtype = Dtype::kF64; }));
  EXPECT_TRUE(differs([](Fingerprint& c) { c.reduce = ReduceOp::kMax; }));
  EXPECT_TRUE(differs([](Fingerprint& c) { c.root = 0; }));
  EXPECT_TRUE(differs([](Fingerprint& c) { c.set_label("bucket 4"); }));
}

TEST(Fingerprint, ASendAgreesWithItsReceiveOnly) {
  Fingerprint send = all_reduce_call();
  send.operation = Operation::kSend;
  send.root = 3;
  Fingerprint recv = send;
  recv.operation = Operation::kRecv;
  recv.set_label("named differently");
  EXPECT_TRUE(agree(send, recv));
  EXPECT_TRUE(agree(recv, send));
  EXPECT_FALSE(agree(send, send));
  recv.root = 4;
  EXPECT_FALSE(agree(send, recv));
}

TEST(Fingerprint, AMismatchSaysWhatEachRankCalledAndBlamesTheMinority) {
  std::vector<Fingerprint> calls(4, all_reduce_call());
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

TEST(Fingerprint, AMismatchOfManyStaysShort) {
  std::vector<Fingerprint> calls(40, all_reduce_call());
  for (size_t rank = 0; rank < calls.size(); ++rank) calls[rank].count = static_cast<int>(rank);
  try {
    throw_mismatch(world(40), calls);
    FAIL();
  } catch (const Error& error) {
    EXPECT_LE(error.notes().size(), 6U);
    EXPECT_NE(error.block().find("34 more different calls"), std::string::npos) << error.block();
  }
}

TEST(Fingerprint, AbsenceNamesTheCallTheRanksAndTheirState) {
  const std::vector<MissingRank> missing = {{2, "process 1234 is stopped by a signal (state T)"},
                                            {3, ""}};
  const auto absent = [&] { throw_absent(world(4), all_reduce_call(), missing, 30'000'000'000); };
  expect_error(Code::kRankAbsent,
               {"all_reduce #17 (bucket 3): 1024 x F32, sum: ranks 2, 3 of 4 absent after 30.0 s",
                "note: rank 2: process 1234 is stopped by a signal (state T)", "--timeout"},
               absent);
  EXPECT_EQ(blamed_by(absent), 2);
}

// Ranks of a stalled group.

RankActivity waits_in(const Fingerprint& call, int peer = -1) {
  RankActivity activity;
  activity.arrived = peer < 0 ? call.sequence : 0;
  activity.finished = peer < 0 ? call.sequence - 1 : 0;
  activity.waiting = {{call, peer}};
  return activity;
}

RankActivity computes_after(int64_t collectives) {
  RankActivity activity;
  activity.arrived = activity.finished = collectives;
  return activity;
}

RankActivity silent_after(int64_t collectives) {
  RankActivity activity = computes_after(collectives);
  activity.silent = true;
  activity.state = "process 7 is stopped by a signal (state T)";
  return activity;
}

Fingerprint numbered(int64_t sequence) {
  Fingerprint call = all_reduce_call();
  call.sequence = sequence;
  return call;
}

Fingerprint message(Operation operation, int64_t sequence = 1) {
  Fingerprint call = numbered(sequence);
  call.operation = operation;
  call.root = 0;
  call.set_label("");
  return call;
}

// What the rank at `rank` throws, and whom it blames.
struct Stalled {
  Code code;
  int blamed;
  std::string block;
};

Stalled stalled_at(int rank, const std::vector<RankActivity>& activities,
                   const std::vector<int>& awaited = {}) {
  Group group = world(static_cast<int>(activities.size()));
  group.rank = rank;
  const auto& waiting = activities[static_cast<size_t>(rank)].waiting;
  try {
    throw_stalled(group, waiting.empty() ? numbered(9) : waiting[0].call, awaited, activities,
                  1'000'000'000);
  } catch (const RankError& error) {
    return {error.code(), error.blamed_rank(), error.block()};
  }
}

TEST(Stalled, ARankOneCallAheadBlamesTheStoppedRankAndNotThoseThatWaitForItToo) {
  // Ranks 1 and 2 are still in #6, because of rank 3; rank 0 has its part of #6 and waits in #7.
  const std::vector<RankActivity> activities = {waits_in(numbered(7)), waits_in(numbered(6)),
                                                waits_in(numbered(6)), silent_after(5)};
  for (const int rank : {0, 1, 2}) {
    const Stalled stalled = stalled_at(rank, activities);
    EXPECT_EQ(stalled.code, Code::kRankAbsent);
    EXPECT_EQ(stalled.blamed, 3) << stalled.block;
    EXPECT_NE(stalled.block.find("rank 3 of 4 absent after 1.00 s"), std::string::npos)
        << stalled.block;
  }
  EXPECT_EQ(stalled_at(0, activities, {1, 2, 3}).blamed, 3);
}

TEST(Stalled, ARankThatNeverComesIsFoundThroughThoseThatWaitForIt) {
  const std::vector<RankActivity> activities = {
      waits_in(message(Operation::kRecv), 1), waits_in(message(Operation::kRecv), 2),
      computes_after(4), waits_in(numbered(5)), computes_after(5)};
  EXPECT_EQ(stalled_at(0, activities).blamed, 2) << stalled_at(0, activities).block;
  EXPECT_EQ(stalled_at(1, activities).blamed, 2);
  EXPECT_NE(stalled_at(3, activities).block.find("rank 2 of 5 absent"), std::string::npos)
      << stalled_at(3, activities).block << "\nrank 4 has come";
}

TEST(Stalled, WhoIsStoppedButHasComeIsNotToBlame) {
  std::vector<RankActivity> activities = {waits_in(numbered(7)), computes_after(6),
                                          waits_in(numbered(7))};
  activities[2].silent = true;
  EXPECT_EQ(stalled_at(0, activities).blamed, 1);
}

TEST(Stalled, AReceiveAgainstAnAllReduceNamesBothCallsOnEveryRank) {
  const std::vector<RankActivity> two = {waits_in(message(Operation::kRecv), 1),
                                         waits_in(numbered(1))};
  const std::string sides =
      "ranks made different calls and wait for each other: rank 0 called recv #1: 1024 x F32, tag "
      "0, from rank 1; rank 1 called all_reduce #1 (bucket 3): 1024 x F32, sum";
  for (const int rank : {0, 1}) {
    const Stalled stalled = stalled_at(rank, two);
    EXPECT_EQ(stalled.code, Code::kCallMismatch);
    EXPECT_EQ(stalled.blamed, -1) << "between two nobody can tell";
    EXPECT_NE(stalled.block.find(sides), std::string::npos) << stalled.block;
  }
  const std::vector<RankActivity> three = {
      waits_in(numbered(1)), waits_in(message(Operation::kRecv), 0), waits_in(numbered(1))};
  for (const int rank : {0, 1, 2}) {
    const Stalled stalled = stalled_at(rank, three);
    EXPECT_EQ(stalled.blamed, 1);
    EXPECT_NE(stalled.block.find("rank 1 called recv #1: 1024 x F32, tag 0, from rank 0; ranks 0, "
                                 "2 called all_reduce #1"),
              std::string::npos)
        << stalled.block;
  }
}

TEST(Stalled, SendsThatAllWaitForEachOtherAreTold) {
  const std::vector<RankActivity> ring = {waits_in(message(Operation::kSend), 1),
                                          waits_in(message(Operation::kSend), 2),
                                          waits_in(message(Operation::kSend), 0)};
  const Stalled stalled = stalled_at(1, ring);
  EXPECT_EQ(stalled.code, Code::kCallMismatch);
  for (const char* side : {"rank 0 called send #1: 1024 x F32, tag 0, to rank 1",
                           "rank 1 called send #1: 1024 x F32, tag 0, to rank 2",
                           "rank 2 called send #1: 1024 x F32, tag 0, to rank 0"}) {
    EXPECT_NE(stalled.block.find(side), std::string::npos) << stalled.block;
  }
}

TEST(Stalled, WhereAllDoTheSameNobodyIsBlamed) {
  const std::vector<RankActivity> collective(3, waits_in(numbered(4)));
  EXPECT_EQ(stalled_at(1, collective).blamed, -1);
  EXPECT_NE(stalled_at(1, collective).block.find("though no rank is missing"), std::string::npos);
  const std::vector<RankActivity> pair = {waits_in(message(Operation::kSend), 1),
                                          waits_in(message(Operation::kRecv), 0)};
  EXPECT_EQ(stalled_at(0, pair).code, Code::kRankAbsent);
  EXPECT_NE(stalled_at(0, pair).block.find("though no rank is missing"), std::string::npos);
}

TEST(Stalled, ARankThatCameTooLateLearnsWhoWaitedForIt) {
  const std::vector<RankActivity> activities = {waits_in(numbered(9)), computes_after(8)};
  const Stalled stalled = stalled_at(1, activities, {1});
  EXPECT_EQ(stalled.code, Code::kRankFailed);
  EXPECT_EQ(stalled.blamed, 0);
  EXPECT_NE(stalled.block.find("rank 0 of 2 waited 1.00 s for this rank in all_reduce #9"),
            std::string::npos)
      << stalled.block;
}

TEST(Fingerprint, GroupsAreNamedByWorldRanks) {
  const Group group{.rank = 0, .world_ranks = {1, 5}, .name = "dp 1"};
  const auto failed = [&] { throw_rank_failed(group, all_reduce_call(), 1, "died"); };
  expect_error(Code::kRankFailed, {"all_reduce #17", "in group dp 1: rank 5 died"}, failed);
  EXPECT_EQ(blamed_by(failed), 5);
}

// What peers learn of an error, field by field.

AbortRecord record_of(const std::function<void()>& action, const Group& group) {
  try {
    action();
  } catch (...) {
    return AbortRecord::of(std::current_exception(), group);
  }
  ADD_FAILURE() << "no error";
  return {};
}

TEST(AbortRecord, SurvivesItsEncoding) {
  std::vector<Fingerprint> calls(3, all_reduce_call());
  calls[1].operation = Operation::kBarrier;
  const AbortRecord record = record_of([&] { throw_mismatch(world(3), calls); }, world(3));
  const std::string bytes = record.encode();
  EXPECT_LE(bytes.size(), AbortRecord::max_bytes(3));
  const auto decoded = AbortRecord::decode(bytes);
  ASSERT_TRUE(decoded);
  EXPECT_EQ(decoded->code, Code::kCallMismatch);
  EXPECT_EQ(decoded->blamed, 1);
  EXPECT_EQ(decoded->text, record.text);
  EXPECT_EQ(decoded->ranks, (std::vector<int32_t>{0, 1, 2}));
  ASSERT_EQ(decoded->fingerprints.size(), 3U);
  EXPECT_EQ(describe(decoded->fingerprints[1]), describe(calls[1]));
  for (size_t cut = 0; cut < bytes.size(); ++cut) {
    EXPECT_FALSE(AbortRecord::decode(std::string_view(bytes).substr(0, cut))) << cut;
  }
}

// Bytes of another process may be anything.
TEST(AbortRecord, RefusesWhatNoRankSays) {
  AbortRecord record{.code = Code::kCallMismatch, .by = 0, .blamed = 1};
  record.ranks = {0, 1};
  record.fingerprints = {all_reduce_call(), all_reduce_call()};
  ASSERT_TRUE(AbortRecord::decode(record.encode()));
  const auto refused = [&](auto&& change) {
    AbortRecord changed = record;
    change(changed.fingerprints[1]);
    EXPECT_FALSE(AbortRecord::decode(changed.encode()));
  };
  refused([](Fingerprint& call) { call.operation = static_cast<Operation>(200); });
  refused([](Fingerprint& call) { call.dtype = static_cast<Dtype>(99); });
  refused([](Fingerprint& call) { call.reduce = static_cast<ReduceOp>(99); });
  refused([](Fingerprint& call) { std::fill(std::begin(call.label), std::end(call.label), 'x'); });
  record.ranks[1] = 77;
  expect_error(Code::kRankFailed, {"ranks that this group lacks"}, [&] {
    throw_recorded(world(2), all_reduce_call(), *AbortRecord::decode(record.encode()), "", 0);
  });
}

TEST(AbortRecord, SecondHandErrorsBlameTheFirstCulprit) {
  Group third = world(4);
  third.rank = 3;
  const auto died = [] { throw_rank_failed(world(4), all_reduce_call(), 2, "died: process 7"); };
  const AbortRecord record = record_of(died, world(4));
  const auto learns = [&] { throw_recorded(third, all_reduce_call(), record, "", 1); };
  expect_error(Code::kRankFailed, {"all_reduce #17", "rank 2 of 4 died: process 7"}, learns);
  EXPECT_EQ(blamed_by(learns), 2);
  EXPECT_EQ(record_of(learns, third).by, 0) << "it is passed on as it came";
  const AbortRecord own = record_of([] { throw Error(Code::kBackend, "no GPU"); }, world(4));
  const auto gave_up = [&] { throw_recorded(third, all_reduce_call(), own, "", 1); };
  expect_error(Code::kRankFailed, {"rank 0 of 4 gave up: no GPU"}, gave_up);
  EXPECT_EQ(blamed_by(gave_up), 0);
}

}  // namespace
}  // namespace lockstep::test::fingerprint_test
