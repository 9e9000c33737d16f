// Practical 5: one device, then DataParallel.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "cli/lab/lab_charts.hpp"
#include "cli/lab/lab_plan.hpp"
#include "cli/lab/lab_tables.hpp"
#include "cli/lab/lab_text.hpp"
#include "cli/lab/lab_trained.hpp"
#include "lockstep/split.hpp"
#include "lockstep/units.hpp"

namespace lockstep::cli::practical5 {
namespace {

// ---- Plan: "single"; "dp" by devices; "split" in the order of the table.

constexpr int64_t kCourseRows = 64;
constexpr int kCourseDevices[] = {2, 3, 5};

Experiment split_experiment(DeviceKind kind, int64_t rows, int devices, int64_t number) {
  const Sizes tiny = {3, rows, 16, 16, 1};
  const char* hardware = kind == DeviceKind::kCpu ? "cpu:" : "cuda:0*";
  Experiment experiment;
  experiment.keys = {{"split", number}};
  experiment.name = fmt::format("split-{}-over-{}", rows, devices);
  experiment.title = fmt::format("split of {} rows over {} devices", rows, devices);
  experiment.devices = devices;
  experiment.program = "practical5_dp";
  experiment.arguments = program_arguments(tiny, fmt::format("{}{}", hardware, devices));
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
  const auto asked_rows = options.count("--split-rows");
  const auto asked_devices = options.list("--split-devices");
  const int64_t rows = asked_rows.value_or(kCourseRows);
  for (const int devices : kCourseDevices) add(kCourseRows, devices);
  for (const int devices : asked_devices) add(rows, devices);
  if (asked_rows && asked_devices.empty()) {
    for (const int devices : kCourseDevices) add(rows, devices);
  }
  return pairs;
}

LabPlan plan(const LabOptions& options, const Hardware& hardware) {
  const auto slots = plan_devices(options.devices, hardware);
  const DeviceKind kind = slots[0].kind;
  const LabConfig config{hardware, slots, choose_sizes(options, kind)};
  std::vector<Experiment> timed = {timed_experiment(Method::kSingle, config, 1)};
  for (const int devices : scaling_points(config.devices())) {
    timed.push_back(timed_experiment(Method::kDataParallel, config, devices));
  }
  LabPlan plan{.repetitions = options.repetitions(), .experiments = {}};
  add_in_turns(plan, timed);
  int64_t number = 0;
  for (const auto& [rows, devices] : split_pairs(options)) {
    plan.experiments.push_back(split_experiment(kind, rows, devices, number++));
  }
  return plan;
}

// What tables and answers look at: the single device, and DataParallel on all devices.
struct AnswerContext {
  const LabRuns& runs;
  const RunSet& single;
  const RunSet& full;
  int devices;
  Comparison comparison;
  std::vector<DeviceRecord> alone;  // the single run's device
  std::vector<DeviceRecord> all;    // the full run's devices
  const RunRecord& record;          // the full run, first repetition

  explicit AnswerContext(const LabRuns& of)
      : runs(of),
        single(of.of("single")),
        full(of.all("dp").back()),
        devices(full.devices),
        comparison(compare(single, full)),
        alone(merged_devices(single)),
        all(merged_devices(full)),
        record(full.first()) {}

