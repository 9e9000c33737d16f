#include <gtest/gtest.h>

#include "lockstep/error.hpp"
#include "report/notes.hpp"
#include "report/pages.hpp"
#include "report/zip.hpp"
#include "report_support.hpp"
#include "support.hpp"

namespace lockstep::test::report_notes_test {
namespace {

Document two_topics() {
  Document document{.title = "Practical 5"};
  document.sections = {
      {.heading = "Measurements"},
      {.heading = "Questions: speed",
       .questions = {{"Did training become faster?", "Yes.", "1.1"}, {"Why?", "Because.", "1.2"}}},
      {.heading = "Questions: 10.2 micro-batches",
       .questions = {{"What changes?", "It.", "10.2"}}}};
  return document;
}

Document with_notes(const std::string& text) {
  Document document = two_topics();
  add_notes(document, parse_notes(text, "notes.md"), "notes.md");
  return document;
}

TEST(ReportNotes, GoWhereTheirHeadingsSay) {
  const Document document = with_notes(
      "# My notes\n\nFirst of all.\n\n## 1.1\nBy number.\n## Why?\nBy text.\n"
      "### speed\nBy topic.\n## 10.2: whatever follows\nBy number again.\n"
      "## measurements\nOf a section.\n");
  EXPECT_EQ(document.notes, "First of all.");
  EXPECT_EQ(document.sections[1].questions[0].notes, "By number.");
  EXPECT_EQ(document.sections[1].questions[1].notes, "By text.");
  EXPECT_EQ(document.sections[1].notes, "By topic.");
  EXPECT_EQ(document.sections[2].questions[0].notes, "By number again.");
  EXPECT_EQ(document.sections[0].notes, "Of a section.");
}

TEST(ReportNotes, TheTemplateAddsNothing) {
  const std::string text = notes_template(two_topics());
  EXPECT_NE(text.find("## 1.1 Did training become faster?"), std::string::npos);
  EXPECT_TRUE(parse_notes(text, "notes.md").empty());
  std::string filled = text;
  filled.insert(filled.find("## 1.2"), "It halved.\n\n");
  EXPECT_EQ(with_notes(filled).sections[1].questions[0].notes, "It halved.");
}

TEST(ReportNotes, UnknownHeadingsListTheKnownOnes) {
  expect_error(Code::kUsage,
               {"line 3 of notes.md", "nothing called \"7.7 Moon\"",
                "1.1 Did training become faster?", "10.2 What changes?", "Measurements"},
               [] { with_notes("\n\n## 7.7 Moon\nWords.\n"); });
  expect_error(Code::kUsage, {"lines 1 and 3 of notes.md", "same"},
               [] { with_notes("## 1.1\na\n## Did training become faster?\nb\n"); });
  EXPECT_NO_THROW(with_notes("## 7.7 Moon\n<!-- nothing -->\n")) << "without words";
  expect_error(Code::kFileFormat, {"line 2 of notes.md is not UTF-8"},
               [] { parse_notes("a\n\xFF\n", "notes.md"); });
}

TEST(ReportNotes, AreShownApartInEveryFormat) {
  Document document = with_notes("## 1.1\nIt <halved> here.\n\n- one\n- two\n");
  document.author = "Ada";
  const std::string html = render_html(document);
  EXPECT_NE(html.find("<p class=\"label\">Notes by Ada</p>\n<p>It &lt;halved&gt; here.</p>\n<ul>\n"
                      "<li>one</li>\n<li>two</li>\n</ul>"),
            std::string::npos);
  EXPECT_EQ(test::xml_fault(html, {"meta"}), "");
  const std::string markdown = render_markdown(document);
  EXPECT_NE(markdown.find("> **Notes by Ada**\n>\n> It \\<halved> here.\n>\n> - one\n"),
            std::string::npos);
  const auto pages = lay_out_pages(document);
  EXPECT_EQ(test::count_text(pages[0], "Ada"), 1U);
  EXPECT_EQ(test::count_text(pages[0], "Notes by Ada"), 1U);
  EXPECT_EQ(test::count_text(pages[0], "• two"), 1U);
}

TEST(ReportZip, HasEveryFileWithItsChecksum) {
  EXPECT_EQ(crc32_of("123456789"), 0xCBF43926U);
  const std::string zip = render_zip({{"report.md", "text"}, {"records/a.json", "{}"}}, "lab5", 0);
  EXPECT_EQ(zip.rfind("PK\x03\x04", 0), 0U);
  EXPECT_NE(zip.find("lab5/report.mdtext"), std::string::npos) << "stored as it is";
  EXPECT_NE(zip.find("lab5/records/a.json{}"), std::string::npos);
  EXPECT_EQ(zip, render_zip({{"report.md", "text"}, {"records/a.json", "{}"}}, "lab5", 0));
  const std::string end = zip.substr(zip.size() - 22);
  EXPECT_EQ(end.substr(0, 4), "PK\x05\x06");
  EXPECT_EQ(end[10], 2) << "entries";
}

}  // namespace
}  // namespace lockstep::test::report_notes_test
