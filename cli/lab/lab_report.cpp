#include "cli/lab/lab_report.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>

#include "base/file.hpp"

namespace lockstep::cli {
namespace {

constexpr size_t kAnswerWidth = 100;

void print_answers(const std::vector<Answer>& answers, bool style) {
  std::string topic;
  for (const auto& answer : answers) {
    if (answer.topic != topic) fmt::print("\nQuestions: {}\n", answer.topic);
    topic = answer.topic;
    fmt::print("\n{}{}{}\n{}\n", style ? "\033[1m" : "", answer.question, style ? "\033[0m" : "",
               wrap_text(answer.text, kAnswerWidth, "  "));
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

  for (const auto& [name, value] : report.trained) document.facts.push_back({name, value});
  if (!report.warning.empty()) document.facts.push_back({"warning", report.warning});

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
  if (!report.warning.empty()) {
    fmt::print("\n{}\n", wrap_text("Warning: " + report.warning, kAnswerWidth, ""));
  }
  fmt::print("\nWhat was trained\n");
  for (const auto& [name, value] : report.trained) fmt::print("  {:<10} {}\n", name, value);
  for (const auto& [name, table] : report.tables) {
    fmt::print("\n{}", table.terminal(style));
    write_file_atomically((std::filesystem::path(folder) / (name + ".csv")).string(), table.csv());
  }
  for (const auto& drawing : report.drawings) fmt::print("\n{}", drawing);
  print_answers(report.answers, style);
}

}  // namespace lockstep::cli
