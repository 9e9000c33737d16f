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
  append(experiment, {"--print-shapes"});
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
  std::string warning;              // why times cannot be judged; empty: they can

  explicit AnswerContext(const LabRuns& of)
      : runs(of),
        single(of.of("single")),
        full(of.some("dp").back()),
        devices(full.devices),
        comparison(compare(single, full)),
        alone(merged_devices(single)),
        all(merged_devices(full)),
        record(full.first()),
        warning(times_warning(disturbance_of(of, {"single", "dp"}), {comparison})) {}

  double speedup() const { return comparison.speedup.mean; }
  bool one_device() const { return devices < 2; }
  bool shared() const { return sharing(full) > 1; }
  bool judged() const { return warning.empty(); }
  bool same_speed() const { return std::abs(speedup() - 1) <= comparison.margin(); }

  std::string others() const { return devices == 2 ? "the other" : "the others on average"; }
};

// ---- Tables

Table speed_table(const AnswerContext& context) {
  std::vector<SetRow> rows = {{"single", &context.single}};
  for (const auto& set_up : context.runs.all("dp")) {
    rows.push_back({"DataParallel", &set_up, &context.single});
  }
  std::vector<SetColumn> columns = {
      name_column("set-up"),
      devices_column(),
      {"step time (s)",
       [](const SetRow& row) { return format_step_s(pooled_step_ms(*row.set_up)); }},
      {"total (s)", [](const SetRow& row) { return format_s(mean_total_s(*row.set_up)); }},
      speedup_column()};
  if (context.judged()) columns.push_back(proportional_column());
  Table table = make_table<SetRow>("Speed: one device against DataParallel", columns, rows);
  add_method_note(table, context.single);
  if (context.judged()) add_proportional_note(table);
  table.add_note(fmt::format("Steps took {} s on one device and {} s with DataParallel on {}.",
                             format_range_s(pooled_step_ms(context.single)),
                             format_range_s(pooled_step_ms(context.full)),
                             plural(context.devices, "device")));
  table.add_note(
      "Total: from the start of the loop to the end of its last step, warm-up included.");
  if (context.judged()) {
    table.add_note(fmt::format("DataParallel on {} is {}.", plural(context.devices, "device"),
                               format_against(context.comparison, "one device")));
  }
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
       {"Δ peak", difference(&DeviceRecord::peak_bytes)},
       {"Δ final", difference(&DeviceRecord::final_bytes)}},
      device_rows({{"single", &context.single}, {"DataParallel", &context.full}}));
  table.add_note(
      "Peak: most bytes live at once in the timed steps. Final: bytes live after the last step. "
      "Δ: against device 0.");
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
       {"rows per device", [](const Split& split) { return format_rows(split.measured); },
        Align::kLeft},
       {"⌈rows/devices⌉",
        [](const Split& split) {
          return std::to_string(split.rule.empty() ? 0 : split.rule.front());
        }},
       {"torch.chunk",
        [](const Split& split) {
          return split.measured == split.rule ? "the same" : "DIFFERS: " + format_rows(split.rule);
        },
        Align::kLeft},
       {"split", kind_of, Align::kLeft}},
      splits_of(context));
}

Table shapes_table(const AnswerContext& context) {
  struct Row {
    const RunSet* split;
    ReplicaRecord replica;
  };
  std::vector<Row> rows;
  for (const auto& set_up : context.runs.all("split")) {
    for (const auto& replica : set_up.first().replicas) rows.push_back({&set_up, replica});
  }
  const auto shape = [](std::vector<int64_t> ReplicaRecord::*which) {
    return [which](const Row& row) {
      return fmt::format("[{}]", fmt::join(row.replica.*which, ", "));
    };
  };
  Table table = make_table<Row>(
      "Inside the model: what each replica saw",
      {{"rows", [](const Row& row) { return std::to_string(rows_of(*row.split)); }},
       {"devices", [](const Row& row) { return std::to_string(row.split->devices); }},
       {"device", [](const Row& row) { return row.replica.device; }, Align::kLeft},
       {"input", shape(&ReplicaRecord::input), Align::kLeft},
       {"output", shape(&ReplicaRecord::output), Align::kLeft}},
      rows);
  table.add_note("Noted in forward() itself, as practical5_dp --print-shapes prints it.");
  return table;
}

