#include "cli/lab/lab10_charts.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "cli/lab/lab10_measures.hpp"
#include "cli/lab/lab10_tables.hpp"
#include "cli/lab/lab_text.hpp"

namespace lockstep::cli {
namespace {

constexpr int kSynchronisationColour = 3;
const std::vector<std::string> kLegend = {"F: forward", "B: backward", "W: weight gradient",
                                          "S: synchronisation"};
constexpr const char* kInputLegend = "I: input gradient";  // as a backward that is split

int colour_of(const ActionRecord& action) {
  if (action.kind == "F") return 0;
  if (action.kind == "W") return 2;
  return action.kind == "S" ? kSynchronisationColour : 1;
}

double first_begin(const std::vector<ActionRecord>& actions) {
  double first = std::numeric_limits<double>::infinity();
  for (const auto& action : actions) first = std::min(first, action.begin_ms);
  return first;
}

TimelineRow& row_named(std::vector<TimelineRow>& rows, const std::string& label) {
  const auto found = std::find_if(rows.begin(), rows.end(),
                                  [&label](const TimelineRow& row) { return row.label == label; });
  if (found != rows.end()) return *found;
  rows.push_back({.label = label});
  return rows.back();
}

// A row for each device in the order of ranks and stages, from the first action on.
std::vector<TimelineRow> rows_of_actions(const PipelineRecord& pipeline,
                                         const std::vector<ActionRecord>& actions,
                                         const std::string& prefix, bool name_ranks) {
  const auto label = [&](int rank, const std::string& device) {
    return fmt::format("{}{} {}", prefix, name_ranks ? fmt::format(" rank {}", rank) : "", device);
  };
  std::vector<TimelineRow> rows;
  const double begin = first_begin(actions);
  for (const auto& stage : pipeline.stages) {
    const bool seen = std::any_of(actions.begin(), actions.end(), [&](const ActionRecord& action) {
      return action.rank == stage.rank && action.device == stage.device;
    });
    if (seen) row_named(rows, label(stage.rank, stage.device));
  }
  for (const auto& action : actions) {
    const std::string number = action.kind == "S" ? "" : std::to_string(action.micro_batch);
    row_named(rows, label(action.rank, action.device))
        .spans.push_back({.name = action.kind + number,
                          .begin_ms = action.begin_ms - begin,
                          .end_ms = action.end_ms - begin,
                          .colour = colour_of(action)});
  }
  return rows;
}

// What the legend has to say for these rows.
std::vector<std::string> legend_for(const std::vector<TimelineRow>& rows) {
  std::vector<std::string> legend(kLegend.size());
  for (const auto& row : rows) {
    for (const auto& span : row.spans) {
      const auto colour = static_cast<size_t>(span.colour);
      legend[colour] = span.name.starts_with("I") ? kInputLegend : kLegend[colour];
    }
  }
  return legend;
}

Figure timeline_figure(const std::string& title, const RunSet& set_up) {
  const PipelineRecord& pipeline = pipeline_of(set_up);
  Timeline chart;
  chart.title = title;
  chart.rows = rows_of_actions(pipeline, pipeline.predicted, "predicted", false);
  if (!chart.rows.empty()) chart.rows.emplace_back();  // a gap
  for (auto& row :
       rows_of_actions(pipeline, pipeline.actions, "measured", ranks_of(pipeline) > 1)) {
    chart.rows.push_back(std::move(row));
  }
  chart.legend = legend_for(chart.rows);
  return {
      std::move(chart),
      fmt::format("The last step of the first run: predicted from the mean times of the stages "
                  "({}, bubble {:.0f} %) and measured (mean of all steps {}, bubble {:.0f} %).{}",
                  format_ms(pipeline.predicted_span_ms), pipeline.predicted_bubble * 100,
                  format_ms(pipeline.span_ms), pipeline.bubble * 100,
                  sharing(set_up) > 1 ? " The devices share hardware." : "")};
}

Figure bubble_figure(const Lab10Results& results) {
  LineChart chart;
  chart.title = "Bubble over micro-batches";
  chart.x_label = "micro-batches";
  chart.unit = Unit::kPercent;
  chart.log_x = true;
  LineSeries predicted{.name = "predicted"};
  LineSeries measured{.name = "measured"};
  LineSeries ideal{.name = "equal stages", .reference = true};
  const auto stages = static_cast<int64_t>(devices_of(pipeline_of(results.base), 0).size());
  for (const auto& [count, runs] : results.micro_batches) {
    for (auto* series : {&predicted, &measured, &ideal})
      series->x.push_back(static_cast<double>(count));
    predicted.y.push_back(mean_of(runs, &PipelineRecord::predicted_bubble) * 100);
    measured.y.push_back(mean_of(runs, &PipelineRecord::bubble) * 100);
    ideal.y.push_back(ideal_bubble(std::max<int64_t>(1, stages), count) * 100);
  }
  chart.series = {predicted, measured, ideal};
  return {
      std::move(chart),
      fmt::format("Share of the devices' time in which they wait, with {} ranks of {} stages.{}",
                  results.base.runs.front().world_size, stages,
                  sharing(results.base) > 1 ? " The devices share hardware." : "")};
}

Figure time_figure(const Lab10Results& results) {
  BarChart chart{
      .title = "Time of a step by schedule",
      .unit = Unit::kMilliseconds,
      .categories = {},
      .series = {{.name = "span, predicted"}, {.name = "span, measured"}, {.name = "whole step"}}};
  for (const auto& [name, set_up] : schedules_of(results)) {
    chart.categories.push_back(name);
    chart.series[0].values.push_back(mean_of(*set_up, &PipelineRecord::predicted_span_ms));
    chart.series[1].values.push_back(mean_of(*set_up, &PipelineRecord::span_ms));
    chart.series[2].values.push_back(pooled_step_ms(*set_up).mean);
  }
  return {std::move(chart),
          fmt::format("{} stages in one process, {} micro-batches; the whole step includes the "
                      "update.{}",
                      results.gpipe.devices, pipeline_of(results.gpipe).micro_batches,
                      sharing(results.gpipe) > 1 ? " The devices share hardware." : "")};
}

}  // namespace

std::vector<Figure> lab10_figures(const Lab10Results& results) {
  return {
      timeline_figure("The base: predicted and measured", results.base),
      timeline_figure("gpipe in one process: predicted and measured", results.gpipe),
      timeline_figure("1f1b in one process: predicted and measured", results.one_f_one_b),
      timeline_figure("zero-bubble in one process: predicted and measured", results.zero_bubble),
      bubble_figure(results),
      time_figure(results)};
}

std::vector<std::string> lab10_drawings(const Lab10Results& results) {
  const auto names = devices_of(pipeline_of(results.gpipe), 0);
  std::vector<std::string> drawings;
  for (const auto& [schedule, simulation] : simulate_schedules(results.gpipe)) {
    GridOptions options;
    if (static_cast<int>(names.size()) == schedule.places()) options.place_names = names;
    drawings.push_back(fmt::format("{}, simulated with the stage times of gpipe's runs, in ms\n{}",
                                   schedule.name, format_grid(schedule, simulation, options)));
  }
  return drawings;
}

}  // namespace lockstep::cli
