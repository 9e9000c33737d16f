// What practical10_hybrid says of a run: its lines, its record, its timeline.

#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>

#include "practical10_support.hpp"

namespace lockstep::test {
namespace {

class MicroBatches : public testing::TestWithParam<int> {};

TEST_P(MicroBatches, EachGoesForwardAndBackwardThroughEachStageAndOneSynchronisationFollows) {
  const auto number = static_cast<size_t>(GetParam());
  const ChildResult result =
      run_hybrid(2, {"--steps", "3", "--micro-batches", std::to_string(number)});
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  for (const std::string rank : {"0", "1"}) {
    for (const std::string stage : {"0", "1"}) {
      const std::string device = stage == "0" ? rank : rank == "0" ? "2" : "3";
      const std::string head =
          "step 1 | rank " + rank + " | stage " + stage + " on cpu:" + device + " | ";
      EXPECT_EQ(count(result.output, head + "forward  | micro-batch "), number) << result.output;
      EXPECT_EQ(count(result.output, head + "backward | micro-batch "), number) << result.output;
      EXPECT_EQ(count(result.output, head + "synchronise | 1 all-reduce, "), 1U) << result.output;
    }
  }
  EXPECT_EQ(count(result.output, "step 2 | rank"), 0U) << "--print-steps is 1";
  EXPECT_EQ(count(result.output, "Processes: 2 | "), 1U);
  EXPECT_EQ(count(result.output, "Micro-batches: " + std::to_string(number) + " of "), 1U);
  EXPECT_EQ(count(result.output, "Schedule: 1f1b"), 1U);
  EXPECT_EQ(count(result.output, "Rank: 1 | Local Rank: 1 | Devices: stage 0 on cpu:1 ("), 1U);
  EXPECT_EQ(count(result.output, "4 devices used"), 1U) << result.output;
}

INSTANTIATE_TEST_SUITE_P(Practical10, MicroBatches, testing::Values(2, 4, 8),
                         [](const auto& number) { return std::to_string(number.param); });

TEST(Practical10, TheRecordIsThatOfTheWholeJob) {
  const RunRecord record = record_of(2, {"--batch", "25", "--micro-batches", "3"});
  EXPECT_EQ(record.world_size, 2);
  EXPECT_EQ(record.split, (std::vector<int64_t>{13, 12}));
  std::vector<std::string> names;
  for (const auto& device : record.devices) names.push_back(device.name);
  EXPECT_EQ(names, (std::vector<std::string>{"cpu:0", "cpu:2", "cpu:1", "cpu:3"}))
      << "rank r has r and r + world size";
  EXPECT_EQ(record.all_reduces.count, 2) << "one for each stage of the rank";
  EXPECT_EQ(record.options.at("micro-batches"), "3");
  EXPECT_EQ(record.options.at("place"), "split");

  ASSERT_TRUE(record.pipeline);
  const PipelineRecord& pipeline = *record.pipeline;
  EXPECT_EQ(pipeline.schedule, "1f1b");
  EXPECT_EQ(pipeline.rows, (std::vector<int64_t>{5, 4, 4})) << "of rank 0's 13";
  ASSERT_EQ(pipeline.stages.size(), 4U);
  EXPECT_EQ(pipeline.stages[0].layers + pipeline.stages[1].layers, 15) << "8 linear, 7 ReLU";
  EXPECT_EQ(pipeline.stages[0].message_bytes, 5 * 48 * 4);
  EXPECT_EQ(pipeline.stages[1].message_bytes, 0);
  EXPECT_EQ(pipeline.stages[3].rank, 1);
  for (const auto& stage : pipeline.stages) EXPECT_GT(stage.forward_ms * stage.backward_ms, 0);
  EXPECT_EQ(pipeline.predicted.size(), 2U * 2 * 3) << "of rank 0";
  EXPECT_EQ(pipeline.actions.size(), 2U * (2 * 2 * 3 + 2)) << "of both, with synchronisations";
  EXPECT_GT(pipeline.span_ms, 0);
  EXPECT_GT(pipeline.predicted_span_ms, 0);
  for (const double bubble : {pipeline.bubble, pipeline.predicted_bubble}) {
    EXPECT_GT(bubble, 0);
    EXPECT_LT(bubble, 1);
  }
}

TEST(Practical10, TheRecordNamesTheDeviceOfEveryStageOnRanksToo) {
  const ScratchFolder folder;
  const ChildResult result =
      run_hybrid(2, {"--place", "ranks", "--quiet", "--json", folder.file("record.json")});
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  const auto record = nlohmann::json::parse(read_bytes(folder.file("record.json")));
  EXPECT_EQ(record.at("device_of_stage"), (nlohmann::json{"cpu:0", "cpu:1"}));
}

TEST(Practical10, LinesOfASplitBackwardStandInColumns) {
  const ChildResult result =
      run_hybrid(0, {"--schedule", "zero-bubble", "--batch", "13", "--steps", "2"});
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_EQ(count(result.output, "Micro-batches: 4 of 4, 3, 3, 3 rows\n"), 1U) << result.output;
  for (const std::string action : {"forward        ", "input gradient ", "weight gradient"}) {
    EXPECT_EQ(count(result.output, "on cpu:1 | " + action + " | micro-batch "), 4U)
        << result.output;
  }
}

TEST(Practical10, TheRecordHasTheTrafficOfEachAxis) {
  const auto axes_of = [](int ranks, const Arguments& flags) {
    return record_of(ranks, flags).pipeline.value().axes;
  };
  const auto two = axes_of(2, {});
  ASSERT_EQ(two.size(), 3U);
  EXPECT_EQ(two[0].name, "data");
  EXPECT_EQ(two[0].size, 2);
  const int64_t weights = (33 * 48 + 6 * 49 * 48 + 49 * 32) * 4;
  EXPECT_EQ(two[0].predicted_bytes, weights) << "2 (n - 1) / n of the gradients, with n = 2";
  EXPECT_GE(two[0].bytes, weights);
  EXPECT_LT(two[0].bytes, weights + 16 * 64) << "each parameter starts at 64 bytes";
  EXPECT_EQ(two[1].name, "pipeline");
  EXPECT_EQ(two[1].calls, 2 * 4) << "each micro-batch forward and backward";
  EXPECT_EQ(two[1].bytes, 2 * 12 * 48 * 4);
  EXPECT_EQ(two[1].predicted_bytes, two[1].bytes);
  EXPECT_EQ(two[2].bytes, 0);

  const auto ranks = axes_of(4, {"--place", "ranks", "--tensor-parallel", "2"});
  EXPECT_EQ(ranks[0].bytes, 0) << "one pipeline";
  EXPECT_EQ(ranks[1].bytes, 24 * 48 * 4) << "a rank sends one way";
  EXPECT_EQ(ranks[1].predicted_bytes, ranks[1].bytes);
  EXPECT_EQ(ranks[2].size, 2);
  EXPECT_GT(ranks[2].bytes, 0);
  EXPECT_EQ(ranks[2].predicted_bytes, ranks[2].bytes);
}

TEST(Practical10, TheLossesAreThoseOfTheWholeBatchOnce) {
  const RunRecord one = record_of(0, {"--stages", "1"});
  for (const Arguments& flags : std::vector<Arguments>{{}, {"--place", "ranks"}}) {
    const RunRecord record = record_of(2, flags);
    ASSERT_EQ(record.losses.size(), one.losses.size());
    for (size_t i = 0; i < one.losses.size(); ++i) {
      EXPECT_NEAR(record.losses[i], one.losses[i], 1e-5 * one.losses[i]) << text_of(flags);
    }
  }
  EXPECT_EQ(record_of(2, {"--place", "ranks"}).split, (std::vector<int64_t>{24}));
}

TEST(Practical10, OneProcessSynchronisesNothingAndSaysSo) {
  const ScratchFolder folder;
  const ChildResult result = run_hybrid(0, {"--json", folder.file("record.json")});
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_EQ(
      count(result.output, "step 1 | rank 0 | no synchronisation: one process holds all rows"), 1U)
      << result.output;
  EXPECT_EQ(count(result.output, "rank 1"), 0U);
  EXPECT_EQ(count(result.output, "synchronise |"), 0U);
  const RunRecord record = read_record(folder.file("record.json"));
  EXPECT_EQ(record.all_reduces.count, 0);
  for (const auto& action : record.pipeline.value().actions) EXPECT_NE(action.kind, "S");
}

TEST(Practical10, OnTheSamePlaceOneDeviceIsUsed) {
  const ScratchFolder folder;
  const ChildResult result =
      run_hybrid(0, {"--place", "same", "--json", folder.file("record.json")});
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_EQ(count(result.output, "stage 0 on cpu:0 ("), 1U) << result.output;
  EXPECT_EQ(count(result.output, ", stage 1 on cpu:0 ("), 1U) << result.output;
  EXPECT_EQ(count(result.output, "1 device used"), 1U) << result.output;
  const RunRecord record = read_record(folder.file("record.json"));
  ASSERT_EQ(record.devices.size(), 1U);
  for (const auto& stage : record.pipeline.value().stages) EXPECT_EQ(stage.device, "cpu:0");
  EXPECT_EQ(record.pipeline->axes[1].bytes, 0) << "nothing goes to another place";
}

// As mpirun and srun bind ranks: no other rank has these cores.
TEST(Practical10, ABoundRankDividesItsOwnCores) {
  const ScratchFolder folder;
  const cli::Interrupts interrupts;
  const auto result =
      cli::run_child({.program = kBin + "practical10_hybrid",
                      .arguments = join(kModel, {"--quiet", "--json", folder.file("record.json")}),
                      .cores = {0}},
                     interrupts);
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  const RunRecord record = read_record(folder.file("record.json"));
  ASSERT_EQ(record.devices.size(), 2U);
  EXPECT_EQ(record.devices[1].name, "cpu:1");
  EXPECT_EQ(record.devices[1].shared_by, 2) << "both on the one core";
  EXPECT_EQ(record.devices[1].threads, 1);
}

TEST(Practical10, HoldsFewerMicroBatchesWith1f1bThanWithGpipe) {
  const auto held = [](const char* schedule) {
    std::vector<int64_t> peaks;
    const Arguments flags = {"--stages", "2", "--micro-batches", "8", "--schedule", schedule};
    const RunRecord record = record_of(0, flags);
    for (const auto& stage : record.pipeline.value().stages)
      peaks.push_back(stage.peak_micro_batches);
    return peaks;
  };
  EXPECT_EQ(held("gpipe"), (std::vector<int64_t>{8, 8}));
  EXPECT_EQ(held("1f1b"), (std::vector<int64_t>{2, 1}));
}

TEST(Practical10, TheTimelineHasEveryActionOnItsDevice) {
  const ScratchFolder folder;
  const ChildResult result =
      run_hybrid(2, {"--steps", "2", "--quiet", "--trace", folder.file("t.json")});
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  const auto trace = nlohmann::json::parse(read_bytes(folder.file("t.json")));
  std::map<std::pair<int, int>, std::string> rows;  // [rank, row]
  std::map<std::string, int> seen;                  // "rank row name"
  for (const auto& event : trace.at("traceEvents")) {
    const int rank = event.at("pid").get<int>();
    const auto name = event.at("name").get<std::string>();
    if (name == "thread_name") {
      rows[{rank, event.at("tid").get<int>()}] = event.at("args").at("name").get<std::string>();
    } else if (event.at("ph") == "X") {
      ++seen[std::to_string(rank) + " " + std::to_string(event.at("tid").get<int>()) + " " + name];
    }
  }
  EXPECT_EQ((rows[{0, 1}]), "cpu:2");
  EXPECT_EQ((rows[{1, 2}]), "communication");
  for (const std::string rank : {"0 ", "1 "}) {
    for (const std::string device : {"0 ", "1 "}) {
      EXPECT_EQ(seen[rank + device + "F3"], 2);
      EXPECT_EQ(seen[rank + device + "B0"], 2);
    }
    EXPECT_EQ(seen[rank + "2 synchronise stage 1"], 2);
  }
}

}  // namespace
}  // namespace lockstep::test
