#include "lockstep/table.hpp"

#include <gtest/gtest.h>
#include <pty.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>
#include <sstream>

#include "lockstep/error.hpp"

namespace lockstep::test::table_test {
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

// As the labs have them: texts on the left, figures that must not be broken on the right.
Table wide() {
  Table table("Speed of all set-ups on this machine, with a title that is long as well",
              {{"set-up"},
               {"step time", Align::kRight},
               {"range of the steps", Align::kRight},
               {"proportional to the devices?"},
               {"bytes", Align::kRight}});
  table.add_row({"DataParallel on cpu:2", "77.8 ± 5.1 ms", "70.1 … 90.2 ms",
                 "no: 71 % of twice the speed of one", "12.0 MiB"});
  table.add_row({"one device", "110 ± 2 ms", "108 … 113 ms", "one device", "0 B"});
  table.add_note("A note that is longer than the window is wide, so it has to be broken too.");
  return table;
}

TEST(Table, AWindowThatIsWideEnoughChangesNothing) {
  EXPECT_EQ(wide().terminal(false, 200), wide().terminal(false));
  EXPECT_EQ(wide().terminal(true, 200), wide().terminal(true));
}

TEST(Table, ANarrowWindowBreaksTextsButNoFigures) {
  EXPECT_EQ(wide().terminal(false, 80),
            "Speed of all set-ups on this machine, with a title that is long as well\n"
            "────────────────────────────────────────────────────────────────────────────────\n"
            "set-up              step time    range of the  proportional to the         bytes\n"
            "                                        steps  devices?\n"
            "────────────────────────────────────────────────────────────────────────────────\n"
            "DataParallel    77.8 ± 5.1 ms  70.1 … 90.2 ms  no: 71 % of twice the    12.0 MiB\n"
            "on cpu:2                                       speed of one\n"
            "one device         110 ± 2 ms    108 … 113 ms  one device                    0 B\n"
            "────────────────────────────────────────────────────────────────────────────────\n"
            "A note that is longer than the window is wide, so it has to be broken too.\n");
}

TEST(Table, AVeryNarrowWindowGetsABlockForEachRow) {
  EXPECT_EQ(wide().terminal(false, 50),
            "Speed of all set-ups on this machine, with a title\n"
            "that is long as well\n"
            "──────────────────────────────────────────────────\n"
            "set-up: DataParallel on cpu:2\n"
            "  step time                  77.8 ± 5.1 ms\n"
            "  range of the steps         70.1 … 90.2 ms\n"
            "  proportional to the        no: 71 % of twice the\n"
            "  devices?                   speed of one\n"
            "  bytes                      12.0 MiB\n"
            "──────────────────────────────────────────────────\n"
            "set-up: one device\n"
            "  step time                  110 ± 2 ms\n"
            "  range of the steps         108 … 113 ms\n"
            "  proportional to the        one device\n"
            "  devices?\n"
            "  bytes                      0 B\n"
            "──────────────────────────────────────────────────\n"
            "A note that is longer than the window is wide, so\n"
            "it has to be broken too.\n");
}

TEST(Table, RowsBecomeColumnsWhereThoseFit) {
  Table table("Speed", {{"set-up"},
                        {"step time", Align::kRight},
                        {"range", Align::kRight},
                        {"total time", Align::kRight},
                        {"speed-up", Align::kRight}});
  table.add_row({"single", "842 ± 698 µs", "246 … 1851 µs", "10.1 ms", "1"});
  table.add_row({"DataParallel", "6.95 ± 5.09 ms", "933 … 12116 µs", "29.9 ms", "0.12 ± 0.02"});
  table.add_note("A note.");
  EXPECT_EQ(table.terminal(false, 50),
            "Speed\n"
            "─────────────────────────────────────────\n"
            "set-up             single    DataParallel\n"
            "─────────────────────────────────────────\n"
            "step time    842 ± 698 µs  6.95 ± 5.09 ms\n"
            "range       246 … 1851 µs  933 … 12116 µs\n"
            "total time        10.1 ms         29.9 ms\n"
            "speed-up                1     0.12 ± 0.02\n"
            "─────────────────────────────────────────\n"
            "A note.\n");
}

TEST(Table, NoLineIsWiderThanTheWindow) {
  for (size_t width = 30; width < 160; ++width) {
    for (const auto& line : lines_of(wide().terminal(false, width))) {
      EXPECT_LE(display_width(line), width) << line;
    }
  }
}

TEST(TerminalWidth, IsWhatTheTerminalOrTheUserSays) {
  int terminal = -1;
  int other = -1;
  winsize window{.ws_row = 24, .ws_col = 57, .ws_xpixel = 0, .ws_ypixel = 0};
  ASSERT_EQ(::openpty(&other, &terminal, nullptr, nullptr, &window), 0);
  ::unsetenv("COLUMNS");
  EXPECT_EQ(terminal_width(terminal), 57U);
  ::setenv("COLUMNS", "66", 1);
  EXPECT_EQ(terminal_width(terminal), 66U);
  for (const char* nonsense : {"", "0", "-3", "wide", "80x24"}) {
    ::setenv("COLUMNS", nonsense, 1);
    EXPECT_EQ(terminal_width(terminal), 57U) << nonsense;
  }
  int pipe_ends[2];
  ASSERT_EQ(::pipe(pipe_ends), 0);
  ::setenv("COLUMNS", "66", 1);
  EXPECT_EQ(terminal_width(pipe_ends[1]), kAnyWidth) << "a pipe has no width";
  ::unsetenv("COLUMNS");
  for (const int descriptor : {terminal, other, pipe_ends[0], pipe_ends[1]}) ::close(descriptor);
}

TEST(ClipText, KeepsWholeCharacters) {
  EXPECT_EQ(clip_text("abc", 3), "abc");
  EXPECT_EQ(clip_text("abcd", 3), "ab…");
  EXPECT_EQ(clip_text("µµµµ", 3), "µµ…");
  EXPECT_EQ(clip_text("日本語", 4), "日…") << "half a wide character does not fit";
  EXPECT_EQ(clip_text("abc", 0), "");
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
}  // namespace lockstep::test::table_test
