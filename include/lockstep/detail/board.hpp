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

/// The most logical devices that one rank can show.
inline constexpr int kBoardDevices = 256;

/// How many of its last collectives a rank's page keeps.
inline constexpr int kBoardCollectives = 16;

/// What a rank is doing.
enum class Phase : uint32_t { kStarting, kTraining, kFinished, kFailed };

/// "training".
std::string_view phase_name(Phase phase);

/// A rank that waits for the others to start shows this in place of a collective.
inline constexpr int64_t kRendezvousSequence = -1;
inline constexpr std::string_view kRendezvousName = "rendezvous";

/// What a rank spends its time on.
enum class Activity : uint32_t { kBusy, kCommunicating, kIdle };

/// One logical device, as its rank last described it.
struct DeviceStatus {
  std::string name;            ///< "cpu:1"; at most 31 bytes are kept
  std::string physical;        ///< "core 1"; at most 63 bytes are kept
  int64_t capacity_bytes = 0;  ///< 0 if unknown
  int64_t live_bytes = 0;
  int64_t peak_bytes = 0;
  int64_t busy_ns = 0;
};

/// The collective that a rank started last.
struct CollectiveStatus {
  int64_t sequence = 0;   ///< counts from 1; 0 if there was none yet
  std::string operation;  ///< "all_reduce"; at most 23 bytes are kept
  int64_t bytes = 0;
  int64_t bucket = -1;  ///< -1 if it is not a bucket
  int64_t started_ns = 0;
  int64_t finished_ns = 0;  ///< 0 while it is running
};

/// The error that made a rank fail. Later errors are consequences and are not kept.
struct FirstError {
  Code code = Code::kInternal;
  int64_t at_ns = 0;     ///< when it was recorded
  int blamed_rank = -1;  ///< world rank at fault if this rank is a victim, else -1
  std::string message;   ///< at most 495 bytes are kept
};

/// A copy of one rank's page. Times are those of monotonic_ns().
struct RankStatus {
  int rank = 0;
  pid_t pid = 0;  ///< 0 if this rank never started
  Phase phase = Phase::kStarting;
  std::string program;   ///< at most 63 bytes are kept
  std::string versions;  ///< of the libraries it computes with; at most 127 bytes are kept
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

/// A rank's own page, for writing. After construction it neither blocks nor allocates, and any
/// thread may use it. Readers never see a partial text. If two threads write the same text at once,
/// one of the writes may be dropped.
class BoardPage {
 public:
  /// Opens the launcher's board and takes one page of it.
  static BoardPage attach(const std::string& path, int rank);

  void start(std::string_view program);          ///< makes this process the rank of the page
  void set_versions(std::string_view versions);  ///< "cuda 13.0, libtorch 2.11.0"
  void set_phase(Phase phase);
  void set_step(int64_t step);
  void set_loss(double loss);
  void add_clock(Activity activity, int64_t nanoseconds);

  void set_device(int index, const DeviceStatus& status);
  /// Updates the numbers of a device that set_device() has described.
  void update_device(int index, int64_t live_bytes, int64_t peak_bytes, int64_t busy_ns);

  void begin_collective(int64_t sequence, std::string_view operation, int64_t bytes,
                        int64_t bucket = -1);
  void finish_collective(int64_t sequence);

  /// Records this rank's first error and sets the phase to failed. Returns false if an error was
  /// already recorded.
  bool record_first_error(Code code, std::string_view message, int blamed_rank = -1);

 private:
  friend class Board;
  BoardPage(std::shared_ptr<const BoardMapping> mapping, int rank);

  std::shared_ptr<const BoardMapping> mapping_;
  int rank_;
};

/// The shared-memory file of one run. It has a page per rank, which ranks write without locks and
/// the launcher and `lockstep top` read. The creator's destructor removes the file.
class Board {
 public:
  /// Creates the file and reserves all its space, so that a full /dev/shm is an Error here and not
  /// a SIGBUS later.
  static Board create(const std::string& path, int ranks, const std::string& run_name);

  /// Opens an existing board for reading. Throws if it is truncated, of another user or version.
  static Board open(const std::string& path);

  /// `/dev/shm/lockstep-<uid>-<run_name>`. A name has 1 to 63 letters, digits, '.', '_' or '-'.
  static std::string default_path(const std::string& run_name);

  const std::string& path() const;
  BoardInfo info() const;
  int ranks() const;

  /// A copy of one rank's page.
  RankStatus status(int rank) const;

  /// The last collectives of a rank, oldest first. If several communicators give their collectives
  /// the same number, only the later one is kept.
  std::vector<CollectiveStatus> past_collectives(int rank) const;

  /// One rank's page for writing. Only a Board from create() has it.
  BoardPage page(int rank) const;

 private:
  Board(std::shared_ptr<const BoardMapping> mapping, std::shared_ptr<const FileRemoval> removal)
      : mapping_(std::move(mapping)), removal_(std::move(removal)) {}

  std::shared_ptr<const BoardMapping> mapping_;
  std::shared_ptr<const FileRemoval> removal_;  // null unless this Board came from create()
};

/// Whether a board belongs to a running job.
enum class BoardState { kLive, kStale, kUnusable };

/// A board file found in /dev/shm.
struct BoardEntry {
  std::string path;
  BoardState state = BoardState::kLive;  ///< kStale if its launcher has died
  BoardInfo info;                        ///< empty if unusable
  std::string problem;                   ///< why unusable
};

/// This user's boards, sorted by path.
std::vector<BoardEntry> list_boards();

/// Removes the boards that killed runs of this user left behind. Returns how many.
int remove_stale_boards();

}  // namespace lockstep
