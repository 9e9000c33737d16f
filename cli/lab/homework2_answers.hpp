#pragma once

#include <vector>

#include "cli/lab/homework2_results.hpp"
#include "cli/lab/lab_report.hpp"

namespace lockstep::cli {

/// The three questions of homework 2. What this run cannot show, its answer says.
std::vector<Answer> answer_homework2(const Homework2Results& results);

}  // namespace lockstep::cli
