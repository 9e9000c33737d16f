// notes.md in the folder of a report.

#include "report/notes.hpp"

#include "fuzz.hpp"

namespace lockstep::fuzz {
namespace {

Document document() {
  Document made;
  made.title = "Lab 5";
  made.sections.push_back({.heading = "Measurements"});
  made.sections.push_back(
      {.heading = "Questions: 2. Splitting",
       .questions = {{.question = "Is device 0 more loaded?", .answer = "Yes.", .number = "2.1"}}});
  return made;
}

std::string written(const std::vector<Note>& notes) {
  std::string text;
  for (const auto& note : notes) {
    if (!note.heading.empty()) text += "## " + note.heading + "\n";
    text += "\n" + note.words + "\n\n";
  }
  return text;
}

}  // namespace
}  // namespace lockstep::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  using namespace lockstep::fuzz;
  accepts([&] {
    const auto notes = parse_notes({reinterpret_cast<const char*>(data), size}, "notes.md");
    bool unnamed = false;         // words under a "## " without a name, which are not written again
    bool like_a_heading = false;  // an indented "## x" is words, but would not be if it stood first
    for (const auto& note : notes) {
      require(!note.words.empty(), "a note has words");
      unnamed = unnamed || (note.heading.empty() && &note != &notes.front());
      like_a_heading = like_a_heading || note.words.starts_with('#');
    }
    if (!unnamed && !like_a_heading) {
      const auto again = parse_notes(written(notes), "again");
      require(again.size() == notes.size(), "notes survive writing");
      for (size_t i = 0; i < notes.size(); ++i) {
        require_equal(notes[i].heading, again[i].heading, "headings survive writing");
        require_equal(notes[i].words, again[i].words, "words survive writing");
      }
    }
    Document report = document();
    add_notes(report, notes, "notes.md");
    render_markdown(report);
    for (const auto& note : notes) blocks_of(note.words);
  });
  return 0;
}
