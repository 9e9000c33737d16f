#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/lab/lab.hpp"

namespace lockstep::cli {

/// Sizes of a model and of its training.
struct Sizes {
  int64_t steps, batch, dim, hidden, depth;
};

/// The sizes asked for, completed by `standard`.
Sizes choose_sizes(const LabOptions& options, const Sizes& standard);

/// The sizes asked for, completed by sizes at which the matrix products outweigh everything else.
Sizes choose_sizes(const LabOptions& options, DeviceKind kind);

/// What all runs of a lab have in common.
struct LabConfig {
  Hardware hardware;
  std::vector<SlotPlan> slots;  ///< all logical devices of the lab
  Sizes sizes;

  int devices() const { return static_cast<int>(slots.size()); }
};

/// The flags that the course's programs share.
std::vector<std::string> program_arguments(const Sizes& sizes, const std::string& devices);

/// Adds these arguments after the others.
void append(Experiment& experiment, const std::vector<std::string>& arguments);

enum class Method { kSingle, kDataParallel, kDistributed };

/// A run whose step time counts. It uses the first `devices` of the lab's devices, on no more
/// cores than those have in the full set. Its key is "single", "dp" or "ddp" with its devices.
Experiment timed_experiment(Method method, const LabConfig& config, int devices);

/// Repeats the `timed` experiments in turns, so that a slow minute hits all alike. The
/// experiments of `once` run once, after the first turn.
void add_in_turns(LabPlan& plan, const std::vector<Experiment>& timed,
                  const std::vector<Experiment>& once = {});

/// Refuses a batch with fewer rows than ranks. `fewer` names the flag that asks for the ranks.
void require_row_for_each_rank(int64_t batch, int64_t ranks, const char* fewer);

/// Device counts that show how speed grows: 1 to N, at most four of them, N included.
std::vector<int> scaling_points(int devices);

/// The --devices text of the first `count` of these slots: "cpu:2", "cuda:0*2,1".
std::string spec_of_first(const std::vector<SlotPlan>& slots, int count);

}  // namespace lockstep::cli
