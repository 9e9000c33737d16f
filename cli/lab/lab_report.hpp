#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cli/lab/lab_results.hpp"
#include "lockstep/table.hpp"
#include "report/chart.hpp"

namespace lockstep::cli {

/// One question of the course, answered from the run's own figures.
struct Answer {
  std::string topic;  ///< "speed", "splitting", "bottleneck"
  std::string question;
  std::string text;
};

struct NamedTable {
  std::string name;  ///< of its CSV file
  Table table;
};

/// What a lab found out.
struct LabReport {
  std::string title;
  RunRecord stamp;  ///< a run whose host and versions are those of all
  std::vector<NamedTable> tables;
  std::vector<Figure> figures;
  std::vector<Answer> answers;
  std::vector<std::string> drawings = {};  ///< for the terminal, instead of figures
};

/// What makes one lab differ from another.
struct Lab {
  std::string folder;  ///< of its report, where the user names none
  std::function<LabPlan(const LabOptions&, const Hardware&)> plan;
  std::function<LabReport(const Finished&, double others_busy_cores)> report;
};

/// Plans, runs the experiments, prints tables and answers, writes the report (HTML, PDF,
/// Markdown, CSV) into options.out.
/// `command` is the line the user typed.
int run_lab(const Lab& lab, const LabOptions& options, const std::string& command);

}  // namespace lockstep::cli
