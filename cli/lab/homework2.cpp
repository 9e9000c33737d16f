#include "cli/lab/homework2.hpp"

#include "cli/lab/homework2_answers.hpp"
#include "cli/lab/homework2_charts.hpp"
#include "cli/lab/homework2_plan.hpp"
#include "cli/lab/homework2_tables.hpp"

namespace lockstep::cli {

LabReport homework2_report(const Homework2Results& results) {
  return {.title = "Homework 2: accumulation and mixed precision",
          .stamp = results.fp32.runs.front(),
          .tables = {{"codes", codes_table(results)}, {"accum_steps", accum_steps_table(results)}},
          .figures = homework2_figures(results),
          .answers = answer_homework2(results)};
}

Lab homework2() {
  return {.folder = "reports/homework2",
          .plan = plan_homework2,
          .report = [](const Finished& finished, double others_busy_cores) {
            Homework2Results results = collect_homework2(finished);
            results.others_busy_cores = others_busy_cores;
            return homework2_report(results);
          }};
}

}  // namespace lockstep::cli
