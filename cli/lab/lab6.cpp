// Practical 6: DataParallel (DP) against DistributedDataParallel (DDP) on the same devices.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "cli/lab/lab6.hpp"
#include "cli/lab/lab_charts.hpp"
#include "cli/lab/lab_plan.hpp"
#include "cli/lab/lab_tables.hpp"
#include "cli/lab/lab_text.hpp"
#include "cli/lab/lab_trained.hpp"
#include "lockstep/error.hpp"

namespace lockstep::cli::practical6 {
namespace {

// ---- Plan: "single"; "dp" and "ddp", both by the same numbers of devices.

const std::vector<int> kCourseRanks = {1, 2, 4};

// Ascending, with 1 among them: every speed-up is against one rank.
std::vector<int> with_one(std::vector<int> ranks) {
  if (ranks.front() != 1) ranks.insert(ranks.begin(), 1);
  return ranks;
}

struct Scale {
  std::vector<SlotPlan> slots;  // of all devices
  std::vector<int> ranks;
};

// A rank needs a device of its own. Without --devices the GPUs are used if there are enough of
// them, otherwise the cores, which may be shared.
Scale choose_scale(const LabOptions& options, const Hardware& hardware) {
  const bool asked = !options.list("--ranks").empty();
  const auto ranks = with_one(options.ascending("--ranks", kCourseRanks));
  if (!options.devices.empty()) {
    Scale scale{plan_devices(options.devices, hardware), ranks};
    const int devices = static_cast<int>(scale.slots.size());
    if (!asked) scale.ranks = scaling_points(devices);
    if (scale.ranks.back() > devices) {
      throw Error(Code::kUsage,
                  fmt::format("{} ranks need a device each, but --devices {} names {}",
                              scale.ranks.back(), options.devices, devices),
                  "name more devices, fewer --ranks, or leave --devices out");
    }
    return scale;
  }
  if (!asked && hardware.gpus > 1) {
    return {plan_devices("cuda", hardware), scaling_points(hardware.gpus)};
  }
  // Ranks that shared a GPU would show no scaling.
  const int most = ranks.back();
  const std::string spec =
      hardware.gpus >= most ? default_devices(hardware, most) : fmt::format("cpu:{}", most);
  return {plan_devices(spec, hardware), ranks};
}

LabPlan plan(const LabOptions& options, const Hardware& hardware) {
  const auto [slots, ranks] = choose_scale(options, hardware);
  const LabConfig config{hardware, slots, choose_sizes(options, slots[0].kind)};
  require_row_for_each_rank(config.sizes.batch, ranks.back(), "--ranks");
  const std::string bucket_mib = options.text("--bucket-mib");
  std::vector<Experiment> timed = {timed_experiment(Method::kSingle, config, 1)};
  for (const int count : ranks) {
    timed.push_back(timed_experiment(Method::kDataParallel, config, count));
    timed.push_back(timed_experiment(Method::kDistributed, config, count));
    if (!bucket_mib.empty()) append(timed.back(), {"--bucket-mib", bucket_mib});
  }
  LabPlan plan{.repetitions = options.repetitions(), .experiments = {}};
  add_in_turns(plan, timed);
  return plan;
}

// ---- Tables

// The table of the course's page, filled in with this run's figures.
Table aspects_table(const AnswerContext& context) {
  Table table(fmt::format("DataParallel against DDP on {}", counted(context.ranks, "device")),
              {{"aspect"}, {"DataParallel"}, {"DDP"}});
  const auto add = [&](const std::string& aspect, const auto& cell) {
    table.add_row({aspect, cell(context.dp), cell(context.ddp)});
  };
  add("processes", [](const RunSet& set_up) { return count_cell(set_up.first().world_size); });
  const auto is_dp = [&context](const RunSet& set_up) { return &set_up == &context.dp; };
  add("data split",
      [&](const RunSet& set_up) { return is_dp(set_up) ? "by itself" : "by the program"; });
  add("… rows per device", [](const RunSet& set_up) { return format_rows(set_up.first().split); });
  add("device use: busy", [](const RunSet& set_up) {
    const Imbalance busy = imbalance_of(merged_devices(set_up));
    return percent_range(busy.least_busy, busy.most_busy);
  });
  add("… peak of device 0",
      [](const RunSet& set_up) { return bytes_cell(merged_devices(set_up).front().peak_bytes); });
  if (!context.one_rank()) {
    add(context.ranks == 2 ? "… peak of device 1" : "… peak of the others",
        [](const RunSet& set_up) {
          return bytes_cell(others_mean(merged_devices(set_up), &DeviceRecord::peak_bytes));
        });
  }
  add("scaling: step time", step_with_deviation);
  add("… speed-up", [&](const RunSet& set_up) {
    return format_speedup(compare(context.runs.of(is_dp(set_up) ? "dp" : "ddp"), set_up));
  });
  table.add_note(fmt::format(
      "Busy: share of the time in which devices computed.{} Speed-up: against the same method on "
      "one device.",
      context.ranks > 2 ? " Peak of the others: on average." : ""));
  return table;
}

Table methods_table(const AnswerContext& context) {
  std::vector<SetRow> rows = {{"single", &context.single}};
  for (const auto& ddp : context.runs.all("ddp")) {
    rows.push_back({"DP", &context.runs.of("dp", ddp.size), &context.single});
    rows.push_back({"DDP", &ddp, &context.single});
  }
  Table table = make_table<SetRow>(
      "All set-ups: DataParallel (DP) and DDP",
      {name_column("set-up"),
       {"processes", [](const SetRow& row) { return count_cell(row.first().world_size); }},
       devices_column(),
       {"rows per device", [](const SetRow& row) { return format_rows(row.first().split); },
        Align::kLeft},
       step_column(),
       speedup_column()},
      rows);
  add_method_note(table, context.single);
  if (context.judged()) {
    table.add_note(fmt::format("On {} DDP is {}.", counted(context.ranks, "device"),
                               format_against(context.comparison, "DP")));
  }
  return table;
}

Table balance_table(const AnswerContext& context) {
  Table table =
      load_table("Balance: device by device", {{"DP", &context.dp}, {"DDP", &context.ddp}});
  table.add_note(
      "Under DP all devices belong to one process and device 0 serves the others; under DDP each "
      "belongs to a process of its own and holds weights, gradients and optimizer state alike.");
  add_busy_note(table, context.ddp);
  return table;
}

// Whether backward hid a bucket's communication.
std::string hidden_cell(const BucketRecord& bucket, double backward_ms) {
  if (bucket.finished_ms <= backward_ms) return "yes";
  return bucket.launched_ms < backward_ms ? "in part" : "no";
}

Table overlap_table(const AnswerContext& context) {
  using Bucket = BucketRecord;
  const double backward_ms = context.record.backward_ms;
  Table table = make_table<Bucket>(
      fmt::format("Overlap: the buckets of one step with {}", counted(context.ranks, "rank")),
      {{"bucket", [](const Bucket& bucket) { return count_cell(bucket.index); }},
       {"parameters", [](const Bucket& bucket) { return count_cell(bucket.parameters); }},
       {"size", [](const Bucket& bucket) { return bytes_cell(bucket.bytes); }},
       {"launched", [](const Bucket& bucket) { return format_ms(bucket.launched_ms); }},
       {"finished", [](const Bucket& bucket) { return format_ms(bucket.finished_ms); }},
       {"after backward",
        [=](const Bucket& bucket) { return signed_ms(bucket.finished_ms - backward_ms); }},
       {"hidden", [=](const Bucket& bucket) { return hidden_cell(bucket, backward_ms); },
        Align::kLeft}},
      context.record.buckets);
  table.add_note(
      fmt::format("Times of rank 0's last step in the first run, from the start of backward, which "
                  "ended after {}. After backward: from its end to the end of the bucket. Hidden: "
                  "whether backward was still running meanwhile.",
                  format_ms(backward_ms)));
  return table;
}

Table communication_table(const AnswerContext& context) {
  // One rank has nothing to communicate.
  const auto unless_none = [](const auto& cell) {
    return [cell](const SetRow& row) -> TableCell {
      return row.first().all_reduces.count > 0 ? cell(row) : "—";
    };
  };
  const auto time = [&](double Communication::*ms) {
    return unless_none(
        [ms](const SetRow& row) { return format_ms(communication_of(*row.set_up).*ms); });
  };
  std::vector<SetRow> rows;
  for (const auto& set_up : context.runs.all("ddp")) rows.push_back({"DDP", &set_up});
  Table table = make_table<SetRow>(
      "Communication per step",
      {devices_column("ranks"),
       {"all-reduces",
        [](const SetRow& row) { return number_cell("{:g}", row.first().all_reduces.count); }},
       {"bytes", [](const SetRow& row) { return bytes_cell(row.first().all_reduces.bytes); }},
       {"total", time(&Communication::total_ms)},
       {"exposed", time(&Communication::exposed_ms)},
       {"hidden/total", unless_none([](const SetRow& row) {
          return format_percent(communication_of(*row.set_up).hidden_share());
        })},
       {"exposed/step", unless_none([](const SetRow& row) {
          const double percent = 100 * exposed_share(*row.set_up);
          return TableCell(fmt::format("{:.1f} %", percent),
                           {.unit = "percent", .numbers = {percent}});
        })}},
      rows);
  table.add_note(
      "Total: from launch to finish of the buckets, mean over ranks and runs, waiting for peers "
      "included. Exposed: what the training thread itself spent on it. Hidden: the rest, behind "
      "backward.");
  return table;
}

Table scaling_table(const AnswerContext& context) {
  std::vector<SetRow> rows;
  const auto add = [&rows](const char* name, const std::vector<RunSet>& sets) {
    for (const auto& set_up : sets) {
      rows.push_back({name, &set_up, &set_up == &sets.front() ? nullptr : &sets.front()});
    }
  };
  add("DP", context.runs.all("dp"));
  add("DDP", context.runs.all("ddp"));
  std::vector<SetColumn> columns = {name_column("method"), devices_column(), step_column(),
                                    range_column(), speedup_column()};
  if (context.judged()) columns.push_back(proportional_column());
  Table table =
      make_table<SetRow>("Scaling: each method against itself on one device", columns, rows);
  add_method_note(table, context.single);
  if (context.judged()) add_proportional_note(table);
  return table;
}

// ---- Charts

std::string devices_text(const RunSet& set_up) {
  return counted(set_up.devices, "device") + (sharing(set_up) > 1 ? ", shared" : "");
}

Figure step_time_figure(const AnswerContext& context) {
  const auto bars = [&context](const char* name, const char* what) {
    LineSeries series = step_series(name, context.runs.all(what));
    return BarSeries{name, std::move(series.y), std::move(series.deviations)};
  };
  BarChart chart{.title = "Step time: DP against DDP",
                 .unit = Unit::kMilliseconds,
                 .categories = {},
                 .series = {bars("DP", "dp"), bars("DDP", "ddp")}};
  for (const auto& set_up : context.runs.all("ddp")) {
    chart.categories.push_back(devices_text(set_up));
  }
  return {std::move(chart),
          fmt::format("Mean step time with its deviation; on {} DP took {} and DDP {}.",
                      devices_text(context.ddp), step_of(context.dp), step_of(context.ddp))};
}

Figure memory_figure(const AnswerContext& context) {
  return {
      peak_chart({{"DP", &context.dp}, {"DDP", &context.ddp}}),
      context.one_rank()
          ? "Most bytes live at once in the timed steps."
          : fmt::format(
                "Most bytes live at once in the timed steps. Device 0 held {} {} under DP and {} "
                "{} under DDP.",
                against_text(extra_on_first(context.dp_devices, &DeviceRecord::peak_bytes)),
                context.others(),
                against_text(extra_on_first(context.ddp_devices, &DeviceRecord::peak_bytes)),
                context.others())};
}

Figure overlap_figure(const AnswerContext& context) {
  const RunRecord& run = context.record;
  return {bucket_timeline(
              fmt::format("Buckets of one step with {}", counted(context.ranks, "rank")), run),
          fmt::format("Rank 0's last step in the first run: backward ended after {}, and {} of {} "
                      "had finished by then.",
                      format_ms(run.backward_ms), finished_in_backward(run),
                      counted(run.buckets.size(), "bucket"))};
}

std::vector<Figure> figures(const AnswerContext& context) {
  std::vector<Figure> all = {step_time_figure(context), memory_figure(context)};
  if (!context.record.buckets.empty()) all.push_back(overlap_figure(context));
  return all;
}

LabFacts trained(const AnswerContext& context) {
  const auto& sets = context.runs.all("ddp");
  std::vector<int> ranks;
  for (const auto& set_up : sets) ranks.push_back(set_up.devices);
  return what_was_trained(
      context.runs, sets.back(),
      {.lab = "6", .own = {{"--ranks", fmt::format("{}", fmt::join(ranks, ","))}}});
}

LabReport report(const LabRuns& runs) {
  const AnswerContext context(runs);
  return {.title = "Practical 6: DistributedDataParallel",
          .stamp = context.single.first(),
          .trained = trained(context),
          .warning = context.warning,
          .tables = {{"aspects", aspects_table(context)},
                     {"methods", methods_table(context)},
                     {"balance", balance_table(context)},
                     {"overlap", overlap_table(context)},
                     {"communication", communication_table(context)},
                     {"scaling", scaling_table(context)}},
          .figures = figures(context),
          .answers = answer_questions(context)};
}

}  // namespace

int64_t focus_of(const LabRuns& runs) {
  int64_t best = runs.some("ddp").back().size;
  for (const auto& set_up : runs.all("ddp")) {
    if (set_up.devices > 1 && sharing(set_up) == 1) best = set_up.size;
  }
  return best;
}

int64_t finished_in_backward(const RunRecord& run) {
  return std::count_if(run.buckets.begin(), run.buckets.end(), [&run](const BucketRecord& bucket) {
    return bucket.finished_ms <= run.backward_ms;
  });
}

Lab lab() {
  using Kind = LabFlag::Kind;
  return {.name = "6",
          .folder = "reports/lab6",
          .flags = {{.name = "--ranks",
                     .kind = Kind::kList,
                     .help = "how many ranks, one set-up each (default: 1,2,4)"},
                    {.name = "--bucket-mib",
                     .kind = Kind::kNumber,
                     .help = "largest gradient bucket (default: 25)"}},
          .examples = {{"", "DDP with 1, 2 and 4 ranks"},
                       {"--ranks 1,2,3 --bucket-mib 1", "other ranks, smaller buckets"}},
          .plan = plan,
          .report = report};
}

}  // namespace lockstep::cli::practical6
