#include "cli/own/run_report.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "cli/lab/lab_charts.hpp"
#include "cli/lab/lab_tables.hpp"
#include "cli/lab/lab_text.hpp"
#include "cli/lab/pipeline_trace.hpp"

namespace lockstep::cli {
namespace {

constexpr size_t kMostInChart = 8;
constexpr size_t kMostBuckets = 32;

std::vector<SetRow> rows_where(const std::vector<SetRow>& all,
                               const std::function<bool(const RunRecord&)>& says) {
  std::vector<SetRow> rows;
  for (const auto& row : all) {
    if (says(row.first())) rows.push_back(row);
  }
  return rows;
}

bool communicates(const RunRecord& run) {
  return run.all_reduces.count > 0 || run.comm_ms > 0;
}

bool accumulates_or_rounds(const RunRecord& run) {
  return run.accum_steps > 1 || run.amp != "off" || run.scale || run.nonfinite > 0;
}

TableCell or_dash(bool known, const TableCell& cell) {
  return known ? cell : "—";
}

// A column about a set-up's first run.
template <class Text>
SetColumn run_column(const std::string& title, const Text& text_of, Align align = Align::kRight) {
  return {title, [text_of](const SetRow& row) { return text_of(row.first()); }, align};
}

Table setup_table(const std::vector<SetRow>& rows) {
  return make_table<SetRow>(
      "What ran",
      {name_column("run"),
       run_column(
           "program", [](const RunRecord& run) { return run.program; }, Align::kLeft),
       run_column("ranks", [](const RunRecord& run) { return count_cell(run.world_size); }),
       devices_column(),
       run_column("rows per step",
                  [](const RunRecord& run) {
                    return or_dash(run.effective_batch > 0, count_cell(run.effective_batch));
                  }),
       run_column(
           "rows per device",
           [](const RunRecord& run) { return or_dash(!run.split.empty(), format_rows(run.split)); },
           Align::kLeft),
       run_column("steps",
                  [](const RunRecord& run) {
                    TableCell steps = count_cell(std::ssize(run.losses));
                    if (run.resumed_after == 0) return steps;
                    steps.value.remark = fmt::format("after {}", run.resumed_after);
                    steps += " " + steps.value.remark;
                    return steps;
                  })},
      rows);
}

Table time_table(const std::vector<SetRow>& rows) {
  Table table = make_table<SetRow>(
      "Time and memory",
      {name_column("run"),
       {"runs", [](const SetRow& row) { return count_cell(std::ssize(row.set_up->runs)); }},
       step_column(),
       range_column(),
       {"total time", [](const SetRow& row) { return seconds_cell(mean_total_s(*row.set_up)); }},
       {"rows/s",
        [](const SetRow& row) {
          const double rate = rows_per_s(*row.set_up);
          return or_dash(rate > 0, number_cell("{:.0f}", rate));
        }},
       {"peak per device", [](const SetRow& row) { return bytes_cell(peak_of(*row.set_up)); }},
       run_column("last loss",
                  [](const RunRecord& run) {
                    return or_dash(
                        !run.losses.empty(),
                        run.losses.empty() ? "" : number_cell("{:.4g}", run.losses.back()));
                  })},
      rows);
  std::set<int64_t> warmups;
  for (const auto& row : rows) warmups.insert(row.first().warmup_steps);
  table.add_note(fmt::format(
      "Step time: mean ± deviation and range over all timed steps, without {} at the start of a "
      "run. The peak is that of the device that held most.",
      warmups.size() == 1 ? counted(*warmups.begin(), "warm-up step") : "its warm-up steps"));
  return table;
}

Table devices_table(const std::vector<SetRow>& rows) {
  using Row = DeviceRow;
  const auto bytes = [](int64_t DeviceRecord::*member) {
    return [member](const Row& row) { return bytes_cell(row.device().*member); };
  };
  Table table = make_table<Row>(
      "Devices",
      {{"run", [](const Row& row) { return row.name; }, Align::kLeft},
       {"device", [](const Row& row) { return row.device().name; }, Align::kLeft},
       {"hardware", [](const Row& row) { return row.device().hardware(); }, Align::kLeft},
       {"rows", [](const Row& row) { return or_dash(row.rows > 0, count_cell(row.rows)); }},
       {"busy", [](const Row& row) { return format_percent(row.device().busy_fraction); }},
       {"peak", bytes(&DeviceRecord::peak_bytes)},
       {"final", bytes(&DeviceRecord::final_bytes)},
       {"sent/step", bytes(&DeviceRecord::sent_bytes_per_step)},
       {"received/step", bytes(&DeviceRecord::received_bytes_per_step)}},
      device_rows(rows));
  return table;
}

Table communication_table(const std::vector<SetRow>& rows) {
  const auto part = [](double Communication::*ms) {
    return [ms](const SetRow& row) { return format_ms(communication_of(*row.set_up).*ms); };
  };
  Table table = make_table<SetRow>(
      "Communication in a step",
      {name_column("run"),
       run_column("all-reduces",
                  [](const RunRecord& run) { return number_cell("{:g}", run.all_reduces.count); }),
       run_column("bytes", [](const RunRecord& run) { return bytes_cell(run.all_reduces.bytes); }),
       {"time", part(&Communication::total_ms)},
       {"hidden", part(&Communication::hidden_ms)},
       {"exposed", part(&Communication::exposed_ms)},
       {"of the step", [](const SetRow& row) { return format_share(exposed_share(*row.set_up)); }}},
      rows);
  table.add_note("Of one rank. Hidden: while it computed. Exposed: while it waited.");
  return table;
}

Table buckets_table(const SetRow& row) {
  using Row = BucketRecord;
  const RunRecord& run = row.first();
  std::vector<Row> buckets = run.buckets;
  if (buckets.size() > kMostBuckets) buckets.resize(kMostBuckets);
  Table table = make_table<Row>(
      fmt::format("Buckets of {}", row.name),
      {{"bucket", [](const Row& bucket) { return count_cell(bucket.index); }},
       {"size", [](const Row& bucket) { return bytes_cell(bucket.bytes); }},
       {"parameters", [](const Row& bucket) { return count_cell(bucket.parameters); }},
       {"launched", [](const Row& bucket) { return format_ms(bucket.launched_ms); }},
       {"finished", [](const Row& bucket) { return format_ms(bucket.finished_ms); }}},
      buckets);
  table.add_note(fmt::format(
      "Rank 0 in the last step, from the start of backward, which took {}.{}",
      format_ms(run.backward_ms),
      buckets.size() < run.buckets.size()
          ? fmt::format(" The first {} of {} buckets.", buckets.size(), run.buckets.size())
          : ""));
  return table;
}

Table ranks_table(const std::vector<SetRow>& rows) {
  Table table("Ranks", {{"run"}, {"rank", Align::kRight}, {"host"}, {"step time", Align::kRight}});
  for (const auto& row : rows) {
    const auto& ranks = row.first().ranks;
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      table.add_row({row.name, count_cell(static_cast<int64_t>(rank)), ranks[rank].host,
                     format_ms(ranks[rank].step_ms)});
    }
  }
  table.add_note("Each rank's own mean in the first run.");
  return table;
}

Table precision_table(const std::vector<SetRow>& rows) {
  return make_table<SetRow>(
      "Accumulation and precision",
      {name_column("run"), micro_rows_column(),
       run_column(
           "precision", [](const RunRecord& run) { return run.amp; }, Align::kLeft),
       run_column("skipped steps", skipped_cell), run_column("final scale", scale_cell),
       run_column("losses not finite",
                  [](const RunRecord& run) { return count_cell(run.nonfinite); })},
      rows);
}

Table memory_table(const std::vector<SetRow>& rows) {
  std::vector<SetColumn> columns = {name_column("run")};
  for (const auto& part : kMemoryParts) columns.push_back(part_column(part));
  Table table = make_table<SetRow>("What the peak of rank 0 consists of", columns, rows);
  table.add_note("Copies: of the weights, in low precision.");
  return table;
}

Table stages_table(const std::vector<SetRow>& rows) {
  Table table("Stages", {{"run"},
                         {"rank", Align::kRight},
                         {"stage", Align::kRight},
                         {"device"},
                         {"layers", Align::kRight},
                         {"forward", Align::kRight},
                         {"backward", Align::kRight},
                         {"held", Align::kRight}});
  for (const auto& row : rows) {
    const PipelineRecord& pipeline = pipeline_of(*row.set_up);
    for (const auto& stage : pipeline.stages) {
      table.add_row({row.name, count_cell(stage.rank), count_cell(stage.stage), stage.device,
                     count_cell(stage.layers), format_ms(stage.forward_ms),
                     format_ms(stage.backward_ms + stage.weight_ms),
                     count_cell(stage.peak_micro_batches)});
    }
    table.add_note(fmt::format("{}: {} with {}, bubble {:.0f} % predicted and {:.0f} % measured.",
                               row.name, pipeline.schedule,
                               counted(pipeline.micro_batches, "micro-batch"),
                               pipeline.predicted_bubble * 100, pipeline.bubble * 100));
  }
  return table;
}

// The options that all runs have in common; those that differ are in the runs' names or records.
LabFacts common_options(const std::vector<SetRow>& rows) {
  LabFacts facts;
  for (const auto& option : rows.front().first().options) {
    const bool common = std::all_of(rows.begin(), rows.end(), [&option](const SetRow& row) {
      const auto found = row.first().options.find(option.first);
      return found != row.first().options.end() && found->second == option.second;
    });
    if (common && !option.second.empty()) facts.push_back(option);
  }
  return facts;
}

// ---- Charts

// The run with most devices names them.
Figure peak_figure(std::vector<SetRow> rows, const std::string& remark) {
  std::stable_sort(rows.begin(), rows.end(), [](const SetRow& a, const SetRow& b) {
    return a.first().devices.size() < b.first().devices.size();
  });
  return {peak_chart(rows), "The most bytes that were live at once in the timed steps." + remark};
}

Timeline pipeline_timeline(const SetRow& row) {
  const PipelineRecord& pipeline = pipeline_of(*row.set_up);
  Timeline chart{.title = fmt::format("One step of {}", row.name),
                 .rows = action_rows(pipeline, pipeline.actions, "", true)};
  chart.legend = action_legend(chart.rows);
  return chart;
}

std::vector<Figure> figures_of(const std::vector<SetRow>& all) {
  const std::vector<SetRow> rows(
      all.begin(), all.begin() + static_cast<long>(std::min(all.size(), kMostInChart)));
  const std::string remark = rows.size() < all.size()
                                 ? fmt::format(" The first {} of {} runs.", rows.size(), all.size())
                                 : "";
  std::vector<Figure> figures = {{time_chart("Step time", "step time", rows),
                                  "Mean and deviation of the timed steps." + remark},
                                 peak_figure(rows, remark)};
  const auto trained = rows_where(rows, [](const RunRecord& run) { return run.losses.size() > 1; });
  if (!trained.empty()) {
    figures.push_back(
        {loss_chart("Loss", trained), "The loss after each optimizer step." + remark});
  }
  for (const auto& row : rows) {
    const RunRecord& run = row.first();
    if (run.pipeline && !run.pipeline->actions.empty()) {
      figures.push_back({pipeline_timeline(row), "The last step of the first run."});
    } else if (!run.buckets.empty() && run.world_size > 1) {
      figures.push_back({bucket_timeline(fmt::format("Buckets of one step of {}", row.name), run),
                         "Rank 0's last step in the first run."});
    }
  }
  return figures;
}

}  // namespace