  double speedup() const { return comparison.speedup.mean; }
  bool one_device() const { return devices < 2; }
  bool shared() const { return sharing(full) > 1; }
  std::string noise() const { return noise_remark(runs, comparison); }
};

// ---- Tables

Table speed_table(const AnswerContext& context) {
  std::vector<SetRow> rows = {{"single", &context.single}};
  for (const auto& set_up : context.runs.all("dp")) {
    rows.push_back({"DataParallel", &set_up, &context.single});
  }
  Table table = make_table<SetRow>(
      "Speed: one device against DataParallel",
      {name_column("set-up"),
       devices_column(),
       step_column(),
       range_column(),
       {"total time", [](const SetRow& row) { return format_seconds(mean_total_s(*row.set_up)); }},
       speedup_column(),
       proportional_column()},
      rows);
  add_method_note(table, context.single);
  table.add_note(
      fmt::format("DataParallel on {} is {}.",
                  context.one_device() ? "one device" : fmt::format("{} devices", context.devices),
                  times_against(context.speedup(), "one device")));
  add_noise_notes(table, context.runs, context.comparison);
  return table;
}

Table memory_table(const AnswerContext& context) {
  using Row = DeviceRow;
  const auto bytes = [](int64_t DeviceRecord::*member) {
    return [member](const Row& row) { return format_bytes(row.device().*member); };
  };
  const auto difference = [](int64_t DeviceRecord::*member) {
    return [member](const Row& row) {
      return row.index == 0 ? "—" : signed_bytes(row.device().*member - row.all[0].*member);
    };
  };
  Table table = make_table<Row>(
      "Memory per device",
      {{"set-up", [](const Row& row) { return row.name; }, Align::kLeft},
       {"device", [](const Row& row) { return row.device().name; }, Align::kLeft},
       {"hardware", [](const Row& row) { return hardware_of(row.device()); }, Align::kLeft},
       {"peak", bytes(&DeviceRecord::peak_bytes)},
       {"final", bytes(&DeviceRecord::final_bytes)},
       {"peak − device 0", difference(&DeviceRecord::peak_bytes)},
       {"final − device 0", difference(&DeviceRecord::final_bytes)}},
      device_rows({{"single", &context.single}, {"DataParallel", &context.full}}));
  table.add_note(
      "Peak: most bytes live at once in the timed steps. Final: bytes live after the last step.");
  return table;
}

// What a split run shows: the rows that each device got, and those that torch.chunk's rule gives.
struct Split {
  int64_t rows;
  int devices;
  std::vector<int64_t> measured;
  std::vector<int64_t> rule;

