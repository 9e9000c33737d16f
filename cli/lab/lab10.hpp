#pragma once

#include "cli/lab/lab10_results.hpp"
#include "cli/lab/lab_report.hpp"

namespace lockstep::cli {

/// Tables, charts and answers of practical 10.
LabReport lab10_report(const Lab10Results& results);

/// Data, model and pipeline parallelism together.
Lab lab10();

}  // namespace lockstep::cli
