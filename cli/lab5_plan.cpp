#include "cli/lab5_plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "lockstep/error.hpp"

namespace lockstep::cli {
namespace {

constexpr int kMaxPoints = 4;
constexpr int64_t kCourseRows = 64;
constexpr int kCourseDevices[] = {2, 3, 5};

struct Sizes {
  int64_t steps, batch, dim, hidden, depth;
};

// Large enough that the matrix products outweigh everything else, small enough for a lesson.
// Products grow with rows times weights, copies between devices with the weights alone: many rows,
// then.
Sizes default_sizes(DeviceKind kind, bool quick) {
  if (kind == DeviceKind::kCuda) {
    return quick ? Sizes{10, 4096, 1024, 4096, 2} : Sizes{30, 4096, 2048, 4096, 2};
  }
  return quick ? Sizes{10, 512, 768, 768, 2} : Sizes{20, 512, 1024, 1024, 2};
}

Sizes choose_sizes(const Lab5Options& options, DeviceKind kind) {
  const Sizes standard = default_sizes(kind, options.quick);
  return {options.steps.value_or(standard.steps), options.batch.value_or(standard.batch),
          options.dim.value_or(standard.dim), options.hidden.value_or(standard.hidden),
          options.depth.value_or(standard.depth)};
}

std::vector<std::string> arguments_for(const Sizes& sizes, const std::string& devices) {
  return {"--steps", std::to_string(sizes.steps), "--batch",   std::to_string(sizes.batch),
          "--dim",   std::to_string(sizes.dim),   "--hidden",  std::to_string(sizes.hidden),
          "--depth", std::to_string(sizes.depth), "--devices", devices,
          "--quiet"};
}

// "cuda:0*2,1" as part of a file name.
std::string file_part(const std::string& spec) {
  std::string part;
  for (const char c : spec) {
    if (c == ':') continue;
    part += c == '*' ? 'x' : c == ',' ? '-' : c;
  }
  return part;
}

// The cores the first `count` devices have among all: a run with fewer devices is given only these,
// so that each of its devices is as large as in the full run. (`cpu:1` alone would take all cores.)
std::vector<int> cores_of_first(const std::vector<SlotPlan>& slots, int count,
                                const Hardware& hardware) {
  if (slots[0].kind == DeviceKind::kCuda || count == static_cast<int>(slots.size())) return {};
  if (slots[0].cores.empty()) {
    const auto cores = std::min(static_cast<size_t>(count), hardware.cores.size());
    return {hardware.cores.begin(), hardware.cores.begin() + static_cast<long>(cores)};
  }
  std::vector<int> cores;
  for (int device = 0; device < count; ++device) {
    const auto& own = slots[static_cast<size_t>(device)].cores;
    cores.insert(cores.end(), own.begin(), own.end());
  }
  return cores;
}

Experiment timed(Role role, const std::string& spec, int devices, const Sizes& sizes, int run,
                 int repetitions) {
  const bool single = role == Role::kSingle;
  Experiment experiment;
  experiment.role = role;
  experiment.name = fmt::format("{}-{}-run{}", single ? "single" : "dp", file_part(spec), run);
  experiment.title = single
                         ? fmt::format("one device of {}, run {} of {}", spec, run, repetitions)
                         : fmt::format("DataParallel on {}, run {} of {}", spec, run, repetitions);
  experiment.devices = devices;
  experiment.rows = sizes.batch;
  experiment.program = single ? "practical5_single" : "practical5_dp";
  experiment.arguments = arguments_for(sizes, spec);
  return experiment;
}

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
  experiment.arguments = arguments_for(tiny, spec);
  experiment.weight = 0.3;
  return experiment;
}

// Rows and devices of every split, the course's first; none twice.
std::vector<std::pair<int64_t, int>> split_pairs(const Lab5Options& options) {
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

std::vector<int> scaling_points(int devices) {
  std::set<int> points;
  if (devices <= kMaxPoints) {
    for (int count = 1; count <= devices; ++count) points.insert(count);
  } else {
    points = {1, 2, devices / 2, devices};
  }
  return {points.begin(), points.end()};
}

std::string spec_of_first(const std::vector<SlotPlan>& slots, int count) {
  if (slots[0].kind == DeviceKind::kCpu) return fmt::format("cpu:{}", count);
  std::string spec = "cuda:";
  for (int begin = 0; begin < count;) {
    const int gpu = slots[static_cast<size_t>(begin)].gpu;
    int end = begin;
    while (end < count && slots[static_cast<size_t>(end)].gpu == gpu) ++end;
    spec += fmt::format("{}{}", begin > 0 ? "," : "", gpu);
    if (end - begin > 1) spec += fmt::format("*{}", end - begin);
    begin = end;
  }
  return spec;
}

Lab5Plan plan_lab5(const Lab5Options& options, const Hardware& hardware) {
  const auto slots = plan_devices(options.devices, hardware);
  const DeviceKind kind = slots[0].kind;
  const int all = static_cast<int>(slots.size());
  const Sizes sizes = choose_sizes(options, kind);
  Lab5Plan plan;
  plan.repetitions = options.quick ? 2 : 3;
  for (int run = 1; run <= plan.repetitions; ++run) {
    plan.experiments.push_back(
        timed(Role::kSingle, spec_of_first(slots, all), 1, sizes, run, plan.repetitions));
    for (const int devices : scaling_points(all)) {
      auto experiment = timed(Role::kDataParallel, spec_of_first(slots, devices), devices, sizes,
                              run, plan.repetitions);
      experiment.cores = cores_of_first(slots, devices, hardware);
      plan.experiments.push_back(std::move(experiment));
    }
  }
  for (const auto& [rows, devices] : split_pairs(options)) {
    plan.experiments.push_back(split(kind, rows, devices));
  }
  return plan;
}

}  // namespace lockstep::cli
