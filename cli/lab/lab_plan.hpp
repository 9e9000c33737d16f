#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli/lab/lab10_variant.hpp"
#include "cli/lab/lab_variant.hpp"
#include "lockstep/device_plan.hpp"

namespace lockstep::cli {

/// What `lockstep lab` was asked for. A size that is not given is chosen by the lab.
struct LabOptions {
  std::string devices = {};  ///< empty: the lab's own
  std::string out = {};      ///< empty: reports/lab5, reports/homework2, …
  bool quick = false;
  std::optional<int64_t> steps = {};
  std::optional<int64_t> batch = {};
  std::optional<int64_t> dim = {};
  std::optional<int64_t> hidden = {};
  std::optional<int64_t> depth = {};

  std::optional<int64_t> split_rows = {};  ///< lab 5: one more split, these rows over split_devices
  std::vector<int> split_devices = {};

  std::vector<int> ranks = {};            ///< lab 6: how many ranks, one run each; empty: its own
  std::optional<double> bucket_mib = {};  ///< lab 6: largest bucket

  std::vector<int> accum_steps =
      {};                ///< lab 7, homework 2: micro-steps in a step; empty: their own
  std::string amp = {};  ///< lab 7, homework 2: bf16 or fp16; empty: the device's

  std::vector<int> micro_batches = {};  ///< lab 10: one run each; empty: the course's
  std::vector<int> batches = {};        ///< lab 10: rows of a step, one run each; empty: those
  std::optional<int64_t> stages = {};   ///< lab 10: of the model
};

enum class Role { kSingle, kDataParallel, kDistributed, kSplit, kHybrid };

/// One run of a program.
struct Experiment {
  Role role = Role::kSingle;
  std::string name;   ///< of its record: "dp-cpu2-run1"
  std::string title;  ///< for people: "DataParallel on cpu:2, run 1 of 3"
  int devices = 1;    ///< logical devices it uses
  int64_t rows = 0;   ///< rows per step
  std::string program;
  int ranks = 0;                       ///< 0: a program of its own; else under `lockstep run`
  std::vector<std::string> arguments;  ///< all but --json
  std::vector<int> cores;              ///< cores it may use; empty: all
  double weight = 1;                   ///< how long it takes, relative to the others
  Variant variant = {};                ///< lab 7, homework 2
  HybridVariant hybrid = {};           ///< lab 10
};

struct LabPlan {
  int repetitions = 3;
  std::vector<Experiment> experiments;  ///< in the order they run: repetitions are interleaved
};

/// Sizes of a model and of its training.
struct Sizes {
  int64_t steps, batch, dim, hidden, depth;
};

/// The sizes asked for, completed by such as make the matrix products outweigh all else.
Sizes choose_sizes(const LabOptions& options, DeviceKind kind);

/// The sizes asked for, completed by these.
Sizes choose_sizes(const LabOptions& options, const Sizes& standard);

/// The flags that the course's programs share.
std::vector<std::string> program_arguments(const Sizes& sizes, const std::string& devices);

/// A run whose step time counts. `slots` are all the lab's devices, of which it uses the first
/// `devices`, on no more cores than those have in the full set.
Experiment timed_experiment(Role role, const std::vector<SlotPlan>& slots, int devices,
                            const Sizes& sizes, const Hardware& hardware);

/// The same, as one of several repetitions.
Experiment repetition(Experiment experiment, int run, int repetitions);

/// Device counts that show how speed grows: 1 to N, at most four of them, N included.
std::vector<int> scaling_points(int devices);

/// The --devices text of the first `count` of these slots: "cpu:2", "cuda:0*2,1".
std::string spec_of_first(const std::vector<SlotPlan>& slots, int count);

}  // namespace lockstep::cli
