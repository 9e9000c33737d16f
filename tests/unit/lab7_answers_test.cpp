#include <gtest/gtest.h>

#include "cli/lab/lab7.hpp"
#include "cli/lab/lab7_answers.hpp"
#include "lab7_support.hpp"

namespace lockstep::cli {
namespace {

using test::made_lab7;
using test::mentions;

std::string answer_to(const Lab7Results& results, const std::string& question_part) {
  return test::answer_with(answer_lab7(results), question_part);
}

TEST(Lab7Answers, EveryQuestionIsAnsweredWhateverTheRunHas) {
  Lab7Results bare = made_lab7();
  std::vector<RunSet*> all = {&bare.fp32,      &bare.amp,      &bare.combined,
                              &bare.no_scaler, &bare.overflow, &bare.overflow_no_scaler};
  for (auto& runs : bare.accumulations) {
    for (auto* set_up : {&runs.no_sync, &runs.synced, &runs.undivided, &runs.one_batch}) {
      all.push_back(set_up);
    }
  }
  for (auto* set_up : all) {
    for (auto& run : set_up->runs) {
      run.memory.reset();
      run.gradient_check.reset();
      run.scale.reset();
      run.skipped_steps.clear();
      run.losses.clear();
      run.all_reduces = {};
      run.step_ms = {};
      run.devices[0].peak_bytes = run.devices[1].peak_bytes = 0;
    }
  }
  for (const auto& results : {made_lab7(), made_lab7({.amp = "fp16"}), made_lab7({.ranks = 1}),
                              made_lab7({.shared_by = 2}), bare}) {
    const auto answers = answer_lab7(results);
    EXPECT_EQ(answers.size(), 10U);
    for (const auto& answer : answers) {
      EXPECT_TRUE(test::reads_well(answer.text)) << answer.question << "\n" << answer.text;
    }
    EXPECT_EQ(lab7_report(results).tables.size(), 5U);
  }
}

TEST(Lab7Answers, TheLossIsDividedAndTheNormsShowWhy) {
  const std::string text = answer_to(made_lab7(), "divided");
  EXPECT_TRUE(mentions(text, "4 micro-steps give the sum of 4 means")) << text;
  EXPECT_TRUE(mentions(text, "the norm 2 instead of 0.5, 4.00 times as much")) << text;
  EXPECT_TRUE(mentions(text, "Its loss after 4 steps was 8 instead of 0.2.")) << text;
  EXPECT_TRUE(mentions(text, "One batch of 256 rows gave 0.5: accumulation is equivalent")) << text;
  Lab7Results other = made_lab7();
  other.accumulations[0].one_batch.runs[0].gradient_check->norm = 0.4;
  other.accumulations[0].undivided.runs[0].nonfinite = 1;
  EXPECT_TRUE(
      mentions(answer_to(other, "divided"), "gave 0.4: norm and losses are up to 25 % apart"));
  EXPECT_TRUE(mentions(answer_to(other, "divided"), "Its loss did not stay finite."));
  Lab7Results other_rows = made_lab7();
  other_rows.accumulations[0].one_batch.runs[0].losses[1] = 0.4;
  EXPECT_TRUE(mentions(answer_to(other_rows, "divided"), "up to 25 % apart"));
  other.accumulations[0].undivided.runs[0].gradient_check.reset();
  EXPECT_TRUE(mentions(answer_to(other, "divided"), "did not record its gradients"));
}

TEST(Lab7Answers, SynchronisationIsCounted) {
  const std::string skipped = answer_to(made_lab7(), "skipped");
  EXPECT_TRUE(mentions(skipped, "made 2 all-reduces of together 16.0 MiB")) << skipped;
  EXPECT_TRUE(mentions(skipped, "4 micro-steps made 8 of together 64.0 MiB")) << skipped;
  EXPECT_TRUE(mentions(skipped, "The gradient was the same.")) << skipped;
  const std::string without = answer_to(made_lab7(), "without no_sync");
  EXPECT_TRUE(mentions(without, "64.0 MiB per optimizer step instead of 16.0 MiB")) << without;
  EXPECT_TRUE(mentions(without, "took 40.0 ms instead of 10.0 ms")) << without;
  EXPECT_TRUE(mentions(without, "1.25 times slower than with no_sync")) << without;
  Lab7Results wrong = made_lab7();
  wrong.accumulations[0].synced.runs[0].gradient_check->norm = 1;
  EXPECT_TRUE(mentions(answer_to(wrong, "skipped"), "100 % apart"));
}

TEST(Lab7Answers, OneRankAndSharedHardwareAreNotSoldAsMore) {
  const Lab7Results one = made_lab7({.ranks = 1});
  for (const char* question : {"skipped", "without no_sync"}) {
    EXPECT_TRUE(mentions(answer_to(one, question), "This run had one rank")) << question;
  }
  EXPECT_TRUE(mentions(answer_to(one, "compare"), "With one rank neither communicates."));
  EXPECT_TRUE(mentions(answer_to(one, "more speed"), "with several ranks communication"));
  const Lab7Results shared = made_lab7({.shared_by = 2});
  for (const char* question : {"without no_sync", "more speed"}) {
    EXPECT_TRUE(mentions(answer_to(shared, question), "All 2 devices share the same hardware"))
        << question;
  }
}

TEST(Lab7Answers, PrecisionIsMeasured) {
  const std::string why = answer_to(made_lab7(), "Why mixed");
  EXPECT_TRUE(mentions(why, "50.0 ms in bf16 and 100 ms in fp32: 2.00 times as fast as fp32"))
      << why;
  EXPECT_TRUE(mentions(why, "temporaries took 4.00 MiB against 8.00 MiB, and 8.00 MiB of low"))
      << why;
  EXPECT_TRUE(mentions(why, "All 4 losses equal fp32's exactly.")) << why;
  Lab7Results uncopied = made_lab7();
  for (auto& run : uncopied.amp.runs) run.memory->low_precision = 0;
  EXPECT_FALSE(mentions(answer_to(uncopied, "Why mixed"), "low-precision"));
  Lab7Results slow = made_lab7();
  for (auto& run : slow.amp.runs) run.step_ms.mean = 200;
  EXPECT_TRUE(mentions(answer_to(slow, "Why mixed"), "2.00 times slower than fp32"));
}

TEST(Lab7Answers, TheScalersReasonIsInTheGradients) {
  const std::string bf16 = answer_to(made_lab7(), "Why is a GradScaler");
  EXPECT_TRUE(mentions(bf16,
                       "Of the 4000000 gradient values of the first fp32 step fp16 would "
                       "lose 12 %, and 0.03 % after multiplication by 65536"))
      << bf16;
  EXPECT_TRUE(mentions(bf16, "none would then be too large")) << bf16;
  EXPECT_TRUE(mentions(bf16, "The run itself computed in bf16")) << bf16;
  Lab7Results large = made_lab7();
  large.fp32.runs[0].gradient_check->fp16_overflow_scaled = 0.02;
  large.fp32.runs[0].gradient_check->fp16_lost_scaled = 1e-9;
  const std::string text = answer_to(large, "Why is a GradScaler");
  EXPECT_TRUE(mentions(text, "and less than 0.001 % after")) << text;
  EXPECT_TRUE(mentions(text, "2 % would then be too large for it, which is why")) << text;
  EXPECT_FALSE(mentions(answer_to(made_lab7({.amp = "fp16"}), "Why is a GradScaler"), "bf16"));
}

TEST(Lab7Answers, WithoutAScalerAnOverflowReachesTheWeights) {
  const std::string text = answer_to(made_lab7(), "What happens without it");
  EXPECT_TRUE(text.starts_with("Small gradients would vanish in fp16; in bf16")) << text;
  EXPECT_TRUE(mentions(text,
                       "planted in step 2: the scaler skipped that step (it named "
                       "layers.0.weight, and the scale went from 65536 to 32768), and 4 of 4 "
                       "losses were finite."))
      << text;
  EXPECT_TRUE(mentions(text, "reached the weights, and 2 of 4 losses were not finite.")) << text;

  Lab7Results fp16 = made_lab7({.amp = "fp16"});
  fp16.no_scaler.runs[0].gradient_check->zero_share = 0.3;
  EXPECT_TRUE(mentions(answer_to(fp16, "What happens without it"),
                       "30 % of the first gradient's values were 0 without a scaler and 0.1 %"));

  Lab7Results missed = made_lab7();
  missed.overflow.runs[0].skipped_steps[0].step = 3;
  missed.overflow_no_scaler.runs[0].nonfinite = 0;
  const std::string honest = answer_to(missed, "What happens without it");
  EXPECT_TRUE(mentions(honest, "planted in step 2 was not skipped in this run.")) << honest;
  EXPECT_TRUE(mentions(honest, "no loss became infinite either.")) << honest;
}

TEST(Lab7Answers, ComparisonsFollowTheFigures) {
  EXPECT_TRUE(answer_to(made_lab7(), "more memory").starts_with("Accumulation, in this run."));
  EXPECT_TRUE(answer_to(made_lab7(), "more speed").starts_with("Mixed precision, in this run."));
  Lab7Results other = made_lab7();
  for (auto& run : other.amp.runs) {
    run.step_ms.mean = 81;
    for (auto& device : run.devices) device.peak_bytes = 10_MiB;
  }
  EXPECT_TRUE(answer_to(other, "more memory").starts_with("Mixed precision, in this run."));
  EXPECT_TRUE(answer_to(other, "more speed").starts_with("Neither clearly, in this run."));
  for (auto& run : other.amp.runs) run.step_ms.mean = 120;
  EXPECT_TRUE(answer_to(other, "more speed").starts_with("Accumulation, in this run."));
  for (auto& device : other.amp.runs[0].devices) device.peak_bytes = 100_MiB;
  for (auto& device : other.accumulations[0].no_sync.runs[0].devices) device.peak_bytes = 90_MiB;
  EXPECT_TRUE(answer_to(other, "more memory").starts_with("Neither saved any in this run."));
  EXPECT_TRUE(mentions(answer_to(made_lab7(), "combined"),
                       "4 micro-steps in bf16 trained 2.50 ± 0.00 times the rows per second of "
                       "plain fp32 (1.25 with accumulation alone, 2.00 with bf16 alone)"));
}

}  // namespace
}  // namespace lockstep::cli
