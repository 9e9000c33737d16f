#include "cli/lab/lab10_plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "lockstep/error.hpp"

namespace lockstep::cli {
namespace {

constexpr int kRanks = 2;
constexpr int64_t kBaseMicroBatches = 4;
const std::vector<int> kCourseMicroBatches = {2, 4, 8};
const std::vector<int> kCourseBatches = {32, 64, 128};
constexpr const char* kSchedules[] = {"sequential", "gpipe", "1f1b", "zero-bubble"};

std::vector<int> ascending(const std::vector<int>& asked, const std::vector<int>& standard) {
  const std::vector<int>& list = asked.empty() ? standard : asked;
  const std::set<int> sorted(list.begin(), list.end());
  return {sorted.begin(), sorted.end()};
}

// Two matrix products in each stage, so that stages take alike. `batch` is that of the parts; the
// schedules get so many rows that each micro-batch keeps a device busy.
struct Lab10Sizes {
  Sizes parts;
  Sizes schedules;
};

Lab10Sizes choose_lab10_sizes(const LabOptions& options, DeviceKind kind, int64_t stages,
                              int64_t most_micro_batches) {
  const int64_t depth = 2 * stages - 2;
  Sizes standard = options.quick ? Sizes{8, 64, 768, 768, depth} : Sizes{20, 64, 1024, 1024, depth};
  int64_t micro_rows = 64;
  if (kind == DeviceKind::kCuda) {
    standard = {options.quick ? 10 : 30, 64, 2048, 4096, depth};
    micro_rows = 512;
  }
  Lab10Sizes sizes{choose_sizes(options, standard), choose_sizes(options, standard)};
  sizes.schedules.batch = options.batch.value_or(micro_rows) * most_micro_batches;
  return sizes;
}

// So many logical devices of the hardware that --devices names, the GPUs alike.
std::string divide_hardware(const std::vector<SlotPlan>& named, int devices) {
  if (named[0].kind == DeviceKind::kCpu) return fmt::format("cpu:{}", devices);
  std::vector<int> gpus;
  for (const auto& slot : named) {
    if (std::find(gpus.begin(), gpus.end(), slot.gpu) == gpus.end()) gpus.push_back(slot.gpu);
  }
  return spread_over_gpus(gpus, devices);
}

void require_rows(const HybridVariant& variant, const char* flag) {
  if (variant.rows >= variant.ranks * variant.micro_batches) return;
  throw Error(Code::kSplit,
              fmt::format("{} {} cannot be divided over {} ranks and {} micro-batches: each needs "
                          "a row",
                          flag, variant.rows, variant.ranks, variant.micro_batches),
              fmt::format("give a larger {}, or fewer --micro-batches", flag));
}

// The programs would refuse it too, but only when the first of them runs.
void require_layers(int64_t stages, int64_t depth) {
  const int64_t layers = 2 * depth + 3;  // of the mlp, with a ReLU between two linear ones
  if (stages <= layers) return;
  throw Error(
      Code::kUsage,
      fmt::format("--stages {} is more than the {} layers of --depth {}", stages, layers, depth),
      fmt::format("give --depth {} or more, or leave it out", (stages - 2) / 2));
}

Experiment hybrid_experiment(const HybridVariant& variant, Sizes sizes,
                             const std::vector<SlotPlan>& named) {
  Experiment experiment;
  experiment.role = Role::kHybrid;
  experiment.hybrid = variant;
  experiment.name = variant.name();
  experiment.title = variant.title();
  experiment.devices = variant.ranks * variant.stages;
  experiment.rows = variant.rows;
  experiment.program = "practical10_hybrid";
  experiment.ranks = variant.ranks;
  sizes.batch = variant.rows;
  experiment.arguments = program_arguments(sizes, divide_hardware(named, experiment.devices));
  const auto words = variant.arguments();
  experiment.arguments.insert(experiment.arguments.end(), words.begin(), words.end());
  experiment.weight = variant.part == HybridPart::kSchedule ? 3 : 2;
  return experiment;
}

// The parts in the order of the course, the base first.
std::vector<HybridVariant> part_variants(const HybridVariant& base,
                                         const std::vector<int>& micro_batches,
                                         const std::vector<int>& batches) {
  std::vector<HybridVariant> variants;
  const auto add = [&](HybridPart part, auto change) {
    HybridVariant variant = base;
    variant.part = part;
    change(variant);
    variants.push_back(variant);
  };
  add(HybridPart::kSingle,
      [](HybridVariant& v) { v.ranks = 1, v.stages = 1, v.micro_batches = 1; });
  add(HybridPart::kBase, [](HybridVariant&) {});
  for (const int count : micro_batches) {
    if (count == base.micro_batches) continue;
    add(HybridPart::kMicroBatches, [count](HybridVariant& v) { v.micro_batches = count; });
  }
  for (const int rows : batches) {
    if (rows == base.rows) continue;
    add(HybridPart::kBatch, [rows](HybridVariant& v) { v.rows = rows; });
  }
  add(HybridPart::kOneProcess, [](HybridVariant& v) { v.ranks = 1; });
  add(HybridPart::kSameDevice, [](HybridVariant&) {});
  return variants;
}

}  // namespace

LabPlan plan_lab10(const LabOptions& options, const Hardware& hardware) {
  const auto named = plan_devices(options.devices, hardware);
  const auto micro_batches = ascending(options.micro_batches, kCourseMicroBatches);
  const auto batches = ascending(options.batches, kCourseBatches);
  const int stages = static_cast<int>(options.stages.value_or(2));
  const auto sizes = choose_lab10_sizes(options, named[0].kind, stages, micro_batches.back());
  require_layers(stages, sizes.parts.depth);

  HybridVariant base{.ranks = kRanks, .stages = stages, .rows = sizes.parts.batch};
  const bool usual = std::find(micro_batches.begin(), micro_batches.end(), kBaseMicroBatches) !=
                     micro_batches.end();
  base.micro_batches = usual ? kBaseMicroBatches : micro_batches.front();

  LabPlan plan;
  plan.repetitions = options.quick ? 2 : 3;
  for (const auto& variant : part_variants(base, micro_batches, batches)) {
    require_rows(variant, variant.part == HybridPart::kBatch ? "--batches" : "--batch");
    plan.experiments.push_back(hybrid_experiment(variant, sizes.parts, named));
  }
  for (int run = 1; run <= plan.repetitions; ++run) {
    for (const char* schedule : kSchedules) {
      const HybridVariant variant{.part = HybridPart::kSchedule,
                                  .ranks = 1,
                                  .stages = stages,
                                  .micro_batches = micro_batches.back(),
                                  .rows = sizes.schedules.batch,
                                  .schedule = schedule};
      plan.experiments.push_back(
          repetition(hybrid_experiment(variant, sizes.schedules, named), run, plan.repetitions));
    }
  }
  return plan;
}

}  // namespace lockstep::cli
