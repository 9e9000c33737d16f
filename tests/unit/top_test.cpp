#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "board_support.hpp"
#include "cli/top_draw.hpp"
#include "cli/top_json.hpp"
#include "cli/top_line.hpp"
#include "cli/top_sample.hpp"
#include "lockstep/clock.hpp"
#include "lockstep/table.hpp"
#include "lockstep/units.hpp"

namespace lockstep::cli {
namespace {

using test::expect_error;

constexpr int64_t kSecond = 1'000'000'000;

// Rank 0 of a made-up run after `step` steps of 0.1 s, device i busy for 8 - i tenths of them.
RankReading rank_after(int64_t step, int devices = 2) {
  RankReading reading;
  reading.process = ProcessState::kRunning;
  RankStatus& status = reading.status;
  status.pid = 4712;
  status.phase = Phase::kTraining;
  status.program = "train";
  status.step = step;
  status.loss = 0.125;
  status.started_ns = kSecond;
  status.updated_ns = 2 * kSecond + step * kSecond / 10;
  for (int i = 0; i < devices; ++i) {
    status.devices.push_back({.name = "cpu:" + std::to_string(i),
                              .physical = "core " + std::to_string(i),
                              .capacity_bytes = 4_GiB,
                              .live_bytes = i == 0 ? 36_MiB : 18_MiB,
                              .peak_bytes = i == 0 ? 40_MiB : 20_MiB,
                              .busy_ns = step * kSecond / 100 * (8 - i)});
  }
  return reading;
}

RunReading run_of(std::vector<RankReading> ranks, const std::string& name = "train-4711") {
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    ranks[rank].status.rank = static_cast<int>(rank);
  RunReading run;
  run.path = "/dev/shm/lockstep-0-" + name;
  run.info = {.run_name = name,
              .ranks = static_cast<int>(ranks.size()),
              .launcher_pid = 4711,
              .launcher_alive = true,
              .started_ns = kSecond};
  run.ranks = std::move(ranks);
  return run;
}

// When the rank of rank_after(step) has just written.
int64_t time_of(int64_t step) {
  return 2 * kSecond + step * kSecond / 10;
}

// The view of a run with 10 steps between two samples.
TopView two_samples(const std::function<void(RankReading&)>& change = [](RankReading&) {}) {
  TopRates rates;
  rates.update({run_of({rank_after(10)})}, time_of(10));
  RankReading later = rank_after(20);
  change(later);
  return rates.update({run_of({later})}, time_of(20));
}

const RankView& first_rank(const TopView& view) {
  return view.runs.at(0).ranks.at(0);
}

TEST(TopRates, OneReadingHasNoRates) {
  TopRates rates;
  const TopView view = rates.update({run_of({rank_after(10)})}, time_of(10));
  EXPECT_TRUE(std::isnan(first_rank(view).steps_per_s));
  EXPECT_TRUE(std::isnan(first_rank(view).devices.at(0).busy));
  EXPECT_TRUE(first_rank(view).devices.at(0).recent.empty());
  EXPECT_EQ(first_rank(view).devices.at(0).status.live_bytes, 36_MiB);
}

TEST(TopRates, TwoReadingsHaveRates) {
  const TopView view = two_samples();
  const RankView& rank = first_rank(view);
  EXPECT_DOUBLE_EQ(rank.steps_per_s, 10);
  EXPECT_DOUBLE_EQ(rank.devices[0].busy, 0.8);
  EXPECT_DOUBLE_EQ(rank.devices[1].busy, 0.7);
  EXPECT_DOUBLE_EQ(rank.busy, 0.75) << "no clocks of its own: the mean of its devices";
  EXPECT_TRUE(std::isnan(rank.communicating));
  EXPECT_DOUBLE_EQ(rank.idle, 0.25);
  EXPECT_EQ(rank.devices[0].recent, std::vector<double>{0.8});
  EXPECT_DOUBLE_EQ(view.runs[0].age_s, 3);
}

TEST(TopRates, TheRanksOwnClocksCount) {
  const TopView view = two_samples([](RankReading& reading) {
    reading.status.busy_ns = 6 * kSecond / 10;
    reading.status.communicating_ns = 3 * kSecond / 10;
    reading.status.idle_ns = kSecond / 10;
  });
  EXPECT_DOUBLE_EQ(first_rank(view).busy, 0.6);
  EXPECT_DOUBLE_EQ(first_rank(view).communicating, 0.3);
  EXPECT_NEAR(first_rank(view).idle, 0.1, 1e-12);
}

TEST(TopRates, RatesAreOverTheTimeTheRankNotedNotOverTheSamples) {
  TopRates rates;
  rates.update({run_of({rank_after(10)})}, time_of(10) + kSecond / 20);
  const TopView view = rates.update({run_of({rank_after(11)})}, time_of(20));
  EXPECT_DOUBLE_EQ(first_rank(view).steps_per_s, 10);
}

TEST(TopRates, ASlowStepKeepsTheRateUntilItIsTooLate) {
  TopRates rates;
  rates.update({run_of({rank_after(10)})}, time_of(10));
  rates.update({run_of({rank_after(20)})}, time_of(20));
  const auto after = [&](double seconds) {
    const int64_t now = time_of(20) + static_cast<int64_t>(seconds * 1e9);
    return rates.update({run_of({rank_after(20)})}, now);
  };
  const TopView soon = after(2);
  EXPECT_DOUBLE_EQ(first_rank(soon).steps_per_s, 10);
  EXPECT_DOUBLE_EQ(first_rank(soon).quiet_s, 2);
  EXPECT_FALSE(first_rank(soon).troubled);
  const TopView late = after(4);
  EXPECT_EQ(first_rank(late).steps_per_s, 0);
  EXPECT_TRUE(std::isnan(first_rank(late).busy));
  EXPECT_EQ(first_rank(late).devices[0].recent.back(), 0);
  const TopView silent = after(11);
  EXPECT_TRUE(first_rank(silent).troubled);
  TopView again = rates.update({run_of({rank_after(140)})}, time_of(140));
  EXPECT_DOUBLE_EQ(first_rank(again).steps_per_s, 10) << "the hang is over";
  EXPECT_FALSE(first_rank(again).troubled);
}

TEST(TopRates, StartUpIsNoStepTime) {
  TopRates rates;
  rates.update({run_of({rank_after(0)})}, time_of(0));
  EXPECT_TRUE(
      std::isnan(first_rank(rates.update({run_of({rank_after(2)})}, time_of(2))).steps_per_s));
  EXPECT_DOUBLE_EQ(first_rank(rates.update({run_of({rank_after(3)})}, time_of(3))).steps_per_s, 10);
}

TEST(TopRates, ARestartedRankBeginsAnew) {
  TopRates rates;
  rates.update({run_of({rank_after(50)})}, time_of(50));
  RankReading other = rank_after(60);
  other.status.pid = 999;
  EXPECT_TRUE(std::isnan(first_rank(rates.update({run_of({other})}, time_of(60))).steps_per_s));
  other.status.step = 5;
  EXPECT_TRUE(std::isnan(first_rank(rates.update({run_of({other})}, time_of(61))).steps_per_s));
}

TEST(TopRates, HistoryIsBounded) {
  TopRates rates;
  TopView view;
  for (int64_t step = 1; step < 200; ++step)
    view = rates.update({run_of({rank_after(step)})}, time_of(step));
  EXPECT_EQ(first_rank(view).devices[0].recent.size(), kRecentSamples);
}

TEST(TopRates, ARunThatEndsStaysForAWhile) {
  TopRates rates;
  rates.update({run_of({rank_after(10)})}, time_of(10));
  const TopView ended = rates.update({}, time_of(11));
  ASSERT_EQ(ended.runs.size(), 1U);
  EXPECT_TRUE(ended.runs[0].ended);
  EXPECT_EQ(first_rank(ended).status.step, 10);
  EXPECT_EQ(rates.update({}, time_of(11) + 9 * kSecond).runs.size(), 1U);
  EXPECT_EQ(rates.update({}, time_of(11) + 11 * kSecond).runs.size(), 0U);
}

TEST(TopRates, ANameUsedAgainIsAnotherRun) {
  TopRates rates;
  rates.update({run_of({rank_after(10)})}, time_of(10));
  RunReading second = run_of({rank_after(20)});
  second.info.started_ns += kSecond;
  const TopView view = rates.update({second}, time_of(20));
  ASSERT_EQ(view.runs.size(), 2U);
  EXPECT_TRUE(view.runs[0].ended);
  EXPECT_TRUE(std::isnan(view.runs[1].ranks[0].steps_per_s)) << "nothing of the old run's steps";
}

TEST(TopRates, StatesNameWhatIsWrong) {
  const auto state_of = [](const std::function<void(RankReading&)>& change) {
    const TopView view = two_samples(change);
    return first_rank(view).state + (first_rank(view).troubled ? "!" : "");
  };
  EXPECT_EQ(state_of([](auto&) {}), "training");
  EXPECT_EQ(state_of([](auto& r) { r.status.pid = 0; }), "not started");
  EXPECT_EQ(state_of([](auto& r) { r.process = ProcessState::kGone; }), "died!");
  EXPECT_EQ(state_of([](auto& r) { r.process = ProcessState::kStopped; }), "stopped!");
  EXPECT_EQ(state_of([](auto& r) { r.process = ProcessState::kUnknown; }), "training");
  EXPECT_EQ(state_of([](auto& r) { r.status.phase = Phase::kFailed; }), "failed!");
  EXPECT_EQ(state_of([](auto& r) { r.problem = "damaged"; }), "unreadable!");
  EXPECT_EQ(state_of([](auto& r) {
              r.process = ProcessState::kGone;
              r.status.phase = Phase::kFinished;
            }),
            "finished");
}

TEST(TopRates, ACollectiveRunsUntilItHasFinished) {
  const auto seconds_of = [](int64_t finished_ns) {
    const TopView view = two_samples([finished_ns](RankReading& reading) {
      reading.status.collective = {.sequence = 3,
                                   .operation = "all_reduce",
                                   .started_ns = time_of(15),
                                   .finished_ns = finished_ns};
    });
    return first_rank(view).collective_s;
  };
  EXPECT_DOUBLE_EQ(seconds_of(0), 0.5);
  EXPECT_DOUBLE_EQ(seconds_of(time_of(15) + kSecond / 100), 0.01);
}

TEST(TopSelection, AnExactNameWinsOverABeginning) {
  const std::vector<RunReading> runs = {run_of({}, "train"), run_of({}, "train-2"),
                                        run_of({}, "other")};
  const auto chosen = [&](const std::string& selection) {
    std::vector<std::string> names;
    for (const auto& run : select_runs(runs, selection)) names.push_back(run.info.run_name);
    return names;
  };
  using Names = std::vector<std::string>;
  EXPECT_EQ(chosen("train"), (Names{"train"}));
  EXPECT_EQ(chosen("tra"), (Names{"train", "train-2"}));
  EXPECT_EQ(chosen(""), (Names{"train", "train-2", "other"}));
  EXPECT_EQ(chosen("x"), Names{});
}

TEST(TopSelection, AWrongNameGetsTheNearest) {
  const std::vector<RunReading> runs = {run_of({}, "practical5_dp-30531"), run_of({}, "abc")};
  const auto fail = [&](const std::string& name) {
    return [&runs, name] { fail_no_run(name, runs); };
  };
  expect_error(Code::kUsage, {"\"practicl5\"", "did you mean practical5_dp-30531?"},
               fail("practicl5"));
  expect_error(Code::kUsage, {"did you mean practical5_dp-30531?"}, fail("practical5_dp-30532"));
  expect_error(Code::kUsage, {"runs are: practical5_dp-30531, abc"}, fail("zzzzzz"));
  expect_error(Code::kUsage, {"no run of yours"}, [] { fail_no_run("x", {}); });
}

using TopBoards = test::BoardTest;

TEST_F(TopBoards, LiveRunsAreReadAndDamagedPagesTold) {
  const auto own = [this] { return select_runs(read_runs(), run_); };
  EXPECT_TRUE(own().empty());
  {
    const Board board = Board::create(Board::default_path(run_), 2, run_);
    board.page(0).start("train");
    board.page(0).set_step(7);
    const auto runs = own();
    ASSERT_EQ(runs.size(), 1U);
    ASSERT_EQ(runs[0].ranks.size(), 2U);
    EXPECT_EQ(runs[0].ranks[0].status.step, 7);
    EXPECT_EQ(runs[0].ranks[0].process, ProcessState::kRunning);
    EXPECT_EQ(runs[0].ranks[1].status.pid, 0);
    EXPECT_EQ(runs[0].ranks[1].process, ProcessState::kUnknown);

    board.page(1).set_phase(static_cast<Phase>(77));
    const auto damaged = own();
    EXPECT_NE(damaged.at(0).ranks[1].problem.find("phase 77"), std::string::npos);
    EXPECT_EQ(damaged[0].ranks[1].status.rank, 1);
    EXPECT_EQ(damaged[0].ranks[0].problem, "");
  }
  EXPECT_TRUE(own().empty());
}

TEST_F(TopBoards, AStoppedAndADeadRankAreTold) {
  const Board board = Board::create(Board::default_path(run_), 1, run_);
  const pid_t child = ::fork();
  if (child == 0) {
    board.page(0).start("train");
    ::raise(SIGSTOP);
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, WUNTRACED);
  ASSERT_TRUE(WIFSTOPPED(status));
  const auto state = [this] { return select_runs(read_runs(), run_).at(0).ranks.at(0).process; };
  EXPECT_EQ(state(), ProcessState::kStopped);
  ::kill(child, SIGKILL);
  ::waitpid(child, &status, 0);
  EXPECT_EQ(state(), ProcessState::kGone);
}

std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const auto& line : lines) text += line + "\n";
  return text;
}

