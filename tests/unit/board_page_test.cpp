#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "board_support.hpp"
#include "lockstep/board.hpp"
#include "support.hpp"

namespace lockstep {
namespace {

using test::BoardTest;
using test::expect_error;
using test::in_child;

TEST_F(BoardTest, WhatARankWritesAReaderSees) {
  const Board made = Board::create(path_, 2, "run");
  const Board board = Board::open(path_);
  BoardPage page = BoardPage::attach(path_, 1);
  page.start("practical5_dp");
  page.set_phase(Phase::kTraining);
  page.set_step(41);
  page.set_loss(0.25);
  page.add_clock(Activity::kBusy, 100);
  page.add_clock(Activity::kBusy, 11);
  page.add_clock(Activity::kCommunicating, 20);
  page.add_clock(Activity::kIdle, 3);
  page.set_device(0, {"cpu:0", "core 0", 1000, 10, 20, 30});
  page.set_device(1, {"cpu:1", "core 1", 2000, 11, 21, 31});
  page.update_device(1, 12, 22, 32);
  page.begin_collective(17, "all_reduce", 4096, 3);

  const RankStatus status = board.status(1);
  EXPECT_EQ(status.pid, ::getpid());
  EXPECT_EQ(status.program, "practical5_dp");
  EXPECT_EQ(status.phase, Phase::kTraining);
  EXPECT_EQ(status.step, 41);
  EXPECT_EQ(status.loss, 0.25);
  EXPECT_EQ(status.busy_ns, 111);
  EXPECT_EQ(status.communicating_ns, 20);
  EXPECT_EQ(status.idle_ns, 3);
  EXPECT_GT(status.started_ns, 0);
  EXPECT_GE(status.updated_ns, status.started_ns);
  ASSERT_EQ(status.devices.size(), 2U);
  EXPECT_EQ(status.devices[0].name, "cpu:0");
  EXPECT_EQ(status.devices[0].capacity_bytes, 1000);
  EXPECT_EQ(status.devices[1].name, "cpu:1");
  EXPECT_EQ(status.devices[1].physical, "core 1");
  EXPECT_EQ(status.devices[1].capacity_bytes, 2000);
  EXPECT_EQ(status.devices[1].live_bytes, 12);
  EXPECT_EQ(status.devices[1].peak_bytes, 22);
  EXPECT_EQ(status.devices[1].busy_ns, 32);
  EXPECT_EQ(board.status(0).pid, 0) << "another rank's page was touched";
}

TEST_F(BoardTest, CollectivesBeginAndFinish) {
  const Board board = Board::create(path_, 1, "run");
  BoardPage page = board.page(0);
  page.begin_collective(1, "all_reduce", 4096, 3);
  CollectiveStatus seen = board.status(0).collective;
  EXPECT_EQ(seen.sequence, 1);
  EXPECT_EQ(seen.operation, "all_reduce");
  EXPECT_EQ(seen.bytes, 4096);
  EXPECT_EQ(seen.bucket, 3);
  EXPECT_GT(seen.started_ns, 0);
  EXPECT_EQ(seen.finished_ns, 0);

  page.begin_collective(2, "barrier", 0);
  page.finish_collective(1);
  seen = board.status(0).collective;
  EXPECT_EQ(seen.sequence, 2);
  EXPECT_EQ(seen.operation, "barrier");
  EXPECT_EQ(seen.bucket, -1);
  EXPECT_EQ(seen.finished_ns, 0) << "an earlier collective finished, not this one";

  page.finish_collective(2);
  seen = board.status(0).collective;
  EXPECT_GE(seen.finished_ns, seen.started_ns);
}

TEST_F(BoardTest, EveryPhaseHasItsName) {
  const Board board = Board::create(path_, 1, "run");
  BoardPage page = board.page(0);
  const std::vector<std::pair<Phase, std::string_view>> phases = {
      {Phase::kStarting, "starting"}, {Phase::kLoading, "loading"},
      {Phase::kTraining, "training"}, {Phase::kEvaluating, "evaluating"},
      {Phase::kSaving, "saving"},     {Phase::kFinished, "finished"},
      {Phase::kFailed, "failed"}};
  for (const auto& [phase, name] : phases) {
    page.set_phase(phase);
    EXPECT_EQ(board.status(0).phase, phase);
    EXPECT_EQ(phase_name(phase), name);
  }
}

TEST_F(BoardTest, LongTextsAreCutBetweenCharacters) {
  const Board board = Board::create(path_, 1, "run");
  BoardPage page = board.page(0);
  page.start(std::string(200, 'p'));
  page.set_device(0,
                  {"a" + std::string(15, 'n') + "äöüäöüäöüäöü", std::string(100, 'h'), 0, 0, 0, 0});
  page.begin_collective(1, std::string(30, 'o'), 0);
  std::string message;
  for (int i = 0; i < 300; ++i) message += "€";
  page.record_first_error(Code::kUsage, message);
  const RankStatus status = board.status(0);
  EXPECT_EQ(status.program, std::string(63, 'p'));
  EXPECT_EQ(status.devices[0].name, "a" + std::string(15, 'n') + "äöüäöüä")
      << "31 bytes would cut a letter";
  EXPECT_EQ(status.devices[0].physical, std::string(63, 'h'));
  EXPECT_EQ(status.collective.operation, std::string(23, 'o'));
  EXPECT_EQ(status.error->message, message.substr(0, 495));
}

TEST_F(BoardTest, DevicesMayBeSetInAnyOrderUpToTheLast) {
  const Board board = Board::create(path_, 1, "run");
  BoardPage page = board.page(0);
  page.set_device(kBoardDevices - 1, {"last", "", 0, 1, 2, 3});
  page.set_device(2, {"third", "", 0, 0, 0, 0});
  const auto devices = board.status(0).devices;
  ASSERT_EQ(devices.size(), static_cast<size_t>(kBoardDevices));
  EXPECT_EQ(devices.back().name, "last");
  EXPECT_EQ(devices.back().peak_bytes, 2);
  EXPECT_EQ(devices[2].name, "third");
  EXPECT_EQ(devices[0].name, "");
}

TEST_F(BoardTest, RanksAndDevicesOutOfRangeAreErrors) {
  const Board board = Board::create(path_, 2, "run");
  for (const int rank : {-1, 2, 1'000'000}) {
    expect_error(Code::kBoard, {"has no rank " + std::to_string(rank), "0 to 1"},
                 [&] { board.status(rank); });
    expect_error(Code::kBoard, {"has no rank"}, [&] { board.page(rank); });
    expect_error(Code::kBoard, {"has no rank"}, [&] { BoardPage::attach(path_, rank); });
  }
  BoardPage page = board.page(0);
  for (const int device : {-1, kBoardDevices}) {
    expect_error(Code::kBoard, {"logical device " + std::to_string(device), "0 to 255"},
                 [&] { page.set_device(device, {}); });
    expect_error(Code::kBoard, {"logical device"}, [&] { page.update_device(device, 0, 0, 0); });
  }
  EXPECT_TRUE(board.status(0).devices.empty());
}

TEST_F(BoardTest, AReaderCannotTakeAPageForWriting) {
  const Board made = Board::create(path_, 1, "run");
  const Board reader = Board::open(path_);
  expect_error(Code::kBoard, {"reading only", "attach"}, [&] { reader.page(0); });
}

TEST_F(BoardTest, TheFirstErrorIsKeptAndMarksTheRankFailed) {
  const Board board = Board::create(path_, 1, "run");
  BoardPage page = board.page(0);
  page.set_phase(Phase::kTraining);
  EXPECT_TRUE(page.record_first_error(Code::kReplicaFailed, "the cause"));
  EXPECT_FALSE(page.record_first_error(Code::kInternal, "a consequence"));
  const RankStatus status = board.status(0);
  EXPECT_EQ(status.phase, Phase::kFailed);
  ASSERT_TRUE(status.error.has_value());
  EXPECT_EQ(status.error->code, Code::kReplicaFailed);
  EXPECT_EQ(status.error->message, "the cause");
  EXPECT_GT(status.error->at_ns, 0);
}

TEST_F(BoardTest, OneErrorWinsAmongManyThreads) {
  constexpr int kThreads = 8;
  for (int round = 0; round < 20; ++round) {
    const Board board = Board::create(path_, 1, "run");
    std::atomic<bool> go = false;
    std::atomic<int> winners = 0;
    std::atomic<int> winner = -1;
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i, page = board.page(0)]() mutable {
        while (!go) std::this_thread::yield();
        if (page.record_first_error(Code::kInternal,
                                    std::string(400, static_cast<char>('a' + i)))) {
          ++winners;
          winner = i;
        }
      });
    }
    go = true;
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(winners, 1);
    EXPECT_EQ(board.status(0).error->message, std::string(400, static_cast<char>('a' + winner)));
  }
}

