#include "cli/lab/homework2_charts.hpp"

#include <fmt/format.h>

#include "cli/lab/lab_charts.hpp"
#include "cli/lab/lab_measures.hpp"

namespace lockstep::cli {
namespace {

LineSeries step_times(const std::string& name, const Homework2Results& results,
                      RunSet AccumPoint::*code) {
  LineSeries series;
  series.name = name;
  for (const auto& point : results.points) {
    const Stats step = pooled_step_ms(point.*code);
    series.x.push_back(static_cast<double>(point.accum_steps));
    series.y.push_back(step.mean);
    series.deviations.push_back(step.stddev);
  }
  return series;
}

}  // namespace

std::vector<Figure> homework2_figures(const Homework2Results& results) {
  const std::string& amp = results.precision();
  LineChart time;
  time.title = "Time of an optimizer step";
  time.x_label = "ACCUM_STEPS";
  time.unit = Unit::kMilliseconds;
  time.log_x = true;
  time.series = {step_times("code 1, fp32", results, &AccumPoint::fp32),
                 step_times("code 3, " + amp, results, &AccumPoint::combined)};
  std::vector<NamedSet> set_ups;
  for (const auto& point : results.points) {
    set_ups.emplace_back(fmt::format("1, {}", point.accum_steps), &point.fp32);
    set_ups.emplace_back(fmt::format("3, {}", point.accum_steps), &point.combined);
  }
  set_ups.emplace_back("one batch", &results.one_batch);
  return {{time, fmt::format("Each micro-step has {} rows, so the time grows with ACCUM_STEPS.",
                             rows_of(results.fp32))},
          {memory_chart("Peak memory of rank 0", set_ups),
           fmt::format("By code and ACCUM_STEPS, beside fp32 with {} rows in one batch.",
                       rows_of(results.one_batch))}};
}

}  // namespace lockstep::cli
