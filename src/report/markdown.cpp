#include <fmt/format.h>

#include "base/utf8.hpp"
#include "report/document.hpp"
#include "report/draw_chart.hpp"

namespace lockstep {
namespace {

// One line of text without special characters of Markdown.
std::string markdown_text(std::string_view text) {
  std::string escaped;
  for (const char c : escape_markdown(clean_text(text))) {
    if (c == '[' || c == ']') escaped += '\\';
    escaped += c;
  }
  return escaped;
}

// Text between more backquotes than it contains in a row.
std::string markdown_code(std::string_view text) {
  const std::string clean = clean_text(text);
  std::string fence = "`";
  while (clean.find(fence) != std::string::npos) fence += '`';
  return fence.size() > 1 ? fence + " " + clean + " " + fence : fence + clean + fence;
}

// The author's words as a quotation.
std::string markdown_words(const Words& words, const std::string& author) {
  std::string text;
  for (const auto& block : blocks_of(words)) {
    if (!text.empty()) text += ">\n";
    text += fmt::format("> {}{}\n", block.item ? "- " : "", markdown_text(block.text));
  }
  if (text.empty()) return "";
  return fmt::format("\n> **{}**\n>\n{}", markdown_text(notes_label(author)), text);
}

std::string markdown_listing(const Listing& listing) {
  std::string fence = "```";
  while (listing.text.find(fence) != std::string::npos) fence += '`';
  const bool closed = listing.text.empty() || listing.text.back() == '\n';
  return fmt::format("\n### [{}]({})\n\n{}cpp\n{}{}{}\n", markdown_text(listing.name),
                     encode_link("code/" + listing.name), fence, listing.text, closed ? "" : "\n",
                     fence);
}

}  // namespace

std::string render_markdown(const Document& document) {
  std::string text = fmt::format("# {}\n\n", markdown_text(document.title));
  if (!document.author.empty())
    text += fmt::format("- author: {}\n", markdown_text(document.author));
  text += fmt::format("- date: {}\n", format_date(document.date));
  if (!document.command.empty())
    text += fmt::format("- command: {}\n", markdown_code(document.command));
  for (const auto& [name, value] : document.facts) {
    text += fmt::format("- {}: {}\n", markdown_text(name), markdown_text(value));
  }
  if (!document.trained.empty()) text += "\n## What was trained\n\n";
  for (const auto& [name, value] : document.trained) {
    text += fmt::format("- {}: {}\n", markdown_text(name), markdown_text(value));
  }
  if (!document.warning.empty()) {
    text += fmt::format("\n**{}**\n", markdown_text(document.warning));
  }
  text += markdown_words(document.notes, document.author);
  size_t figure_number = 0;
  for (const auto& section : document.sections) {
    if (!section.heading.empty()) text += fmt::format("\n## {}\n", markdown_text(section.heading));
    for (const auto& table : section.tables) text += "\n" + table.markdown();
    for (const auto& figure : section.figures) {
      ++figure_number;
      text += fmt::format("\n![{0}](figure-{1}.svg)\n\nFigure {1}. {2}\n",
                          markdown_text(chart_title(figure.chart)), figure_number,
                          markdown_text(figure.caption));
    }
    for (const auto& question : section.questions) {
      text += fmt::format("\n**{}** {}\n", markdown_text(numbered(question)),
                          markdown_text(question.answer));
      text += markdown_words(question.notes, document.author);
    }
    text += markdown_words(section.notes, document.author);
  }
  if (!document.code.empty()) text += "\n## Code\n";
  for (const auto& listing : listings_of(document, true)) text += markdown_listing(listing);
  const auto others = listings_of(document, false);
  if (!others.empty()) text += "\nAlso run:\n\n";
  for (const auto& listing : others) {
    text += fmt::format("- [{}]({})\n", markdown_text(listing.name),
                        encode_link("code/" + listing.name));
  }
  if (document.records.empty()) return text;
  text += "\n## Records\n\nEverything above is made from these files, one per run.\n\n";
  for (const auto& [name, path] : document.records) {
    text += fmt::format("- [{}]({})\n", markdown_text(name), encode_link(path));
  }
  return text;
}

}  // namespace lockstep
