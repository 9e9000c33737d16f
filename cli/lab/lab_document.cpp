#include "cli/lab/lab_document.hpp"

namespace lockstep::cli {

Document lab_document(const LabReport& report, const std::string& command, std::time_t date,
                      const std::vector<std::string>& record_names) {
  Document document{.title = report.title,
                    .date = date,
                    .command = command,
                    .facts = {},
                    .sections = {},
                    .records = {}};
  for (const auto& [name, value] : report.stamp.host) {
    document.facts.push_back({name == "name" ? "host" : name, value});
  }
  for (const auto& [name, value] : report.stamp.versions) document.facts.push_back({name, value});

  Section& measurements = document.sections.emplace_back();
  measurements.heading = "Measurements";
  for (const auto& [name, table] : report.tables) measurements.tables.push_back(table);
  measurements.figures = report.figures;

  std::string topic;
  for (const auto& answer : report.answers) {
    if (answer.topic != topic) {
      document.sections.emplace_back().heading = "Questions: " + answer.topic;
      topic = answer.topic;
    }
    document.sections.back().questions.push_back({answer.question, answer.text});
  }
  for (const auto& name : record_names) {
    document.records.push_back({name, "records/" + name + ".json"});
  }
  return document;
}

}  // namespace lockstep::cli
