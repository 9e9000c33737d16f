#include "checkpoint/store.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>

#include "fault_files.hpp"
#include "small_checkpoint.hpp"
#include "support.hpp"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using test::Crash;
using test::FaultFiles;
using test::latest_good;
using test::save_small;
using test::ScratchFolder;
using test::step_if_right;

std::vector<int64_t> steps_of(const std::string& folder) {
  std::vector<int64_t> steps;
  for (const auto& entry : list_checkpoints(folder)) steps.push_back(entry.step);
  return steps;
}

// Entries that a writer left: all that are neither checkpoints nor the lock.
int leftovers(const std::string& folder) {
  int count = 0;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const auto name = entry.path().filename().string();
    if (name != ".lock" && !name.starts_with("step-")) ++count;
  }
  return count;
}

class StoreTest : public testing::Test {
 protected:
  ScratchFolder scratch_;
  const std::string folder_ = scratch_.file("runs/a");
};

TEST_F(StoreTest, KeepsTheLatest) {
  CheckpointStore store(folder_);
  for (const int64_t step : {1, 2, 5, 100'000'000}) {
    save_small(store, FileSystem::system(), step, 2);
  }
  EXPECT_EQ(steps_of(folder_), (std::vector<int64_t>{5, 100'000'000}));
  EXPECT_EQ(step_if_right(folder_ + "/step-100000000"), 100'000'000);
  EXPECT_EQ(step_if_right(folder_ + "/step-00000005"), 5);
  EXPECT_EQ(leftovers(folder_), 0);
}

TEST_F(StoreTest, ListsNothingElse) {
  EXPECT_TRUE(list_checkpoints(folder_).empty());
  fs::create_directories(folder_ + "/step-7");
  fs::create_directories(folder_ + "/step-00000008x");
  fs::create_directories(folder_ + "/step--0000008");
  fs::create_directories(folder_ + "/step-00000009");
  test::write_bytes(folder_ + "/step-00000010", "a file");
  EXPECT_EQ(steps_of(folder_), (std::vector<int64_t>{9}));
}

TEST_F(StoreTest, NeverReplacesAGoodOne) {
  CheckpointStore store(folder_);
  save_small(store, FileSystem::system(), 3, 2);
  test::expect_error(Code::kFileWrite, {"step-00000003", "is good"},
                     [&] { save_small(store, FileSystem::system(), 3, 2); });
  EXPECT_EQ(latest_good(folder_), 3);
  EXPECT_EQ(leftovers(folder_), 0);
}

TEST_F(StoreTest, MovesADamagedOneAside) {
  CheckpointStore store(folder_);
  save_small(store, FileSystem::system(), 3, 2);
  test::write_bytes(folder_ + "/step-00000003/model.rank1.safetensors", "no tensors");
  save_small(store, FileSystem::system(), 3, 2);
  EXPECT_EQ(latest_good(folder_), 3);
  EXPECT_TRUE(fs::exists(folder_ + "/step-00000003.damaged-1"));
}

TEST_F(StoreTest, LeavesLaterOnesAlone) {
  CheckpointStore store(folder_);
  for (const int64_t step : {1, 2, 9}) save_small(store, FileSystem::system(), step, 5);
  test::write_bytes(folder_ + "/step-00000009/manifest.json", "{}");
  save_small(store, FileSystem::system(), 3, 1);  // a run that went back to step 2
  EXPECT_EQ(steps_of(folder_), (std::vector<int64_t>{3, 9}));
  EXPECT_EQ(latest_good(folder_), 3);
}

TEST_F(StoreTest, OneWriterAtATime) {
  {
    const CheckpointStore store(folder_);
    test::expect_error(Code::kFileWrite, {folder_, "is in use", "pid " + std::to_string(getpid())},
                       [&] { CheckpointStore second(folder_); });
  }
  const CheckpointStore third(folder_);
}

