#include "cli/lab/lab5.hpp"

#include "cli/lab/lab5_answers.hpp"
#include "cli/lab/lab5_charts.hpp"
#include "cli/lab/lab5_plan.hpp"
#include "cli/lab/lab5_tables.hpp"

namespace lockstep::cli {

LabReport lab5_report(const Lab5Results& results) {
  return {.title = "Practical 5: one device, then DataParallel",
          .stamp = results.single.runs.front(),
          .tables = {{"speed", speed_table(results)},
                     {"memory", memory_table(results)},
                     {"split", split_table(results)},
                     {"bottleneck", bottleneck_table(results)}},
          .figures = lab5_figures(results),
          .answers = answer_lab5(results)};
}

Lab lab5() {
  return {.folder = "reports/lab5",
          .plan = plan_lab5,
          .report = [](const Finished& finished, double others_busy_cores) {
            Lab5Results results = collect_lab5(finished);
            results.others_busy_cores = others_busy_cores;
            return lab5_report(results);
          }};
}

}  // namespace lockstep::cli