  bool some_idle() const { return measured.size() < static_cast<size_t>(devices); }
};

std::vector<Split> splits_of(const AnswerContext& context) {
  std::vector<Split> splits;
  for (const auto& set_up : context.runs.all("split")) {
    const int64_t rows = rows_of(set_up);
    splits.push_back(
        {rows, set_up.devices, set_up.first().split, chunk_rows(rows, set_up.devices)});
  }
  return splits;
}

Table split_table(const AnswerContext& context) {
  const auto kind_of = [](const Split& split) {
    return std::string(all_equal(split.measured) ? "equal" : "uneven") +
           (split.some_idle() ? ", some idle" : "");
  };
  return make_table<Split>(
      "How DataParallel divides the batch",
      {{"rows", [](const Split& split) { return std::to_string(split.rows); }},
       {"devices", [](const Split& split) { return std::to_string(split.devices); }},
       {"used", [](const Split& split) { return std::to_string(split.measured.size()); }},
       {"rows per device, measured", [](const Split& split) { return format_rows(split.measured); },
        Align::kLeft},
       {"⌈rows / devices⌉",
        [](const Split& split) {
          return std::to_string(split.rule.empty() ? 0 : split.rule.front());
        }},
       {"torch.chunk's rule",
        [](const Split& split) {
          return split.measured == split.rule ? "the same" : "DIFFERS: " + format_rows(split.rule);
        },
        Align::kLeft},
       {"split", kind_of, Align::kLeft}},
      splits_of(context));
}

Table bottleneck_table(const AnswerContext& context) {
  Table table = load_table("Where the load is: DataParallel, device by device",
                           {{"DataParallel", &context.full}});
  table.add_note(
      "Extra: what device 0 has more than the others have on average. It keeps the whole batch, "
      "the gathered output with the loss, the summed gradients and the optimizer's state.");
  add_busy_note(table, context.full);
  return table;
}

// ---- Charts

Figure step_time_figure(const AnswerContext& context) {
  const Stats single = pooled_step_ms(context.single);
  LineSeries one{.name = "one device", .x = {1}, .y = {single.mean}, .deviations = {single.stddev}};
  LineSeries ideal{.name = "ideal", .x = {1}, .y = {single.mean}, .reference = true};
  for (const auto& set_up : context.runs.all("dp")) {
    if (set_up.devices == 1) continue;
    ideal.x.push_back(set_up.devices);
    ideal.y.push_back(single.mean / set_up.devices);
  }
  return {LineChart{.title = "Step time over devices",
                    .x_label = "devices",
                    .unit = Unit::kMilliseconds,
                    .series = {std::move(one), step_series("DataParallel", context.runs.all("dp")),
                               std::move(ideal)},
                    .log_x = context.devices >= 4},
          fmt::format("Mean step time with its deviation; on {} DataParallel took {} where the "
                      "ideal is {}.",
                      plural(context.devices, "device"), step_of(context.full),
                      format_ms(single.mean / context.devices))};
}

Figure memory_figure(const AnswerContext& context) {
  return {peak_chart({{"one device", &context.single}, {"DataParallel", &context.full}}),
          fmt::format("Most bytes live at once in the timed steps; device 0 held {} against the "
                      "others' mean.",
                      signed_bytes(extra_on_first(context.all, &DeviceRecord::peak_bytes)))};
}

// ---- Answers

const std::string kOneDevice =
    "This run had one device, so it cannot show it; try --devices cpu:2, or cuda:0*2 on one GPU.";

// The part of a step that would have to stay on one device to explain the speed-up (Amdahl's law).
double serial_fraction(double speedup, int devices) {
  return std::clamp((devices / speedup - 1) / (devices - 1), 0.0, 1.0);
}

std::string answer_faster(const AnswerContext& context) {
  if (context.one_device()) {
    return fmt::format("A step took {} with DataParallel and {} without. {}", step_of(context.full),
                       step_of(context.single), kOneDevice);
  }
  const std::string figures =
      fmt::format("A step took {} on {} devices against {} on one", step_of(context.full),
                  context.devices, step_of(context.single));
  std::string text;
  if (std::abs(context.speedup() - 1) <= context.comparison.margin()) {
    text = fmt::format(
        "Not measurably. {}: copying the model and gathering the results costs what dividing the "
        "rows saves.",
        figures);
  } else if (context.speedup() > 1) {
    text = fmt::format(
        "Yes. {}: {:.2f} times as fast, because each device computes only its share of "
        "the rows, at the same time as the others.",
        figures, context.speedup());
  } else {
    text = fmt::format(
        "No. {}: {:.2f} times slower, because what DataParallel adds to a step (copying the model "
        "out, gathering outputs and gradients, waiting for device 0) cost more than dividing the "
        "rows saved.",
        figures, 1 / context.speedup());
  }
  return text + sharing_sentence(context.full) + context.noise();
}

// The speed-ups on all numbers of devices, after a space.
std::string growth(const AnswerContext& context) {
  const auto& sets = context.runs.all("dp");
  if (sets.size() < 2) return "";
  std::vector<std::string> counts;
  std::vector<std::string> speedups;
  for (const auto& set_up : sets) {
    counts.push_back(std::to_string(set_up.devices));
    speedups.push_back(fmt::format("{:.2f}", compare(context.single, set_up).speedup.mean));
  }
  return fmt::format(" On {} devices DataParallel ran {} times as fast as the single device.",
                     fmt::join(counts, ", "), fmt::join(speedups, ", "));
}

std::string answer_proportional(const AnswerContext& context) {
  if (context.one_device()) return kOneDevice;
  if (context.shared()) {
    return shared_remark(context.full) + growth(context) +
           " The speed can only grow in proportion where the hardware grows with the devices.";
  }
  const double efficiency = context.comparison.efficiency;
  std::string text;
  if (context.speedup() <= 1) {
    text = fmt::format("No: {} devices gave no speed-up at all ({:.2f}).", context.devices,
                       context.speedup());
  } else if (efficiency > 1.05) {
    text = fmt::format(
        "More than that: {:.2f} times on {} devices, which noise can explain, or smaller pieces "
        "that fit a cache better.",
        context.speedup(), context.devices);
  } else if (efficiency >= kProportional) {
    text = fmt::format("Nearly: {:.2f} times on {} devices is {} of proportional.",
                       context.speedup(), context.devices, format_percent(efficiency));
  } else {
    text = fmt::format(
        "No: {:.2f} times on {} devices is {} of proportional, as if {} of the step ran on one "
        "device only (the loss, the sum of the gradients and the optimizer do).",
        context.speedup(), context.devices, format_percent(efficiency),
        format_percent(serial_fraction(context.speedup(), context.devices)));
  }
  return text + growth(context) + context.noise();
}

std::string answer_memory(const AnswerContext& context) {
  const int64_t single = context.alone[0].peak_bytes;
  const std::string alone = fmt::format("The single device peaked at {}.", format_bytes(single));
  if (context.one_device()) {
    return fmt::format("{} DataParallel on one device peaked at {}. {}", alone,
                       format_bytes(context.all[0].peak_bytes), kOneDevice);
  }
  int64_t sum = 0;
  for (const auto& device : context.all) sum += device.peak_bytes;
  return fmt::format(
      "{} Under DataParallel device 0 peaked at {} and the others at {} on average; that is "
      "together {}, {:.2f} times the single device. Every device holds a whole copy of the model, "
      "but only the activations of its own rows; device 0 also holds the batch, the gathered "
      "output, the summed gradients and the optimizer's state.",
      alone, format_bytes(context.all[0].peak_bytes),
      format_bytes(others_mean(context.all, &DeviceRecord::peak_bytes)), format_bytes(sum),
      static_cast<double>(sum) / static_cast<double>(std::max<int64_t>(1, single)));
}

std::string answer_user_split(const AnswerContext& context) {
  return fmt::format(
      "No. The program hands DataParallel one batch of {0} rows and gets one output of {0} rows "
      "back; the record shows that DataParallel gave its devices {1} rows.",
      context.record.effective_batch, format_rows(context.record.split));
}

std::string answer_rule(const AnswerContext& context) {
  std::vector<std::string> seen;
  std::vector<std::string> broken;
  for (const auto& split : splits_of(context)) {
    seen.push_back(fmt::format("{} rows over {} devices gave {}", split.rows, split.devices,
                               format_rows(split.measured)));
    if (split.measured != split.rule) broken.push_back(seen.back());
  }
  const std::string rule =
      "It divides the batch along dimension 0, in contiguous pieces, by torch.chunk's rule: every "
      "device gets ⌈rows / devices⌉ rows until the rows run out.";
  if (!broken.empty()) {
    return fmt::format("{} But this run broke the rule: {}.", rule, fmt::join(broken, "; "));
  }
  return seen.empty() ? rule : fmt::format("{} Measured: {}.", rule, fmt::join(seen, "; "));
}

std::string answer_even(const AnswerContext& context) {
  std::vector<std::string> equal;
  std::vector<std::string> uneven;
  std::vector<std::string> idle;
  for (const auto& split : splits_of(context)) {
    const std::string text = fmt::format("{} over {}", split.rows, split.devices);
    if (split.some_idle()) {
      idle.push_back(fmt::format("{} (only {} used)", text, split.measured.size()));
    } else if (split.rows % split.devices == 0) {
      equal.push_back(text);
    } else {
      uneven.push_back(fmt::format("{} ({})", text, format_rows(split.measured)));
    }
  }
  std::string text =
      "It is equal when the number of devices divides the number of rows. Otherwise it is uneven, "
      "because a row cannot be cut: the last device gets what is left.";
  if (!equal.empty()) text += fmt::format(" Here equal: {}.", fmt::join(equal, ", "));
  if (!uneven.empty()) text += fmt::format(" Uneven: {}.", fmt::join(uneven, ", "));
  if (!idle.empty()) text += fmt::format(" Rows ran out early: {}.", fmt::join(idle, ", "));
  return text;
}

int64_t others_traffic(const AnswerContext& context) {
  int64_t sum = 0;
  for (size_t i = 1; i < context.all.size(); ++i) sum += traffic(context.all[i]);
  return sum / static_cast<int64_t>(context.all.size() - 1);
}

std::string answer_first_loaded(const AnswerContext& context) {
  if (context.one_device()) return kOneDevice;
  const DeviceRecord& first = context.all[0];
  const int64_t others_peak = others_mean(context.all, &DeviceRecord::peak_bytes);
  const bool memory =
      static_cast<double>(first.peak_bytes) > kMoreMemory * static_cast<double>(others_peak);
  // With two devices every byte has device 0 at one end and device 1 at the other.
  const bool moves_more = traffic(first) > others_traffic(context);
  return fmt::format(
      "{} Its memory peaked at {} against {} on the others on average ({}), and it moved {} per "
      "step against {}{}, because it feeds every replica and collects from it.",
      memory || moves_more ? "Yes." : "Not in this run.", format_bytes(first.peak_bytes),
      format_bytes(others_peak),
      first.peak_bytes >= others_peak ? format_bytes(first.peak_bytes - others_peak) + " more"
                                      : format_bytes(others_peak - first.peak_bytes) + " less",
      format_bytes(traffic(first)), format_bytes(others_traffic(context)),
      context.devices == 2 ? " (with two devices each byte has device 0 at one end)"
                           : " on each other one");
}

std::string answer_equal_use(const AnswerContext& context) {
  if (context.one_device()) return kOneDevice;
  std::vector<std::string> busy;
  for (const auto& device : context.all) {
    busy.push_back(fmt::format("{} {}", device.name, format_percent(device.busy_fraction)));
  }
  std::string text =
      fmt::format("{} Busy: {}.",
                  imbalance_of(context.all).busy_gap() <= kEquallyBusy ? "In time, nearly." : "No.",
                  fmt::join(busy, ", "));
  const auto& split = context.record.split;
  if (split.size() < context.all.size()) {
    text +=
        fmt::format(" Only {} of {} devices got rows at all.", split.size(), context.all.size());
  } else if (!all_equal(split)) {
    text += fmt::format(" They had {} rows, so the last one had less to do.", format_rows(split));
  }
  text += " In memory and traffic they are not equal: device 0 does the work that is not divided.";
  if (context.shared()) text += " On shared hardware, waiting for it counts as busy.";
  return text;
}

std::string answer_bottleneck(const AnswerContext& context) {
  if (context.one_device()) return kOneDevice;
  std::string text = fmt::format(
      "At device 0: it sends {} and receives {} in every step, to replicate the model, scatter the "
      "batch and gather outputs and gradients.",
      format_bytes(context.all[0].sent_bytes_per_step),
      format_bytes(context.all[0].received_bytes_per_step));
  const double step_ms = pooled_step_ms(context.full).mean;
  if (context.record.comm_ms > 0) {
    text +=
        fmt::format(" Moving data took {} of a {} step ({}).", format_ms(context.record.comm_ms),
                    format_ms(step_ms), format_percent(context.record.comm_ms / step_ms));
  }
  const Imbalance busy = imbalance_of(context.all);
  text += fmt::format(
      " The devices stood idle {:.0f} to {:.0f} % of the time, waiting for each other or for the "
      "parts of the step that are not divided.",
      100 * (1 - busy.most_busy), 100 * (1 - busy.least_busy));
  if (context.shared()) text += " Here the shared hardware itself is a second bottleneck.";
  return text;
}

std::string answer_advantage(const AnswerContext& context) {
  std::string text =
      "It is simple: there is one process and one line around the module, the loop does not "
      "change, and the numbers trained stay the same." +
      loss_parity(context.single.first(), context.record, "the single device's");
  if (!context.one_device() && context.speedup() > 1 + kSameSpeed) {
    text += fmt::format(" It brought {:.2f} times the speed here.", context.speedup());
  }
  return text;
}

std::string answer_limitation(const AnswerContext& context) {
  if (context.one_device()) {
    return "All that is not divided stays with device 0, in one process on one machine. " +
           kOneDevice;
  }
  return fmt::format(
      "Everything passes through device 0 of one process on one machine: it held {} more than the "
      "others at its peak and moved {} per step, and the largest model is the one that fits a "
      "single device.",
      format_bytes(std::max<int64_t>(0, extra_on_first(context.all, &DeviceRecord::peak_bytes))),
      format_bytes(traffic(context.all[0])));
}

std::string answer_scaling(const AnswerContext& context) {
  if (context.one_device()) return kOneDevice;
  const std::string text = fmt::format(
      "Each further device gets fewer rows but a whole copy of the model: device 0's traffic grows "
      "by about {} per step and device, while the computation that hides it shrinks.",
      format_bytes(traffic(context.all[0]) / (context.devices - 1)));
  if (context.shared()) return text + sharing_sentence(context.full);
  const double serial = serial_fraction(context.speedup(), context.devices);
  if (context.speedup() <= 1 || serial <= 0.005) return text;
  return text + fmt::format(
                    " With {:.0f} % of this step not divided, no number of devices could exceed "
                    "{:.1f} times the speed of one (Amdahl's law).",
                    serial * 100, 1 / serial);
}

LabReport report(const LabRuns& runs) {
  const AnswerContext context(runs);
  return {
      .title = "Practical 5: one device, then DataParallel",
      .stamp = context.single.first(),
      .trained = what_was_trained(runs, context.full, {.lab = "5"}),
      .tables = {{"speed", speed_table(context)},
                 {"memory", memory_table(context)},
                 {"split", split_table(context)},
                 {"bottleneck", bottleneck_table(context)}},
      .figures = {step_time_figure(context), memory_figure(context)},
      .answers = {
          {"speed", "Did training become faster?", answer_faster(context)},
          {"speed", "Is the speed-up proportional to the devices?", answer_proportional(context)},
          {"speed", "How does memory differ?", answer_memory(context)},
          {"splitting", "Is the batch split by the user's code?", answer_user_split(context)},
          {"splitting", "How does DataParallel divide it?", answer_rule(context)},
          {"splitting", "When is the split equal, when uneven, and why?", answer_even(context)},
          {"bottleneck", "Is device 0 more loaded?", answer_first_loaded(context)},
          {"bottleneck", "Are all devices equally used?", answer_equal_use(context)},
          {"bottleneck", "Where could the bottleneck be?", answer_bottleneck(context)},
          {"bottleneck", "What is the main advantage of DataParallel?", answer_advantage(context)},
          {"bottleneck", "What is its main limitation?", answer_limitation(context)},
          {"bottleneck", "Why might it not scale to many devices?", answer_scaling(context)},
      }};
}

}  // namespace

Lab lab() {
  using Kind = LabFlag::Kind;
  return {.name = "5",
          .folder = "reports/lab5",
          .flags = {{.name = "--split-rows",
                     .kind = Kind::kCount,
                     .help = "show one more split, of that many rows (default: 64)",
                     .last = 1'000'000},
                    {.name = "--split-devices",
                     .kind = Kind::kList,
                     .help = "... over these numbers of devices"}},
          .examples = {{"", "on every GPU, or on cpu:2"},
                       {"--quick --devices cuda:0*2", "two logical devices share GPU 0"},
                       {"--split-rows 9 --split-devices 4,7", "two more rows in the split table"}},
          .plan = plan,
          .report = report};
}

}  // namespace lockstep::cli::practical5
