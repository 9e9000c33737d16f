#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "report/document.hpp"

namespace lockstep {

/// What an author wrote under one heading of a file of notes.
struct Note {
  std::string heading;  ///< without "##"; "" for what is written before the first
  Words words;
  size_t line = 0;  ///< of the heading, from 1
};

/// Reads notes: Markdown with a heading `## 2.1 …` for each question or topic. A title `# …` and
/// comments `<!-- … -->` are skipped, and so are headings without words below them. `file` is named
/// in Errors: two notes under one heading, text that is not UTF-8.
std::vector<Note> parse_notes(std::string_view text, const std::string& file);

/// Puts the words where their headings say: a question's number or text, a section's heading or
/// topic, with or without what follows the number. An unknown heading is an Error that lists the
/// known ones, and then the document has not changed.
void add_notes(Document& document, const std::vector<Note>& notes, const std::string& file);

/// A file of notes with every heading and no words.
std::string notes_template(const Document& document);

}  // namespace lockstep
