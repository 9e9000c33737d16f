#include "cli/lab/lab_charts.hpp"

#include <limits>

#include "cli/lab/lab_measures.hpp"

namespace lockstep::cli {

BarChart memory_chart(const std::string& title, const std::vector<NamedSet>& set_ups) {
  struct Part {
    const char* name;
    int64_t MemorySplit::*bytes;
  };
  constexpr Part kParts[] = {{"weights", &MemorySplit::weights},
                             {"gradients", &MemorySplit::gradients},
                             {"optimizer state", &MemorySplit::optimizer_state},
                             {"low-precision copies", &MemorySplit::low_precision},
                             {"activations", &MemorySplit::activations}};
  BarChart chart;
  chart.title = title;
  chart.unit = Unit::kBytes;
  chart.stacked = true;
  for (const auto& [name, set_up] : set_ups) chart.categories.push_back(name);
  for (const Part& part : kParts) {
    BarSeries series;
    series.name = part.name;
    for (const auto& [name, set_up] : set_ups) {
      const auto split = memory_of(*set_up);
      series.values.push_back(split ? static_cast<double>((*split).*part.bytes)
                                    : std::numeric_limits<double>::quiet_NaN());
    }
    chart.series.push_back(std::move(series));
  }
  return chart;
}

LineChart loss_chart(const std::string& title, const std::vector<NamedSet>& set_ups) {
  LineChart chart;
  chart.title = title;
  chart.x_label = "optimizer step";
  chart.log_y = true;
  chart.from_zero = false;
  for (const auto& [name, set_up] : set_ups) {
    LineSeries series;
    series.name = name;
    series.y = set_up->runs.front().losses;
    for (size_t i = 0; i < series.y.size(); ++i) series.x.push_back(static_cast<double>(i + 1));
    chart.series.push_back(std::move(series));
  }
  return chart;
}

}  // namespace lockstep::cli