// Two writers change every text as fast as they can; a reader must only ever see whole ones.
TEST_F(BoardTest, TextsNeverTear) {
  const Board made = Board::create(path_, 1, "run");
  const Board board = Board::open(path_);
  const auto write = [](const std::stop_token& stop, BoardPage page) {
    for (int64_t i = 1; !stop.stop_requested(); ++i) {
      const auto letter = static_cast<char>('a' + i % 26);
      page.start(std::string(static_cast<size_t>(1 + i % 60), letter));
      page.set_device(0, {std::string(static_cast<size_t>(1 + i % 30), letter),
                          std::string(static_cast<size_t>(1 + i % 60), letter), letter, 0, 0, 0});
      page.begin_collective(i, std::string(static_cast<size_t>(1 + i % 20), letter), i * 3, i * 5);
    }
  };
  const std::jthread first(write, made.page(0));
  const std::jthread second(write, made.page(0));

  const auto uniform = [](const std::string& text) {
    return text.find_first_not_of(text.empty() ? '?' : text[0]) == std::string::npos;
  };
  int distinct = 0;
  std::string last;
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(700);
  while (std::chrono::steady_clock::now() < until) {
    const RankStatus status = board.status(0);
    ASSERT_TRUE(uniform(status.program)) << status.program;
    if (!status.devices.empty()) {
      const DeviceStatus& device = status.devices[0];
      ASSERT_TRUE(uniform(device.name + device.physical)) << device.name << " " << device.physical;
      ASSERT_EQ(device.capacity_bytes, device.name[0]);
    }
    const CollectiveStatus& collective = status.collective;
    ASSERT_TRUE(uniform(collective.operation)) << collective.operation;
    ASSERT_EQ(collective.bytes, collective.sequence * 3);
    if (collective.sequence != 0) {
      ASSERT_EQ(collective.bucket, collective.sequence * 5);
    }
    distinct += status.program != last ? 1 : 0;
    last = status.program;
  }
  EXPECT_GT(distinct, 10) << "the writers were not seen at work";
}

