#include "cli/lab/lab5_results.hpp"

namespace lockstep::cli {

Lab5Results collect_lab5(const Finished& finished) {
  Lab5Results results;
  for (const auto& [experiment, record] : finished) {
    if (experiment.role == Role::kSingle) {
      results.single.runs.push_back(record);
    } else if (experiment.role == Role::kSplit) {
      results.splits.push_back({experiment.rows, experiment.devices, record});
    } else {
      add_run(results.data_parallel, experiment.devices, record);
    }
  }
  return results;
}

}  // namespace lockstep::cli
