#include "lockstep/board.hpp"

#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cmath>
#include <cstring>

#include "board_support.hpp"
#include "lockstep/clock.hpp"
#include "support.hpp"

namespace lockstep {
namespace {

using test::BoardTest;
using test::expect_error;
using test::in_child;

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
  // More than the whole file system: refused at once, before anything is taken from other programs.
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
  expect_error(Code::kBoard, {"has layout 1", "reads layout 3", "same version"}, open);
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

}  // namespace
}  // namespace lockstep
