#pragma once

#include <string>

#include "cli/lab_report.hpp"
#include "lockstep/device_plan.hpp"

namespace lockstep::test {

/// A machine of cores 0 to count - 1.
inline Hardware cores(int count, int gpus = 0) {
  Hardware hardware;
  for (int core = 0; core < count; ++core) hardware.cores.push_back(core);
  hardware.gpus = gpus;
  return hardware;
}

inline bool mentions(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// The text of the answer whose question has this part.
inline std::string answer_with(const std::vector<cli::Answer>& answers,
                               const std::string& question_part) {
  for (const auto& answer : answers) {
    if (mentions(answer.question, question_part)) return answer.text;
  }
  return "no such question";
}

}  // namespace lockstep::test
