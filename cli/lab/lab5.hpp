#pragma once

#include "cli/lab/lab5_results.hpp"
#include "cli/lab/lab_report.hpp"

namespace lockstep::cli {

/// Tables and answers of practical 5.
LabReport lab5_report(const Lab5Results& results);

/// One device against DataParallel.
Lab lab5();

}  // namespace lockstep::cli
