#include <gtest/gtest.h>

#include "cli/top/top_draw.hpp"
#include "cli/top/top_screen.hpp"
#include "lockstep/table.hpp"
#include "lockstep/units.hpp"
#include "top_support.hpp"

namespace lockstep::cli::top_draw_test {
namespace {

using test::joined;
using test::plain;
using test::rank_after;
using test::run_of;
using test::time_of;
using test::two_samples;

TEST(TopDraw, WideToTheLetter) {
  EXPECT_EQ(joined(draw_runs(two_samples(), plain(80))),
            "train-4711  1 rank  for 3.00 s  process 4711  full memory bar = 40.0 MiB\n"
            "rank 0  training  step 20  10 steps/s  loss 0.125  busy 75 %  comm -  idle 25 %\n"
            "  cpu:0 ██████████████████████▒▒ 36.0 MiB  █████████████···  80 %              ▇\n"
            "  cpu:1 ███████████▒············ 18.0 MiB  ███████████·····  70 %              ▆\n");
}

TEST(TopDraw, NarrowToTheLetter) {
  EXPECT_EQ(joined(draw_runs(two_samples(), plain(40))),
            "train-4711  1 rank  for 3.00 s\n"
            "  process 4711\n"
            "  full memory bar = 40.0 MiB\n"
            "rank 0  training  step 20  10 steps/s\n"
            "  loss 0.125  busy 75 %  comm -\n"
            "  idle 25 %\n"
            "  cpu:0 ████████▒ 36.0 MiB  █████·  80 %\n"
            "  cpu:1 ████▒···· 18.0 MiB  ████··  70 %\n");
}

TEST(TopDraw, VeryWideShowsHardwarePeakAndCapacity) {
  const auto lines = draw_runs(two_samples(), plain(130, false));
  EXPECT_EQ(
      lines.at(2),
      "  cpu:0 core 0 ########################=== 36.0 MiB, peak 40.0 MiB, 1 % of 4.00 GiB    "
      "###############....  80 %                 *");
}

TEST(TopDraw, NoLineIsWiderThanAsked) {
  TopView view = two_samples([](RankReading& reading) {
    reading.status.collective = {
        .sequence = 12345, .operation = "reduce_scatter", .bytes = 24_MiB, .bucket = 12};
    reading.status.error = FirstError{.code = Code::kRankFailed,
                                      .message = std::string(300, 'x') + " and more\nlines"};
    reading.problem = "a long text about what is wrong with this page of the board";
  });
  for (size_t width = 1; width < 200; ++width) {
    for (const bool utf8 : {false, true}) {
      for (const auto& line : TopScreen(1).draw(view, 50, plain(width, utf8))) {
        EXPECT_LE(display_width(line), width) << line;
        EXPECT_EQ(line.find('\n'), std::string::npos);
      }
    }
  }
}

TEST(TopDraw, CollectivesSayWhetherTheyRun) {
  const auto text_with = [](int64_t finished_ns) {
    return joined(draw_runs(two_samples([finished_ns](RankReading& reading) {
                              reading.status.collective = {.sequence = 17,
                                                           .operation = "all_reduce",
                                                           .bytes = 24_MiB,
                                                           .bucket = 3,
                                                           .started_ns = time_of(15),
                                                           .finished_ns = finished_ns};
                            }),
                            plain(160)));
  };
  EXPECT_NE(text_with(0).find("all_reduce #17 bucket 3  24.0 MiB running for 500 ms"),
            std::string::npos)
      << text_with(0);
  EXPECT_NE(text_with(time_of(15) + 4'100'000).find("24.0 MiB took 4.10 ms"), std::string::npos);
}

TEST(TopDraw, TheFirstErrorIsShownInFewLines) {
  const auto lines = draw_runs(two_samples([](RankReading& reading) {
                                 reading.status.phase = Phase::kFailed;
                                 reading.status.error =
                                     FirstError{.code = Code::kRankFailed,
                                                .blamed_rank = 2,
                                                .message = "rank 2 ended while others needed it"};
                               }),
                               plain(80));
  EXPECT_EQ(lines.at(2), "  LS0022: rank 2 ended while others needed it (because of rank 2)");
  std::string message;
  for (int i = 0; i < 100; ++i) message += "word ";
  const auto longer = draw_runs(two_samples([&](RankReading& reading) {
                                  reading.status.error = FirstError{.message = message};
                                }),
                                plain(80));
  EXPECT_EQ(longer.size(), 2U + 3U + 2U) << "title, rank, three lines of error, two devices";
}

TEST(TopDraw, RanksThatDidNotStartHaveAStateOnly) {
  const auto lines =
      draw_runs(two_samples([](RankReading& reading) { reading.status.pid = 0; }), plain(80));
  EXPECT_EQ(lines.at(1), "rank 0  not started");
}

TEST(TopDraw, ColoursTakeNoWidthAndEnd) {
  const auto coloured = draw_runs(two_samples(), {.width = 80, .utf8 = true, .colour = true});
  const auto bare = draw_runs(two_samples(), plain(80));
  ASSERT_EQ(coloured.size(), bare.size());
  for (size_t i = 0; i < bare.size(); ++i) {
    std::string stripped;
    bool on = false;
    for (size_t at = 0; at < coloured[i].size(); ++at) {
      if (coloured[i][at] != '\033') {
        stripped += coloured[i][at];
        continue;
      }
      const size_t end = coloured[i].find('m', at);
      on = coloured[i].substr(at, end - at) != "\033[0";
      at = end;
    }
    EXPECT_EQ(stripped, bare[i]);
    EXPECT_FALSE(on) << "a colour left on";
  }
}

TEST(TopDraw, NamesCannotMoveTheCursor) {
  EXPECT_EQ(printable("a\033[2Jb\r\n\x7f", true), "a?[2Jb???");
  EXPECT_EQ(printable("caf\xe9 \xc2\x9b", true), "caf? ?");
  EXPECT_EQ(printable("12 µs ±", true), "12 µs ±");
  EXPECT_EQ(printable("12 µs ±", false), "12 us ?");
  TopRates rates;
  RunReading run = run_of({rank_after(1)}, "evil\033[H");
  run.ranks[0].status.devices[0].name = "\033]0;";
  for (const auto& line : draw_runs(rates.update({run}, time_of(1)), plain(80)))
    EXPECT_EQ(line.find('\033'), std::string::npos);
}

TEST(TopDraw, AsciiIsAscii) {
  for (const auto& line : TopScreen(0.05).draw(two_samples(), 20, plain(80, false))) {
    for (const char c : line) EXPECT_LT(static_cast<unsigned char>(c), 0x80) << line;
  }
}

TEST(TopDraw, ALinePerRankForOutputThatIsNoTerminal) {
  EXPECT_EQ(rank_lines(two_samples()),
            (std::vector<std::string>{
                "train-4711  rank 0  training  step 20  10 steps/s  loss 0.125  busy 75 %  comm -  "
                "idle 25 %  cpu:0 36.0 MiB 80 %  cpu:1 18.0 MiB 70 %"}));
}

TEST(TopDraw, SparklinesShowTheNewestAtTheRight) {
  EXPECT_EQ(sparkline({0, 0.5, 1}, 5, true), "  ▁▅█");
  EXPECT_EQ(sparkline({0, 0.5, 1}, 2, false), "=#");
  EXPECT_EQ(sparkline({}, 2, true), "  ");
  EXPECT_EQ(sparkline({-1, 7}, 2, false), "_#");
}

}  // namespace
}  // namespace lockstep::cli::top_draw_test
