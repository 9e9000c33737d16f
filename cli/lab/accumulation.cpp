#include "cli/lab/accumulation.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "cli/lab/lab_trained.hpp"
#include "lockstep/error.hpp"
#include "lockstep/units.hpp"

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

// The model of divisor_study(). At this learning rate it learns; at four times as much it diverges
// within half of the steps, with every seed that was tried and with other widths.
constexpr Sizes kDivisorSizes = {30, 64, 256, 256, 2};
constexpr double kDivisorRate = 0.9;
constexpr int64_t kFewestDivisorSteps = 4;

// The models of memory_study(), and the largest number of rows. The first of the four steps warms
// up, so that what only the first one needs is not counted.
constexpr Sizes kMemoryCpu = {4, 4096, 64, 256, 8};
constexpr Sizes kMemoryCuda = {4, 16384, 256, 1024, 8};
constexpr int64_t kFewerRows = 8;  // each point has this many times fewer than the next

// One run of a model of its own, whatever sizes the lab has.
Experiment study_experiment(LabConfig config, const Sizes& sizes, const RunKey& key,
                            const std::string& program, const std::vector<std::string>& arguments) {
  config.sizes = sizes;
  config.sizes.batch = std::max<int64_t>(sizes.batch, config.devices());
  Experiment experiment = timed_experiment(Method::kDistributed, config, config.devices());
  experiment.keys = {key};
  experiment.program = program;
  append(experiment, arguments);
  experiment.weight = 1;
  return experiment;
}

std::string option_text(const RunSet& set_up, const std::string& name) {
  const auto& options = set_up.first().options;
  const auto found = options.find(name);
  return found == options.end() ? "" : found->second;
}

double relative_step_noise(const RunSet& set_up) {
  const Stats step = pooled_step_ms(set_up);
  return step.mean > 0 ? step.stddev / step.mean : 0;
}

// The first step whose loss is not finite, counted from 1; 0: there is none.
int64_t first_nonfinite(const std::vector<double>& losses) {
  const auto found = std::find_if_not(losses.begin(), losses.end(),
                                      [](double loss) { return std::isfinite(loss); });
  return found == losses.end() ? 0 : found - losses.begin() + 1;
}

// How many steps, from the first on, two runs have the same losses in, except for rounding.
size_t equal_losses(const std::vector<double>& a, const std::vector<double>& b) {
  size_t equal = 0;
  for (; equal < std::min(a.size(), b.size()); ++equal) {
    const bool finite = std::isfinite(a[equal]) && std::isfinite(b[equal]);
    const double apart = std::abs(a[equal] - b[equal]);
    if (finite ? apart > kSameNorm * std::abs(a[equal])
               : std::isfinite(a[equal]) || std::isfinite(b[equal])) {
      break;
    }
  }
  return equal;
}

// What became of the run that did not divide its loss, compared with the one that did.
std::string undivided_outcome(const std::vector<double>& divided,
                              const std::vector<double>& undivided, int64_t factor) {
  const int64_t broke_at = first_nonfinite(undivided);
  if (broke_at > 0) {
    return fmt::format("training diverged: from step {} on the loss was not finite", broke_at);
  }
  const double last = undivided.back();
  if (last > undivided.front()) {
    return fmt::format("training diverged: the loss rose from {:.3g} to {:.3g}", undivided.front(),
                       last);
  }
  if (last > divided.back() * (1 + kSameNorm)) {
    return fmt::format("it trained worse: the loss ended at {:.3g}", last);
  }
  return fmt::format(
      "the loss ended at {:.3g}: a learning rate {} times as large did no harm here, so these runs "
      "cannot show that it can",
      last, factor);
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
  if (!scaler) parts.emplace_back("no-scaler");
  if (overflow_at > 0) parts.push_back(fmt::format("overflow{}", overflow_at));
  return fmt::format("{}", fmt::join(parts, "-"));
}

