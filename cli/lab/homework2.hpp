#pragma once

#include "cli/lab/homework2_results.hpp"
#include "cli/lab/lab_report.hpp"

namespace lockstep::cli {

/// Tables, charts and answers of homework 2.
LabReport homework2_report(const Homework2Results& results);

/// Accumulation, mixed precision, and both.
Lab homework2();

}  // namespace lockstep::cli