DrawStyle plain(size_t width, bool utf8 = true) {
  return {.width = width, .utf8 = utf8, .colour = false};
}

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
      for (const auto& line : draw_screen(view, 1, 50, plain(width, utf8))) {
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
  for (const auto& line : draw_screen(two_samples(), 0.05, 20, plain(80, false))) {
    for (const char c : line) EXPECT_LT(static_cast<unsigned char>(c), 0x80) << line;
  }
}

TEST(TopDraw, TheScreenIsNeverTallerThanTheWindow) {
  TopRates rates;
  const TopView view =
      rates.update({run_of({rank_after(1), rank_after(1), rank_after(1)})}, time_of(1));
  const auto all = draw_screen(view, 1, 100, plain(80));
  EXPECT_EQ(all.at(0), "lockstep top  1 run  every 1.00 s  q quits");
  EXPECT_EQ(all.size(), 2U + 1U + 3U * 3U);
  const auto cut = draw_screen(view, 1, 6, plain(80));
  ASSERT_EQ(cut.size(), 6U);
  EXPECT_EQ(cut[4], all[4]);
  EXPECT_EQ(cut[5], "7 more lines: enlarge the window, or name one run");
  EXPECT_EQ(draw_screen(view, 1, 1, plain(80)).size(), 1U);
}

