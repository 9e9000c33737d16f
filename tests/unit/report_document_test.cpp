#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <regex>

#include "base/file.hpp"
#include "lockstep/error.hpp"
#include "report/document.hpp"
#include "report/pages.hpp"
#include "report_support.hpp"

namespace lockstep::test::report_document_test {
namespace {

constexpr std::time_t kDate = 1767323040;  // 2026-01-02 03:04 UTC

Table small_table(const std::string& title, size_t rows) {
  Table table(title, {{"code"}, {"time", Align::kRight}, {"memory", Align::kRight}, {"stability"}});
  for (size_t i = 0; i < rows; ++i) {
    table.add_row({std::to_string(i), "82.4 ± 3.1 ms", "26.3 MiB", "finite, none skipped"});
  }
  table.add_note("Mean and deviation over two runs.");
  return table;
}

Figure line_figure() {
  return {LineChart{.title = "Time",
                    .x_label = "ACCUM_STEPS",
                    .unit = Unit::kMilliseconds,
                    .series = {{.name = "code 1", .x = {4, 8, 16}, .y = {80, 160, 320}}}},
          "Time grows with the micro-steps."};
}

std::string words(int count) {
  std::string text;
  for (int i = 0; i < count; ++i) text += i > 0 ? " measured" : "Measured";
  return text + ".";
}

// A report like that of homework 2: two tables, two charts, three answers.
Document homework() {
  Document document{.title = "Homework 2: accumulation and mixed precision",
                    .date = kDate,
                    .command = "lockstep lab homework2",
                    .facts = {{"host", "box"}, {"cpu", "a CPU"}, {"libtorch", "2.11.0"}}};
  document.sections = {
      {.heading = "Measurements",
       .tables = {small_table("Codes", 3), small_table("ACCUM_STEPS", 8)},
       .figures = {line_figure(), line_figure()}},
      {.heading = "Questions",
       .questions = {{"Time?", words(90)}, {"Memory?", words(90)}, {"Why?", words(90)}}}};
  document.records = {{"code1-run1", "records/code1-run1.json"}};
  return document;
}

TEST(ReportPages, AHomeworkFitsInTwoToThree) {
  const auto pages = lay_out_pages(homework());
  EXPECT_GE(pages.size(), 1U);
  EXPECT_LE(pages.size(), 2U);
  for (const auto& page : pages) expect_inside(page, kPrinted);
  EXPECT_EQ(count_text(pages.back(), "page " + std::to_string(pages.size()) + " of " +
                                         std::to_string(pages.size())),
            1U);
  EXPECT_EQ(count_text(pages[0], "Table 2. ACCUM_STEPS"), 1U);
  EXPECT_EQ(count_text(pages[0], "Figure 2. Time grows with the micro-steps."), 1U);
}

TEST(ReportPages, ALongTableRepeatsItsHeaderAndLosesNoRow) {
  Document document{.title = "Long"};
  document.sections.push_back({.heading = "All", .tables = {small_table("Two hundred", 200)}});
  const auto pages = lay_out_pages(document);
  ASSERT_GT(pages.size(), 2U);
  size_t rows = 0;
  for (const auto& page : pages) {
    expect_inside(page, kPrinted);
    EXPECT_EQ(count_text(page, "stability"), 1U);
    EXPECT_GT(count_text(page, "26.3 MiB"), 0U) << "a header without a row";
    rows += count_text(page, "26.3 MiB");
  }
  EXPECT_EQ(rows, 200U);
}

TEST(ReportPages, RowsAreNeverCut) {
  Document document{.title = "Cells of many lines"};
  Table table("Wrapped", {{"name"}, {"text"}});
  for (int i = 0; i < 40; ++i) table.add_row({"row" + std::to_string(i), words(60 + i) + " end"});
  document.sections.push_back({.tables = {table}});
  for (const auto& page : lay_out_pages(document)) {
    size_t begun = 0;
    size_t ended = 0;
    for (const auto& text : test::texts_of(page)) {
      begun += text.utf8.rfind("row", 0) == 0 ? 1 : 0;
      ended += text.utf8.size() >= 3 && text.utf8.substr(text.utf8.size() - 3) == "end" ? 1 : 0;
    }
    EXPECT_EQ(begun, ended);
  }
}

TEST(ReportPages, NoHeadingIsLeftAlone) {
  for (int fill = 20; fill < 75; ++fill) {
    Document document{.title = "T"};
    Section first;
    first.questions.push_back({"Q", words(fill * 12)});
    Section second{.heading = "The heading", .tables = {small_table("Under it", 2)}};
    Section third{.heading = "Another", .questions = {{"Asked?", words(40)}}};
    document.sections = {first, second, third};
    for (const auto& page : lay_out_pages(document)) {
      EXPECT_EQ(count_text(page, "The heading"), count_text(page, "Table 1. Under it")) << fill;
      EXPECT_EQ(count_text(page, "Table 1. Under it"), count_text(page, "stability")) << fill;
      EXPECT_EQ(count_text(page, "Another"), count_text(page, "Asked?")) << fill;
      const auto texts = test::texts_of(page);
      const auto asked = std::find_if(texts.begin(), texts.end(),
                                      [](const auto& text) { return text.utf8 == "Asked?"; });
      if (asked == texts.end()) continue;
      ASSERT_NE(asked + 1, texts.end());
      EXPECT_EQ((asked + 1)->utf8.rfind("Measured", 0), 0U) << "a question alone, " << fill;
    }
  }
}

TEST(ReportPages, WhateverIsInItStaysInside) {
  const std::string word(2000, 'W');
  Table wide(word, std::vector<Column>(30, {word.substr(0, 40), Align::kRight}));
  wide.add_row(std::vector<TableCell>(30, "123456789012345678901234567890"));
  wide.add_row(std::vector<TableCell>(30, words(300)));
  wide.add_note(word);
  Table none("No columns", {});
  Table empty("No rows", {{"a"}, {"b"}});
  Document document{.title = word, .command = word, .facts = {{word, word}, {"", ""}}};
  document.sections.push_back({.heading = word,
                               .tables = {wide, none, empty},
                               .figures = {line_figure(), {Timeline{}, word}, {BarChart{}, ""}},
                               .questions = {{word, word}, {"", ""}}});
  document.sections.emplace_back();
  document.records.assign(400, {word.substr(0, 30), "r"});
  for (const auto& page : lay_out_pages(document)) expect_inside(page, kPrinted);
  EXPECT_EQ(lay_out_pages(Document{}).size(), 1U);
}

TEST(ReportPages, NoPartOfATableHasLessThanThreeRows) {
  for (int fill = 10; fill < 60; ++fill) {
    Document document{.title = "T"};
    Section first;
    first.questions.push_back({"Q", words(fill * 12)});
    document.sections = {first, {.tables = {small_table("Divided", 20)}}};
    size_t rows = 0;
    for (const auto& page : lay_out_pages(document)) {
      const size_t here = count_text(page, "26.3 MiB");
      EXPECT_TRUE(here == 0 || here >= 3) << here << " rows, " << fill;
      EXPECT_LE(count_text(page, "Mean and deviation over two runs."), here) << "notes alone";
      rows += here;
    }
    EXPECT_EQ(rows, 20U);
  }
}

TEST(ReportPages, FiguresThatDoNotFitLeaveNoHole) {
  Timeline tall{.title = "Tall"};  // more than a third of a page
  for (int i = 0; i < 20; ++i) tall.rows.push_back({"row", {{"s", 0, 1, 0}}});
  size_t floated = 0;
  for (int fill = 10; fill < 50; ++fill) {
    Document document{.title = "T"};
    Section first;
    first.questions.push_back({"Q", words(fill * 12)});
    document.sections = {
        first,
        {.heading = "All", .tables = {small_table("Above", 3)}, .figures = {{tall, "A caption."}}},
        {.heading = "Then", .questions = {{"Asked?", words(900)}}}};
    const auto pages = lay_out_pages(document);
    for (size_t i = 0; i + 1 < pages.size(); ++i) {
      double lowest = 0;
      for (const auto& mark : pages[i].marks()) {
        const Box bounds = bounds_of(mark);
        if (bounds.bottom() <= kBody.bottom() + 1) lowest = std::max(lowest, bounds.bottom());
      }
      EXPECT_LT(kBody.bottom() - lowest, 150) << "an empty part of page " << i + 1 << ", " << fill;
    }
    const std::string page = joined_texts(pages[0]);
    floated += page.find("Asked?") < page.size() && page.find("A caption.") == std::string::npos;
    for (const auto& each : pages) expect_inside(each, kPrinted);
  }
  EXPECT_GT(floated, 0U) << "the text goes on before the figure";
}

TEST(ReportPages, ListsCodeWithNumbers) {
  Document document = homework();
  document.trained = {{"model", "mlp"}, {"command", words(60)}};
  document.code = {{"train.cpp", "int main() {\n\treturn 0;\n}\n" + std::string(400, 'x') + "\n"}};
  const auto pages = lay_out_pages(document);
  for (const auto& page : pages) expect_inside(page, kPrinted);
  EXPECT_EQ(count_text(pages.back(), "    return 0;"), 1U);
  EXPECT_GE(count_text(pages.back(), "}"), 1U);
  EXPECT_EQ(count_text(pages[0], "What was trained"), 1U);
}

TEST(ReportPdf, IsTheSameForTheSameDocument) {
  const std::string pdf = render_pdf(homework());
  EXPECT_EQ(pdf.rfind("%PDF-", 0), 0U);
  EXPECT_EQ(pdf, render_pdf(homework()));
  EXPECT_NE(pdf.find("20260102030400Z"), std::string::npos) << "the document's date";
  EXPECT_NE(pdf.find("/Count " + std::to_string(lay_out_pages(homework()).size())),
            std::string::npos);
}

TEST(ReportPdf, LeadsToSectionsRecordsAndCode) {
  Document document = homework();
  document.code = {{"train & test.cpp", "int main() {}\n"}, {"other.cpp", "never shown", false}};
  std::vector<std::string> titles;
  std::vector<std::string> paths;
  for (const auto& page : lay_out_pages(document)) {
    for (const auto& bookmark : page.bookmarks()) titles.push_back(bookmark.title);
    for (const auto& link : page.links()) {
      paths.push_back(link.path);
      EXPECT_GT(link.box.width, 0);
      EXPECT_LE(link.box.right(), kPrinted.right());
    }
  }
  EXPECT_EQ(titles, (std::vector<std::string>{
                        "Measurements", "Table 1. Codes", "Table 2. ACCUM_STEPS", "Questions",
                        "Time?", "Memory?", "Why?", "Records", "Code", "train & test.cpp"}));
  EXPECT_EQ(paths, (std::vector<std::string>{"records/code1-run1.json", "code/train & test.cpp",
                                             "code/other.cpp"}));
  for (const auto& text : {render_html(document), render_markdown(document)}) {
    EXPECT_NE(text.find("code/other.cpp"), std::string::npos);
    EXPECT_EQ(text.find("never shown"), std::string::npos);
  }
  const std::string pdf = render_pdf(document);
  for (const char* part :
       {"/URI (records/code1-run1.json)", "/URI (code/train%20%26%20test.cpp)", "/Outlines"}) {
    EXPECT_NE(pdf.find(part), std::string::npos) << part;
  }
}

TEST(ReportHtml, NeedsNothingButItself) {
  const std::string html = render_html(homework());
  EXPECT_EQ(html.find("http"), std::string::npos);
  EXPECT_EQ(html.find("<script"), std::string::npos);
  EXPECT_EQ(html.find("<link"), std::string::npos);
  EXPECT_EQ(html.find("url("), std::string::npos);
  EXPECT_EQ(html.find(" src="), std::string::npos);
  const std::regex links("href=\"([^\"]*)\"");
  size_t count = 0;
  for (std::sregex_iterator at(html.begin(), html.end(), links), end; at != end; ++at, ++count) {
    EXPECT_EQ((*at)[1].str(), "records/code1-run1.json");
  }
  EXPECT_EQ(count, 1U);
  EXPECT_EQ(xml_fault(html, {"meta"}), "");
  for (const char* part :
       {"prefers-color-scheme:dark", "@media print", "name=\"viewport\"",
        "<td class=\"r\">26.3 MiB</td>", "2026-01-02 03:04 UTC", "Figure 2. Time grows"}) {
    EXPECT_NE(html.find(part), std::string::npos) << part;
  }
}

TEST(ReportHtml, TimelinesCanBeZoomed) {
  Document document = homework();
  EXPECT_EQ(render_html(document).find("<script"), std::string::npos) << "nothing to zoom";
  const std::string evil = "</script><script>alert(1)</script>";
  document.sections[0].figures.push_back(
      {Timeline{.title = "Step",
                .rows = {{"rank 0 cpu:0", {{"F0", 0, 1.5, 0}, {evil, 2, 3, 1}, {"odd", 3, 2, 0}}}},
                .legend = {"F: forward", "B: backward"}},
       "A step."});
  const std::string html = render_html(document);
  EXPECT_EQ(xml_fault(html, {"meta"}), "");
  EXPECT_NE(html.find("\"label\":\"rank 0 cpu:0\""), std::string::npos);
  EXPECT_NE(html.find("\"begin\":0.0,\"colour\":0,\"end\":1.5,\"kind\":\"F: forward\""),
            std::string::npos);
  EXPECT_EQ(html.find("\"name\":\"odd\""), std::string::npos) << "ends before it begins";
  EXPECT_EQ(html.find("<script>alert"), std::string::npos);
  EXPECT_EQ(html.find("http"), std::string::npos);
  EXPECT_NE(html.find("<svg viewBox"), std::string::npos) << "the picture, without scripts";
}

TEST(ReportHtml, EveryTextIsEscaped) {
  const std::string evil = "<script>alert(\"x\")</script>&'\x01\xFF";
  Document document{.title = evil, .command = evil, .facts = {{evil, evil}}};
  document.author = document.notes = document.warning = evil;
  document.trained = {{evil, evil}};
  document.code = {{"a&b.cpp", evil}};
  Table table(evil, {{evil}});
  table.add_row({evil});
  table.add_note(evil);
  document.sections = {
      {.heading = evil,
       .tables = {table},
       .figures = {{BarChart{.title = evil, .categories = {evil}, .series = {{evil, {1}}}}, evil}},
       .questions = {{evil, evil, evil, evil}}}};
  document.records = {{evil, "javascript:alert(1)//\"><b>"}};
  const std::string html = render_html(document);
  EXPECT_EQ(xml_fault(html, {"meta"}), "");
  EXPECT_EQ(html.find("<script"), std::string::npos);
  EXPECT_EQ(html.find("<b>"), std::string::npos);
  EXPECT_EQ(html.find("javascript:"), std::string::npos)
      << "a link is never an address with a scheme";
  EXPECT_EQ(html.find('\x01'), std::string::npos);
  EXPECT_NE(html.find("&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt;&amp;&#39; \uFFFD"),
            std::string::npos);
}

TEST(ReportMarkdown, LinksFiguresAndRecords) {
  const std::string text = render_markdown(homework());
  for (const char* part :
       {"# Homework 2", "- date: 2026-01-02 03:04 UTC", "- command: `lockstep lab homework2`",
        "- libtorch: 2.11.0", "## Measurements", "### Codes", "![Time](figure-1.svg)",
        "![Time](figure-2.svg)", "Figure 2. Time grows", "**Time?** Measured",
        "[code1-run1](records/code1-run1.json)"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part;
  }
}

TEST(ReportMarkdown, TextHasNoMeaning) {
  const std::string text = render_markdown(
      {.title = "a\n# b", .command = "run `x`", .facts = {{"host", "[a](b) <i>*c*"}}});
  EXPECT_NE(text.find("# a # b\n"), std::string::npos);
  EXPECT_NE(text.find("`` run `x` ``"), std::string::npos);
  EXPECT_NE(text.find("\\[a\\](b) \\<i>\\*c\\*"), std::string::npos);
}

TEST(ReportFiles, AreWrittenOrRefusedByName) {
  const auto folder =
      std::filesystem::temp_directory_path() / ("lockstep-report-" + std::to_string(::getpid()));
  std::filesystem::create_directories(folder);
  write_report(homework(), folder.string());
  for (const char* name :
       {"report.md", "report.html", "report.pdf", "figure-1.svg", "figure-2.svg"}) {
    EXPECT_TRUE(std::filesystem::exists(folder / name)) << name;
  }
  EXPECT_EQ(read_text_file((folder / "report.pdf").string()), render_pdf(homework()));
  std::filesystem::remove_all(folder);
  try {
    write_report(homework(), folder.string());
    FAIL() << "the folder is gone";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kFileWrite);
  }
}

}  // namespace
}  // namespace lockstep::test::report_document_test
