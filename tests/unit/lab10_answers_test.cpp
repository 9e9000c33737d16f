#include <gtest/gtest.h>

#include "lab10_support.hpp"

namespace lockstep::cli::lab10_answers_test {
namespace {

using test::made_lab10;
using test::mentions;
using test::set_up;

const test::LabOf kLab{"10"};

TEST(Lab10Answers, EveryQuestionIsAnsweredWhateverTheRunHas) {
  LabRuns no_actions = made_lab10();
  LabRuns bare = made_lab10();
  test::change_runs(no_actions, [](RunRecord& run) {
    run.pipeline->actions.clear();
    run.pipeline->predicted.clear();
  });
  test::change_runs(bare, [](RunRecord& run) {
    run.pipeline.reset();
    run.losses.clear();
    run.split.clear();
  });
  for (const LabRuns& results : {made_lab10(), made_lab10({.shared_by = 4}), no_actions, bare}) {
    const auto answers = kLab.report(results).answers;
    EXPECT_EQ(answers.size(), 13U);
    for (const auto& answer : answers) {
      EXPECT_TRUE(test::reads_well(answer.text)) << answer.question << "\n" << answer.text;
    }
    EXPECT_EQ(kLab.report(results).tables.size(), 8U);
    EXPECT_EQ(kLab.report(results).figures.size(), 6U);
  }
  for (const char* question : {"MICRO_BATCHES", "pattern", "rank 1", "several devices"}) {
    EXPECT_TRUE(mentions(kLab.answer(no_actions, question), "recorded no actions")) << question;
  }
  EXPECT_TRUE(mentions(kLab.answer(no_actions, "When"), "has no synchronisation"));
  EXPECT_TRUE(mentions(kLab.answer(bare, "How many processes"), "recorded no stages"));
  EXPECT_TRUE(mentions(kLab.answer(bare, "other schedules"), "nothing can be simulated"));
  EXPECT_TRUE(mentions(kLab.answer(bare, "predicted"), "recorded no spans"));
  EXPECT_TRUE(mentions(kLab.answer(bare, "axis"), "recorded no communication"));
  EXPECT_TRUE(mentions(kLab.answer(bare, "numbers trained"), "cannot be compared"));
}

TEST(Lab10Answers, TheBaseSaysWhoDoesWhat) {
  const LabRuns results = made_lab10();
  const std::string who = kLab.answer(results, "How many processes");
  EXPECT_TRUE(mentions(who,
                       "2 processes, one for each rank: rank 0 uses cpu:0 (stage 0) and cpu:2 "
                       "(stage 1); rank 1 uses cpu:1 (stage 0) and cpu:3 (stage 1)."))
      << who;
  EXPECT_TRUE(mentions(who, "4 logical devices work")) << who;
  EXPECT_FALSE(mentions(who, "share the same hardware")) << who;
  EXPECT_TRUE(mentions(kLab.answer(made_lab10({.shared_by = 4}), "How many processes"),
                       "All 4 devices share the same hardware"));
  const std::string count = kLab.answer(results, "How many micro-batches");
  EXPECT_TRUE(mentions(count, "4 on each rank: of the batch's 64 rows rank 0 takes 32")) << count;
  EXPECT_TRUE(mentions(count, "micro-batches of 8 rows each.")) << count;
  LabRuns uneven = made_lab10();
  set_up(uneven, "base").runs[0].pipeline->rows = {9, 8, 8, 7};
  EXPECT_TRUE(mentions(kLab.answer(uneven, "How many micro-batches"), "of 9, 8, 8 and 7 rows."));
  EXPECT_TRUE(mentions(count, "8 forward and 8 backward actions of rank 0")) << count;
}

TEST(Lab10Answers, SynchronisationFollowsTheLastBackward) {
  LabRuns results = made_lab10();
  const std::string text = kLab.answer(results, "When");
  EXPECT_TRUE(
      mentions(text, "stage 1 from 13.5 ms to 15.0 ms, its last backward having ended at 13.5 ms"))
      << text;
  EXPECT_TRUE(mentions(text, "gradients only add up over the 4 micro-batches")) << text;
  EXPECT_TRUE(mentions(text, "1.50 ms of it was hidden: an earlier stage")) << text;
  for (auto& action : set_up(results, "base").runs[0].pipeline->actions) {
    if (action.kind == "S") action.begin_ms = 1;
  }
  EXPECT_TRUE(mentions(kLab.answer(results, "When"), "2 synchronisations began before"));
  EXPECT_TRUE(text.starts_with("Once per step for each stage, on rank 0:")) << text;
}

TEST(Lab10Answers, SynchronisationsAreCountedAgainstStagesWithWeights) {
  LabRuns results = made_lab10();
  auto& base = *set_up(results, "base").runs[0].pipeline;
  std::erase_if(base.actions, [](const auto& a) { return a.kind == "S" && a.stage == 0; });
  EXPECT_TRUE(kLab.answer(results, "When").starts_with("1 synchronisation in a step for 2 stages"))
      << kLab.answer(results, "When");
  base.stages[0].parameters = 0;
  EXPECT_TRUE(
      kLab.answer(results, "When").starts_with("Once per step for each stage with weights,"))
      << kLab.answer(results, "When");
}

TEST(Lab10Answers, MicroBatchesAreCountedAndTheBubbleShrinks) {
  const std::string text = kLab.answer(made_lab10(), "MICRO_BATCHES 2, 4 and 8");
  EXPECT_TRUE(mentions(text, "prints 4, 8 and 16 forward and 4, 8 and 16 backward lines")) << text;
  EXPECT_TRUE(mentions(text, "predicted as 33 %, 20 % and 11 % and measured as 33 %, 20 % and"))
      << text;
  EXPECT_TRUE(mentions(text, "held up to 2, 4 and 8 micro-batches")) << text;
  EXPECT_FALSE(mentions(text, "did not shrink")) << text;
  LabRuns flat = made_lab10({.shared_by = 4});
  for (auto& set_up : flat.sets["micro_batches"]) set_up.runs[0].pipeline->bubble = 0.5;
  EXPECT_TRUE(mentions(kLab.answer(flat, "MICRO_BATCHES"), "the measured bubble did not shrink"));
  EXPECT_TRUE(mentions(kLab.answer(flat, "MICRO_BATCHES"), "on devices that share hardware."));
}

TEST(Lab10Answers, ThePatternIsComparedActionByAction) {
  LabRuns results = made_lab10();
  const std::string text = kLab.answer(results, "Batch 32, 64 and 128");
  EXPECT_TRUE(
      text.starts_with("No: with 32, 64 and 128 rows every device of every rank ran the "
                       "same 32 actions in the same order."))
      << text;
  EXPECT_TRUE(mentions(text, "Micro-batches had 4, 8 and 16 rows")) << text;
  EXPECT_TRUE(mentions(text, "was 4.00 KiB, 8.00 KiB and 16.0 KiB, and")) << text;
  EXPECT_TRUE(mentions(text, "stays at 16.0 MiB per step")) << text;
  LabRuns one = made_lab10();
  one.sets["batch"].resize(1);
  EXPECT_TRUE(mentions(kLab.answer(one, "Batch 32"), "batches of one size only"));
  auto& actions = results.sets["batch"][2].runs[0].pipeline->actions;
  std::swap(actions[0].micro_batch, actions[1].micro_batch);
  results.sets["batch"][0].runs[0].all_reduces.bytes = 1024;
  const std::string other = kLab.answer(results, "Batch");
  EXPECT_TRUE(other.starts_with("In this run it did: with 128 rows")) << other;
  EXPECT_TRUE(mentions(other, "moved 1.00 KiB, 16.0 MiB and 16.0 MiB per step")) << other;
}

TEST(Lab10Answers, OneProcessHasNobodyToSynchroniseWith) {
  LabRuns results = made_lab10();
  const std::string text = kLab.answer(results, "rank 1");
  EXPECT_TRUE(
      text.starts_with("Rank 1 does not exist, so no line begins with [Rank 1]: rank 0 takes all "
                       "64 rows on cpu:0 and cpu:1, and its trace has 8 forward and 8 backward "
                       "actions."))
      << text;
  EXPECT_TRUE(mentions(text,
                       "there were no all-reduces. With 2 processes there were 2 per step, "
                       "16.0 MiB in all."))
      << text;
  RunRecord& run = set_up(results, "one_process").runs[0];
  run.all_reduces.count = 3;
  run.pipeline->actions.front().rank = 1;
  const std::string wrong = kLab.answer(results, "rank 1");
  EXPECT_TRUE(mentions(wrong, "has 1 forward action of rank 1")) << wrong;
  EXPECT_TRUE(mentions(wrong, "still a synchronisation: 0 in the trace, 3 all-reduces")) << wrong;
}

TEST(Lab10Answers, OneDeviceHasNoOverlap) {
  LabRuns results = made_lab10();
  const std::string text = kLab.answer(results, "several devices");
  EXPECT_TRUE(
      text.starts_with("The lines name other devices: those of rank 0 name cpu:0 instead of cpu:0 "
                       "and cpu:2, those of rank 1 name cpu:1 instead of cpu:1 and cpu:3. 2 "
                       "devices are used in all, instead of 4: no rank uses several."))
      << text;
  EXPECT_TRUE(
      mentions(text, "whereas 60 % of its computing time overlapped with a device for each"))
      << text;
  auto& base = set_up(results, "base").runs[0].pipeline->actions;
  const auto measured = base;
  std::erase_if(base, [](const auto& action) { return action.stage == 1; });
  EXPECT_TRUE(mentions(kLab.answer(results, "several devices"),
                       "ran at the same time, nor did they with a device for each stage;"))
      << kLab.answer(results, "several devices");
  base = measured;
  set_up(results, "same_device") = set_up(results, "base");
  const std::string wrong = kLab.answer(results, "several devices");
  EXPECT_TRUE(mentions(wrong, "against expectation a rank still uses several.")) << wrong;
  EXPECT_TRUE(mentions(wrong, "Still 60 % of rank 0's computing time overlapped")) << wrong;
}

TEST(Lab10Answers, TheGainIsMeasuredAgainstSequential) {
  const std::string text = kLab.answer(made_lab10(), "pipelining gain");
  EXPECT_TRUE(
      mentions(text, "took 50.0 ± 0.0 ms with one stage after the other, 29.0 ± 0.0 ms with gpipe"))
      << text;
  EXPECT_TRUE(mentions(text, "gpipe was 1.72 times as fast as sequential")) << text;
  EXPECT_TRUE(
      mentions(text, "29.0 ± 0.0 ms with 1f1b and 27.0 ± 0.0 ms with zero-bubble. gpipe was"))
      << text;
  EXPECT_TRUE(mentions(text, "and zero-bubble was 1.85 times as fast as sequential.")) << text;
  EXPECT_TRUE(mentions(text, "allow gpipe 1.78 times")) << text;
  LabRuns noisy = made_lab10();
  set_up(noisy, "zero-bubble").runs[0].step_ms.mean = 60;
  EXPECT_TRUE(mentions(kLab.report(noisy).warning, "varied")) << "zero-bubble's runs";
  LabRuns none = made_lab10({.shared_by = 2});
  for (auto* set_up :
       {&set_up(none, "gpipe"), &set_up(none, "1f1b"), &set_up(none, "zero-bubble")}) {
    for (auto& run : set_up->runs) run.step_ms.mean = 60;
  }
  const std::string slower = kLab.answer(none, "pipelining gain");
  EXPECT_TRUE(mentions(slower, "gpipe was 1.20 times slower than sequential")) << slower;
  EXPECT_TRUE(mentions(slower, "share the same hardware")) << slower;
  for (auto& run : set_up(none, "gpipe").runs) run.pipeline->predicted_span_ms = 60;
  EXPECT_FALSE(mentions(kLab.answer(none, "pipelining gain"), "allow gpipe")) << "no gain allowed";
}

TEST(Lab10Answers, ABusyMachineIsToldOnceAndNoCauseIsNamed) {
  LabRuns busy = made_lab10({.slow = 1.5});
  EXPECT_EQ(kLab.report(busy).warning, "");
  busy.others_busy_cores = 1;
  const LabReport report = kLab.report(busy);
  EXPECT_TRUE(mentions(report.warning, "other programs kept 1.0 cores busy")) << report.warning;
  for (const char* question : {"pipelining gain", "predicted and measured"}) {
    const std::string text = kLab.answer(busy, question);
    EXPECT_TRUE(text.starts_with("That cannot be judged from this run. ")) << text;
  }
  for (const auto& answer : report.answers) {
    for (const char* part : {"ther programs", "proves little", "times as fast", "times slower",
                             "knows neither", "contains the wait", "did not shrink"}) {
      EXPECT_FALSE(mentions(answer.text, part)) << answer.text;
    }
  }
  for (const auto& [name, table] : report.tables) {
    for (const auto& note : table.notes()) EXPECT_FALSE(mentions(note, "Warning")) << name;
  }
}

TEST(Lab10Answers, PredictionsAgreeOrNot) {
  const std::string text = kLab.answer(made_lab10(), "predicted and measured");
  EXPECT_TRUE(text.starts_with("Yes, bubbles within 10 percentage points and spans within 10 %."))
      << text;
  EXPECT_TRUE(
      mentions(text,
               "With gpipe the bubble was predicted as 11 % and measured as 11 %, the span as "
               "27.0 ms and 27.0 ms."))
      << text;
  EXPECT_TRUE(
      kLab.answer(made_lab10({.slow = 1.5}), "predicted and measured").starts_with("Not here."));
  LabRuns apart = made_lab10();
  for (auto& run : set_up(apart, "1f1b").runs) run.pipeline->bubble = 0.4;
  EXPECT_TRUE(kLab.answer(apart, "predicted and measured").starts_with("Not here."));
  apart = made_lab10();
  for (auto& run : set_up(apart, "zero-bubble").runs) run.pipeline->span_ms *= 2;
  EXPECT_TRUE(kLab.answer(apart, "predicted and measured").starts_with("Not here."));
}

TEST(Lab10Answers, MemoryAndSimulation) {
  LabRuns results = made_lab10();
  const std::string saved = kLab.answer(results, "1f1b save");
  EXPECT_TRUE(saved.starts_with("Memory.")) << saved;
  EXPECT_TRUE(mentions(saved, "at most 2 micro-batches with 1f1b and 8 with gpipe")) << saved;
  EXPECT_TRUE(mentions(saved, "8.00 MiB against 16.0 MiB on cpu:0 (-50 %)")) << saved;
  const std::string others = kLab.answer(results, "other schedules");
  EXPECT_TRUE(mentions(others, "gpipe 27.0 ms with a bubble of 11 %, 1f1b 27.0 ms")) << others;
  EXPECT_TRUE(mentions(others, "shorter than 1f1b")) << others;
  EXPECT_TRUE(mentions(others,
                       "a step took 27.0 ± 0.0 ms with a bubble of 4 %, against 29.0 ± 0.0 "
                       "ms and 11 % with 1f1b"))
      << others;
  EXPECT_TRUE(mentions(others, ": zero-bubble was 1.07 times as fast as 1f1b.")) << others;
  EXPECT_TRUE(mentions(others, "Interleaved passes smaller stages on")) << others;
  LabRuns slower = made_lab10();
  for (auto& run : set_up(slower, "zero-bubble").runs) run.step_ms.mean = 58;
  EXPECT_TRUE(mentions(kLab.answer(slower, "other schedules"), "2.00 times slower than 1f1b"));
  set_up(results, "1f1b") = set_up(results, "gpipe");
  EXPECT_TRUE(kLab.answer(results, "1f1b save").starts_with("Nothing that this run can show."));
}

TEST(Lab10Answers, AxesAndLosses) {
  LabRuns results = made_lab10();
  const std::string axes = kLab.answer(results, "axis");
  EXPECT_TRUE(mentions(axes,
                       "the data axis of 2 sent 8.00 KiB in 2 calls (predicted 8.00 KiB) and took "
                       "1.50 ms (predicted 1.00 ms)"))
      << axes;
  EXPECT_FALSE(mentions(axes, "wait for the other side")) << axes;
  set_up(results, "base").runs[0].pipeline->axes[0].ms = 3;
  EXPECT_TRUE(mentions(kLab.answer(results, "axis"), "wait for the other side"));
  const std::string same = kLab.answer(results, "numbers trained");
  EXPECT_TRUE(
      same.starts_with("No. The losses of 5 set-ups with 64 rows and those of one device "
                       "are equal exactly"))
      << same;
  set_up(results, "one_process").runs[0].losses[2] *= 1 + 1e-6;
  EXPECT_TRUE(mentions(kLab.answer(results, "numbers trained"), "which is rounding"));
  LabRuns split = made_lab10();
  set_up(split, "zero-bubble").runs[0].losses[2] = 1;
  EXPECT_TRUE(kLab.answer(split, "numbers trained").starts_with("Not as it should be"));
  set_up(results, "one_process").runs[0].losses[2] = 1;
  const std::string other = kLab.answer(results, "numbers trained");
  EXPECT_TRUE(other.starts_with("Not as it should be in this run.")) << other;
  EXPECT_TRUE(mentions(other, "at most 300 % apart, which is more than rounding")) << other;
}

}  // namespace
}  // namespace lockstep::cli::lab10_answers_test
