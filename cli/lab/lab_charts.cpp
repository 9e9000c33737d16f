#include "cli/lab/lab_charts.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "lockstep/units.hpp"

namespace lockstep::cli {
namespace {

constexpr size_t kMostBucketRows = 10;

// The first row whose last span has ended when this one begins; a new row where there is none.
TimelineRow& row_for(std::vector<TimelineRow>& rows, double begin_ms) {
  for (auto& row : rows) {
    if (row.spans.back().end_ms <= begin_ms) return row;
  }
  rows.push_back({.label = rows.empty() ? "buckets" : "", .spans = {}});
  return rows.back();
}

std::vector<TimelineRow> bucket_rows(const std::vector<BucketRecord>& buckets) {
  constexpr int kBucketColour = 1;
  std::vector<TimelineRow> rows;
  for (const auto& bucket : buckets) {
    const std::string size = format_bytes(bucket.bytes);
    TimelineSpan span{.name = size,
                      .begin_ms = bucket.launched_ms,
                      .end_ms = bucket.finished_ms,
                      .colour = kBucketColour};
    if (buckets.size() <= kMostBucketRows) {
      rows.push_back({.label = fmt::format("bucket {}", bucket.index), .spans = {std::move(span)}});
    } else {
      span.name = fmt::format("{}: {}", bucket.index, size);
      row_for(rows, bucket.launched_ms).spans.push_back(std::move(span));
    }
  }
  return rows;
}

// Forward, backward (or its input gradient), weight gradient, synchronisation.
int colour_of(const ActionRecord& action) {
  if (action.kind == "F") return 0;
  if (action.kind == "W") return 2;
  return action.kind == "S" ? 3 : 1;
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

}  // namespace

BarChart time_chart(const std::string& title, const std::string& name,
                    const std::vector<SetRow>& set_ups) {
  BarChart chart{.title = title, .unit = Unit::kMilliseconds};
  BarSeries series{.name = name};
  for (const auto& row : set_ups) {
    const Stats step = pooled_step_ms(*row.set_up);
    chart.categories.push_back(row.name);
    series.values.push_back(step.mean);
    series.deviations.push_back(step.stddev);
  }
  chart.series = {std::move(series)};
  return chart;
}

BarChart memory_chart(const std::string& title, const std::vector<SetRow>& set_ups) {
  BarChart chart{.title = title, .unit = Unit::kBytes, .stacked = true};
  for (const auto& row : set_ups) chart.categories.push_back(row.name);
  for (const auto& part : kMemoryParts) {
    BarSeries series{.name = part.name};
    for (const auto& row : set_ups) {
      const auto split = memory_of(*row.set_up);
      series.values.push_back(split ? static_cast<double>((*split).*part.bytes) : std::nan(""));
    }
    chart.series.push_back(std::move(series));
  }
  return chart;
}

BarChart peak_chart(const std::vector<SetRow>& set_ups) {
  BarChart chart{.title = "Peak memory per device", .unit = Unit::kBytes};
  for (const auto& device : merged_devices(*set_ups.back().set_up)) {
    chart.categories.push_back(device.name);
  }
  for (const auto& row : set_ups) {
    const auto devices = merged_devices(*row.set_up);
    BarSeries series{.name = row.name};
    for (size_t i = 0; i < chart.categories.size(); ++i) {
      series.values.push_back(i < devices.size() ? static_cast<double>(devices[i].peak_bytes)
                                                 : std::nan(""));
    }
    chart.series.push_back(std::move(series));
  }
  return chart;
}

LineChart loss_chart(const std::string& title, const std::vector<SetRow>& set_ups) {
  LineChart chart{.title = title, .x_label = "optimizer step", .log_y = true, .from_zero = false};
  for (const auto& row : set_ups) {
    LineSeries series{.name = row.name, .y = row.first().losses};
    const auto before = static_cast<size_t>(row.first().resumed_after);
    for (size_t i = 0; i < series.y.size(); ++i) {
      series.x.push_back(static_cast<double>(before + i + 1));
    }
    chart.series.push_back(std::move(series));
  }
  return chart;
}

LineSeries step_series(const std::string& name, const std::vector<RunSet>& set_ups) {
  LineSeries series{.name = name};
  for (const auto& set_up : set_ups) {
    const Stats step = pooled_step_ms(set_up);
    series.x.push_back(static_cast<double>(set_up.size));
    series.y.push_back(step.mean);
    series.deviations.push_back(step.stddev);
  }
  return series;
}

Timeline bucket_timeline(const std::string& title, const RunRecord& run) {
  Timeline chart{.title = title,
                 .rows = {{.label = "backward",
                           .spans = {{.name = format_seconds(run.backward_ms / 1000),
                                      .begin_ms = 0,
                                      .end_ms = run.backward_ms,
                                      .colour = 0}}}}};
  for (auto& row : bucket_rows(run.buckets)) chart.rows.push_back(std::move(row));
  return chart;
}

std::vector<TimelineRow> action_rows(const PipelineRecord& pipeline,
                                     const std::vector<ActionRecord>& actions,
                                     const std::string& prefix, bool name_ranks) {
  const auto label = [&](int rank, const std::string& device) {
    return fmt::format("{}{}{}", prefix, name_ranks ? fmt::format("rank {} ", rank) : "", device);
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

std::vector<std::string> action_legend(const std::vector<TimelineRow>& rows) {
  const auto shown = [&rows](char kind) {
    for (const auto& row : rows) {
      for (const auto& span : row.spans) {
        if (span.name.starts_with(kind)) return true;
      }
    }
    return false;
  };
  const char* backward = !shown('I')  ? "B: backward"
                         : shown('B') ? "B: backward, I: input gradient"
                                      : "I: input gradient";
  return {shown('F') ? "F: forward" : "", shown('B') || shown('I') ? backward : "",
          shown('W') ? "W: weight gradient" : "", shown('S') ? "S: synchronisation" : ""};
}

}  // namespace lockstep::cli
