#pragma once

#include <sys/types.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/error.hpp"

namespace lockstep {

class BoardMapping;
class FileRemoval;

/// Logical devices one rank can show.
inline constexpr int kBoardDevices = 256;

enum class Phase : uint32_t {
  kStarting,
  kLoading,
  kTraining,
  kEvaluating,
  kSaving,
  kFinished,
  kFailed
};

/// "training".
std::string_view phase_name(Phase phase);

/// What a rank's time is spent on.
enum class Activity : uint32_t { kBusy, kCommunicating, kIdle };

/// One logical device, as its rank last described it.
struct DeviceStatus {
  std::string name;            ///< "cpu:1"; at most 31 bytes are kept
  std::string physical;        ///< "core 1"; at most 63 bytes are kept
  int64_t capacity_bytes = 0;  ///< 0: unknown
  int64_t live_bytes = 0;
  int64_t peak_bytes = 0;
  int64_t busy_ns = 0;
};

/// The last collective a rank began.
struct CollectiveStatus {
  int64_t sequence = 0;   ///< counts from 1; 0: none yet
  std::string operation;  ///< "all_reduce"; at most 23 bytes are kept
  int64_t bytes = 0;
  int64_t bucket = -1;  ///< -1: not a bucket
  int64_t started_ns = 0;
  int64_t finished_ns = 0;  ///< 0: still running
};

/// The error that made a rank fail; later ones are consequences and are not kept.
struct FirstError {
  Code code = Code::kInternal;
  int64_t at_ns = 0;     ///< when it was recorded
  int blamed_rank = -1;  ///< the rank of the world at fault, where this one is its victim
  std::string message;   ///< at most 495 bytes are kept
};

/// A copy of one rank's page. Times are monotonic_ns().
struct RankStatus {
  int rank = 0;
  pid_t pid = 0;  ///< 0: this rank never started
  Phase phase = Phase::kStarting;
  std::string program;  ///< at most 63 bytes are kept
  int64_t started_ns = 0;
  int64_t updated_ns = 0;  ///< when the rank last wrote anything
  int64_t step = 0;
  double loss = std::numeric_limits<double>::quiet_NaN();
  CollectiveStatus collective;
  int64_t busy_ns = 0;
  int64_t communicating_ns = 0;
  int64_t idle_ns = 0;
  std::vector<DeviceStatus> devices;
  std::optional<FirstError> error;
};

/// What a board says about its run.
struct BoardInfo {
  std::string run_name;
  int ranks = 0;
  pid_t launcher_pid = 0;
  bool launcher_alive = false;
  int64_t started_ns = 0;
};

/// A rank's own page, for writing. Never waits and never allocates after construction; any thread
/// may call it, and a reader never sees a part of a text. Of two writes of one text at the same
/// moment one may be dropped, as if the other had come last.
class BoardPage {
 public:
  /// Opens the board a launcher made and takes one page of it.
  static BoardPage attach(const std::string& path, int rank);

  void start(std::string_view program);  ///< this process is the rank from now on
  void set_phase(Phase phase);
  void set_step(int64_t step);
  void set_loss(double loss);
  void add_clock(Activity activity, int64_t nanoseconds);

  void set_device(int index, const DeviceStatus& status);
  /// The figures of a device that set_device has named: no text is written.
  void update_device(int index, int64_t live_bytes, int64_t peak_bytes, int64_t busy_ns);

  void begin_collective(int64_t sequence, std::string_view operation, int64_t bytes,
                        int64_t bucket = -1);
  void finish_collective(int64_t sequence);

  /// Keeps the first error of this rank and sets the phase to failed; false: there was one already.
  bool record_first_error(Code code, std::string_view message, int blamed_rank = -1);

 private:
  friend class Board;
  BoardPage(std::shared_ptr<const BoardMapping> mapping, int rank);

  std::shared_ptr<const BoardMapping> mapping_;
  int rank_;
};

/// The shared-memory file of one run: a page per rank, written without locks, read by the launcher,
/// by `lockstep top` and by records. The maker's destructor removes the file.
class Board {
 public:
  /// Makes a new file; all its space is reserved now, so that a full /dev/shm is an Error here and
  /// never a SIGBUS later.
  static Board create(const std::string& path, int ranks, const std::string& run_name);

  /// Opens an existing board for reading; a foreign, cut or outdated one is an Error.
  static Board open(const std::string& path);

  /// /dev/shm/lockstep-<uid>-<run_name>; a name is 1 to 63 letters, digits, '.', '_' or '-'.
  static std::string default_path(const std::string& run_name);

  const std::string& path() const;
  BoardInfo info() const;
  int ranks() const;

  /// A copy of one rank's page.
  RankStatus status(int rank) const;

  /// One rank's page for writing; only from the Board that create() made.
  BoardPage page(int rank) const;

 private:
  Board(std::shared_ptr<const BoardMapping> mapping, std::shared_ptr<const FileRemoval> removal)
      : mapping_(std::move(mapping)), removal_(std::move(removal)) {}

  std::shared_ptr<const BoardMapping> mapping_;
  std::shared_ptr<const FileRemoval> removal_;  // the maker's only
};

enum class BoardState { kLive, kStale, kUnusable };

/// A board file found in /dev/shm.
struct BoardEntry {
  std::string path;
  BoardState state = BoardState::kLive;  ///< stale: its launcher has died
  BoardInfo info;                        ///< empty where unusable
  std::string problem;                   ///< why unusable
};

/// This user's boards, by path.
std::vector<BoardEntry> list_boards();

/// Removes the boards of this user's runs that were killed; gives their number.
int remove_stale_boards();

}  // namespace lockstep
