#include "cli/lab/lab5_plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace lockstep::cli {
namespace {

constexpr int64_t kCourseRows = 64;
constexpr int kCourseDevices[] = {2, 3, 5};

Experiment split(DeviceKind kind, int64_t rows, int devices) {
  const Sizes tiny = {3, rows, 16, 16, 1};
  const std::string spec =
      fmt::format("{}{}", kind == DeviceKind::kCpu ? "cpu:" : "cuda:0*", devices);
  Experiment experiment;
  experiment.role = Role::kSplit;
  experiment.name = fmt::format("split-{}-over-{}", rows, devices);
  experiment.title = fmt::format("split of {} rows over {} devices", rows, devices);
  experiment.devices = devices;
  experiment.rows = rows;
  experiment.program = "practical5_dp";
  experiment.arguments = program_arguments(tiny, spec);
  experiment.weight = 0.3;
  return experiment;
}

// Rows and devices of every split, the course's first; none twice.
std::vector<std::pair<int64_t, int>> split_pairs(const LabOptions& options) {
  std::vector<std::pair<int64_t, int>> pairs;
  const auto add = [&pairs](int64_t rows, int devices) {
    const std::pair pair(rows, devices);
    if (std::find(pairs.begin(), pairs.end(), pair) == pairs.end()) pairs.push_back(pair);
  };
  for (const int devices : kCourseDevices) add(kCourseRows, devices);
  const int64_t rows = options.split_rows.value_or(kCourseRows);
  for (const int devices : options.split_devices) add(rows, devices);
  if (options.split_rows && options.split_devices.empty()) {
    for (const int devices : kCourseDevices) add(rows, devices);
  }
  return pairs;
}

}  // namespace

LabPlan plan_lab5(const LabOptions& options, const Hardware& hardware) {
  const auto slots = plan_devices(options.devices, hardware);
  const DeviceKind kind = slots[0].kind;
  const Sizes sizes = choose_sizes(options, kind);
  LabPlan plan;
  plan.repetitions = options.quick ? 2 : 3;
  for (int run = 1; run <= plan.repetitions; ++run) {
    const auto add = [&](Role role, int devices) {
      plan.experiments.push_back(repetition(timed_experiment(role, slots, devices, sizes, hardware),
                                            run, plan.repetitions));
    };
    add(Role::kSingle, 1);
    for (const int devices : scaling_points(static_cast<int>(slots.size()))) {
      add(Role::kDataParallel, devices);
    }
  }
  for (const auto& [rows, devices] : split_pairs(options)) {
    plan.experiments.push_back(split(kind, rows, devices));
  }
  return plan;
}

}  // namespace lockstep::cli