Table bottleneck_table(const AnswerContext& context) {
  Table table = load_table("Where the load is: DataParallel, device by device",
                           {{"DataParallel", &context.full}});
  table.add_note(
      "Device 0 also keeps the whole batch, the gathered output with the loss, the summed "
      "gradients and the optimizer's state.");
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
  std::string caption = "Most bytes live at once in the timed steps.";
  if (!context.one_device()) {
    const int64_t extra = extra_on_first(context.all, &DeviceRecord::peak_bytes);
    caption += fmt::format(" Under DataParallel device 0 held {} {}.", against_text(extra),
                           context.others());
  }
  return {peak_chart({{"one device", &context.single}, {"DataParallel", &context.full}}), caption};
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
    return fmt::format("A step took {} with DataParallel and {} without. {}",
                       step_with_deviation(context.full), step_with_deviation(context.single),
                       kOneDevice);
  }
  const std::string figures =
      fmt::format("A step took {} on {} devices and {} on one", step_with_deviation(context.full),
                  context.devices, step_with_deviation(context.single));
  const std::string speedup = format_speedup(context.comparison);
  if (!context.judged()) {
    return fmt::format("That cannot be judged from this run. {}, a speed-up of {}.", figures,
                       speedup);
  }
  std::string text;
  if (context.same_speed()) {
    text = fmt::format("Not measurably. {}: a speed-up of {}.", figures, speedup);
  } else if (context.speedup() > 1) {
    text = fmt::format(
        "Yes. {}: {} times as fast, because each device computes only its share of the rows, at "
        "the same time as the others.",
        figures, speedup);
  } else {
    text = fmt::format("No. {}: {:.2f} times slower.", figures, 1 / context.speedup());
    if (!context.shared()) {
      text +=
          " What DataParallel adds to a step, copying the model out and gathering outputs and "
          "gradients, cost more than dividing the rows saved.";
    }
  }
  return text + sharing_sentence(context.full);
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
  return fmt::format(" With {} devices DataParallel ran {} times as fast as the single device.",
                     listed(counts), listed(speedups));
}

std::string answer_proportional(const AnswerContext& context) {
  if (context.one_device()) return kOneDevice;
  const std::string speedup = format_speedup(context.comparison);
  if (!context.judged()) {
    return fmt::format(
        "That cannot be judged from this run: the speed-up was {} on {} devices, where {} would be "
        "proportional.",
        speedup, context.devices, context.devices);
  }
  if (context.shared()) {
    return "This run cannot show it, because the devices share hardware: the speed can only grow "
           "in proportion where the hardware grows with the devices." +
           growth(context);
  }
  const double efficiency = context.comparison.efficiency;
  std::string text;
  if (context.same_speed() || context.speedup() <= 1) {
    text = fmt::format("No: {} devices gave no speed-up at all ({}).", context.devices, speedup);
  } else if (efficiency > 1.05) {
    text = fmt::format("More than that: {} times on {} devices. This run does not show why.",
                       speedup, context.devices);
  } else if (efficiency >= kProportional) {
    text = fmt::format("Nearly: {} times on {} devices is {} of proportional.", speedup,
                       context.devices, format_percent(efficiency));
  } else {
    text = fmt::format(
        "No: {} times on {} devices is {} of proportional, as if {} of the step ran on one device "
        "only (the loss, the sum of the gradients and the optimizer do).",
        speedup, context.devices, format_percent(efficiency),
        format_percent(serial_fraction(context.speedup(), context.devices)));
  }
  return text + growth(context);
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
      "{} Under DataParallel device 0 peaked at {} and {} at {}{}: together {}, which is {:.2f} "
      "times the single device's peak. Every device holds a whole copy of the model, "
      "but only the activations of its own rows; device 0 also holds the batch, the gathered "
      "output, the summed gradients and the optimizer's state.",
      alone, format_bytes(context.all[0].peak_bytes),
      context.devices == 2 ? "the other" : "the others",
      format_bytes(others_mean(context.all, &DeviceRecord::peak_bytes)),
      context.devices == 2 ? "" : " on average", format_bytes(sum),
      static_cast<double>(sum) / static_cast<double>(std::max<int64_t>(1, single)));
}

