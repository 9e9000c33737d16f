#include "cli/lab/lab6_charts.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "cli/lab/lab_text.hpp"
#include "lockstep/units.hpp"

namespace lockstep::cli {
namespace {

constexpr size_t kMostBucketRows = 10;

std::string devices_of(const RunSet& set_up) {
  return fmt::format("{} device{}{}", set_up.devices, set_up.devices > 1 ? "s" : "",
                     sharing(set_up) > 1 ? ", shared" : "");
}

Figure step_time_figure(const Lab6Results& results) {
  BarChart chart{.title = "Step time: DP against DDP",
                 .unit = Unit::kMilliseconds,
                 .categories = {},
                 .series = {{.name = "DP"}, {.name = "DDP"}}};
  const auto add = [](BarSeries& series, const RunSet& set_up) {
    const Stats step = pooled_step_ms(set_up);
    series.values.push_back(step.mean);
    series.deviations.push_back(step.stddev);
  };
  for (size_t i = 0; i < results.distributed.size(); ++i) {
    chart.categories.push_back(devices_of(results.distributed[i]));
    add(chart.series[0], results.data_parallel[i]);
    add(chart.series[1], results.distributed[i]);
  }
  const size_t focus = results.focus();
  return {std::move(chart),
          fmt::format("Mean step time with its deviation; on {} DP took {} and DDP {}.",
                      devices_of(results.distributed[focus]),
                      format_ms(pooled_step_ms(results.data_parallel[focus]).mean),
                      format_ms(pooled_step_ms(results.distributed[focus]).mean))};
}

Figure memory_figure(const Lab6Results& results) {
  const auto central = merged_devices(results.data_parallel[results.focus()]);
  const auto distributed = merged_devices(results.distributed[results.focus()]);
  BarChart chart{.title = "Peak memory per device",
                 .unit = Unit::kBytes,
                 .categories = {},
                 .series = {{.name = "DP"}, {.name = "DDP"}}};
  for (size_t i = 0; i < std::min(central.size(), distributed.size()); ++i) {
    chart.categories.push_back(distributed[i].name);
    chart.series[0].values.push_back(static_cast<double>(central[i].peak_bytes));
    chart.series[1].values.push_back(static_cast<double>(distributed[i].peak_bytes));
  }
  return {std::move(chart),
          fmt::format("Device 0 held {} against the others' mean under DP and {} under DDP.",
                      signed_bytes(extra_on_first(central, &DeviceRecord::peak_bytes)),
                      signed_bytes(extra_on_first(distributed, &DeviceRecord::peak_bytes)))};
}

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

Figure overlap_figure(const RunSet& set_up) {
  const RunRecord& run = set_up.runs.front();
  Timeline chart{.title = fmt::format("Buckets of one step with {} ranks", set_up.devices),
                 .rows = {{.label = "backward",
                           .spans = {{.name = format_ms(run.backward_ms),
                                      .begin_ms = 0,
                                      .end_ms = run.backward_ms,
                                      .colour = 0}}}}};
  for (auto& row : bucket_rows(run.buckets)) chart.rows.push_back(std::move(row));
  const auto hidden = std::count_if(
      run.buckets.begin(), run.buckets.end(),
      [&](const BucketRecord& bucket) { return bucket.finished_ms <= run.backward_ms; });
  return {std::move(chart),
          fmt::format("Rank 0's last step in the first run: backward ended after {}, and {} of {} "
                      "bucket{} had finished by then.",
                      format_ms(run.backward_ms), hidden, run.buckets.size(),
                      run.buckets.size() > 1 ? "s" : "")};
}

}  // namespace

std::vector<Figure> lab6_figures(const Lab6Results& results) {
  std::vector<Figure> figures = {step_time_figure(results), memory_figure(results)};
  const RunSet& focus = results.distributed[results.focus()];
  if (!focus.runs.front().buckets.empty()) figures.push_back(overlap_figure(focus));
  return figures;
}

}  // namespace lockstep::cli
