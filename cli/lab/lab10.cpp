#include "cli/lab/lab10.hpp"

#include "cli/lab/lab10_answers.hpp"
#include "cli/lab/lab10_charts.hpp"
#include "cli/lab/lab10_plan.hpp"
#include "cli/lab/lab10_tables.hpp"

namespace lockstep::cli {

LabReport lab10_report(const Lab10Results& results) {
  return {.title = "Practical 10: hybrid parallelism",
          .stamp = results.base.runs.front(),
          .tables = {{"placement", placement_table(results)},
                     {"synchronisation", synchronisation_table(results)},
                     {"actions", actions_table(results)},
                     {"timing", timing_table(results)},
                     {"schedules", schedules_table(results)},
                     {"simulated", simulated_table(results)},
                     {"communication", communication_table(results)}},
          .figures = lab10_figures(results),
          .answers = answer_lab10(results),
          .drawings = lab10_drawings(results)};
}

Lab lab10() {
  return {.folder = "reports/lab10",
          .plan = plan_lab10,
          .report = [](const Finished& finished, double others_busy_cores) {
            Lab10Results results = collect_lab10(finished);
            results.others_busy_cores = others_busy_cores;
            return lab10_report(results);
          }};
}

}  // namespace lockstep::cli