TEST_F(StoreTest, RemovesLeftoversOfAWriterThatDied) {
  const pid_t child = ::fork();
  if (child == 0) {
    CheckpointStore store(folder_);
    const auto draft = store.begin(4);
    test::write_bytes(draft + "/half.safetensors", "half");
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(leftovers(folder_), 1);
  const CheckpointStore store(folder_);
  EXPECT_EQ(leftovers(folder_), 0);
}

TEST_F(StoreTest, LeavesADraftWhoseWriterLives) {
  CheckpointStore store(folder_);
  const auto draft = store.begin(4);
  EXPECT_THROW(CheckpointStore second(folder_), Error);
  EXPECT_TRUE(fs::exists(draft));
}

TEST_F(StoreTest, RefusesAFolderThatCannotBeWritten) {
  test::write_bytes(scratch_.file("file"), "no folder");
  test::expect_error(Code::kFileWrite, {scratch_.file("file")},
                     [&] { CheckpointStore store(scratch_.file("file")); });
  test::expect_error(Code::kFileWrite, {"file/below"},
                     [&] { CheckpointStore store(scratch_.file("file/below")); });
  test::expect_error(Code::kUsage, {"empty"}, [&] { CheckpointStore store(""); });
  for (const int error : {EROFS, ENOSPC, EACCES}) {
    FaultFiles files(scratch_.file(""));
    files.fail_at = 1;
    files.error = error;
    test::expect_error(Code::kFileWrite, {std::strerror(error)},
                       [&] { CheckpointStore store(folder_, files); });
  }
}

TEST_F(StoreTest, RefusesAStepThatIsNone) {
  CheckpointStore store(folder_);
  test::expect_error(Code::kUsage, {"step -1"}, [&] { store.begin(-1); });
}

TEST_F(StoreTest, WritesThatTakeOneByteAtATime) {
  FaultFiles files(scratch_.file(""));
  files.short_writes = true;
  CheckpointStore store(folder_, files);
  save_small(store, files, 1, 1);
  EXPECT_EQ(latest_good(folder_), 1);
}

// A save of step 2 after that of step 1, with one fault at a call of the second.
struct Trial {
  ScratchFolder scratch;
  std::string folder = scratch.file("runs/a");
  FaultFiles files{scratch.file("")};

  // Returns whether the save went through. `prepare` sets the fault after the first save.
  bool run(const std::function<void(FaultFiles&)>& prepare) {
    try {
      CheckpointStore store(folder, files);
      save_small(store, files, 1, 1);
      first_calls = files.calls();
      prepare(files);
      save_small(store, files, 2, 1);
      return true;
    } catch (const Error&) {
      return false;
    } catch (const Crash&) {
      return false;
    }
  }

  int first_calls = 0;
};

int calls_of_a_save() {
  Trial trial;
  EXPECT_TRUE(trial.run([](FaultFiles&) {}));
  return trial.files.calls() - trial.first_calls;
}

TEST(StoreFaults, ACrashAtAnyCallLeavesTheOldOrTheNew) {
  const int calls = calls_of_a_save();
  ASSERT_GT(calls, 20);
  for (int call = 1; call <= calls; ++call) {
    SCOPED_TRACE(testing::Message() << "call " << call << " of " << calls);
    Trial trial;
    EXPECT_FALSE(trial.run([&](FaultFiles& files) { files.fail_at = files.calls() + call; }));
    const int64_t good = latest_good(trial.folder);
    EXPECT_TRUE(good == 1 || good == 2);
    // The next run cleans up and goes on.
    CheckpointStore store(trial.folder);
    EXPECT_EQ(leftovers(trial.folder), 0);
    EXPECT_EQ(latest_good(trial.folder), good);
    save_small(store, FileSystem::system(), 3, 1);
    EXPECT_EQ(steps_of(trial.folder), (std::vector<int64_t>{3}));
  }
}

TEST(StoreFaults, APowerLossAtAnyCallLeavesTheOldOrTheNew) {
  const int calls = calls_of_a_save();
  for (int call = 1; call <= calls + 1; ++call) {
    Trial trial;
    trial.run([&](FaultFiles& files) { files.fail_at = files.calls() + call; });
    for (const auto loss : {FaultFiles::Loss::kSynced, FaultFiles::Loss::kNames}) {
      SCOPED_TRACE(testing::Message()
                   << "call " << call << " of " << calls << ", loss " << static_cast<int>(loss));
      const ScratchFolder after;
      trial.files.write_survivors(loss, after.file("disk"));
      const int64_t good = latest_good(after.file("disk/runs/a"));
      EXPECT_TRUE(good == 1 || good == 2) << good;
      if (call == calls + 1) {
        EXPECT_EQ(good, 2) << "a save that ended is not durable";
      }
      const CheckpointStore store(after.file("disk/runs/a"));
      EXPECT_EQ(leftovers(after.file("disk/runs/a")), 0);
    }
  }
}

TEST(StoreFaults, AnErrorAtAnyCallLeavesTheOldOrTheNew) {
  const int calls = calls_of_a_save();
  int failed = 0;
  for (const int error : {ENOSPC, EIO, EROFS}) {
    for (const bool for_good : {false, true}) {
      for (int call = 1; call <= calls; ++call) {
        SCOPED_TRACE(testing::Message()
                     << "call " << call << " of " << calls << ": " << std::strerror(error)
                     << (for_good ? " from then on" : ""));
        Trial trial;
        const bool saved = trial.run([&](FaultFiles& files) {
          files.fail_at = files.calls() + call;
          files.error = error;
          files.fails_for_good = for_good;
        });
        failed += saved ? 0 : 1;
        const int64_t good = latest_good(trial.folder);
        EXPECT_TRUE(good == 1 || good == 2);
        if (saved) {
          EXPECT_EQ(good, 2);
        }
        CheckpointStore store(trial.folder);
        EXPECT_EQ(leftovers(trial.folder), 0);
        EXPECT_EQ(latest_good(trial.folder), good);
      }
    }
  }
  EXPECT_GT(failed, 5 * calls);  // only removing what is not there may fail unnoticed
}

}  // namespace
}  // namespace lockstep
