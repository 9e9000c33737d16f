#include "cli/lab/lab_report.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>

#include "base/file.hpp"
#include "base/table_data.hpp"
#include "lockstep/error.hpp"
#include "lockstep/units.hpp"
#include "report/notes.hpp"
#include "report/zip.hpp"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;

constexpr size_t kAnswerWidth = 100;
constexpr const char* kNotesFile = "notes.md";
constexpr const char* kZipFile = "hand-in.zip";

void print_trained(const LabFacts& trained, size_t width) {
  if (trained.empty()) return;
  fmt::print("\nWhat was trained\n");
  const std::string indent(13, ' ');
  for (const auto& [name, value] : trained) {
    fmt::print("  {:<10} {}\n", name, wrap_text(value, width, indent).substr(indent.size()));
  }
}

void print_answers(const std::vector<Answer>& answers, bool style, size_t width) {
  std::string topic;
  for (const auto& answer : answers) {
    if (answer.topic != topic) fmt::print("\nQuestions: {}\n", answer.topic);
    topic = answer.topic;
    fmt::print("\n{}{}{}\n{}\n", style ? "\033[1m" : "", wrap_text(answer.question, width),
               style ? "\033[0m" : "", wrap_text(answer.text, std::min(width, kAnswerWidth), "  "));
  }
}

// Prints tables, drawings and answers.
void print_lab(const LabReport& report) {
  const bool style = may_style(STDOUT_FILENO);
  const size_t width = terminal_width(STDOUT_FILENO);
  if (!report.warning.empty()) {
    fmt::print("\n{}\n", wrap_text("Warning: " + report.warning, std::min(width, kAnswerWidth)));
  }
  print_trained(report.trained, std::min(width, kAnswerWidth));
  for (const auto& [name, table] : report.tables) {
    fmt::print("\n{}", table.terminal(style, width));
  }
  for (const auto& drawing : report.drawings) fmt::print("\n{}", drawing);
  print_answers(report.answers, style, width);
}

// Prints where the report lies, and the zip if there is one.
void print_folder(const HandIn& hand_in, const std::string& folder) {
  const fs::path out(folder);
  fmt::print("\n{}\n",
             wrap_text(fmt::format("Report: {}; beside it report.pdf, report.md, the tables "
                                   "as CSV, and the records",
                                   (out / "report.html").string()),
                       terminal_width(STDOUT_FILENO)));
  if (hand_in.zip) fmt::print("To hand in: {}\n", (out / kZipFile).string());
}

// "10.2" of "10.2 micro-batches", "1" of "1. Execution time"; else nothing.
std::string leading_number(const std::string& text) {
  size_t end = std::min(text.find_first_not_of("0123456789."), text.size());
  if (end == 0 || end == text.size() || text[end] != ' ') return "";
  while (end > 0 && text[end - 1] == '.') --end;
  return text.substr(0, end);
}

// Numbers the questions of the sections. The course's own numbers count: of a topic, or of a
// question. A topic without a number gets a letter if other topics have numbers.
void number_questions(std::vector<Section>& sections, const std::vector<std::string>& topics) {
  const bool by_course = std::any_of(topics.begin(), topics.end(), [](const std::string& topic) {
    return !leading_number(topic).empty();
  });
  int topic_count = 0;
  for (size_t i = 0; i < sections.size(); ++i) {
    std::string part = leading_number(topics[i]);
    if (part.empty()) {
      part = by_course ? std::string(1, static_cast<char>('A' + topic_count % 26))
                       : std::to_string(topic_count + 1);
      ++topic_count;
    }
    auto& questions = sections[i].questions;
    for (size_t j = 0; j < questions.size(); ++j) {
      Question& question = questions[j];
      question.number = leading_number(question.question);
      if (!question.number.empty()) {
        question.question.erase(0, question.question.find(' ') + 1);
      } else {
        const bool alone = questions.size() == 1 && by_course;
        question.number = alone ? part : fmt::format("{}.{}", part, j + 1);
      }
    }
  }
}

