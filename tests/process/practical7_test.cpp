// The programs of practical 7 and homework 2 as a user starts them.
// That their numbers are PyTorch's is tested in tests/parity/practical7_parity.py.

#include <gtest/gtest.h>

#include <cmath>

#include "base/file.hpp"
#include "base/safetensors.hpp"
#include "lockstep/record.hpp"
#include "program_support.hpp"

namespace lockstep::test {
namespace {

// A model small enough that a run is mostly start-up.
const Arguments kSmall = {"--steps", "4",        "--batch", "12",      "--dim",
                          "8",       "--hidden", "16",      "--depth", "1"};

ChildResult run_ranks(int ranks, const std::string& program, const Arguments& arguments) {
  return run("lockstep",
             join({"run", "-n", std::to_string(ranks), "--ranks", "all", kBin + program},
                  join(kSmall, arguments)));
}

RunRecord record_of(int ranks, const std::string& program, const Arguments& arguments) {
  const ScratchFolder folder;
  const ChildResult result =
      run_ranks(ranks, program, join(arguments, {"--json", folder.file("record.json")}));
  EXPECT_EQ(result.exit_code, 0) << result.output << result.errors;
  return read_record(folder.file("record.json"));
}

// The number of weights. In a bucket each parameter begins at a multiple of 64 bytes.
constexpr int64_t kWeights = (8 + 1) * 16 + (16 + 1) * 16 + (16 + 1) * 8;

TEST(Practical7, OneSetOfBucketsWithNoSyncAndOneForEachMicroStepWithout) {
  const Arguments buckets = {"--accum-steps", "4", "--bucket-mib", "0.0005"};
  const RunRecord once = record_of(2, "practical7_accumulation", buckets);
  const RunRecord each =
      record_of(2, "practical7_accumulation", join(buckets, {"--sync-every-step"}));
  ASSERT_GT(once.buckets.size(), 1U);
  EXPECT_EQ(once.all_reduces.count, static_cast<double>(once.buckets.size()));
  EXPECT_GE(once.all_reduces.bytes, kWeights * 4);
  EXPECT_EQ(each.all_reduces.count, 4 * once.all_reduces.count);
  EXPECT_EQ(each.all_reduces.bytes, 4 * once.all_reduces.bytes);
  EXPECT_EQ(once.accum_steps, 4);
  EXPECT_EQ(once.effective_batch, 48);
  EXPECT_EQ(once.options.at("sync-every-step"), "no");
  EXPECT_EQ(each.options.at("sync-every-step"), "yes");
  for (size_t i = 0; i < 4; ++i) EXPECT_NEAR(each.losses[i], once.losses[i], 1e-6);
}

size_t count_of(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(Practical7, SaysWhichMicroStepSynchronisedAndWhenTheWeightsChanged) {
  for (const char* program : {"practical7_accumulation", "homework2_combined"}) {
    const std::string said = run_ranks(2, program, {"--accum-steps", "3"}).output;
    for (const char* rank : {"0", "1"}) {
      const std::string of_rank = std::string(" | rank ") + rank + " | ";
      EXPECT_EQ(count_of(said, "step 1" + of_rank + "micro-step 1 of 3 | not synchronised"), 1U)
          << said;
      EXPECT_EQ(count_of(said, "step 1" + of_rank + "micro-step 2 of 3 | not synchronised"), 1U);
      EXPECT_EQ(count_of(said, "step 2" + of_rank + "micro-step 3 of 3 | synchronised: 1 all-"), 1U)
          << said;
      EXPECT_EQ(count_of(said, "step 2" + of_rank +
                                   "update | the weights changed once, for 3 "
                                   "micro-steps and 36 rows"),
                1U)
          << said;
    }
    EXPECT_EQ(count_of(said, "step 3 | rank"), 0U) << "--print-steps is 2";
  }
  const Arguments each = {"--accum-steps", "3", "--sync-every-step", "--print-steps", "1"};
  const std::string synced = run_ranks(2, "practical7_accumulation", each).output;
  EXPECT_EQ(count_of(synced, "| synchronised: 1 all-reduce,"), 6U) << synced;
  EXPECT_EQ(count_of(synced, "not synchronised"), 0U) << synced;
  const std::string alone = run_ranks(1, "practical7_accumulation", {}).output;
  EXPECT_EQ(count_of(alone, "one rank: there is nothing to synchronise"), 8U) << alone;
  const std::string skipped =
      run_ranks(2, "homework2_combined", {"--overflow-at", "1", "--devices", "cpu:2"}).output;
  EXPECT_EQ(count_of(skipped, "update | skipped by the scaler"), 2U) << skipped;
  EXPECT_EQ(count_of(run_ranks(2, "practical7_accumulation", {"--quiet"}).output, "micro-step"),
            0U);
}

TEST(Practical7, AnUndividedLossMakesTheFirstGradientThatManyTimesAsLarge) {
  const RunRecord divided = record_of(2, "practical7_accumulation", {"--accum-steps", "4"});
  const RunRecord undivided =
      record_of(2, "practical7_accumulation", {"--accum-steps", "4", "--no-divide"});
  ASSERT_TRUE(divided.gradient_check && undivided.gradient_check);
  EXPECT_EQ(divided.gradient_check->count, kWeights);
  EXPECT_NEAR(undivided.gradient_check->norm / divided.gradient_check->norm, 4, 1e-3);
  EXPECT_NEAR(undivided.losses[0], divided.losses[0], 1e-6) << "the loss itself is the same";
}

TEST(Practical7, TheMemoryOfTheRecordAddsUpToThePeak) {
  const RunRecord full =
      record_of(2, "homework2_combined", {"--amp", "off", "--optimizer", "adamw"});
  const RunRecord lower = record_of(2, "homework2_combined", {"--amp", "bf16"});
  ASSERT_TRUE(full.memory && lower.memory);
  EXPECT_EQ(full.memory->weights, kWeights * 4);
  EXPECT_EQ(full.memory->gradients, kWeights * 4);
  EXPECT_EQ(full.memory->optimizer_state, 2 * kWeights * 4) << "AdamW keeps two averages";
  EXPECT_EQ(full.memory->low_precision, 0);
  EXPECT_EQ(lower.memory->optimizer_state, 0) << "SGD without momentum keeps nothing";
  EXPECT_EQ(lower.memory->low_precision, kWeights * 2) << "every weight and bias once in bf16";
  for (const auto& record : {full, lower}) {
    const MemorySplit& memory = *record.memory;
    EXPECT_GT(memory.activations, 0);
    EXPECT_EQ(memory.weights + memory.gradients + memory.optimizer_state + memory.low_precision +
                  memory.activations,
              record.devices.front().peak_bytes);
  }
}

TEST(Practical7, MixedPrecisionIsTheDefaultOfItsProgramsAndSaysSo) {
  const RunRecord record = record_of(2, "practical7_amp", {"--devices", "cpu:2"});
  EXPECT_EQ(record.amp, "bf16");
  EXPECT_EQ(record.options.at("amp"), "bf16");
  EXPECT_EQ(record.scale, 65536);
  EXPECT_TRUE(record.skipped_steps.empty());
  const RunRecord plain = record_of(2, "practical7_amp", {"--no-scaler", "--devices", "cpu:2"});
  EXPECT_FALSE(plain.scale);
}

class PlantedOverflow : public testing::TestWithParam<int> {};

TEST_P(PlantedOverflow, SkipsThatStepOnEveryRankAndLeavesTheWeights) {
  for (const char* program : {"practical7_amp", "homework2_combined"}) {
    const ScratchFolder folder;
    const Arguments cpu = {"--devices", "cpu:" + std::to_string(GetParam()), "--steps", "1"};
    // Nothing is trained where the only step overflows: the weights are the initial ones.
    const auto weights_after = [&](const char* name, const Arguments& more) {
      const ChildResult result =
          run_ranks(GetParam(), program, join(join(cpu, {"--save", folder.file(name)}), more));
      EXPECT_EQ(result.exit_code, 0) << result.errors;
      return read_text_file(folder.file(name));
    };
    const std::string skipped = weights_after("skipped", {"--overflow-at", "1"});
    const std::string initial = weights_after("initial", {"--lr", "1e-30"});
    const std::string trained = weights_after("trained", {});
    EXPECT_EQ(skipped, initial) << program;
    EXPECT_NE(trained, initial) << program;
  }
}

TEST_P(PlantedOverflow, IsInTheRecordWithParameterAndScale) {
  const RunRecord record = record_of(GetParam(), "practical7_amp",
                                     {"--overflow-at", "2", "--check-replicas", "1", "--devices",
                                      "cpu:" + std::to_string(GetParam())});
  ASSERT_EQ(record.skipped_steps.size(), 1U);
  EXPECT_EQ(record.skipped_steps[0].step, 2);
  EXPECT_EQ(record.skipped_steps[0].parameter.substr(0, 7), "layers.");
  EXPECT_EQ(record.skipped_steps[0].scale_before, 65536);
  EXPECT_EQ(record.skipped_steps[0].scale_after, 32768);
  EXPECT_EQ(record.scale, 32768);
  EXPECT_EQ(record.nonfinite, 0);
  EXPECT_EQ(record.losses.size(), 4U);
}

INSTANTIATE_TEST_SUITE_P(Ranks, PlantedOverflow, testing::Values(1, 2, 3),
                         [](const auto& ranks) { return std::to_string(ranks.param); });

TEST(Practical7, WithoutAScalerAnOverflowSpoilsTheTraining) {
  const RunRecord record = record_of(2, "practical7_amp", {"--overflow-at", "2", "--no-scaler"});
  EXPECT_TRUE(std::isfinite(record.losses[0]));
  EXPECT_TRUE(std::isfinite(record.losses[1])) << "the gradient overflows, not the loss";
  EXPECT_FALSE(std::isfinite(record.losses[2]));
  EXPECT_EQ(record.nonfinite, 2);
}

TEST(Practical7, WithoutAScalerTheRankThatOverflowsIsNamed) {
  const Arguments spoiled = {"--overflow-at", "2", "--no-scaler", "--devices", "cpu:2"};
  const ChildResult warned = run_ranks(2, "practical7_amp", spoiled);
  const std::string said = warned.output + warned.errors;
  EXPECT_EQ(warned.exit_code, 0) << said;
  EXPECT_NE(said.find("warning[LS0032]: rank 1, step 2: the gradient of layers."),
            std::string::npos)
      << said;
  EXPECT_NE(said.find("the loss is not finite from step 3"), std::string::npos) << said;
  const ChildResult stopped =
      run_ranks(2, "practical7_amp", join(spoiled, {"--nonfinite", "stop"}));
  EXPECT_EQ(stopped.exit_code, 1);
  EXPECT_NE((stopped.output + stopped.errors).find("LS0032"), std::string::npos)
      << stopped.output << stopped.errors;
}

TEST(Practical7, SaysThatAStepWasSkipped) {
  const ChildResult result = run_ranks(2, "practical7_amp", {"--overflow-at", "3"});
  EXPECT_NE(result.output.find("step 3 skipped: the gradient of layers."), std::string::npos)
      << result.output;
  EXPECT_NE(result.output.find("scale 65536 -> 32768"), std::string::npos);
}

TEST(Practical7, RefusesBadFlagsBeforeAnythingStarts) {
  const auto refused = [](const char* program, const Arguments& arguments, const char* named) {
    const ChildResult result = run_ranks(2, program, arguments);
    EXPECT_EQ(result.exit_code, 2) << result.errors;
    EXPECT_NE((result.output + result.errors).find(named), std::string::npos)
        << result.output << result.errors;
  };
  refused("practical7_accumulation", {"--accum-steps", "0"}, "--accum-steps 0");
  refused("practical7_accumulation", {"--print-steps", "-1"}, "--print-steps -1");
  refused("practical7_accumulation", {"--amp", "bf16"}, "--amp");
  refused("practical7_amp", {"--amp", "fp8"}, "\"fp8\"");
  refused("practical7_amp", {"--nonfinite", "perhaps"}, "\"perhaps\"");
  refused("practical7_amp", {"--overflow-at", "5"}, "--overflow-at 5");
  refused("practical7_amp", {"--accum-steps", "2"}, "--accum-steps");
  refused("practical7_amp", {"--amp", "off", "--master-weights"}, "--master-weights");
  refused("practical7_amp", {"--capture", "on", "--devices", "cpu:2"}, "is not a GPU");
  refused("homework2_combined", {"--capture", "on", "--overflow-at", "2"}, "--overflow-at");
}

TEST(Practical7, MasterWeightsAreWhatIsSaved) {
  const ScratchFolder folder;
  for (const char* program : {"practical7_amp", "homework2_combined"}) {
    const RunRecord record = record_of(
        1, program,
        {"--amp", "bf16", "--master-weights", "--save", folder.file("weights.safetensors")});
    EXPECT_EQ(record.options.at("master-weights"), "yes");
    ASSERT_TRUE(record.memory);
    EXPECT_EQ(record.memory->weights, kWeights * 4);
    EXPECT_EQ(record.memory->low_precision, kWeights * 2);
    EXPECT_LT(record.losses.back(), record.losses.front());
    const SafetensorsReader saved(folder.file("weights.safetensors"));
    for (const auto& tensor : saved.tensors()) EXPECT_EQ(tensor.dtype, Dtype::kF32) << tensor.name;
  }
}

TEST(Practical7, ARecordFromTheCpuDoesNotSpeakOfCapture) {
  const RunRecord record = record_of(1, "practical7_accumulation", {"--devices", "cpu:1"});
  EXPECT_EQ(record.options.at("capture"), "auto");
  EXPECT_FALSE(record.capture);
}

}  // namespace
}  // namespace lockstep::test
