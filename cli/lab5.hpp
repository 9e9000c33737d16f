#pragma once

#include <string>

#include "cli/lab5_plan.hpp"
#include "cli/lab5_results.hpp"

namespace lockstep::cli {

/// The whole report as Markdown: environment, tables, answers, records.
std::string lab5_report(const Lab5Results& results, const std::string& command,
                        const std::string& date, const std::vector<std::string>& record_names);

/// `lockstep lab 5`: runs the experiments, prints tables and answers, writes the report into
/// options.out. `command` is the line the user typed.
int run_lab5(const Lab5Options& options, const std::string& command);

}  // namespace lockstep::cli
