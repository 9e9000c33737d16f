#include "lockstep/detail/board.hpp"

#include <signal.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>

#include "board_support.hpp"
#include "lockstep/clock.hpp"
#include "support.hpp"

namespace lockstep::test::board_test {
namespace {

TEST_F(BoardTest, ANewBoardIsEmpty) {
  const int64_t before = monotonic_ns();
  const Board board = Board::create(path_, 3, "night.run_1");
  EXPECT_EQ(board.path(), path_);
  EXPECT_EQ(board.ranks(), 3);
  const BoardInfo info = board.info();
  EXPECT_EQ(info.run_name, "night.run_1");
  EXPECT_EQ(info.ranks, 3);
  EXPECT_EQ(info.launcher_pid, ::getpid());
  EXPECT_TRUE(info.launcher_alive);
  EXPECT_GE(info.started_ns, before);
  EXPECT_LE(info.started_ns, monotonic_ns());
  for (int rank = 0; rank < 3; ++rank) {
    const RankStatus status = board.status(rank);
    EXPECT_EQ(status.rank, rank);
    EXPECT_EQ(status.pid, 0);
    EXPECT_EQ(status.phase, Phase::kStarting);
    EXPECT_EQ(status.program, "");
    EXPECT_EQ(status.step, 0);
    EXPECT_TRUE(std::isnan(status.loss));
    EXPECT_EQ(status.collective.sequence, 0);
    EXPECT_EQ(status.collective.bucket, -1);
    EXPECT_TRUE(status.devices.empty());
    EXPECT_FALSE(status.error.has_value());
  }
  struct stat file {};
  ASSERT_EQ(::stat(path_.c_str(), &file), 0);
  EXPECT_EQ(file.st_mode & 07777, 0600U);
  EXPECT_GE(file.st_blocks * 512, file.st_size) << "the file has holes";
}

TEST_F(BoardTest, KeepsTheLastCollectives) {
  const Board board = Board::create(path_, 2, "run");
  BoardPage page = board.page(1);
  EXPECT_TRUE(board.past_collectives(1).empty());
  for (int sequence = 1; sequence <= 20; ++sequence) {
    page.begin_collective(sequence, sequence % 2 == 0 ? "broadcast" : "all_reduce", sequence, 3);
    if (sequence < 20) page.finish_collective(sequence);
  }
  const auto past = board.past_collectives(1);
  ASSERT_EQ(past.size(), static_cast<size_t>(kBoardCollectives));
  for (size_t i = 0; i < past.size(); ++i) {
    EXPECT_EQ(past[i].sequence, static_cast<int64_t>(i) + 5);
    EXPECT_EQ(past[i].bytes, past[i].sequence);
    EXPECT_EQ(past[i].operation, past[i].sequence % 2 == 0 ? "broadcast" : "all_reduce");
    EXPECT_EQ(past[i].finished_ns == 0, past[i].sequence == 20);
  }
  EXPECT_TRUE(board.past_collectives(0).empty());
}

TEST_F(BoardTest, TheFileGoesWithItsMakerOnly) {
  std::optional<Board> board = Board::create(path_, 1, "run");
  BoardPage page = board->page(0);
  { const Board reader = Board::open(path_); }
  EXPECT_TRUE(std::filesystem::exists(path_)) << "a reader removed it";
  EXPECT_EQ(in_child([&] {
              board.reset();
              return 0;
            }),
            0);
  EXPECT_TRUE(std::filesystem::exists(path_)) << "a forked child removed it";
  board.reset();
  EXPECT_FALSE(std::filesystem::exists(path_)) << "a page kept it";
  page.set_step(3);
  expect_error(Code::kBoard, {path_, "No such file", "has ended"}, [&] { Board::open(path_); });
}

TEST_F(BoardTest, CreateRefusesAnExistingFileAndSaysWhose) {
  const Board board = Board::create(path_, 1, "first");
  expect_error(Code::kBoard,
               {"exists already", path_, "run \"first\"", std::to_string(::getpid()), "is running"},
               [&] { Board::create(path_, 1, "second"); });
  EXPECT_EQ(Board::open(path_).info().run_name, "first");

  const std::string other = scratch_.file("other");
  test::write_bytes(other, "precious");
  expect_error(Code::kBoard, {"exists already", other, "give the run another name"}, [&] {
    try {
      Board::create(other, 1, "run");
    } catch (const Error& error) {
      EXPECT_EQ(error.help().find("rm "), std::string::npos) << "it is not lockstep's";
      throw;
    }
  });
  EXPECT_EQ(test::read_bytes(other), "precious");

  const std::string link = scratch_.file("link");
  std::filesystem::create_symlink(scratch_.file("nowhere"), link);
  expect_error(Code::kBoard, {"exists already"}, [&] { Board::create(link, 1, "run"); });
}

TEST_F(BoardTest, CreateRefusesBadArguments) {
  for (const int ranks : {0, -1}) {
    expect_error(Code::kBoard, {"at least one rank, not " + std::to_string(ranks)},
                 [&] { Board::create(path_, ranks, "run"); });
  }
  for (const std::string& name :
       {std::string(), std::string("a/b"), std::string("../x"), std::string("a b"),
        std::string("é"), std::string("a\nb"), std::string(64, 'n')}) {
    expect_error(Code::kBoard, {"cannot name a run", "1 to 63"},
                 [&] { Board::create(path_, 1, name); });
    expect_error(Code::kBoard, {"cannot name a run"}, [&] { Board::default_path(name); });
  }
  expect_error(Code::kBoard, {"No such file"},
               [&] { Board::create(scratch_.file("no/b"), 1, "run"); });
  EXPECT_EQ(scratch_.count(), 0U);
}

TEST_F(BoardTest, NoRoomIsAnErrorWithNeedHaveAndRemedy) {
  struct statvfs space {};
  ASSERT_EQ(::statvfs("/dev/shm", &space), 0);
  if (space.f_blocks == 0) GTEST_SKIP() << "/dev/shm has no size limit on this machine";
  // More than the whole file system: must fail at once, before it takes space from other programs.
  const auto ranks = static_cast<int>(space.f_blocks * space.f_frsize / 60'000);
  const std::string path = Board::default_path(run_ + "-full");
  expect_error(Code::kBoard, {"cannot reserve", path, "need ", "have ", "/dev/shm", "--shm-size"},
               [&] { Board::create(path, ranks, "run"); });
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST_F(BoardTest, EveryTruncationIsRefused) {
  const Board board = Board::create(path_, 2, "run");
  const std::string whole = test::read_bytes(path_);
  const std::string cut = scratch_.file("cut");
  for (const size_t bytes :
       {size_t{0}, size_t{1}, size_t{8}, size_t{111}, size_t{4095}, size_t{4096}, size_t{4097},
        whole.size() / 2, whole.size() - 4096, whole.size() - 1}) {
    test::write_bytes(cut, whole.substr(0, bytes));
    SCOPED_TRACE(bytes);
    expect_error(Code::kBoard, {cut, std::to_string(bytes) + " bytes"}, [&] { Board::open(cut); });
    expect_error(Code::kBoard, {cut}, [&] { BoardPage::attach(cut, 0); });
  }
  test::write_bytes(cut, whole + std::string(4096, '\0'));
  expect_error(Code::kBoard, {cut, "2 ranks need"}, [&] { Board::open(cut); });
  test::write_bytes(cut, whole);
  EXPECT_EQ(Board::open(cut).ranks(), 2);
}

TEST_F(BoardTest, ForeignAndOutdatedFilesAreRefused) {
  const Board board = Board::create(path_, 1, "run");
  const std::string whole = test::read_bytes(path_);
  const std::string other = scratch_.file("other");
  const auto with = [&](size_t offset, uint32_t value) {
    std::string bytes = whole;
    std::memcpy(bytes.data() + offset, &value, sizeof(value));
    test::write_bytes(other, bytes);
  };
  const auto open = [&] { Board::open(other); };
  with(0, 0);
  expect_error(Code::kBoard, {"is not a board, or is still being made"}, open);
  with(8, 1);
  expect_error(Code::kBoard, {"has layout 1", "reads layout 6", "same version"}, open);
  with(12, 0);
  expect_error(Code::kBoard, {"0 ranks need"}, open);
  with(12, UINT32_MAX);
  expect_error(Code::kBoard, {"4294967295 ranks need"}, open);
  with(16, 4096);
  expect_error(Code::kBoard, {"pages of 4096 bytes"}, open);
  test::write_bytes(other, std::string(whole.size(), 'x'));
  expect_error(Code::kBoard, {"is not a board"}, open);
}

TEST_F(BoardTest, ADamagedPageIsAnErrorNotACrash) {
  const Board board = Board::create(path_, 1, "run");
  std::string bytes = test::read_bytes(path_);
  std::fill(bytes.begin() + 4096, bytes.end(), '\xff');
  const std::string other = scratch_.file("other");
  test::write_bytes(other, bytes);
  expect_error(Code::kBoard, {"rank 0's page", "is damaged"},
               [&] { Board::open(other).status(0); });
}

TEST_F(BoardTest, TimesAndCountersOfADamagedPageCanBeAdded) {
  const Board board = Board::create(path_, 1, "train");
  board.page(0).set_step(std::numeric_limits<int64_t>::min());
  board.page(0).add_clock(Activity::kBusy, std::numeric_limits<int64_t>::max());
  const RankStatus status = board.status(0);
  EXPECT_EQ(status.step, 0);
  EXPECT_EQ(status.busy_ns, int64_t{1} << 60);
}

TEST_F(BoardTest, OnlyRegularFilesOfThisUserAreOpened) {
  expect_error(Code::kBoard, {"not a regular file"}, [&] { Board::open(scratch_.file("")); });
  ASSERT_EQ(::mkfifo(scratch_.file("pipe").c_str(), 0600), 0);
  expect_error(Code::kBoard, {"not a regular file"}, [&] { Board::open(scratch_.file("pipe")); });
  const Board board = Board::create(path_, 1, "run");
  std::filesystem::create_symlink(path_, scratch_.file("link"));
  expect_error(Code::kBoard, {"cannot open"}, [&] { Board::open(scratch_.file("link")); });
  if (::geteuid() != 0) GTEST_SKIP() << "only root can make a file of another user";
  ASSERT_EQ(::chown(path_.c_str(), 12345, 12345), 0);
  expect_error(Code::kBoard, {"belongs to user 12345", "runs as 0"}, [&] { Board::open(path_); });
}

const BoardEntry* entry_at(const std::vector<BoardEntry>& entries, const std::string& path) {
  for (const auto& entry : entries) {
    if (entry.path == path) return &entry;
  }
  return nullptr;
}

TEST_F(BoardTest, ListTellsLiveStaleAndUnusableApart) {
  const std::string live = Board::default_path(run_ + "-live");
  const std::string stale = Board::default_path(run_ + "-stale");
  const std::string unusable = Board::default_path(run_ + "-unusable");
  EXPECT_EQ(live, "/dev/shm/lockstep-" + std::to_string(::geteuid()) + "-" + run_ + "-live");
  const Board board = Board::create(live, 2, run_ + "-live");
  ASSERT_EQ(in_child([&] {
              const Board abandoned = Board::create(stale, 1, run_ + "-stale");
              ::_exit(0);  // without destructors, as when killed
              return 0;
            }),
            0);
  test::write_bytes(unusable, "text");

  const auto entries = list_boards();
  const BoardEntry* found = entry_at(entries, live);
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(found->state, BoardState::kLive);
  EXPECT_EQ(found->info.ranks, 2);
  EXPECT_EQ(found->info.run_name, run_ + "-live");
  found = entry_at(entries, stale);
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(found->state, BoardState::kStale);
  EXPECT_FALSE(found->info.launcher_alive);
  found = entry_at(entries, unusable);
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(found->state, BoardState::kUnusable);
  EXPECT_NE(found->problem.find("4 bytes"), std::string::npos) << found->problem;

  expect_error(Code::kBoard, {"has ended", "rm " + stale}, [&] { Board::create(stale, 1, "run"); });
  EXPECT_GE(remove_stale_boards(), 1);
  EXPECT_FALSE(std::filesystem::exists(stale));
  EXPECT_TRUE(std::filesystem::exists(live));
  EXPECT_TRUE(std::filesystem::exists(unusable)) << "what is not understood is not ours to remove";
  std::filesystem::remove(unusable);
}

// A pid that is in use again, by another process, is not the launcher.
TEST_F(BoardTest, AReusedPidIsNotTheLauncher) {
  const Board board = Board::create(path_, 1, "run");
  std::string bytes = test::read_bytes(path_);
  const int64_t other_start = 1;
  std::memcpy(bytes.data() + 32, &other_start, sizeof(other_start));
  const std::string other = scratch_.file("other");
  test::write_bytes(other, bytes);
  EXPECT_EQ(Board::open(other).info().launcher_pid, ::getpid());
  EXPECT_FALSE(Board::open(other).info().launcher_alive);

  const uint64_t other_namespace = 1;
  std::memcpy(bytes.data() + 40, &other_namespace, sizeof(other_namespace));
  test::write_bytes(other, bytes);
  EXPECT_TRUE(Board::open(other).info().launcher_alive)
      << "another container's process is not known";
}

TEST_F(BoardTest, WhatARankWritesAReaderSees) {
  const Board made = Board::create(path_, 2, "run");
  const Board board = Board::open(path_);
  BoardPage page = BoardPage::attach(path_, 1);
  page.start("practical5_dp");
  page.set_versions("libtorch 2.11.0");
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
  EXPECT_EQ(status.versions, "libtorch 2.11.0");
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
  const std::vector<std::pair<Phase, std::string_view>> phases = {{Phase::kStarting, "starting"},
                                                                  {Phase::kTraining, "training"},
                                                                  {Phase::kFinished, "finished"},
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

// Two writers change every text as fast as they can. A reader must only see whole texts.
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

// A writer that is killed at a random time must leave a board that can be read and used again.
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
}  // namespace lockstep::test::board_test