TEST_F(BoardTest, ProcessesShareTheBoard) {
  const Board board = Board::create(path_, 2, "run");
  const int status = in_child([&] {
    BoardPage page = BoardPage::attach(path_, 1);
    page.start("child");
    for (int step = 1; step <= 1000; ++step) page.set_step(step);
    page.record_first_error(Code::kInternal, "child failed");
    return 0;
  });
  ASSERT_EQ(status, 0);
  const RankStatus seen = board.status(1);
  EXPECT_NE(seen.pid, ::getpid());
  EXPECT_EQ(seen.program, "child");
  EXPECT_EQ(seen.step, 1000);
  EXPECT_EQ(seen.error->message, "child failed");

  const int read = in_child([&] { return Board::open(path_).status(1).step == 1000 ? 0 : 1; });
  EXPECT_EQ(read, 0);
}

// Killed at a random moment, a writer must leave a board that can still be read and used again.
TEST_F(BoardTest, AKilledWriterLeavesWholeTexts) {
  const Board board = Board::create(path_, 1, "run");
  for (int round = 0; round < 20; ++round) {
    const pid_t child = ::fork();
    if (child == 0) {
      BoardPage page = board.page(0);
      for (int64_t i = 0;; ++i) page.start(std::string(60, static_cast<char>('a' + i % 26)));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    const std::string seen = board.status(0).program;
    EXPECT_TRUE(seen.empty() || seen == std::string(60, seen[0])) << seen;
  }
  board.page(0).start("successor");
  EXPECT_EQ(board.status(0).program, "successor");
}

}  // namespace
}  // namespace lockstep
