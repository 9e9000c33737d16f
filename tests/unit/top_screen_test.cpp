#include "cli/top/top_screen.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <algorithm>
#include <iterator>

#include "lockstep/table.hpp"
#include "top_support.hpp"

namespace lockstep::cli::top_screen_test {
namespace {

using test::plain;
using test::rank_after;
using test::run_of;
using test::time_of;

using Lines = std::vector<std::string>;

std::string name_of(size_t run) {
  return fmt::format("train-{:03}", run);
}

// Runs "train-000" to "train-199" or so, as two samples saw them.
TopView many_runs(
    size_t runs, size_t ranks,
    const std::function<void(RunReading&)>& change = [](RunReading&) {}) {
  TopRates rates;
  TopView view;
  for (const int64_t step : {10, 20}) {
    std::vector<RunReading> readings;
    for (size_t i = 0; i < runs; ++i) {
      readings.push_back(run_of(std::vector<RankReading>(ranks, rank_after(step, 1)), name_of(i)));
      change(readings.back());
    }
    view = rates.update(readings, time_of(step));
  }
  return view;
}

Lines with(const Lines& lines, const std::string& part) {
  Lines found;
  for (const auto& line : lines) {
    if (line.find(part) != std::string::npos) found.push_back(line);
  }
  return found;
}

TEST(TopKeys, AreReadAsTerminalsSendThem) {
  EXPECT_EQ(
      decode_keys("\033[A\033OB\033[5~\033[6~\033[H\033[4~"),
      (std::vector<KeyPress>{
          {Key::kUp}, {Key::kDown}, {Key::kPageUp}, {Key::kPageDown}, {Key::kHome}, {Key::kEnd}}));
  EXPECT_EQ(decode_keys("/a\x7f\r"),
            (std::vector<KeyPress>{
                {Key::kCharacter, '/'}, {Key::kCharacter, 'a'}, {Key::kErase}, {Key::kEnter}}));
  EXPECT_EQ(decode_keys("\033"), (std::vector<KeyPress>{{Key::kEscape}}));
  EXPECT_TRUE(decode_keys("\033[1;5C\033[").empty()) << "what means nothing here types nothing";
}

TEST(TopScreen, OneRunIsDrawnWhole) {
  const TopView view = many_runs(1, 3);
  const Lines lines = TopScreen(1).draw(view, 24, plain(80));
  ASSERT_EQ(lines.size(), 24U);
  EXPECT_EQ(lines.front(), "lockstep top  1 run  every 1.00 s");
  EXPECT_EQ(Lines(lines.begin() + 1, lines.begin() + 8), draw_run(view.runs[0], plain(80)));
  EXPECT_EQ(lines.back(), "q quit  Enter fold");
}

TEST(TopScreen, RunsThatFitAreUnfoldedAndApart) {
  const Lines lines = TopScreen(1).draw(many_runs(2, 1), 24, plain(80));
  EXPECT_EQ(with(lines, "rank 0").size(), 2U);
  EXPECT_TRUE(lines[1].starts_with("▌ train-000"));
  const auto gap = std::find(lines.begin(), lines.end(), "");
  ASSERT_NE(gap, lines.end());
  EXPECT_TRUE(std::next(gap)->starts_with("  train-001")) << *std::next(gap);
}

TEST(TopScreen, RunsThatDoNotFitAreALineEach) {
  const Lines lines = TopScreen(1).draw(many_runs(12, 8), 24, plain(80));
  ASSERT_EQ(lines.size(), 24U);
  EXPECT_EQ(lines[0], "lockstep top  12 runs  every 1.00 s");
  EXPECT_EQ(lines[1], "▌ train-000  8 ranks  training  step 20  10 steps/s  loss 0.125  busy 80 %");
  EXPECT_EQ(with(lines, "train-").size(), 12U);
  EXPECT_EQ(lines.back(), "q quit  ↑↓ select  Enter fold  / find  a all");
}

TEST(TopScreen, EnterUnfoldsTheSelectedRunOnly) {
  TopScreen screen(1);
  const TopView view = many_runs(12, 3);
  screen.draw(view, 24, plain(80));
  EXPECT_TRUE(screen.press({{Key::kDown}, {Key::kEnter}}));
  Lines lines = screen.draw(view, 24, plain(80));
  EXPECT_EQ(with(lines, "▌ train-001").size(), 1U);
  EXPECT_EQ(with(lines, "rank 2").size(), 1U) << "unfolded to its end";
  screen.press({{Key::kEnter}});
  lines = screen.draw(view, 24, plain(80));
  EXPECT_TRUE(with(lines, "rank 2").empty());
}

TEST(TopScreen, TheSelectionStaysInSightAndWithItsRun) {
  TopScreen screen(1);
  TopView view = many_runs(200, 2);
  screen.draw(view, 24, plain(80));
  for (int i = 0; i < 50; ++i) {
    screen.press({{Key::kDown}});
    const Lines lines = screen.draw(view, 24, plain(80));
    EXPECT_EQ(with(lines, "▌ " + name_of(static_cast<size_t>(i) + 1)).size(), 1U);
  }
  EXPECT_NE(screen.draw(view, 24, plain(80)).back().find("30-51 of 200"), std::string::npos)
      << screen.draw(view, 24, plain(80)).back();
  view.runs.erase(view.runs.begin());  // one above it ends
  EXPECT_EQ(with(screen.draw(view, 24, plain(80)), "▌ train-050").size(), 1U);
  screen.press({{Key::kEnd}});
  EXPECT_EQ(with(screen.draw(view, 24, plain(80)), "▌ train-199").size(), 1U);
  screen.press({{Key::kHome}});
  EXPECT_TRUE(screen.draw(view, 24, plain(80))[1].starts_with("▌ train-001"));
}

TEST(TopScreen, PagesScrollAndEndWhereTheLinesEnd) {
  TopScreen screen(1);
  const TopView view = many_runs(200, 1);
  screen.draw(view, 24, plain(80));
  screen.press({{Key::kPageDown}});
  EXPECT_TRUE(screen.draw(view, 24, plain(80))[1].starts_with("  train-021"));
  for (int i = 0; i < 50; ++i) screen.press({{Key::kPageDown}});
  EXPECT_TRUE(screen.draw(view, 24, plain(80))[22].starts_with("  train-199"));
  screen.press({{Key::kPageUp}});
  EXPECT_TRUE(screen.draw(view, 24, plain(80))[22].starts_with("  train-178"));
}

TEST(TopScreen, ArrowsScrollASingleRun) {
  TopScreen screen(1);
  const TopView view = many_runs(1, 40);
  screen.draw(view, 24, plain(80));
  screen.press({{Key::kDown}});
  EXPECT_TRUE(screen.draw(view, 24, plain(80))[1].starts_with("rank 0"));
  screen.press({{Key::kUp}});
  EXPECT_TRUE(screen.draw(view, 24, plain(80))[1].starts_with("train-000"));
}

TEST(TopScreen, FindsByName) {
  TopScreen screen(1);
  const TopView view = many_runs(200, 8);
  screen.draw(view, 24, plain(80));
  screen.press(decode_keys("/-12"));
  Lines lines = screen.draw(view, 24, plain(80));
  EXPECT_EQ(lines[0], "lockstep top  10 of 200 runs  every 1.00 s");
  EXPECT_TRUE(lines.back().starts_with("name: -12")) << lines.back();
  EXPECT_EQ(with(lines, "train-12").size(), 10U);
  EXPECT_TRUE(screen.press(decode_keys("q"))) << "a letter of the name, not a command";
  EXPECT_EQ(screen.draw(view, 24, plain(80))[1], "no run's name has \"-12q\" in it");
  screen.press(decode_keys("\x7f\r"));
  EXPECT_EQ(screen.draw(view, 24, plain(80))[0],
            "lockstep top  10 of 200 runs  with \"-12\"  every 1.00 s");
  screen.press(decode_keys("\033"));
  EXPECT_EQ(screen.draw(view, 24, plain(80))[0], "lockstep top  200 runs  every 1.00 s");
}

TEST(TopScreen, ATroubledRunShowsItWhenFolded) {
  const TopView view = many_runs(12, 8, [](RunReading& run) {
    if (run.info.run_name == name_of(3)) run.ranks[5].process = ProcessState::kGone;
  });
  const Lines lines = TopScreen(1).draw(view, 24, plain(80));
  EXPECT_EQ(with(lines, "1 rank in trouble"),
            Lines{"  train-003  1 rank in trouble  8 ranks  step 20  10 steps/s  loss 0.125"});
}

TEST(TopScreen, QuitsOnQ) {
  EXPECT_FALSE(TopScreen(1).press(decode_keys("q")));
  EXPECT_TRUE(TopScreen(1).press(decode_keys("xz")));
}

TEST(TopScreen, NeverWiderOrTallerThanTheWindow) {
  const TopView view = many_runs(30, 3);
  for (const size_t width : {1, 2, 3, 10, 39, 40, 79, 80, 200}) {
    for (size_t height = 1; height < 30; ++height) {
      for (const bool utf8 : {false, true}) {
        TopScreen screen(1);
        screen.draw(view, height, plain(width, utf8));
        screen.press(decode_keys("jj\r/rain\r"));
        const Lines lines = screen.draw(view, height, plain(width, utf8));
        EXPECT_EQ(lines.size(), height);
        for (const auto& line : lines) EXPECT_LE(display_width(line), width) << line;
      }
    }
  }
}

TEST(TopScreen, FortyColumnsShowTheImportantKeys) {
  const Lines lines = TopScreen(1).draw(many_runs(200, 8), 24, plain(40));
  EXPECT_EQ(lines.back(), "q quit  ↑↓ select  / find    1-22 of 200");
  EXPECT_EQ(lines[1], "▌ train-000  8 ranks  training  step 20");
}

TEST(TopScreen, NoRunIsAFriendlyLine) {
  const Lines lines = TopScreen(2).draw({}, 24, plain(100));
  EXPECT_EQ(lines[0], "lockstep top  0 runs  every 2.00 s");
  EXPECT_EQ(lines[1], no_run_text());
  EXPECT_EQ(lines.back(), "q quit");
}

}  // namespace
}  // namespace lockstep::cli::top_screen_test
