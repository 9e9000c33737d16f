#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/lab/lab_plan.hpp"
#include "cli/lab/lab_text.hpp"

// What the labs on gradient accumulation and mixed precision share.

namespace lockstep::cli {

/// One way to train; everything else is alike in all of them.
struct TrainingVariant {
  int64_t accum_steps = 1;  ///< micro-steps in an optimizer step
  int64_t row_factor = 1;   ///< rows of a micro-step, in multiples of --batch
  std::string amp = "off";
  bool sync_every_step = false;
  bool scaler = true;       ///< where amp is not off
  int64_t overflow_at = 0;  ///< optimizer step with a planted infinite gradient; 0: none

  /// In fp32 "fp32", and by micro-steps "accumulated", "synced" and "one_batch"; in lower precision
  /// "amp", "no_scaler", "combined" by micro-steps, and by the step of the planted gradient
  /// "overflow" and "overflow_no_scaler".
  RunKey key() const;
  std::string program() const;                 ///< that can train so
  std::string name() const;                    ///< of its records: "accum4-sync"
  std::string title() const;                   ///< for people: "fp32, 4 micro-steps"
  std::vector<std::string> arguments() const;  ///< beyond the flags that all share
};

/// --accum-steps and --amp.
std::vector<LabFlag> accumulation_flags();

/// What a lab takes where the user says nothing.
struct AccumulationDefaults {
  Sizes cpu;
  Sizes cuda;
  std::vector<int> accum_steps;
};

struct AccumulationConfig : LabConfig {  ///< a rank on each device
  std::vector<int> accum_steps;          ///< ascending
  std::string amp;                       ///< bf16 or fp16
};

/// Refuses too few rows for the ranks, an accumulation over fewer than two micro-steps, and a
/// precision that does not exist or that the devices lack.
AccumulationConfig choose_config(const LabOptions& options, const Hardware& hardware,
                                 const AccumulationDefaults& defaults);

/// Why the loss is divided, shown by a small model whose learning rate suits the divided loss, but
/// not one that is a few times as large. Three runs by micro-steps: "divided", "undivided", and
/// "larger_rate", which divides the loss and multiplies the learning rate instead.
std::vector<Experiment> divisor_study(const AccumulationConfig& config);

/// Peak memory in fp32 and in lower precision over the rows of a step, with a deep and narrow model
/// whose activations outgrow its weights: "memory_fp32" and "memory_amp" by rows. From `points` row
/// counts the largest are taken.
std::vector<Experiment> memory_study(const AccumulationConfig& config, size_t points);

/// Variants in the order they run: `timed` in every repetition, in turns; `once` and `studies`
/// after the first turn, for what a single run shows.
LabPlan plan_variants(const std::vector<TrainingVariant>& timed,
                      const std::vector<TrainingVariant>& once,
                      const std::vector<Experiment>& studies, int repetitions,
                      const AccumulationConfig& config);

/// How much faster `other` trains a row than `base`. The deviation of the speed-up is no smaller
/// than the steps' own: two or three runs may agree by chance.
Comparison compare_rows(const RunSet& base, const RunSet& other);

/// "3 all-reduces", "1 all-reduce": of an optimizer step.
std::string count_all_reduces(const RunSet& set_up);

/// The runs that most questions are about: those with the fewest micro-steps, and those without
/// accumulation.
struct AccumulationContext {
  explicit AccumulationContext(const LabRuns& of);

  const LabRuns& runs;
  const RunSet& fp32;
  const RunSet& amp;
  const RunSet& accumulated;   ///< one synchronisation in a step
  const RunSet& synced;        ///< one in each micro-step
  const RunSet& one_batch;     ///< all rows at once, without accumulation
  const RunSet& combined;      ///< accumulation and autocast
  const RunSet& divided;       ///< of divisor_study(), as the next two
  const RunSet& undivided;     ///< the loss is not divided
  const RunSet& larger_rate;   ///< the learning rate is multiplied instead
  std::string precision;       ///< bf16 or fp16
  int64_t micro_steps;         ///< of a step with accumulation
  int64_t rows;                ///< of a step with accumulation
  int64_t micro_rows;          ///< of a step without
  Comparison faster_with_amp;  ///< than fp32
  std::string warning;         ///< why times cannot be judged; empty: they can

  bool one_rank() const { return fp32.devices < 2; }
  bool times_count() const { return warning.empty(); }

  /// The largest row count of memory_study().
  const RunSet& many_rows_fp32() const { return runs.some("memory_fp32").back(); }
  const RunSet& many_rows_amp() const { return runs.some("memory_amp").back(); }

  /// What divisor_study() found, as sentences.
  std::string divisor_text() const;

  /// What lower precision did to the peak where activations outgrow weights, as a sentence.
  std::string many_rows_text() const;

  /// The box of a lab's report that says what was trained.
  LabFacts trained(const std::string& lab) const;
};

}  // namespace lockstep::cli