std::vector<ReportFile> table_files(const std::vector<NamedTable>& tables) {
  std::vector<ReportFile> files;
  nlohmann::json all = nlohmann::json::array();
  for (const auto& [name, table] : tables) {
    files.push_back({name + ".csv", table.csv()});
    all.push_back(json_of(data_of(table)));
    all.back()["name"] = name;
  }
  if (tables.empty()) return files;
  files.push_back(
      {"tables.json", all.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n"});
  return files;
}

std::string remake_help(const std::string& why, const std::string& folder) {
  return fmt::format("{}; then `lockstep report {}` makes the report from the records", why,
                     folder);
}

// Files are replaced one by one, so a disk that would fill up half-way is refused before the first.
void require_space(const std::vector<ReportFile>& files, const std::string& folder) {
  uintmax_t bytes = 0;
  for (const auto& file : files) bytes += file.bytes.size();
  std::error_code unknown;
  const auto space = fs::space(folder, unknown);
  if (unknown || space.available >= bytes) return;
  throw Error(Code::kFileWrite,
              fmt::format("the disk of {} has {} left, and the report needs {}", folder,
                          format_bytes(static_cast<int64_t>(space.available)),
                          format_bytes(static_cast<int64_t>(bytes))),
              remake_help("free some space", folder));
}

void write_all(const std::vector<ReportFile>& files, const std::string& folder) {
  require_space(files, folder);
  try {
    write_files(files, folder);
  } catch (const Error& error) {
    throw Error(error.code(), error.message(), remake_help(error.help(), folder), error.notes());
  }
}

// The notes that were asked for, or those that lie in the folder.
std::string notes_path(const HandIn& hand_in, const fs::path& folder) {
  if (!hand_in.notes.empty()) return hand_in.notes;
  return fs::exists(folder / kNotesFile) ? (folder / kNotesFile).string() : "";
}

// Whether somebody wrote notes into this file, which must then stay as they are.
bool has_words(const fs::path& file) {
  if (!fs::exists(file)) return false;
  try {
    return !parse_notes(read_text_file(file.string()), file.string()).empty();
  } catch (const Error&) {
    return true;
  }
}

// The records of a report, and what else `lockstep report` needs to make it again.
std::vector<ReportFile> kept_files(const fs::path& folder, const ReportOrigin& origin) {
  std::vector<ReportFile> files;
  for (const auto& name : origin.records) {
    const std::string path = "records/" + name + ".json";
    files.push_back({path, read_text_file((folder / path).string())});
  }
  for (const char* name : {"lab.json", "compare.json"}) {
    if (fs::exists(folder / name)) {
      files.push_back({name, read_text_file((folder / name).string())});
    }
  }
  return files;
}

}  // namespace

Document lab_document(const LabReport& report, const std::string& command, std::time_t date,
                      const std::vector<std::string>& record_names) {
  Document document{.title = report.title, .date = date, .command = command};
  for (const auto& [name, value] : report.stamp.host) {
    document.facts.push_back({name == "name" ? "host" : name, value});
  }
  for (const auto& [name, value] : report.stamp.versions) document.facts.push_back({name, value});
  for (const auto& [name, value] : report.trained) document.trained.push_back({name, value});
  for (const auto& [name, text, printed] : report.code) {
    document.code.push_back({name, text, printed});
  }
  document.warning = report.warning;

  std::vector<Section> questions;
  std::vector<std::string> topics;
  for (const auto& answer : report.answers) {
    if (topics.empty() || answer.topic != topics.back()) {
      questions.emplace_back().heading = "Questions: " + answer.topic;
      topics.push_back(answer.topic);
    }
    questions.back().questions.push_back({answer.question, answer.text});
  }
  number_questions(questions, topics);
  Section& measurements = document.sections.emplace_back();
  measurements.heading = "Measurements";
  for (const auto& [name, table] : report.tables) measurements.tables.push_back(table);
  measurements.figures = report.figures;
  for (auto& section : questions) document.sections.push_back(std::move(section));
  for (const auto& name : record_names) {
    document.records.push_back({name, "records/" + name + ".json"});
  }
  return document;
}

void make_report_folder(const fs::path& folder) {
  const auto refuse = [&folder](const std::string& why) {
    throw Error(Code::kFileWrite,
                fmt::format("cannot write to the folder {}: {}", folder.string(), why),
                "name a folder you may write to with --out");
  };
  std::error_code error;
  fs::create_directories(folder / "records", error);
  if (error) refuse(error.message());
  if (!fs::is_directory(folder / "records")) refuse("a file of that name exists");
  const fs::path trial = folder / ".lockstep-trial";
  try {
    write_file_atomically(trial.string(), "");
  } catch (const Error& failed) {
    refuse(failed.message());
  }
  fs::remove(trial, error);
}

void require_notes(const HandIn& hand_in) {
  if (!hand_in.notes.empty()) parse_notes(read_text_file(hand_in.notes), hand_in.notes);
}

void write_lab_report(const LabReport& report, const ReportOrigin& origin, const HandIn& hand_in,
                      const std::string& folder) {
  Document document = lab_document(report, origin.command, origin.date, origin.records);
  document.author = hand_in.author;
  const std::string notes = notes_path(hand_in, folder);
  const std::string text = notes.empty() ? notes_template(document) : read_text_file(notes);
  std::optional<Error> misfit;
  try {
    add_notes(document, parse_notes(text, notes), notes);
  } catch (const Error& error) {
    misfit.emplace(error.code(), error.message(),
                   fmt::format("{}; the report is there without the notes, and `lockstep report {} "
                               "--notes {}` adds them",
                               error.help(), folder, notes),
                   error.notes());
  }
  std::vector<ReportFile> files = report_files(document);
  for (auto& file : table_files(report.tables)) files.push_back(std::move(file));
  if (hand_in.zip && !misfit) {
    std::vector<ReportFile> handed_in = files;
    if (!notes.empty()) handed_in.push_back({kNotesFile, text});
    for (auto& file : kept_files(folder, origin)) handed_in.push_back(std::move(file));
    const std::string name = fs::canonical(folder).filename().string();
    files.push_back({kZipFile, render_zip(handed_in, name, origin.date)});
  }
  if (!has_words(fs::path(folder) / kNotesFile)) files.push_back({kNotesFile, text});
  write_all(files, folder);
  if (misfit) throw *misfit;
}

void publish_report(const LabReport& report, const ReportOrigin& origin, const HandIn& hand_in,
                    const fs::path& folder) {
  print_lab(report);
  write_lab_report(report, origin, hand_in, folder.string());
  print_folder(hand_in, folder.string());
}

}  // namespace lockstep::cli
