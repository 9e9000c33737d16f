// Practical 5: one device, then DataParallel.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "cli/lab/lab5.hpp"
#include "cli/lab/lab_charts.hpp"
#include "cli/lab/lab_plan.hpp"
#include "cli/lab/lab_tables.hpp"
#include "cli/lab/lab_text.hpp"
#include "cli/lab/lab_trained.hpp"
#include "lockstep/split.hpp"

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
                             counted(context.devices, "device")));
  table.add_note(
      "Total: from the start of the loop to the end of its last step, warm-up included.");
  if (context.judged()) {
    table.add_note(fmt::format("DataParallel on {} is {}.", counted(context.devices, "device"),
                               format_against(context.comparison, "one device")));
  }
  return table;
}

Table memory_table(const AnswerContext& context) {
  using Row = DeviceRow;
  const auto bytes = [](int64_t DeviceRecord::*member) {
    return [member](const Row& row) { return bytes_cell(row.device().*member); };
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
       {"hardware", [](const Row& row) { return row.device().hardware(); }, Align::kLeft},
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

Table split_table(const AnswerContext& context) {
  const auto kind_of = [](const Split& split) {
    return std::string(all_equal(split.measured) ? "equal" : "uneven") +
           (split.some_idle() ? ", some idle" : "");
  };
  return make_table<Split>(
      "How DataParallel divides the batch",
      {{"rows", [](const Split& split) { return count_cell(split.rows); }},
       {"devices", [](const Split& split) { return count_cell(split.devices); }},
       {"used", [](const Split& split) { return count_cell(std::ssize(split.measured)); }},
       {"rows per device", [](const Split& split) { return format_rows(split.measured); },
        Align::kLeft},
       {"⌈rows/devices⌉",
        [](const Split& split) { return count_cell(split.rule.empty() ? 0 : split.rule.front()); }},
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
  Table table =
      make_table<Row>("Inside the model: what each replica saw",
                      {{"rows", [](const Row& row) { return count_cell(rows_of(*row.split)); }},
                       {"devices", [](const Row& row) { return count_cell(row.split->devices); }},
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
                      counted(context.devices, "device"), step_of(context.full),
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
  return {.title = "Practical 5: one device, then DataParallel",
          .stamp = context.single.first(),
          .trained = what_was_trained(runs, context.full, {.lab = "5"}),
          .warning = context.warning,
          .tables = tables(context),
          .figures = {step_time_figure(context), memory_figure(context)},
          .answers = answer_questions(context)};
}

}  // namespace

std::vector<Split> splits_of(const AnswerContext& context) {
  std::vector<Split> splits;
  for (const auto& set_up : context.runs.all("split")) {
    const int64_t rows = rows_of(set_up);
    splits.push_back(
        {rows, set_up.devices, set_up.first().split, chunk_rows(rows, set_up.devices)});
  }
  return splits;
}

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
