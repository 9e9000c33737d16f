// practical10_hybrid as a user starts it, with stages on devices of one process and on ranks: what
// it prints and records, what it trains, what it refuses, and how it fails. That its numbers are
// PyTorch's is tested in tests/parity/practical10_parity.py.

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "base/safetensors.hpp"
#include "launch_support.hpp"
#include "lockstep/detail/board.hpp"
#include "lockstep/record.hpp"
#include "program_support.hpp"

namespace lockstep::test {
namespace {

// Deep enough to be cut into four, small enough that a run is mostly start-up.
const Arguments kModel = {"--steps",  "10", "--batch", "24", "--dim", "32",
                          "--hidden", "48", "--depth", "6",  "--lr",  "0.05"};

// The program alone where `ranks` is 0, otherwise under `lockstep run`, whose console shows rank 0.
ChildResult run_hybrid(int ranks, const Arguments& arguments) {
  const Arguments whole = join(kModel, arguments);
  if (ranks == 0) return run("practical10_hybrid", whole);
  const ScratchFolder logs;  // kept after failures: not in the user's folder
  return run("lockstep", join({"run", "-n", std::to_string(ranks), "--log-dir", logs.file("logs"),
                               kBin + "practical10_hybrid"},
                              whole));
}

RunRecord record_of(int ranks, const Arguments& arguments) {
  const ScratchFolder folder;
  const std::string path = folder.file("record.json");
  const ChildResult result = run_hybrid(ranks, join(arguments, {"--quiet", "--json", path}));
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_EQ(result.output, "") << "told to be quiet";
  return read_record(path);
}

std::string text_of(const Arguments& arguments) {
  std::string text;
  for (const auto& word : arguments) text += " " + word;
  return text;
}

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
          "[Rank " + rank + "] step 1 | stage " + stage + " on cpu:" + device + " | ";
      EXPECT_EQ(count(result.output, head + "forward  | micro-batch "), number) << result.output;
      EXPECT_EQ(count(result.output, head + "backward | micro-batch "), number) << result.output;
      EXPECT_EQ(count(result.output, head + "synchronise | 1 all-reduce, "), 1U) << result.output;
    }
  }
  EXPECT_EQ(count(result.output, "step 2 | stage"), 0U) << "--print-steps is 1";
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
      count(result.output, "[Rank 0] step 1 | no synchronisation: one process holds all rows"), 1U)
      << result.output;
  EXPECT_EQ(count(result.output, "Rank 1]"), 0U);
  EXPECT_EQ(count(result.output, "synchronise |"), 0U);
  const RunRecord record = read_record(folder.file("record.json"));
  EXPECT_EQ(record.all_reduces.count, 0);
  for (const auto& action : record.pipeline.value().actions) EXPECT_NE(action.kind, "S");
}

TEST(Practical10, WithAllStagesOnOneDeviceOnlyThatIsUsed) {
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
  EXPECT_EQ(record.pipeline->axes[1].bytes, 0) << "nothing goes to another device";
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

// Weights: those of one device, however stages, ranks and rows are divided.

using Weights = std::map<std::string, std::vector<float>>;

Weights read_weights(const std::string& path) {
  const SafetensorsReader file(path);
  Weights weights;
  for (const auto& info : file.tensors()) {
    auto& values = weights[info.name];
    values.resize(static_cast<size_t>(info.bytes()) / sizeof(float));
    file.read(info, std::as_writable_bytes(std::span(values)));
  }
  return weights;
}

Weights trained(const ScratchFolder& folder, const ChildResult& result) {
  EXPECT_EQ(result.exit_code, 0) << result.output << result.errors;
  return read_weights(folder.file("w"));
}

// What one device learns from the same rows; practical5_single knows the mlp only.
Weights single_device(const Arguments& arguments, const char* program = "practical5_single") {
  const ScratchFolder folder;
  const Arguments ends = {"--quiet", "--devices", "cpu:1", "--save", folder.file("w")};
  return trained(folder, run(program, join(join(kModel, arguments), ends)));
}

Weights hybrid(int ranks, const Arguments& arguments) {
  const ScratchFolder folder;
  return trained(folder,
                 run_hybrid(ranks, join(arguments, {"--quiet", "--save", folder.file("w")})));
}

void expect_same(const Weights& actual, const Weights& expected, const std::string& what,
                 double relative = 1e-4, double absolute = 1e-6) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (const auto& [name, values] : expected) {
    ASSERT_TRUE(actual.contains(name)) << what << ": " << name;
    ASSERT_EQ(actual.at(name).size(), values.size()) << what << ": " << name;
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_NEAR(actual.at(name)[i], values[i], absolute + relative * std::abs(values[i]))
          << what << ": " << name << "[" << i << "]";
    }
  }
}

