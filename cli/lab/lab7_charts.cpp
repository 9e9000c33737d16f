#include "cli/lab/lab7_charts.hpp"

#include <fmt/format.h>

#include "cli/lab/lab_charts.hpp"
#include "cli/lab/lab_measures.hpp"

namespace lockstep::cli {
namespace {

BarChart speed_chart(const std::vector<NamedSet>& set_ups, const RunSet& fp32) {
  BarChart chart;
  chart.title = "Rows per second, times those of fp32";
  BarSeries series;
  series.name = "speed-up";
  for (const auto& [name, set_up] : set_ups) {
    const Comparison faster = compare_per_row(fp32, *set_up);
    chart.categories.push_back(name);
    series.values.push_back(faster.speedup.mean);
    series.deviations.push_back(faster.speedup.stddev);
  }
  chart.series = {series};
  return chart;
}

}  // namespace

std::vector<Figure> lab7_figures(const Lab7Results& results) {
  const std::string& amp = results.precision();
  const AccumulationRuns& many = results.first();
  const std::string k = std::to_string(many.micro_steps);
  return {
      {speed_chart({{"fp32", &results.fp32},
                    {k + " micro-steps", &many.no_sync},
                    {k + ", sync each", &many.synced},
                    {"one batch", &many.one_batch},
                    {amp, &results.amp},
                    {fmt::format("{}, {}", amp, k), &results.combined}},
                   results.fp32),
       fmt::format("Steps of {} rows (fp32, {}) and of {} rows (all others).",
                   rows_of(results.fp32), amp, rows_of(many.no_sync))},
      {memory_chart("Peak memory of rank 0", {{"fp32", &results.fp32},
                                              {k + " micro-steps", &many.no_sync},
                                              {"one batch", &many.one_batch},
                                              {amp, &results.amp},
                                              {fmt::format("{}, {}", amp, k), &results.combined}}),
       fmt::format("One batch holds the activations of all {} rows; {} micro-steps those of {}.",
                   rows_of(many.one_batch), k, rows_of(results.fp32))},
      {loss_chart("Loss", {{"fp32", &results.fp32},
                           {amp, &results.amp},
                           {"overflow, scaler", &results.overflow},
                           {"overflow, no scaler", &results.overflow_no_scaler}}),
       fmt::format("An infinite gradient was planted in step {}; a line ends where its loss is not "
                   "finite.",
                   results.overflow_at)},
  };
}

}  // namespace lockstep::cli
