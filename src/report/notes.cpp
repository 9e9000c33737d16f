#include "report/notes.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <map>

#include "base/utf8.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

constexpr std::string_view kBlank = " \t\r\n";

std::string trimmed(std::string_view text) {
  const size_t begin = text.find_first_not_of(kBlank);
  if (begin == std::string_view::npos) return "";
  return std::string(text.substr(begin, text.find_last_not_of(kBlank) - begin + 1));
}

// Comments as blanks, so that lines keep their numbers.
std::string without_comments(std::string_view text) {
  std::string rest(text);
  for (size_t begin = rest.find("<!--"); begin != std::string::npos;) {
    const size_t close = rest.find("-->", begin);
    const size_t end = close == std::string::npos ? rest.size() : close + 3;
    for (size_t i = begin; i < end; ++i) {
      if (rest[i] != '\n') rest[i] = ' ';
    }
    begin = rest.find("<!--", end);
  }
  return rest;
}

void require_utf8(std::string_view text, const std::string& file) {
  size_t line = 1;
  while (!text.empty()) {
    const auto [point, bytes] = first_character(text);
    if (point == 0xFFFD && bytes == 1) {
      throw Error(Code::kFileFormat, fmt::format("line {} of {} is not UTF-8", line, file),
                  "save the notes as plain text in UTF-8");
    }
    if (point == '\n') ++line;
    text.remove_prefix(bytes);
  }
}

// A heading as it is compared: lower case, single spaces, no punctuation at its end.
std::string key_of(std::string_view heading) {
  std::string key;
  for (const char c : trimmed(heading)) {
    const bool blank = kBlank.find(c) != std::string_view::npos;
    if (blank && key.ends_with(' ')) continue;
    key += blank ? ' ' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  while (!key.empty() && std::string_view("?.:! ").find(key.back()) != std::string_view::npos) {
    key.pop_back();
  }
  return key;
}

// "2.1" of "2.1 is device 0 more loaded", "10.2" of "10.2: …"; else nothing.
std::string number_of(std::string_view key) {
  std::string number(key.substr(0, std::min(key.find_first_of(" :)"), key.size())));
  while (number.ends_with('.')) number.pop_back();
  const bool digits = std::any_of(number.begin(), number.end(),
                                  [](unsigned char c) { return std::isdigit(c) != 0; });
  return digits ? number : "";
}

constexpr std::string_view kQuestionsPrefix = "Questions: ";

std::string topic_of(const Section& section) {
  const std::string& heading = section.heading;
  return heading.starts_with(kQuestionsPrefix) ? heading.substr(kQuestionsPrefix.size()) : heading;
}

// Where notes may go, by their keys. Questions come before sections of the same number.
std::map<std::string, Words*> places_of(Document& document) {
  std::map<std::string, Words*> places;
  const auto add = [&places](std::string_view heading, Words& words) {
    const std::string key = key_of(heading);
    if (!key.empty()) places.emplace(key, &words);
  };
  for (auto& section : document.sections) {
    for (auto& question : section.questions) {
      add(question.number, question.notes);
      add(question.question, question.notes);
      add(numbered(question), question.notes);
    }
  }
  for (auto& section : document.sections) {
    add(section.heading, section.notes);
    add(topic_of(section), section.notes);
    add(number_of(key_of(topic_of(section))), section.notes);
  }
  return places;
}

Words* place_of(const std::map<std::string, Words*>& places, const std::string& heading) {
  const std::string key = key_of(heading);
  auto found = places.find(key);
  if (found == places.end()) found = places.find(number_of(key));
  return found == places.end() ? nullptr : found->second;
}

std::vector<std::string> known_headings(const Document& document) {
  std::vector<std::string> known;
  for (const auto& section : document.sections) {
    if (section.questions.empty() && !section.heading.empty()) known.push_back(section.heading);
    for (const auto& question : section.questions) known.push_back(numbered(question));
  }
  return known;
}

}  // namespace

std::vector<Note> parse_notes(std::string_view text, const std::string& file) {
  require_utf8(text, file);
  const std::string clean = without_comments(text);
  std::vector<Note> notes = {{}};
  size_t line_number = 0;
  for (size_t begin = 0; begin < clean.size();) {
    const size_t end = std::min(clean.find('\n', begin), clean.size());
    const std::string line = clean.substr(begin, end - begin);
    begin = end + 1;
    ++line_number;
    const size_t marks = std::min(line.find_first_not_of('#'), line.size());
    const bool heading = marks > 0 && marks < line.size() && line[marks] == ' ';
    if (heading && marks == 1) continue;  // the title
    if (heading) {
      notes.push_back({trimmed(std::string_view(line).substr(marks)), "", line_number});
    } else {
      notes.back().words += line + "\n";
    }
  }
  for (auto& note : notes) note.words = trimmed(note.words);
  std::erase_if(notes, [](const Note& note) { return note.words.empty(); });
  return notes;
}

void add_notes(Document& document, const std::vector<Note>& notes, const std::string& file) {
  const auto places = places_of(document);
  std::map<Words*, size_t> taken;  // the line of the note that is there
  std::vector<Words*> chosen;
  for (const auto& note : notes) {
    Words* place = note.heading.empty() ? &document.notes : place_of(places, note.heading);
    if (place == nullptr) {
      const auto known = known_headings(document);
      const std::string meant = did_you_mean(note.heading, known);
      throw Error(Code::kUsage,
                  fmt::format("line {} of {}: this report has nothing called \"{}\"", note.line,
                              file, note.heading),
                  meant.empty()
                      ? "use one of these headings, or its number alone"
                      : fmt::format("did you mean \"{}\"? Its number alone will do", meant),
                  known);
    }
    const auto [other, is_new] = taken.emplace(place, note.line);
    if (!is_new) {
      throw Error(Code::kUsage,
                  fmt::format("lines {} and {} of {} are notes on the same: \"{}\"", other->second,
                              note.line, file, note.heading),
                  "write them under one heading");
    }
    chosen.push_back(place);
  }
  for (size_t i = 0; i < notes.size(); ++i) *chosen[i] = notes[i].words;
}

std::string notes_template(const Document& document) {
  std::string text = fmt::format(
      "# Notes: {}\n\n"
      "<!-- Your own words go below the headings: paragraphs, and lists whose lines start with "
      "\"- \". A heading\nwithout words is left out of the report. `lockstep report` with this "
      "folder puts them into the report. -->\n",
      clean_text(document.title));
  for (const auto& heading : known_headings(document)) {
    text += fmt::format("\n## {}\n\n", clean_text(heading));
  }
  return text;
}

}  // namespace lockstep
