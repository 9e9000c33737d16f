#include <fmt/format.h>

#include "base/utf8.hpp"
#include "report/document.hpp"
#include "report/draw_chart.hpp"

namespace lockstep {
namespace {

// One line of text in which nothing has a meaning to Markdown.
std::string plain(std::string_view text) {
  std::string escaped;
  for (const char c : escape_markdown(clean_text(text))) {
    if (c == '[' || c == ']') escaped += '\\';
    escaped += c;
  }
  return escaped;
}

// Text between more backquotes than it holds in a row.
std::string code(std::string_view text) {
  const std::string clean = clean_text(text);
  std::string fence = "`";
  while (clean.find(fence) != std::string::npos) fence += '`';
  return fence.size() > 1 ? fence + " " + clean + " " + fence : fence + clean + fence;
}

}  // namespace

std::string render_markdown(const Document& document) {
  std::string text = fmt::format("# {}\n\n", plain(document.title));
  text += fmt::format("- date: {}\n", format_date(document.date));
  if (!document.command.empty()) text += fmt::format("- command: {}\n", code(document.command));
  for (const auto& [name, value] : document.facts) {
    text += fmt::format("- {}: {}\n", plain(name), plain(value));
  }
  size_t figure_number = 0;
  for (const auto& section : document.sections) {
    if (!section.heading.empty()) text += fmt::format("\n## {}\n", plain(section.heading));
    for (const auto& table : section.tables) text += "\n" + table.markdown();
    for (const auto& figure : section.figures) {
      ++figure_number;
      text += fmt::format("\n![{0}](figure-{1}.svg)\n\nFigure {1}. {2}\n",
                          plain(chart_title(figure.chart)), figure_number, plain(figure.caption));
    }
    for (const auto& [question, answer] : section.questions) {
      text += fmt::format("\n**{}** {}\n", plain(question), plain(answer));
    }
  }
  if (document.records.empty()) return text;
  text += "\n## Records\n\nEverything above is made from these files, one per run.\n\n";
  for (const auto& [name, path] : document.records) {
    text += fmt::format("- [{}]({})\n", plain(name), encode_link(path));
  }
  return text;
}

}  // namespace lockstep
