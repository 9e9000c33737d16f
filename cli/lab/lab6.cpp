#include "cli/lab/lab6.hpp"

#include "cli/lab/lab6_answers.hpp"
#include "cli/lab/lab6_charts.hpp"
#include "cli/lab/lab6_plan.hpp"
#include "cli/lab/lab6_tables.hpp"

namespace lockstep::cli {

LabReport lab6_report(const Lab6Results& results) {
  return {.title = "Practical 6: DistributedDataParallel",
          .stamp = results.single.runs.front(),
          .tables = {{"methods", methods_table(results)},
                     {"balance", balance_table(results)},
                     {"overlap", overlap_table(results)},
                     {"communication", communication_table(results)},
                     {"scaling", scaling_table(results)}},
          .figures = lab6_figures(results),
          .answers = answer_lab6(results)};
}

Lab lab6() {
  return {.folder = "reports/lab6",
          .plan = plan_lab6,
          .report = [](const Finished& finished, double others_busy_cores) {
            Lab6Results results = collect_lab6(finished);
            results.others_busy_cores = others_busy_cores;
            return lab6_report(results);
          }};
}

}  // namespace lockstep::cli