LabReport report_on_runs(const std::string& title, const std::vector<NamedRuns>& runs) {
  std::vector<SetRow> rows;
  for (const auto& each : runs) rows.push_back({each.name, &each.set_up});
  LabReport report{.title = title,
                   .stamp = rows.front().first(),
                   .trained = common_options(rows),
                   .tables = {{"runs", setup_table(rows)},
                              {"time", time_table(rows)},
                              {"devices", devices_table(rows)}},
                   .figures = figures_of(rows),
                   .answers = {}};
  const auto add = [&](const std::string& name, bool (*says)(const RunRecord&),
                       Table (*make)(const std::vector<SetRow>&)) {
    const auto chosen = rows_where(rows, says);
    if (!chosen.empty()) report.tables.push_back({name, make(chosen)});
  };
  add("communication", communicates, communication_table);
  add(
      "ranks", [](const RunRecord& run) { return run.ranks.size() > 1; }, ranks_table);
  add("precision", accumulates_or_rounds, precision_table);
  add(
      "memory", [](const RunRecord& run) { return run.memory.has_value(); }, memory_table);
  add(
      "stages", [](const RunRecord& run) { return run.pipeline.has_value(); }, stages_table);
  int number = 0;
  for (const auto& row : rows) {
    const RunRecord& run = row.first();
    if (run.world_size < 2 || run.buckets.empty()) continue;
    if (++number > static_cast<int>(kMostInChart)) break;
    report.tables.push_back({fmt::format("buckets-{}", number), buckets_table(row)});
  }
  return report;
}

}  // namespace lockstep::cli