std::string TrainingVariant::title() const {
  std::vector<std::string> parts = {amp == "off" ? "fp32" : amp};
  if (accum_steps > 1) parts.push_back(fmt::format("{} micro-steps", accum_steps));
  if (row_factor > 1) parts.push_back(fmt::format("{} times the rows", row_factor));
  if (sync_every_step) parts.emplace_back("all-reduce in each");
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
  if (!scaler) words.emplace_back("--no-scaler");
  if (overflow_at > 0) words.insert(words.end(), {"--overflow-at", std::to_string(overflow_at)});
  return words;
}

std::vector<LabFlag> accumulation_flags() {
  using Kind = LabFlag::Kind;
  return {{.name = "--accum-steps",
           .kind = Kind::kList,
           .help = "micro-steps in an optimizer step (default: the lab's own)",
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

std::vector<Experiment> divisor_study(const AccumulationConfig& config) {
  const int64_t micro_steps = std::max<int64_t>(kFewestDivisorSteps, config.accum_steps.front());
  const auto run = [&](const char* what, const std::string& title, double rate, bool divide) {
    std::vector<std::string> arguments = {"--accum-steps", std::to_string(micro_steps), "--lr",
                                          fmt::format("{:g}", rate)};
    if (!divide) arguments.emplace_back("--no-divide");
    Experiment experiment = study_experiment(config, kDivisorSizes, {what, micro_steps},
                                             "practical7_accumulation", arguments);
    experiment.name = fmt::format("small-lr{:g}{}", rate, divide ? "" : "-undivided");
    experiment.title = fmt::format("small model, learning rate {:g}, {}", rate, title);
    return experiment;
  };
  const double larger = kDivisorRate * static_cast<double>(micro_steps);
  return {run("divided", "loss divided", kDivisorRate, true),
          run("undivided", "loss undivided", kDivisorRate, false),
          run("larger_rate", "loss divided", larger, true)};
}

std::vector<Experiment> memory_study(const AccumulationConfig& config, size_t points) {
  Sizes sizes = config.slots[0].kind == DeviceKind::kCuda ? kMemoryCuda : kMemoryCpu;
  std::vector<Experiment> experiments;
  for (size_t point = 0; point < points; ++point, sizes.batch /= kFewerRows) {
    for (const std::string& amp : {std::string("off"), config.amp}) {
      const std::string name = amp == "off" ? "fp32" : amp;
      Experiment experiment = study_experiment(
          config, sizes, {amp == "off" ? "memory_fp32" : "memory_amp", sizes.batch},
          "practical7_amp", {"--amp", amp});
      experiment.name = fmt::format("deep-{}-rows{}", name, sizes.batch);
      experiment.title = fmt::format("deep model, {} rows, {}", sizes.batch, name);
      experiments.push_back(experiment);
    }
  }
  return experiments;
}

LabPlan plan_variants(const std::vector<TrainingVariant>& timed,
                      const std::vector<TrainingVariant>& once,
                      const std::vector<Experiment>& studies, int repetitions,
                      const AccumulationConfig& config) {
  const auto experiments = [&config](const std::vector<TrainingVariant>& variants) {
    std::vector<Experiment> all;
    for (const auto& variant : variants) all.push_back(variant_experiment(variant, config));
    return all;
  };
  std::vector<Experiment> single = experiments(once);
  single.insert(single.end(), studies.begin(), studies.end());
  LabPlan plan{.repetitions = repetitions, .experiments = {}};
  add_in_turns(plan, experiments(timed), single);
  return plan;
}

Comparison compare_rows(const RunSet& base, const RunSet& other) {
  Comparison comparison = compare_per_row(base, other);
  const double noise = std::hypot(relative_step_noise(base), relative_step_noise(other));
  comparison.speedup.stddev = std::max(comparison.speedup.stddev, comparison.speedup.mean * noise);
  return comparison;
}

std::string count_all_reduces(const RunSet& set_up) {
  const double count = set_up.first().all_reduces.count;
  return fmt::format("{:g} all-reduce{}", count, count == 1 ? "" : "s");
}

AccumulationContext::AccumulationContext(const LabRuns& of)
    : runs(of),
      fp32(of.of("fp32")),
      amp(of.of("amp")),
      accumulated(of.of("accumulated")),
      synced(of.of("synced")),
      one_batch(of.of("one_batch")),
      combined(of.of("combined")),
      divided(of.of("divided")),
      undivided(of.of("undivided")),
      larger_rate(of.of("larger_rate")),
      precision(amp.first().amp),
      micro_steps(accumulated.size),
      rows(rows_of(accumulated)),
      micro_rows(rows_of(fp32)),
      faster_with_amp(compare_rows(fp32, amp)),
      warning(
          times_warning(disturbance_of(of, {"fp32", "amp", "accumulated", "synced", "combined"}),
                        {faster_with_amp, compare_rows(accumulated, synced),
                         compare_rows(accumulated, combined)})) {}

std::string AccumulationContext::divisor_text() const {
  const auto norms = norm_ratio(divided, undivided);
  const auto& with = divided.first().losses;
  const auto& without = undivided.first().losses;
  const auto& larger = larger_rate.first().losses;
  if (!norms || with.empty() || without.empty()) {
    return "These runs did not record their gradients and losses, so they cannot show it.";
  }
  if (!std::isfinite(with.back())) {
    return "The small model's loss did not stay finite even divided, so these runs cannot show it.";
  }
  std::string text = fmt::format(
      "A small model was trained with {} micro-steps at learning rate {}. Divided, the loss went "
      "from {:.3g} to {:.3g} in {}. Undivided, the first gradient had the norm {:.3g} instead of "
      "{:.3g} ({:.2f} times), and {}.",
      undivided.size, option_text(divided, "lr"), with.front(), with.back(),
      counted(with.size(), "step"), gradients_of(undivided)->norm, gradients_of(divided)->norm,
      *norms, undivided_outcome(with, without, undivided.size));
  const size_t equal = equal_losses(without, larger);
  if (equal == 0) return text;
  return text + fmt::format(
                    " It is a matter of the learning rate: at {}, the divided run had the same "
                    "losses as the undivided one{}.",
                    option_text(larger_rate, "lr"),
                    equal == without.size() ? "" : fmt::format(" in its first {} steps", equal));
}

std::string AccumulationContext::many_rows_text() const {
  const int64_t before = peak_of(many_rows_fp32());
  const int64_t after = peak_of(many_rows_amp());
  const double change = relative_change(before, after);
  const std::string model =
      fmt::format("A deep, narrow model with {} rows a step", rows_of(many_rows_fp32()));
  if (before == 0) return model + " did not record its memory.";
  return fmt::format("{} took {} in {} against {} in fp32 ({}): {}.", model, format_bytes(after),
                     precision, format_bytes(before), format_change(change),
                     change < 0 ? "there the activations outweigh the copies of the weights"
                                : "in this run not even there did memory fall");
}

LabFacts AccumulationContext::trained(const std::string& lab) const {
  std::vector<int64_t> steps;
  for (const auto& set_up : runs.all("accumulated")) steps.push_back(set_up.size);
  TrainedBox box{
      .lab = lab,
      .own = {{"--accum-steps", fmt::format("{}", fmt::join(steps, ","))}, {"--amp", precision}}};
  box.more["precision"] = fmt::format("with AMP: matrix products in {}", precision);
  box.more["optimizer"] = fmt::format("small model: {} and {}", option_text(divided, "lr"),
                                      option_text(larger_rate, "lr"));
  const auto add_model = [&box](const char* name, const RunSet& set_up) {
    if (!set_up.first().model) return;
    auto& more = box.more["model"];
    more +=
        fmt::format("{}{}: {}", more.empty() ? "" : "; ", name, set_up.first().model->description);
  };
  add_model("small model", divided);
  add_model("deep model", many_rows_fp32());
  return what_was_trained(runs, accumulated, box);
}

}  // namespace lockstep::cli
