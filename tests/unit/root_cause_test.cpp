// Which rank is to blame, and what the failure report says: from views, without processes.

#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>

#include "launch/oom_watch.hpp"
#include "launch/progress.hpp"
#include "launch/root_cause.hpp"

namespace lockstep::test::root_cause_test {
namespace {

RankView alive(int rank, char state = 'S') {
  RankView view;
  view.rank = rank;
  view.pid = 1000 + rank;
  view.state = state;
  return view;
}

RankView ended(int rank, int order, int status) {
  RankView view = alive(rank);
  view.end = WorkerEnd{rank, status, order};
  view.order = order;
  return view;
}

RankView with_error(RankView view, Code code, int blamed, const std::string& message = "oops") {
  view.board.error = FirstError{code, 1, blamed, message};
  return view;
}

constexpr int exited(int code) {
  return code << 8;
}

TEST(RootCause, TheFirstBadEndIsTheCulprit) {
  const RootCause root_cause = find_root_cause(
      {ended(0, 1, exited(1)), ended(1, 0, exited(3)), alive(2), ended(3, 2, exited(0))}, false);
  EXPECT_EQ(root_cause.rank, 1);
  EXPECT_EQ(root_cause.first_failure, 1);
  EXPECT_EQ(root_cause.cause, Cause::kExit);
  EXPECT_EQ(root_cause.exit_code, 3);
  EXPECT_EQ(root_cause.gave_up, (std::vector<int>{0}));
  EXPECT_EQ(root_cause.running, (std::vector<int>{2}));
}

TEST(RootCause, ARestartHelpsUnlessTheProgramItselfIsAtFault) {
  const auto may = [](const RankView& view) {
    const std::vector<RankView> views = {view, alive(1)};
    return restart_after(find_root_cause(views, false), views) == Restart::kMayHelp;
  };
  for (const int code : {2, 126, 127}) EXPECT_FALSE(may(ended(0, 0, exited(code)))) << code;
  for (const int code : {1, 3, 255}) EXPECT_TRUE(may(ended(0, 0, exited(code)))) << code;
  EXPECT_TRUE(may(ended(0, 0, SIGKILL)));
  for (const Code code : {Code::kUsage, Code::kDeviceSpec, Code::kSplit, Code::kLaunch}) {
    EXPECT_FALSE(may(with_error(ended(0, 0, exited(2)), code, -1))) << code_name(code);
  }
  for (const Code code : {Code::kRendezvous, Code::kFileRead, Code::kFileWrite}) {
    EXPECT_TRUE(may(with_error(ended(0, 0, exited(2)), code, -1)))
        << code_name(code) << ": a network or a disk may work the next time";
  }
}

TEST(RootCause, NobodyNeedsToExplainARankThatWasKilled) {
  EXPECT_TRUE(first_was_killed({ended(0, 0, SIGKILL), alive(1)}));
  EXPECT_TRUE(first_was_killed({alive(0), ended(1, 0, SIGSEGV)}));
  EXPECT_FALSE(first_was_killed({ended(0, 0, SIGABRT), alive(1)}));
  EXPECT_FALSE(first_was_killed({ended(0, 0, exited(1)), ended(1, 1, SIGKILL)}));
  EXPECT_FALSE(first_was_killed({with_error(ended(0, 0, SIGSEGV), Code::kRankFailed, 1), alive(1)}))
      << "it blamed another rank before it died";
}

TEST(RootCause, SignalsKeepTheirCode) {
  const RootCause killed = find_root_cause({ended(0, 0, SIGKILL), alive(1)}, false);
  EXPECT_EQ(killed.cause, Cause::kSignal);
  EXPECT_EQ(killed.exit_code, 137);
  EXPECT_EQ(find_root_cause({ended(0, 0, SIGKILL)}, true).cause, Cause::kOutOfMemory);
  EXPECT_EQ(find_root_cause({ended(0, 0, SIGSEGV)}, true).cause, Cause::kSignal)
      << "only SIGKILL is the system's way";
}

TEST(RootCause, AVictimsErrorLeadsToTheCulprit) {
  // Rank 0 ended first, but says that rank 2 failed; rank 2 did, with its own code.
  const RootCause root_cause =
      find_root_cause({with_error(ended(0, 0, exited(1)), Code::kRankFailed, 2), alive(1),
                       with_error(ended(2, 1, exited(7)), Code::kSplit, -1)},
                      false);
  EXPECT_EQ(root_cause.rank, 2);
  EXPECT_EQ(root_cause.first_failure, 0);
  EXPECT_EQ(root_cause.exit_code, 7);
  EXPECT_EQ(root_cause.gave_up, (std::vector<int>{0}));
}

TEST(RootCause, BlameIsFollowedFromVictimToVictim) {
  const RootCause root_cause = find_root_cause(
      {with_error(ended(0, 0, exited(1)), Code::kRankFailed, 1),
       with_error(ended(1, 1, exited(1)), Code::kRankFailed, 2), ended(2, 2, SIGABRT)},
      false);
  EXPECT_EQ(root_cause.rank, 2);
  EXPECT_EQ(root_cause.exit_code, 134);
}

TEST(RootCause, ALivingCulpritHasTheVictimsCode) {
  const auto views = [](char state) {
    return std::vector<RankView>{with_error(ended(0, 0, exited(1)), Code::kRankAbsent, 1),
                                 alive(1, state)};
  };
  EXPECT_EQ(find_root_cause(views('T'), false).cause, Cause::kHalted);
  EXPECT_EQ(find_root_cause(views('R'), false).cause, Cause::kMissing);
  EXPECT_EQ(find_root_cause(views('R'), false).rank, 1);
  EXPECT_EQ(find_root_cause(views('R'), false).exit_code, 1);
  EXPECT_TRUE(find_root_cause(views('R'), false).running.empty()) << "the culprit is no victim";
  EXPECT_EQ(patience_with(views('R')), Patience::kForLivingCulprit);
}

TEST(RootCause, ARankThatLeftWellCanBeTheCulprit) {
  const RootCause root_cause = find_root_cause(
      {with_error(ended(0, 1, exited(1)), Code::kRankFailed, 1), ended(1, 0, exited(0))}, false);
  EXPECT_EQ(root_cause.cause, Cause::kLeft);
  EXPECT_EQ(root_cause.rank, 1);
  EXPECT_EQ(root_cause.exit_code, 1);
}

TEST(RootCause, ARankOfAnotherHost) {
  const std::vector<RankView> views = {with_error(ended(0, 0, exited(1)), Code::kRankFailed, 5),
                                       alive(1)};
  EXPECT_EQ(find_root_cause(views, false).cause, Cause::kRemote);
  EXPECT_EQ(find_root_cause(views, false).rank, 5);
  EXPECT_EQ(patience_with(views), Patience::kForLivingCulprit);
}

TEST(RootCause, ARankThatHasGivenUpIsAwaitedLonger) {
  const std::vector<RankView> views = {with_error(ended(0, 0, exited(1)), Code::kRankFailed, 1),
                                       alive(1)};
  EXPECT_EQ(patience_with(views), Patience::kForEndingCulprit);
}

TEST(RootCause, ARankThatCameTooLateIsTheCulpritAndNotTheOneThatGaveUpFirst) {
  // Rank 0 missed rank 1; rank 1 came then, and found that rank 0 had given up.
  for (const int late_ends : {0, 1}) {
    const RootCause root_cause = find_root_cause(
        {with_error(ended(0, 1 - late_ends, exited(1)), Code::kRankAbsent, 1, "rank 1 absent"),
         with_error(ended(1, late_ends, exited(1)), Code::kRankFailed, 0, "rank 0 gave up")},
        false);
    EXPECT_EQ(root_cause.rank, 1);
    EXPECT_EQ(root_cause.cause, Cause::kLate);
    EXPECT_EQ(root_cause.first_failure, 0);
    EXPECT_EQ(root_cause.gave_up, (std::vector<int>{0}));
  }
}

TEST(RootCause, RanksThatMissEachOtherDisagree) {
  const std::vector<RankView> views = {
      with_error(ended(0, 1, exited(1)), Code::kRankAbsent, 1, "barrier #1: rank 1 absent"),
      with_error(ended(1, 0, exited(1)), Code::kRankAbsent, 0,
                 "recv #1 in group dp: rank 0 absent"),
      alive(2)};
  const RootCause root_cause = find_root_cause(views, false);
  EXPECT_EQ(root_cause.cause, Cause::kDisagreement);
  EXPECT_EQ(root_cause.rank, 0) << "whichever ended first";
  const Error error = failure_error(root_cause, views, {});
  EXPECT_EQ(error.code(), Code::kCallMismatch);
  EXPECT_EQ(error.message(), "ranks wait for each other: rank 0: barrier #1: rank 1 absent");
  EXPECT_NE(error.block().find("rank 1 reported: recv #1 in group dp: rank 0 absent"),
            std::string::npos)
      << error.block();
}

TEST(RootCause, ADisagreementHasNoVictims) {
  const std::string said =
      "ranks made different calls: rank 0 called recv #1; rank 1 called split #1";
  for (const int first : {0, 1}) {
    const std::vector<RankView> views = {
        with_error(ended(0, first, exited(1)), Code::kCallMismatch, -1, said),
        with_error(ended(1, 1 - first, exited(1)), Code::kCallMismatch, -1, said)};
    const RootCause root_cause = find_root_cause(views, false);
    EXPECT_EQ(root_cause.cause, Cause::kDisagreement);
    EXPECT_EQ(root_cause.rank, 0);
    const Error error = failure_error(root_cause, views, {});
    EXPECT_EQ(error.message(), said) << "in the name of neither";
    EXPECT_EQ(error.block().find("victims"), std::string::npos) << error.block();
  }
}

// Found by bench/faults on a machine with ten times as many busy processes as cores.
TEST(RootCause, ARankThatIsSlowToReportItsOtherCallDidCome) {
  const std::string said =
      "ranks made different calls: rank 2 called broadcast #2; ranks 0, 1 called all_reduce #2";
  const std::vector<RankView> views = {
      alive(0), with_error(ended(1, 0, exited(1)), Code::kCallMismatch, 2, said), alive(2)};
  const RootCause root_cause = find_root_cause(views, false);
  EXPECT_EQ(root_cause.cause, Cause::kDisagreement);
  EXPECT_EQ(root_cause.exit_code, 1);
  const Error error = failure_error(root_cause, views, {});
  EXPECT_EQ(error.code(), Code::kCallMismatch);
  EXPECT_EQ(error.message(), said);
}

RankView in_rendezvous(RankView view) {
  view.board.pid = view.pid;
  view.board.collective.sequence = -1;
  view.board.collective.operation = "rendezvous";
  view.board.collective.started_ns = 5;
  return view;
}

TEST(RootCause, ARankThatEndedWellBeforeTheRendezvousIsTheCulprit) {
  const std::vector<RankView> views = {in_rendezvous(alive(0)), alive(1), ended(2, 0, exited(0))};
  EXPECT_FALSE(ranks_that_never_came(views).empty());
  const auto root_cause = find_early_leaver(views);
  ASSERT_TRUE(root_cause);
  EXPECT_EQ(root_cause->rank, 2);
  EXPECT_EQ(root_cause->cause, Cause::kLeft);
  EXPECT_EQ(root_cause->exit_code, 1);
  EXPECT_EQ(root_cause->running, (std::vector<int>{0, 1}));
  EXPECT_EQ(failure_line(*root_cause, views, {}),
            "rank 2 ended with exit code 0 and never came to the rendezvous of all ranks");
}

TEST(RootCause, ARankMayEndWellWhereNobodyMissesIt) {
  EXPECT_FALSE(find_early_leaver({alive(0), ended(1, 0, exited(0))})) << "no rendezvous";
  RankView past = in_rendezvous(alive(0));
  past.board.collective.finished_ns = 6;
  EXPECT_FALSE(find_early_leaver({past, ended(1, 0, exited(0))})) << "the rendezvous is over";
  RankView came = in_rendezvous(ended(1, 0, exited(0)));
  EXPECT_FALSE(find_early_leaver({in_rendezvous(alive(0)), came}))
      << "it came, and its communicator tells the others that it left";
  EXPECT_TRUE(ranks_that_never_came({in_rendezvous(alive(0)), came}).empty());
}

TEST(RootCause, AnotherHostAccusesARankOfThisOne) {
  const RootCause root_cause = find_cause_in_rank({alive(2, 'T'), alive(3)}, 2, false);
  EXPECT_EQ(root_cause.rank, 2);
  EXPECT_EQ(root_cause.cause, Cause::kHalted);
  EXPECT_EQ(root_cause.exit_code, 1);
  EXPECT_EQ(root_cause.running, (std::vector<int>{3}));
}

TEST(RootCause, RanksThatBlameEachOtherOrThemselvesEndTheSearch) {
  const RootCause both = find_root_cause({with_error(ended(0, 0, exited(1)), Code::kRankFailed, 1),
                                          with_error(ended(1, 1, exited(1)), Code::kRankFailed, 0)},
                                         false);
  EXPECT_EQ(both.rank, 0);
  EXPECT_EQ(find_root_cause({with_error(ended(0, 0, exited(1)), Code::kRankFailed, 0)}, false).rank,
            0);
}

TEST(RootCause, AVictimThatKnowsNoNameIsNotBlamed) {
  const RootCause root_cause = find_root_cause(
      {with_error(ended(0, 0, exited(1)), Code::kRankFailed, -1), ended(1, 1, SIGKILL)}, false);
  EXPECT_EQ(root_cause.rank, 1);
}

TEST(RootCause, PreemptedRanksAreNoFailure) {
  const RootCause root_cause =
      find_root_cause({ended(0, 0, exited(75)), ended(1, 1, exited(4))}, false);
  EXPECT_EQ(root_cause.rank, 1);
  EXPECT_TRUE(root_cause.gave_up.empty());
}

FailureFacts facts() {
  return {.host = "box",
          .program = "./train",
          .world_size = 3,
          .logs = "/logs/0",
          .error_message = "",
          .last_errors = {},
          .stacks = {},
          .bundle = "",
          .remote = "",
          .now_ns = 2'000'000'000};
}

TEST(FailureReport, NamesEverythingThatIsKnown) {
  RankView root = with_error(ended(1, 0, exited(1)), Code::kSplit, -1, "rows do not fit");
  root.board.updated_ns = 1;
  root.board.step = 17;
  root.board.collective = {52, "all_reduce", 24 << 20, 3, 1'000'000'000, 0};
  const std::vector<RankView> views = {ended(0, 1, exited(1)), root, alive(2)};
  const Error error = failure_error(find_root_cause(views, false), views, facts());
  EXPECT_EQ(error.block(),
            "error[LS0008]: rank 1: rows do not fit\n"
            "note: rank 1 of 3 on box, process 1001, ./train\n"
            "note: it was at step 17, in all_reduce #52 of 24.0 MiB (bucket 3), 1.00 s ago\n"
            "note: victims: rank 0 gave up, rank 2 stopped by lockstep\n"
            "note: logs of all ranks: /logs/0\n"
            "help: tail /logs/0/rank1.*; `lockstep explain LS0008`");
}

TEST(FailureReport, IsAtMostFifteenLinesWhateverRanksSay) {
  std::string chatter;
  for (int i = 0; i < 100; ++i) chatter += "a line\nand one more ";
  RankView first = with_error(ended(0, 0, exited(1)), Code::kRankFailed, 1, chatter);
  RankView root = ended(1, 1, exited(9));
  root.board.updated_ns = 1;
  const std::vector<RankView> views = {first, root, alive(2)};
  FailureFacts much = facts();
  much.error_message = chatter;
  much.last_errors = {chatter, chatter, chatter, chatter, chatter, chatter};
  const std::string block = failure_error(find_root_cause(views, false), views, much).block();
  EXPECT_LE(std::count(block.begin(), block.end(), '\n') + 1, 15) << block;
  EXPECT_LT(block.size(), 4000U);
  EXPECT_NE(block.find("rank 1 ended with exit code 9"), std::string::npos);
  EXPECT_NE(block.find("it wrote: "), std::string::npos);
}

TEST(FailureReport, QuotesTheOtherHost) {
  const std::vector<RankView> views = {with_error(ended(0, 0, exited(1)), Code::kRankFailed, 5)};
  FailureFacts from_afar = facts();
  from_afar.remote = "rank 5 was killed by signal 9 (Killed)";
  const Error error = failure_error(find_root_cause(views, false), views, from_afar);
  EXPECT_EQ(error.message(), "rank 5 was killed by signal 9 (Killed)");
  EXPECT_NE(error.help().find("that host"), std::string::npos);
}

RankStatus at_step(int64_t step, int64_t sequence = 0, bool finished = true) {
  RankStatus status;
  status.updated_ns = 1;
  status.step = step;
  status.collective.sequence = sequence;
  status.collective.finished_ns = sequence != 0 && finished ? 10 * sequence : 0;
  return status;
}

TEST(StallWatch, NoticesThatNoRankMakesAStepOrACollective) {
  StallWatch watch(30);
  EXPECT_FALSE(watch.look({at_step(0), at_step(0)}, 1000));
  EXPECT_FALSE(watch.look({at_step(0), at_step(0)}, 9000)) << "loading may take long";
  EXPECT_FALSE(watch.look({at_step(1), at_step(0)}, 9001));
  EXPECT_FALSE(watch.look({at_step(1), at_step(0)}, 9030));
  EXPECT_TRUE(watch.look({at_step(1), at_step(0)}, 9031));
  EXPECT_FALSE(watch.look({at_step(1), at_step(1)}, 9032)) << "one rank is enough";
  EXPECT_FALSE(watch.look({at_step(1, 1), at_step(1)}, 9062)) << "so is a collective";
  EXPECT_FALSE(watch.look({at_step(1, 2, false), at_step(1)}, 9092));
  EXPECT_TRUE(watch.look({at_step(1, 2, false), at_step(1)}, 9122)) << "rank 1 does not come";
  EXPECT_FALSE(watch.look({at_step(1, 2, false), at_step(1, 2, false)}, 9200));
  EXPECT_FALSE(watch.look({at_step(1, 2, false), at_step(1, 2, false)}, 9999))
      << "a collective has a deadline of its own";
}

TEST(FailureReport, NamesRanksWithoutProgressTheirStepsAndStacks) {
  std::vector<RankView> views = {alive(0, 'R'), alive(1, 'R'), alive(2)};
  views[0].board = at_step(18, 4);
  views[1].board = at_step(17, 4);
  views[2].board = at_step(18, 5, false);
  const RootCause root_cause = find_stall(views, 30);
  EXPECT_EQ(root_cause.rank, 1) << "the one that is furthest behind";
  EXPECT_EQ(root_cause.stalled, (std::vector<int>{0, 1}));
  EXPECT_EQ(root_cause.running, (std::vector<int>{2}));
  FailureFacts known = facts();
  known.stacks = {{0, {"spin", "load"}}, {1, {"wait", "read"}}};
  const Error error = failure_error(root_cause, views, known);
  EXPECT_EQ(error.code(), Code::kRankAbsent);
  EXPECT_EQ(error.message(),
            "ranks 0 and 1 made no step and no collective for 30.0 s (--step-timeout)");
  const std::string block = error.block();
  for (const char* part : {"it was at step 17", "its stack, innermost first: wait < read",
                           "rank 0 was at step 18", "its stack: spin < load", "victims: rank 2"}) {
    EXPECT_NE(block.find(part), std::string::npos) << part << "\nin\n" << block;
  }
  EXPECT_LE(std::count(block.begin(), block.end(), '\n'), 15);
}

TEST(OomWatch, ReadsTheKernelsCounters) {
  EXPECT_EQ(parse_oom_kills("low 0\noom 4\noom_kill 3\noom_group_kill 0\n"), 3);
  EXPECT_EQ(parse_oom_kills("oom_kill_disable 0\nunder_oom 0\noom_kill 12\n"), 12);
  EXPECT_FALSE(parse_oom_kills("nr_free_pages 12\n"));
  EXPECT_EQ(oom_counter_file("0::/user.slice/a\n", "/cg"), "/cg/user.slice/a/memory.events");
  EXPECT_EQ(oom_counter_file("5:cpu:/\n4:memory:/job/1\n0::/\n", "/cg"),
            "/cg/memory/job/1/memory.oom_control");
  EXPECT_EQ(oom_counter_file("", "/cg"), "");
}

}  // namespace
}  // namespace lockstep::test::root_cause_test
