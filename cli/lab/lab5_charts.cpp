#include "cli/lab/lab5_charts.hpp"

#include <fmt/format.h>

#include <cmath>

#include "cli/lab/lab_text.hpp"
#include "lockstep/units.hpp"

namespace lockstep::cli {
namespace {

Figure step_time_figure(const Lab5Results& results) {
  const Stats single = pooled_step_ms(results.single);
  LineSeries one{.name = "one device", .x = {1}, .y = {single.mean}, .deviations = {single.stddev}};
  LineSeries parallel{.name = "DataParallel"};
  LineSeries ideal{.name = "ideal", .x = {1}, .y = {single.mean}, .reference = true};
  for (const auto& set_up : results.data_parallel) {
    const Stats step = pooled_step_ms(set_up);
    parallel.x.push_back(set_up.devices);
    parallel.y.push_back(step.mean);
    parallel.deviations.push_back(step.stddev);
    if (set_up.devices == 1) continue;
    ideal.x.push_back(set_up.devices);
    ideal.y.push_back(single.mean / set_up.devices);
  }
  const int devices = results.full().devices;
  return {
      LineChart{.title = "Step time over devices",
                .x_label = "devices",
                .unit = Unit::kMilliseconds,
                .series = {std::move(one), std::move(parallel), std::move(ideal)},
                .log_x = devices >= 4},
      fmt::format("Mean step time with its deviation; on {} device{} DataParallel took {} where "
                  "the ideal is {}.",
                  devices, devices > 1 ? "s" : "", format_ms(pooled_step_ms(results.full()).mean),
                  format_ms(single.mean / devices))};
}

Figure memory_figure(const Lab5Results& results) {
  const auto single = merged_devices(results.single);
  const auto devices = merged_devices(results.full());
  BarChart chart{.title = "Peak memory per device",
                 .unit = Unit::kBytes,
                 .categories = {},
                 .series = {{.name = "one device"}, {.name = "DataParallel"}}};
  for (size_t i = 0; i < devices.size(); ++i) {
    chart.categories.push_back(devices[i].name);
    chart.series[0].values.push_back(i < single.size() ? static_cast<double>(single[i].peak_bytes)
                                                       : std::nan(""));
    chart.series[1].values.push_back(static_cast<double>(devices[i].peak_bytes));
  }
  return {std::move(chart),
          fmt::format("Most bytes live at once in the timed steps; device 0 held {} against the "
                      "others' mean.",
                      signed_bytes(extra_on_first(devices, &DeviceRecord::peak_bytes)))};
}

}  // namespace

std::vector<Figure> lab5_figures(const Lab5Results& results) {
  return {step_time_figure(results), memory_figure(results)};
}

}  // namespace lockstep::cli
