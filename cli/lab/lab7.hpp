#pragma once

#include "cli/lab/lab7_results.hpp"
#include "cli/lab/lab_report.hpp"

namespace lockstep::cli {

/// Tables, charts and answers of practical 7.
LabReport lab7_report(const Lab7Results& results);

/// Gradient accumulation and mixed precision.
Lab lab7();

}  // namespace lockstep::cli