TEST(Practical10Weights, AreThoseOfOneDeviceInOneProcess) {
  const Weights expected = single_device({});
  for (const Arguments& flags : std::vector<Arguments>{
           {"--stages", "2", "--micro-batches", "1"},
           {"--stages", "2", "--micro-batches", "2", "--schedule", "gpipe"},
           {"--stages", "3", "--micro-batches", "4"},
           {"--stages", "4", "--micro-batches", "8", "--schedule", "zero-bubble"},
           {"--stages", "2", "--micro-batches", "5"},
           {"--stages", "4", "--micro-batches", "4", "--schedule", "interleaved"},
           {"--stages", "3", "--micro-batches", "7", "--schedule", "sequential"},
           {"--stages", "2", "--place", "same", "--recompute"},
           {"--stages", "4", "--place", "0,0,1,1", "--schedule", "gpipe"},
           {"--stages", "2", "--cut", "3,12"},
           {"--stages", "3", "--cut", "time"}}) {
    expect_same(hybrid(0, flags), expected, text_of(flags));
  }
}

TEST(Practical10Weights, AreThoseOfOneDeviceOverRanks) {
  const Weights expected = single_device({});
  const auto check = [&](int ranks, const Arguments& flags) {
    expect_same(hybrid(ranks, flags), expected, std::to_string(ranks) + text_of(flags));
  };
  check(2, {"--stages", "2", "--micro-batches", "3"});
  check(2, {"--place", "ranks", "--schedule", "zero-bubble"});
  check(3, {"--place", "ranks", "--stages", "3", "--micro-batches", "5"});
  check(4, {"--place", "ranks", "--cut", "time"});
  check(2, {"--place", "ranks", "--stages", "4", "--schedule", "interleaved"});
  check(8, {"--place", "ranks", "--tensor-parallel", "2", "--schedule", "gpipe"});
}

TEST(Practical10Weights, OfTheTransformerToo) {
  const Arguments model = {"--model", "transformer", "--hidden", "128",
                           "--depth", "2",           "--lr",     "0.005"};
  const Weights expected = single_device(model, "practical6_ddp");
  expect_same(hybrid(2, model), expected, "two processes of two stages");
  expect_same(hybrid(4, join(model, {"--place", "ranks", "--tensor-parallel", "2"})), expected,
              "two stages on ranks that divide matrices");
}

TEST(Practical10Weights, DoNotDependOnAccumulation) {
  const Weights expected = single_device({});
  expect_same(hybrid(2, {"--batch", "8", "--accum-steps", "3", "--optimizer", "sgd"}), expected,
              "three micro-steps of 8 rows");
}

TEST(Practical10Weights, InBf16AreNearThoseOfOneDeviceInBf16) {
  const Arguments bf16 = {"--amp", "bf16"};
  const Weights expected = single_device(bf16, "practical7_amp");
  expect_same(hybrid(2, bf16), expected, "devices", 2e-2, 2e-3);
  expect_same(hybrid(2, join(bf16, {"--place", "ranks"})), expected, "ranks", 2e-2, 2e-3);
  const RunRecord record = record_of(2, bf16);
  EXPECT_EQ(record.amp, "bf16");
  EXPECT_EQ(record.scale, 65536);
}

// Refusals before anything starts, and failures.

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
  refused(0, {"--place", "0,1,1"}, "3 numbers, but the stages are 2");
  refused(0, {"--place", "0,2"}, "--place 0,2 uses device 2 but not 1");
  refused(0, {"--place", "0,"}, "--place 0,");
  refused(0, {"--cut", "3,2"}, "--cut 3,2 has 5 layers, but the model has 15");
  refused(0, {"--cut", "0,15"}, "\"0\" is not a number from 1");
  refused(0, {"--tensor-parallel", "2"}, "add --place ranks");
  refused(0, {"--place", "ranks"}, "1 rank cannot be divided into pipelines of 2 ranks");
  refused(0, {"--print-steps", "-1"}, "--print-steps -1");
  refused(0, {"--amp", "fp8"}, "\"fp8\"");
  refused(0, {"--accum-steps", "0"}, "--accum-steps 0");
}

TEST(Practical10Refuses, WhatDoesNotFitTheRanks) {
  refused(2, {"--micro-batches", "13"}, "--micro-batches 13 cannot be made from 12 rows");
  refused(3, {"--place", "ranks"}, "3 ranks cannot be divided into pipelines of 2 ranks");
  refused(2, {"--place", "ranks", "--tensor-parallel", "2"}, "x --tensor-parallel 2");
  refused(2, {"--devices", "cpu:3"},
          "makes 3 logical devices, but this host has 2 ranks with 2 devices each");
  refused(2, {"--stages", "16"}, "no collective yet");
  refused(2, {"--cut", "3,2"}, "no collective yet");
}

class Practical10Failure : public LaunchTest {};

// The board tells when both ranks train, what devices they use, and who they are. The timeout is
// longer than this test may take.
TEST_F(Practical10Failure, ADeadRankIsNamedAndNothingHangs) {
  const pid_t job =
      start(join({"-n", "2", "--timeout", "300", kBin + "practical10_hybrid"},
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
