#include "cli/lab/lab7.hpp"

#include "cli/lab/lab7_answers.hpp"
#include "cli/lab/lab7_charts.hpp"
#include "cli/lab/lab7_plan.hpp"
#include "cli/lab/lab7_tables.hpp"

namespace lockstep::cli {

LabReport lab7_report(const Lab7Results& results) {
  return {.title = "Practical 7: gradient accumulation and mixed precision",
          .stamp = results.fp32.runs.front(),
          .tables = {{"techniques", techniques_table(results)},
                     {"accumulation", accumulation_table(results)},
                     {"precision", precision_table(results)},
                     {"memory", memory_split_table(results)},
                     {"gradients", gradients_table(results)}},
          .figures = lab7_figures(results),
          .answers = answer_lab7(results)};
}

Lab lab7() {
  return {.folder = "reports/lab7",
          .plan = plan_lab7,
          .report = [](const Finished& finished, double others_busy_cores) {
            Lab7Results results = collect_lab7(finished);
            results.others_busy_cores = others_busy_cores;
            return lab7_report(results);
          }};
}

}  // namespace lockstep::cli
