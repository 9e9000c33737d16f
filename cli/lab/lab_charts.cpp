#include "cli/lab/lab_charts.hpp"

#include <cmath>

namespace lockstep::cli {

BarChart memory_chart(const std::string& title, const std::vector<SetRow>& set_ups) {
  BarChart chart{.title = title, .unit = Unit::kBytes, .stacked = true};
  for (const auto& row : set_ups) chart.categories.push_back(row.name);
  for (const auto& [name, bytes] : kMemoryParts) {
    BarSeries series{.name = name};
    for (const auto& row : set_ups) {
      const auto split = memory_of(*row.set_up);
      series.values.push_back(split ? static_cast<double>((*split).*bytes) : std::nan(""));
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
    for (size_t i = 0; i < series.y.size(); ++i) series.x.push_back(static_cast<double>(i + 1));
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

}  // namespace lockstep::cli
