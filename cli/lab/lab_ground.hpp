#pragma once

#include <string>
#include <vector>

#include "cli/lab/lab_plan.hpp"

namespace lockstep::cli {

/// What all runs of practical 7 or of homework 2 have in common.
struct Ground {
  std::vector<SlotPlan> slots;  ///< a rank on each
  Sizes sizes;
  std::vector<int> accum_steps;  ///< ascending
  std::string amp;               ///< bf16 or fp16
};

/// What a lab takes where the user says nothing.
struct GroundDefaults {
  Sizes cpu;
  Sizes cuda;
  std::vector<int> accum_steps;
};

/// Refuses too few rows for the ranks, an accumulation over fewer than two micro-steps, and a
/// precision that does not exist or that the devices lack.
Ground choose_ground(const LabOptions& options, const Hardware& hardware,
                     const GroundDefaults& defaults);

/// One run of a variant on all devices of the ground.
Experiment variant_experiment(const Variant& variant, const Ground& ground,
                              const Hardware& hardware);

/// Variants in the order they run: `timed` in every repetition, in turns; `once` after the first
/// round, for what a single run shows.
LabPlan plan_variants(const std::vector<Variant>& timed, const std::vector<Variant>& once,
                      int repetitions, const Ground& ground, const Hardware& hardware);

}  // namespace lockstep::cli
