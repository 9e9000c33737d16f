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
  bool divide = true;       ///< the loss, by accum_steps
  bool scaler = true;       ///< where amp is not off
  int64_t overflow_at = 0;  ///< optimizer step with a planted infinite gradient; 0: none

  /// In fp32 "fp32", and by micro-steps "accumulated", "synced", "undivided" and "one_batch"; in
  /// lower precision "amp", "no_scaler", "combined" by micro-steps, and by the step of the planted
  /// gradient "overflow" and "overflow_no_scaler".
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

/// Variants in the order they run: `timed` in every repetition, in turns; `once` after the first
/// turn, for what a single run shows.
LabPlan plan_variants(const std::vector<TrainingVariant>& timed,
                      const std::vector<TrainingVariant>& once, int repetitions,
                      const AccumulationConfig& config);

/// The runs that most questions are about: those with the fewest micro-steps, and those without
/// accumulation.
struct AccumulationContext {
  explicit AccumulationContext(const LabRuns& of);

  const LabRuns& runs;
  const RunSet& fp32;
  const RunSet& amp;
  const RunSet& accumulated;   ///< one synchronisation in a step
  const RunSet& synced;        ///< one in each micro-step
  const RunSet& undivided;     ///< the loss is not divided
  const RunSet& one_batch;     ///< all rows at once, without accumulation
  const RunSet& combined;      ///< accumulation and autocast
  std::string precision;       ///< bf16 or fp16
  int64_t micro_steps;         ///< of a step with accumulation
  int64_t rows;                ///< of a step with accumulation
  int64_t micro_rows;          ///< of a step without
  Comparison faster_with_amp;  ///< than fp32

  bool one_rank() const { return fp32.devices < 2; }
  std::string noise(const Comparison& of) const { return noise_remark(runs, of); }
};

}  // namespace lockstep::cli
