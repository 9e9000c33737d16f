#include "cli/lab/lab_report.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "base/file.hpp"

namespace lockstep::cli {
namespace {

constexpr size_t kAnswerWidth = 100;

void print_answers(const std::vector<Answer>& answers, bool style, size_t width) {
  std::string topic;
  for (const auto& answer : answers) {
    if (answer.topic != topic) fmt::print("\nQuestions: {}\n", answer.topic);
    topic = answer.topic;
    fmt::print("\n{}{}{}\n{}\n", style ? "\033[1m" : "", wrap_text(answer.question, width),
               style ? "\033[0m" : "", wrap_text(answer.text, std::min(width, kAnswerWidth), "  "));
  }
}

}  // namespace

Document lab_document(const LabReport& report, const std::string& command, std::time_t date,
                      const std::vector<std::string>& record_names) {
  Document document{.title = report.title, .date = date, .command = command};
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

void print_lab(const LabReport& report, const std::string& folder) {
  const bool style = may_style(STDOUT_FILENO);
  const size_t width = terminal_width(STDOUT_FILENO);
  for (const auto& [name, table] : report.tables) {
    fmt::print("\n{}", table.terminal(style, width));
    write_file_atomically((std::filesystem::path(folder) / (name + ".csv")).string(), table.csv());
  }
  for (const auto& drawing : report.drawings) fmt::print("\n{}", drawing);
  print_answers(report.answers, style, width);
}

}  // namespace lockstep::cli
