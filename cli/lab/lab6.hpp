#pragma once

#include "cli/lab/lab6_results.hpp"
#include "cli/lab/lab_report.hpp"

namespace lockstep::cli {

/// Tables and answers of practical 6.
LabReport lab6_report(const Lab6Results& results);

/// DataParallel against DistributedDataParallel.
Lab lab6();

}  // namespace lockstep::cli
