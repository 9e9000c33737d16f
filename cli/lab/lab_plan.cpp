#include "cli/lab/lab_plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "lockstep/error.hpp"

namespace lockstep::cli {
namespace {

constexpr int kMaxPoints = 4;

// Large enough that the matrix products outweigh everything else, small enough for a lesson.
// Products grow with rows times weights, copies between devices with the weights alone: hence the
// many rows.
Sizes default_sizes(DeviceKind kind, bool quick) {
  if (kind == DeviceKind::kCuda) {
    return quick ? Sizes{10, 4096, 1024, 4096, 2} : Sizes{30, 4096, 2048, 4096, 2};
  }
  return quick ? Sizes{10, 512, 768, 768, 2} : Sizes{20, 512, 1024, 1024, 2};
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

// The cores that the first `count` devices have among all. A run with fewer devices is given only
// these, so that each of its devices is as large as in the full run. (`cpu:1` alone would take all
// cores.)
std::vector<int> cores_of_first(const LabConfig& config, int count) {
  const auto& slots = config.slots;
  if (slots[0].kind == DeviceKind::kCuda || count == config.devices()) return {};
  if (slots[0].cores.empty()) {
    const auto& all = config.hardware.cores;
    const auto cores = std::min(static_cast<size_t>(count), all.size());
    return {all.begin(), all.begin() + static_cast<long>(cores)};
  }
  std::vector<int> cores;
  for (int device = 0; device < count; ++device) {
    const auto& own = slots[static_cast<size_t>(device)].cores;
    cores.insert(cores.end(), own.begin(), own.end());
  }
  return cores;
}

}  // namespace

Sizes choose_sizes(const LabOptions& options, const Sizes& standard) {
  return {options.steps.value_or(standard.steps), options.batch.value_or(standard.batch),
          options.dim.value_or(standard.dim), options.hidden.value_or(standard.hidden),
          options.depth.value_or(standard.depth)};
}

Sizes choose_sizes(const LabOptions& options, DeviceKind kind) {
  return choose_sizes(options, default_sizes(kind, options.quick));
}

std::vector<std::string> program_arguments(const Sizes& sizes, const std::string& devices) {
  return {"--steps", std::to_string(sizes.steps), "--batch",   std::to_string(sizes.batch),
          "--dim",   std::to_string(sizes.dim),   "--hidden",  std::to_string(sizes.hidden),
          "--depth", std::to_string(sizes.depth), "--devices", devices,
          "--quiet"};
}

void append(Experiment& experiment, const std::vector<std::string>& arguments) {
  experiment.arguments.insert(experiment.arguments.end(), arguments.begin(), arguments.end());
}

Experiment timed_experiment(Method method, const LabConfig& config, int devices) {
  const bool single = method == Method::kSingle;
  // The single program takes the first of all devices, with that one's share of the machine.
  const std::string spec = spec_of_first(config.slots, single ? config.devices() : devices);
  Experiment experiment;
  experiment.devices = devices;
  experiment.arguments = program_arguments(config.sizes, spec);
  // The methods are compared, and DataParallel's steps cannot be captured.
  if (config.slots[0].kind != DeviceKind::kCpu) append(experiment, {"--capture", "off"});
  if (single) {
    experiment.name = "single";
    experiment.title = fmt::format("one device of {}", spec);
    experiment.program = "practical5_single";
  } else if (method == Method::kDataParallel) {
    experiment.name = "dp";
    experiment.title = fmt::format("DataParallel on {}", spec);
    experiment.program = "practical5_dp";
  } else {
    experiment.name = "ddp";
    experiment.title = fmt::format("DDP, {} rank{} on {}", devices, devices > 1 ? "s" : "", spec);
    experiment.program = "practical6_ddp";
    experiment.ranks = devices;
  }
  experiment.keys = {{experiment.name, devices}};
  experiment.name += "-" + file_part(spec);
  if (!single) experiment.cores = cores_of_first(config, devices);
  return experiment;
}

void add_in_turns(LabPlan& plan, const std::vector<Experiment>& timed,
                  const std::vector<Experiment>& once) {
  for (int run = 1; run <= plan.repetitions; ++run) {
    for (Experiment experiment : timed) {
      experiment.name += fmt::format("-run{}", run);
      experiment.title += fmt::format(", run {} of {}", run, plan.repetitions);
      plan.experiments.push_back(std::move(experiment));
    }
    if (run == 1) plan.experiments.insert(plan.experiments.end(), once.begin(), once.end());
  }
}

void require_row_for_each_rank(int64_t batch, int64_t ranks, const char* fewer) {
  if (batch >= ranks) return;
  throw Error(
      Code::kSplit,
      fmt::format("--batch {} cannot be divided over {} ranks: each needs a row", batch, ranks),
      fmt::format("give a larger --batch, or fewer {}", fewer));
}

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

}  // namespace lockstep::cli
