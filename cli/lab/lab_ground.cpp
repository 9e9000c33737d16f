#include "cli/lab/lab_ground.hpp"

#include <fmt/format.h>

#include <set>

#include "lockstep/error.hpp"

namespace lockstep::cli {
namespace {

std::vector<int> choose_accum_steps(const std::vector<int>& asked,
                                    const std::vector<int>& standard) {
  const std::vector<int>& list = asked.empty() ? standard : asked;
  const std::set<int> sorted(list.begin(), list.end());
  if (*sorted.begin() < 2) {
    throw Error(Code::kUsage,
                fmt::format("--accum-steps {}: there is nothing to accumulate", *sorted.begin()),
                "name numbers from 2 on; the run without accumulation is always among them");
  }
  return {sorted.begin(), sorted.end()};
}

std::string choose_amp(const std::string& asked, DeviceKind kind) {
  if (asked.empty()) return kind == DeviceKind::kCuda ? "fp16" : "bf16";
  if (asked != "bf16" && asked != "fp16") {
    throw Error(Code::kUsage, fmt::format("--amp {} is no lower precision", asked),
                "name bf16 or fp16; the runs in fp32 are always among them");
  }
  if (asked == "fp16" && kind == DeviceKind::kCpu) {
    throw Error(Code::kUsage, "--amp fp16 needs a GPU: libtorch trains in bf16 on the CPU",
                "use --amp bf16; its report also says what fp16 would lose of the gradients");
  }
  return asked;
}

}  // namespace

Ground choose_ground(const LabOptions& options, const Hardware& hardware,
                     const GroundDefaults& defaults) {
  auto slots = plan_devices(options.devices, hardware);
  const DeviceKind kind = slots[0].kind;
  const Sizes sizes =
      choose_sizes(options, kind == DeviceKind::kCuda ? defaults.cuda : defaults.cpu);
  if (sizes.batch < static_cast<int64_t>(slots.size())) {
    throw Error(Code::kSplit,
                fmt::format("--batch {} cannot be divided over {} ranks: each needs a row",
                            sizes.batch, slots.size()),
                "give a larger --batch, or fewer --devices");
  }
  return {std::move(slots), sizes, choose_accum_steps(options.accum_steps, defaults.accum_steps),
          choose_amp(options.amp, kind)};
}

Experiment variant_experiment(const Variant& variant, const Ground& ground,
                              const Hardware& hardware) {
  Sizes sizes = ground.sizes;
  sizes.batch *= variant.row_factor;
  Experiment experiment = timed_experiment(Role::kDistributed, ground.slots,
                                           static_cast<int>(ground.slots.size()), sizes, hardware);
  experiment.variant = variant;
  experiment.name = variant.name();
  experiment.title = variant.title();
  experiment.program = variant.program();
  const auto words = variant.arguments();
  experiment.arguments.insert(experiment.arguments.end(), words.begin(), words.end());
  experiment.weight = 1 + static_cast<double>(variant.effective_factor());  // 1: to start
  return experiment;
}

LabPlan plan_variants(const std::vector<Variant>& timed, const std::vector<Variant>& once,
                      int repetitions, const Ground& ground, const Hardware& hardware) {
  LabPlan plan;
  plan.repetitions = repetitions;
  for (int run = 1; run <= repetitions; ++run) {
    for (const auto& variant : timed) {
      plan.experiments.push_back(
          repetition(variant_experiment(variant, ground, hardware), run, repetitions));
    }
    if (run > 1) continue;
    for (const auto& variant : once) {
      plan.experiments.push_back(variant_experiment(variant, ground, hardware));
    }
  }
  return plan;
}

}  // namespace lockstep::cli