std::string answer_user_split(const AnswerContext& context) {
  return fmt::format(
      "No. The program hands DataParallel one batch of {0} rows and gets one output of {0} rows "
      "back; the record shows that DataParallel gave its devices {1}.",
      context.record.effective_batch, rows_text(context.record.split));
}

std::string answer_rule(const AnswerContext& context) {
  std::vector<std::string> seen;
  std::vector<std::string> broken;
  for (const auto& split : splits_of(context)) {
    seen.push_back(fmt::format("{} rows over {} devices gave {}", split.rows, split.devices,
                               rows_text(split.measured)));
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
      uneven.push_back(fmt::format("{} ({})", text, rows_text(split.measured)));
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

// What device 0 has more than the others.
struct Extra {
  int64_t peak;      // negative: it has less
  int64_t traffic;   // of device 0
  int64_t others;    // traffic of each of the others, on average
  bool more_memory;  // noticeably

  explicit Extra(const AnswerContext& context)
      : peak(extra_on_first(context.all, &DeviceRecord::peak_bytes)),
        traffic(cli::traffic(context.all[0])),
        others(others_traffic(context)),
        more_memory(imbalance_of(context.all).memory > kMoreMemory) {}

  bool more_traffic() const { return traffic > others; }

 private:
  static int64_t others_traffic(const AnswerContext& context) {
    int64_t sum = 0;
    for (size_t i = 1; i < context.all.size(); ++i) sum += cli::traffic(context.all[i]);
    return sum / static_cast<int64_t>(context.all.size() - 1);
  }
};

// How much devices move, as a clause about device 0.
std::string traffic_text(const AnswerContext& context, const Extra& extra) {
  if (!extra.more_traffic()) {
    return fmt::format(
        "it moved as much as {}, {} per step{}", context.others(), format_bytes(extra.traffic),
        context.devices == 2 ? ": with two devices every byte has device 0 at one end "
                               "and device 1 at the other"
                             : "");
  }
  return fmt::format(
      "it moved {} per step against {} on {}, because it feeds every replica and "
      "collects from it",
      format_bytes(extra.traffic), format_bytes(extra.others), context.others());
}

std::string answer_first_loaded(const AnswerContext& context) {
  if (context.one_device()) return kOneDevice;
  const Extra extra(context);
  return fmt::format("{} Its memory peaked at {}, {} {}. In traffic, {}.",
                     extra.more_memory && extra.more_traffic() ? "Yes."
                     : extra.more_memory                       ? "Yes, in memory."
                     : extra.more_traffic()                    ? "Yes, in traffic."
                                                               : "Not in this run.",
                     format_bytes(context.all[0].peak_bytes), against_text(extra.peak),
                     context.others(), traffic_text(context, extra));
}

std::string answer_equal_use(const AnswerContext& context) {
  if (context.one_device()) return kOneDevice;
  std::vector<std::string> busy;
  for (const auto& device : context.all) {
    busy.push_back(fmt::format("{} {}", device.name, format_percent(device.busy_fraction)));
  }
  const bool alike = imbalance_of(context.all).busy_gap() <= kEquallyBusy;
  std::string text = fmt::format("{} The devices computed for this share of the time: {}.",
                                 alike ? "In computing time, nearly." : "No.", listed(busy));
  const auto& split = context.record.split;
  if (split.size() < context.all.size()) {
    text +=
        fmt::format(" Only {} of {} devices got rows at all.", split.size(), context.all.size());
  } else if (!all_equal(split)) {
    text += fmt::format(" They had {}, so the last one had less to do.", rows_text(split));
  }
  const Extra extra(context);
  if (!extra.more_memory && !extra.more_traffic()) {
    text += " In memory and traffic they are equal too.";
  } else if (extra.more_memory && extra.more_traffic()) {
    text += fmt::format(
        " In memory and traffic they are not: device 0 held {} more at its peak, and moved {} per "
        "step against {} on {}.",
        format_bytes(extra.peak), format_bytes(extra.traffic), format_bytes(extra.others),
        context.others());
  } else if (extra.more_memory) {
    text += fmt::format(
        " In memory they are not: device 0 held {} more at its peak. In traffic they are: {} per "
        "step.",
        format_bytes(extra.peak), format_bytes(extra.traffic));
  } else {
    text += fmt::format(
        " In traffic they are not: device 0 moved {} per step against {} on {}. In memory they "
        "are.",
        format_bytes(extra.traffic), format_bytes(extra.others), context.others());
  }
  if (context.shared() && !on_cores(context.full)) {
    text += " On a shared GPU, waiting for it counts as computing.";
  }
  return text;
}

// What devices did while they did not compute, after a space. Nothing if the run cannot tell.
std::string idle_text(const AnswerContext& context) {
  if (!context.judged()) return "";
  double least_waiting = 1;
  double most_waiting = 0;
  double most_queued = 0;
  for (const auto& device : context.all) {
    if (on_cores(context.full) && !device.queued_fraction) return "";
    const double queued = device.queued_fraction.value_or(0);
    const double waiting = std::max(0.0, 1 - device.busy_fraction - queued);
    least_waiting = std::min(least_waiting, waiting);
    most_waiting = std::max(most_waiting, waiting);
    most_queued = std::max(most_queued, queued);
  }
  std::string text = fmt::format(
      " For {} of the time the devices waited for each other or for the parts of the step that are "
      "not divided.",
      percent_range(least_waiting, most_waiting));
  if (most_queued >= 0.01) {
    text +=
        fmt::format(" For up to {} they were ready but had no core.", format_percent(most_queued));
  }
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
  text += idle_text(context);
  if (context.shared()) text += " Here the shared hardware itself is a second bottleneck.";
  return text;
}

std::string answer_advantage(const AnswerContext& context) {
  std::string text =
      "It is simple: there is one process and one line around the module, the loop does not "
      "change, and the numbers trained stay the same." +
      loss_parity(context.single.first(), context.record, "the single device's");
  if (!context.one_device() && context.judged() && !context.same_speed() && context.speedup() > 1) {
    text += fmt::format(" It brought {} times the speed here.", format_speedup(context.comparison));
  }
  return text;
}

std::string answer_limitation(const AnswerContext& context) {
  if (context.one_device()) {
    return "All that is not divided stays with device 0, in one process on one machine. " +
           kOneDevice;
  }
  const Extra extra(context);
  return fmt::format(
      "Everything passes through device 0 of one process on one machine: at its peak it held {} "
      "{}, and it moved {} per step. The largest model is the one that fits a single device.",
      against_text(extra.peak), context.others(), format_bytes(extra.traffic));
}

std::string answer_scaling(const AnswerContext& context) {
  if (context.one_device()) return kOneDevice;
  const std::string text = fmt::format(
      "Each further device needs a whole copy of the model and sends back all its gradients: "
      "device 0's traffic grows by about {} per step and device, while each device computes on "
      "fewer rows.",
      format_bytes(traffic(context.all[0]) / (context.devices - 1)));
  if (!context.judged() || context.shared()) return text;
  const double serial = serial_fraction(context.speedup(), context.devices);
  if (context.same_speed() || context.speedup() <= 1 || serial <= 0.005) return text;
  return text + fmt::format(
                    " If {:.0f} % of this step is not divided, as the measured speed-up suggests, "
                    "no number of devices can exceed {:.1f} times the speed of one (Amdahl's law).",
                    serial * 100, 1 / serial);
}

std::vector<NamedTable> tables(const AnswerContext& context) {
  std::vector<NamedTable> all = {{"speed", speed_table(context)},
                                 {"memory", memory_table(context)},
                                 {"split", split_table(context)},
                                 {"bottleneck", bottleneck_table(context)}};
  Table shapes = shapes_table(context);
  if (!shapes.rows().empty()) all.insert(all.end() - 1, {"shapes", std::move(shapes)});
  return all;
}

LabReport report(const LabRuns& runs) {
  const AnswerContext context(runs);
  return {
      .title = "Practical 5: one device, then DataParallel",
      .stamp = context.single.first(),
      .trained = what_was_trained(runs, context.full, {.lab = "5"}),
      .warning = context.warning,
      .tables = tables(context),
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
