#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/device_plan.hpp"

namespace lockstep::cli {

/// What `lockstep lab 5` was asked for. A size that is not given is chosen by plan_lab5.
struct Lab5Options {
  std::string devices = {};  ///< empty: every GPU, or cpu:2
  std::string out = "reports/lab5";
  bool quick = false;
  std::optional<int64_t> steps = {};
  std::optional<int64_t> batch = {};
  std::optional<int64_t> dim = {};
  std::optional<int64_t> hidden = {};
  std::optional<int64_t> depth = {};
  std::optional<int64_t> split_rows = {};  ///< one more split: these rows over split_devices
  std::vector<int> split_devices = {};
};

enum class Role { kSingle, kDataParallel, kSplit };

/// One run of a program.
struct Experiment {
  Role role = Role::kSingle;
  std::string name;   ///< of its record: "dp-cpu2-run1"
  std::string title;  ///< for people: "DataParallel on cpu:2, run 1 of 3"
  int devices = 1;    ///< logical devices it uses
  int64_t rows = 0;   ///< rows per step
  std::string program;
  std::vector<std::string> arguments;  ///< all but --json
  std::vector<int> cores;              ///< cores it may use; empty: all
  double weight = 1;                   ///< how long it takes, relative to the others
};

struct Lab5Plan {
  int repetitions = 3;
  std::vector<Experiment> experiments;  ///< in the order they run: repetitions are interleaved
};

/// Plans the whole lab, before anything starts. A bad --devices is an Error.
Lab5Plan plan_lab5(const Lab5Options& options, const Hardware& hardware);

/// Device counts that show how speed grows: 1 to N, at most four of them, N included.
std::vector<int> scaling_points(int devices);

/// The --devices text of the first `count` of these slots: "cpu:2", "cuda:0*2,1".
std::string spec_of_first(const std::vector<SlotPlan>& slots, int count);

}  // namespace lockstep::cli