TEST(TopDraw, NoRunIsAFriendlyLine) {
  EXPECT_EQ(
      draw_screen({}, 2, 24, plain(100)),
      (std::vector<std::string>{"lockstep top  0 runs  every 2.00 s  q quits", "", no_run_text()}));
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

TEST(TopJson, HasWhatTheScreenHasAndNullForTheUnknown) {
  const auto value = top_json(two_samples([](RankReading& reading) {
    reading.status.loss = std::nan("");
    reading.status.devices[1].capacity_bytes = 0;
    reading.status.collective = {.sequence = 2, .operation = "barrier", .started_ns = time_of(20)};
    reading.status.error = FirstError{.code = Code::kRankAbsent, .message = "gone"};
  }));
  EXPECT_EQ(value.at("schema"), 1);
  const auto& run = value.at("runs").at(0);
  EXPECT_EQ(run.at("name"), "train-4711");
  EXPECT_EQ(run.at("ended"), false);
  const auto& rank = run.at("ranks").at(0);
  EXPECT_EQ(rank.at("state"), "training");
  EXPECT_EQ(rank.at("steps_per_s"), 10);
  EXPECT_EQ(rank.at("loss"), "nan");
  EXPECT_EQ(rank.at("communicating"), nullptr);
  EXPECT_EQ(rank.at("collective").at("running"), true);
  EXPECT_EQ(rank.at("collective").at("bucket"), nullptr);
  EXPECT_EQ(rank.at("error").at("code"), "LS0021");
  EXPECT_EQ(rank.at("error").at("blamed_rank"), nullptr);
  EXPECT_EQ(rank.at("devices").at(0).at("live_bytes"), 36_MiB);
  EXPECT_EQ(rank.at("devices").at(0).at("busy"), 0.8);
  EXPECT_EQ(rank.at("devices").at(1).at("capacity_bytes"), nullptr);
}

GpuSample busy_gpu() {
  return {.index = 0,
          .name = "NVIDIA H200",
          .memory_bytes = 140_GiB,
          .memory_used_bytes = 12_GiB,
          .utilisation = 0.87,
          .power_w = 412.4,
          .power_limit_w = 700,
          .temperature_c = 61,
          .sm_clock_mhz = 1980,
          .processes = std::vector<GpuProcess>{{.pid = 4712, .memory_bytes = 6_GiB}, {.pid = 4713}},
          .compute_capability = "9.0"};
}

TEST(TopGpus, StandAboveTheRunsToTheLetter) {
  TopView view = two_samples();
  view.gpus = {busy_gpu()};
  const auto lines = draw_runs(view, plain(100));
  EXPECT_EQ(lines.at(0),
            "GPU 0  NVIDIA H200  87 %  12.0 GiB of 140 GiB  412 of 700 W  61 °C  1980 MHz  "
            "2 processes");
  EXPECT_EQ(lines.at(1), "");
  EXPECT_TRUE(lines.at(2).starts_with("train-4711"));
  EXPECT_EQ(lines.size(), draw_runs(two_samples(), plain(100)).size() + 2);
  EXPECT_EQ(rank_lines(view).at(0), lines.at(0)) << "a line each where output is no terminal";
  EXPECT_EQ(rank_lines(view).size(), 2U);
}

TEST(TopGpus, WhatTheDriverDoesNotTellIsLeftOut) {
  TopView view;
  view.gpus = {{.index = 3, .name = "Old\033[H", .memory_bytes = 2_GiB, .memory_used_bytes = 0}};
  EXPECT_EQ(joined(draw_runs(view, plain(80))), "GPU 3  Old?[H  0 B of 2.00 GiB\n");
  view.gpus[0].power_w = 30;
  view.gpus[0].processes.emplace(1);
  EXPECT_EQ(joined(draw_runs(view, plain(80))),
            "GPU 3  Old?[H  0 B of 2.00 GiB  30 W  1 process\n");
}

TEST(TopGpus, NoLineIsWiderThanAskedAndAsciiIsAscii) {
  TopView view = two_samples();
  view.gpus = {busy_gpu(), busy_gpu()};
  for (size_t width = 1; width < 120; ++width) {
    for (const auto& line : draw_screen(view, 1, 50, plain(width, false))) {
      EXPECT_LE(display_width(line), width) << line;
      for (const char c : line) EXPECT_LT(static_cast<unsigned char>(c), 0x80) << line;
    }
  }
  EXPECT_NE(joined(draw_runs(view, plain(100, false))).find("61 C"), std::string::npos);
}

TEST(TopGpus, AreShownAlsoWhereNoRunGoesOn) {
  TopView view;
  view.gpus = {busy_gpu()};
  const auto lines = draw_screen(view, 2, 24, plain(100));
  ASSERT_EQ(lines.size(), 5U);
  EXPECT_EQ(lines[2], no_run_text());
  EXPECT_EQ(lines[3], "");
  EXPECT_TRUE(lines[4].starts_with("GPU 0  NVIDIA H200"));
}

TEST(TopGpus, JsonHasNullForTheUnknown) {
  TopView view;
  EXPECT_EQ(top_json(view).at("gpus"), nlohmann::json::array());
  view.gpus = {busy_gpu(), {.index = 1, .name = "Old"}};
  const auto gpus = top_json(view).at("gpus");
  EXPECT_EQ(gpus.at(0).at("name"), "NVIDIA H200");
  EXPECT_EQ(gpus.at(0).at("memory_used_bytes"), 12_GiB);
  EXPECT_EQ(gpus.at(0).at("utilisation"), 0.87);
  EXPECT_EQ(gpus.at(0).at("processes").at(0).at("memory_bytes"), 6_GiB);
  EXPECT_EQ(gpus.at(0).at("processes").at(1).at("memory_bytes"), nullptr);
  for (const char* name :
       {"utilisation", "power_w", "power_limit_w", "temperature_c", "sm_clock_mhz", "processes"}) {
    EXPECT_EQ(gpus.at(1).at(name), nullptr) << name;
  }
}

TEST(Nvml, TellsOfTheGpusOfThisMachine) {
  const Nvml nvml;
  if (!nvml.present()) {
    EXPECT_TRUE(nvml.sample().empty());
    EXPECT_EQ(nvml.driver_version(), "");
    EXPECT_EQ(nvml.cuda_version(), "");
    GTEST_SKIP() << "no NVIDIA driver here";
  }
  EXPECT_NE(nvml.driver_version(), "");
  EXPECT_NE(nvml.cuda_version(), "");
  const auto gpus = nvml.sample();
  ASSERT_FALSE(gpus.empty());
  for (const auto& gpu : gpus) {
    EXPECT_NE(gpu.name, "");
    EXPECT_GT(gpu.memory_bytes, 1_GiB);
    EXPECT_LE(gpu.memory_used_bytes, gpu.memory_bytes);
    EXPECT_GE(gpu.utilisation.value_or(0), 0);
    EXPECT_LE(gpu.utilisation.value_or(0), 1);
    if (gpu.power_w) {
      EXPECT_GT(*gpu.power_w, 1);
      EXPECT_LT(*gpu.power_w, 2000);
    }
    if (gpu.temperature_c) {
      EXPECT_GT(*gpu.temperature_c, 0);
      EXPECT_LT(*gpu.temperature_c, 120);
    }
    if (gpu.sm_clock_mhz) {
      EXPECT_LT(*gpu.sm_clock_mhz, 5000);
    }
  }
}

TEST(TopJson, ALossBeforeTheFirstStepIsUnknown) {
  TopRates rates;
  RankReading fresh = rank_after(0);
  fresh.status.loss = std::nan("");
  const auto value = top_json(rates.update({run_of({fresh})}, time_of(0)));
  EXPECT_EQ(value.at("runs").at(0).at("ranks").at(0).at("loss"), nullptr);
}

}  // namespace
}  // namespace lockstep::cli
