#pragma once

#include <string>
#include <vector>

#include "cli/lab5_results.hpp"

namespace lockstep::cli {

/// One question of the course, answered from the run's own figures.
struct Answer {
  std::string topic;  ///< "speed", "splitting", "bottleneck"
  std::string question;
  std::string text;
};

/// Every question of practical 5. What this run cannot show, its answer says.
std::vector<Answer> answer_lab5(const Lab5Results& results);

}  // namespace lockstep::cli
