#include "cli/lab/accumulation.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "lockstep/error.hpp"

namespace lockstep::cli {
namespace {

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

// One run of a variant on all devices.
Experiment variant_experiment(const TrainingVariant& variant, LabConfig config) {
  config.sizes.batch *= variant.row_factor;
  Experiment experiment = timed_experiment(Method::kDistributed, config, config.devices());
  experiment.keys = {variant.key()};
  experiment.name = variant.name();
  experiment.title = variant.title();
  experiment.program = variant.program();
  append(experiment, variant.arguments());
  // 1: to start
  experiment.weight = 1 + static_cast<double>(variant.accum_steps * variant.row_factor);
  return experiment;
}

}  // namespace

RunKey TrainingVariant::key() const {
  if (amp != "off") {
    if (overflow_at > 0) return {scaler ? "overflow" : "overflow_no_scaler", overflow_at};
    if (!scaler) return {"no_scaler"};
    return accum_steps > 1 ? RunKey{"combined", accum_steps} : RunKey{"amp"};
  }
  if (row_factor > 1) return {"one_batch", row_factor};
  if (accum_steps == 1) return {"fp32"};
  if (!divide) return {"undivided", accum_steps};
  return {sync_every_step ? "synced" : "accumulated", accum_steps};
}

std::string TrainingVariant::program() const {
  if (amp == "off") return "practical7_accumulation";
  return accum_steps == 1 ? "practical7_amp" : "homework2_combined";
}

std::string TrainingVariant::name() const {
  std::vector<std::string> parts;
  if (amp != "off") parts.push_back(amp);
  if (accum_steps > 1) parts.push_back(fmt::format("accum{}", accum_steps));
  if (row_factor > 1) parts.push_back(fmt::format("rows-times{}", row_factor));
  if (parts.empty()) parts.emplace_back("fp32");
  if (sync_every_step) parts.emplace_back("sync");
  if (!divide) parts.emplace_back("undivided");
  if (!scaler) parts.emplace_back("no-scaler");
  if (overflow_at > 0) parts.push_back(fmt::format("overflow{}", overflow_at));
  return fmt::format("{}", fmt::join(parts, "-"));
}

std::string TrainingVariant::title() const {
  std::vector<std::string> parts = {amp == "off" ? "fp32" : amp};
  if (accum_steps > 1) parts.push_back(fmt::format("{} micro-steps", accum_steps));
  if (row_factor > 1) parts.push_back(fmt::format("{} times the rows", row_factor));
  if (sync_every_step) parts.emplace_back("all-reduce in each");
  if (!divide) parts.emplace_back("loss undivided");
  if (!scaler) parts.emplace_back("no scaler");
  if (overflow_at > 0) parts.push_back(fmt::format("overflow in step {}", overflow_at));
  return fmt::format("{}", fmt::join(parts, ", "));
}

std::vector<std::string> TrainingVariant::arguments() const {
  std::vector<std::string> words;
  const bool amp_only = program() == "practical7_amp";
  if (!amp_only) words.insert(words.end(), {"--accum-steps", std::to_string(accum_steps)});
  if (amp != "off") words.insert(words.end(), {"--amp", amp});
  if (sync_every_step) words.emplace_back("--sync-every-step");
  if (!divide) words.emplace_back("--no-divide");
  if (!scaler) words.emplace_back("--no-scaler");
  if (overflow_at > 0) words.insert(words.end(), {"--overflow-at", std::to_string(overflow_at)});
  return words;
}

std::vector<LabFlag> accumulation_flags() {
  using Kind = LabFlag::Kind;
  return {{.name = "--accum-steps",
           .kind = Kind::kList,
           .help = "micro-steps in an optimizer step (default: 4,8 and 4,8,16,32)",
           .first = 2},
          {.name = "--amp",
           .kind = Kind::kText,
           .help = "lower precision (default: bf16, fp16 on GPUs)",
           .values = "bf16|fp16"}};
}

AccumulationConfig choose_config(const LabOptions& options, const Hardware& hardware,
                                 const AccumulationDefaults& defaults) {
  const auto slots = plan_devices(options.devices, hardware);
  const DeviceKind kind = slots[0].kind;
  const Sizes sizes =
      choose_sizes(options, kind == DeviceKind::kCuda ? defaults.cuda : defaults.cpu);
  const auto accum_steps = options.ascending("--accum-steps", defaults.accum_steps);
  require_row_for_each_rank(sizes.batch, static_cast<int64_t>(slots.size()), "--devices");
  if (accum_steps.front() < 2) {
    throw Error(
        Code::kUsage,
        fmt::format("--accum-steps {}: there is nothing to accumulate", accum_steps.front()),
        "name numbers from 2 on; the run without accumulation is always among them");
  }
  return {{hardware, slots, sizes}, accum_steps, choose_amp(options.text("--amp"), kind)};
}

LabPlan plan_variants(const std::vector<TrainingVariant>& timed,
                      const std::vector<TrainingVariant>& once, int repetitions,
                      const AccumulationConfig& config) {
  const auto experiments = [&config](const std::vector<TrainingVariant>& variants) {
    std::vector<Experiment> all;
    for (const auto& variant : variants) all.push_back(variant_experiment(variant, config));
    return all;
  };
  LabPlan plan{.repetitions = repetitions, .experiments = {}};
  add_in_turns(plan, experiments(timed), experiments(once));
  return plan;
}

AccumulationContext::AccumulationContext(const LabRuns& of)
    : runs(of),
      fp32(of.of("fp32")),
      amp(of.of("amp")),
      accumulated(of.of("accumulated")),
      synced(of.of("synced")),
      undivided(of.of("undivided")),
      one_batch(of.of("one_batch")),
      combined(of.of("combined")),
      precision(amp.first().amp),
      micro_steps(accumulated.size),
      rows(rows_of(accumulated)),
      micro_rows(rows_of(fp32)),
      faster_with_amp(compare(fp32, amp)) {}

}  // namespace lockstep::cli
