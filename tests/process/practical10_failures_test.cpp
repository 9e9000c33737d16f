// practical10_hybrid refuses what does not fit before anything starts, and ends with its ranks.

#include <gtest/gtest.h>

#include "launch_support.hpp"
#include "lockstep/board.hpp"
#include "practical10_support.hpp"

namespace lockstep::test {
namespace {

void refused(int ranks, const Arguments& arguments, const std::string& named) {
  const ChildResult result = run_hybrid(ranks, arguments);
  EXPECT_EQ(result.exit_code, 2) << text_of(arguments) << result.errors;
  EXPECT_NE((result.output + result.errors).find(named), std::string::npos)
      << named << "\n"
      << result.output << result.errors;
  EXPECT_NE((result.output + result.errors).find("help: "), std::string::npos);
}

TEST(Practical10Refuses, BadFlagsBeforeAnythingStarts) {
  refused(0, {"--micro-batches", "0"}, "--micro-batches 0");
  refused(0, {"--micro-batches", "25"}, "--micro-batches 25 cannot be made from --batch 24");
  refused(0, {"--stages", "0"}, "--stages 0");
  refused(0, {"--stages", "16"}, "--stages 16 is more than the 15 layers");
  refused(0, {"--schedule", "1f2b"}, "did you mean 1f1b?");
  refused(0, {"--schedule", "interleaved", "--stages", "3"}, "LS0028");
  refused(0, {"--place", "apart"}, "\"apart\"");
  refused(0, {"--place", "0,1,1"}, "3 numbers, but there are 2 stages");
  refused(0, {"--place", "0,2"}, "--place 0,2 uses device 2 but not 1");
  refused(0, {"--place", "0,"}, "--place 0,");
  refused(0, {"--cut", "3,2"}, "--cut 3,2 has 5 layers, but the model has 15");
  refused(0, {"--cut", "0,15"}, "\"0\" is not a number from 1");
  refused(0, {"--tensor-parallel", "2"}, "add --place ranks");
  refused(0, {"--place", "ranks"}, "1 rank cannot be divided into pipelines of 2 places");
  refused(0, {"--print-steps", "-1"}, "--print-steps -1");
  refused(0, {"--amp", "fp8"}, "\"fp8\"");
  refused(0, {"--accum-steps", "0"}, "--accum-steps 0");
}

TEST(Practical10Refuses, WhatDoesNotFitTheRanks) {
  refused(2, {"--micro-batches", "13"}, "--micro-batches 13 cannot be made from 12 rows");
  refused(3, {"--place", "ranks"}, "3 ranks cannot be divided into pipelines of 2 places");
  refused(2, {"--place", "ranks", "--tensor-parallel", "2"}, "x --tensor-parallel 2");
  refused(2, {"--devices", "cpu:3"},
          "makes 3 logical devices, but this host has 2 ranks with 2 devices each");
  refused(2, {"--stages", "16"}, "no collective yet");
  refused(2, {"--cut", "3,2"}, "no collective yet");
}

class Practical10Failure : public LaunchTest {};

// The board tells when both ranks train, what devices they use, and who they are.
TEST_F(Practical10Failure, ADeadRankIsNamedAndNothingHangs) {
  const pid_t job =
      start(join({"-n", "2", "--timeout", "60", kBin + "practical10_hybrid"},
                 join(kModel, {"--steps", "1000000", "--quiet", "--place", "ranks"})));
  pid_t victim = 0;
  const bool training = eventually([&] {
    for (const auto& entry : list_boards()) {
      if (entry.state != BoardState::kLive || entry.info.launcher_pid != job) continue;
      const Board board = Board::open(entry.path);
      if (board.status(0).step < 3 || board.status(1).step < 3) continue;
      victim = board.status(1).pid;
    }
    return victim != 0;
  });
  EXPECT_TRUE(training) << read_bytes(file("job.err"));
  ::kill(training ? victim : job, SIGKILL);
  const JobResult result = finish(job);
  EXPECT_EQ(result.exit_code, 137) << result.errors;
  EXPECT_NE(result.errors.find("]: rank 1 "), std::string::npos) << result.errors;
  EXPECT_LT(result.seconds, 30) << "long before the deadline";
}

TEST_F(Practical10Failure, TheBoardShowsAllDevicesOfARank) {
  const pid_t job = start(join({"-n", "2", kBin + "practical10_hybrid"},
                               join(kModel, {"--steps", "1000000", "--quiet"})));
  RankStatus seen;
  EXPECT_TRUE(eventually([&] {
    for (const auto& entry : list_boards()) {
      if (entry.state != BoardState::kLive || entry.info.launcher_pid != job) continue;
      seen = Board::open(entry.path).status(1);
    }
    return seen.step > 0;
  })) << read_bytes(file("job.err"));
  ::kill(job, SIGTERM);
  finish(job);
  ASSERT_EQ(seen.devices.size(), 2U);
  EXPECT_EQ(seen.devices[0].name, "cpu:1");
  EXPECT_EQ(seen.devices[1].name, "cpu:3");
  for (const auto& device : seen.devices) EXPECT_GT(device.live_bytes, 0);
}

}  // namespace
}  // namespace lockstep::test
