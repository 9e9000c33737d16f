#include "lockstep/table.hpp"

#include <gtest/gtest.h>
#include <pty.h>
#include <unistd.h>

#include <cstdlib>
#include <sstream>

#include "lockstep/error.hpp"

namespace lockstep {
namespace {

Table sample() {
  Table table("Speed", {{"set-up"}, {"time", Align::kRight}});
  table.add_row({"one", "4.0 ± 0.1 µs"});
  table.add_row({"two", "12 ms"});
  return table;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

TEST(DisplayWidth, CountsColumnsNotBytes) {
  EXPECT_EQ(display_width("abc"), 3U);
  EXPECT_EQ(display_width("4 µs ± 1"), 8U);
  EXPECT_EQ(display_width("⌈n⌉"), 3U);
  EXPECT_EQ(display_width("e\u0301"), 1U) << "a combining accent takes no column";
  EXPECT_EQ(display_width("日本"), 4U) << "wide characters take two columns";
}

TEST(DisplayWidth, BrokenBytesCountAsOne) {
  EXPECT_EQ(display_width("a\xC2"), 2U) << "sequence cut at the end";
  EXPECT_EQ(display_width("\xFF\xFE"), 2U) << "bytes that begin nothing";
  EXPECT_EQ(display_width("\xE2\x28\xA1"), 3U) << "no continuation byte";
}

TEST(Table, TerminalAlignsByDisplayWidth) {
  const auto lines = lines_of(sample().terminal(false));
  ASSERT_EQ(lines.size(), 7U);
  EXPECT_EQ(lines[0], "Speed");
  EXPECT_EQ(lines[2], "set-up          time");
  EXPECT_EQ(lines[4], "one     4.0 ± 0.1 µs");
  EXPECT_EQ(lines[5], "two            12 ms");
  for (const size_t rule : {1, 3, 6}) {
    EXPECT_EQ(display_width(lines[rule]), display_width(lines[4])) << "rule in line " << rule;
  }
}

TEST(Table, BoldOnlyWhenTold) {
  EXPECT_EQ(sample().terminal(false).find('\033'), std::string::npos);
  const auto lines = lines_of(sample().terminal(true));
  EXPECT_EQ(lines[2], "\033[1mset-up          time\033[0m");
  EXPECT_EQ(lines[5], "two            12 ms");
}

TEST(Table, LineBreaksInsideCellsDoNotBreakRows) {
  Table table("T", {{"a"}, {"b"}});
  table.add_row({"x\ny", "1"});
  EXPECT_EQ(lines_of(table.terminal(false))[4], "x y  1");
  EXPECT_NE(table.markdown().find("| x y | 1 |"), std::string::npos);
}

TEST(Table, NotesAreWrappedUnderTheTable) {
  Table table = sample();
  table.add_note("first");
  table.add_note(std::string(60, 'x') + " " + std::string(60, 'y'));
  const auto lines = lines_of(table.terminal(false));
  EXPECT_EQ(lines[7], "first");
  EXPECT_EQ(lines[8], std::string(60, 'x'));
  EXPECT_EQ(lines[9], std::string(60, 'y'));
}

TEST(Table, MarkdownEscapesWhatItWouldInterpret) {
  Table table("a|b", {{"spec"}, {"n", Align::kRight}});
  table.add_row({"cuda:0*2,1*2", "a|b"});
  table.add_note("one * two");
  EXPECT_EQ(table.markdown(),
            "### a\\|b\n\n"
            "| spec | n |\n"
            "| --- | ---: |\n"
            "| cuda:0\\*2,1\\*2 | a\\|b |\n"
            "\none \\* two\n");
}

TEST(Table, CsvQuotesOnlyWhereNeeded) {
  Table table("T", {{"plain"}, {"odd, name"}});
  table.add_row({"a b", "say \"hi\""});
  table.add_row({"two\nlines", ""});
  EXPECT_EQ(table.csv(),
            "plain,odd_name\r\n"
            "a b,\"say \"\"hi\"\"\"\r\n"
            "\"two\nlines\",\r\n");
}

TEST(Table, RefusesARowOfAnotherLength) {
  Table table = sample();
  EXPECT_THROW(table.add_row({"only one"}), Error);
}

// On a real terminal, so that only the variables can forbid styles.
TEST(MayStyle, OnATerminalUnlessForbidden) {
  int ours = -1;
  int terminal = -1;
  ASSERT_EQ(::openpty(&ours, &terminal, nullptr, nullptr, nullptr), 0);
  ::unsetenv("NO_COLOR");
  ::setenv("TERM", "xterm", 1);
  EXPECT_TRUE(may_style(terminal));
  ::setenv("NO_COLOR", "1", 1);
  EXPECT_FALSE(may_style(terminal));
  ::unsetenv("NO_COLOR");
  ::setenv("TERM", "dumb", 1);
  EXPECT_FALSE(may_style(terminal));
  ::setenv("TERM", "xterm", 1);
  int pipe_ends[2];
  ASSERT_EQ(::pipe(pipe_ends), 0);
  EXPECT_FALSE(may_style(pipe_ends[1])) << "not a terminal";
  for (const int end : pipe_ends) ::close(end);
  ::close(terminal);
  ::close(ours);
}

TEST(WrapText, BreaksBetweenWordsAndIndents) {
  EXPECT_EQ(wrap_text("one two three", 9, "  "), "  one two\n  three");
  EXPECT_EQ(wrap_text("incomprehensible x", 4), "incomprehensible\nx");
  EXPECT_EQ(wrap_text("a\nb", 80), "a\nb");
  EXPECT_EQ(wrap_text("µs µs µs", 8), "µs µs µs") << "columns, not bytes";
  EXPECT_EQ(wrap_text("", 8), "");
}

}  // namespace
}  // namespace lockstep
