#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "cli/nvml.hpp"
#include "lockstep/detail/board.hpp"

namespace lockstep::cli {

/// How the system sees a rank's process; unknown if it runs in another container.
enum class ProcessState { kUnknown, kRunning, kStopped, kGone };

/// One rank's page as read at one moment.
struct RankReading {
  RankStatus status = {};
  ProcessState process = ProcessState::kUnknown;
  std::string problem = {};  ///< why the page cannot be read; empty if it was read
};

/// One live run's board as read at one moment.
struct RunReading {
  std::string path = {};
  BoardInfo info = {};
  std::vector<RankReading> ranks = {};
};

/// All live runs of this user; one that ends while it is read is left out.
std::vector<RunReading> read_runs();

/// The runs whose name is `selection`, or otherwise those whose name begins with it; all if it is
/// empty.
std::vector<RunReading> select_runs(std::vector<RunReading> runs, const std::string& selection);

/// Throws an Error for a selection that matches no run, and names the nearest one.
[[noreturn]] void fail_no_run(const std::string& selection, const std::vector<RunReading>& runs);

inline constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

/// Samples kept for the sparkline.
inline constexpr size_t kRecentSamples = 60;

/// A logical device with the rates from two readings. Fractions are kUnknown until a step was seen.
struct DeviceView {
  DeviceStatus status = {};
  double busy = kUnknown;           ///< fraction of the time between the last steps seen
  std::vector<double> recent = {};  ///< one per sample, the newest last
};

struct RankView {
  RankStatus status = {};  ///< its devices are in `devices`
  std::string state = {};  ///< the phase, or "not started", "stopped", "died", "unreadable"
  bool troubled = false;   ///< the state needs somebody's attention
  std::string problem = {};
  double steps_per_s = kUnknown;
  double busy =
      kUnknown;  ///< from the rank's own clocks, or the mean of its devices if it keeps none
  double communicating = kUnknown;
  double idle = kUnknown;
  double quiet_s = 0;       ///< since the rank last wrote anything
  double collective_s = 0;  ///< how long the last collective took, or has been running
  std::vector<DeviceView> devices = {};
};

struct RunView {
  BoardInfo info = {};
  bool ended = false;  ///< its launcher or its board is gone
  double age_s = 0;
  std::vector<RankView> ranks = {};
};

/// Everything that `lockstep top` draws or prints is made from this.
struct TopView {
  std::vector<RunView> runs = {};
  std::vector<GpuSample> gpus = {};  ///< of this machine; none without a driver
};

/// Turns readings into rates. Boards are written step by step, so rates are taken between readings
/// in which the step differs, over the time the rank itself noted; they hold until the next step,
/// or until that is so late that they no longer mean anything.
class TopRates {
 public:
  /// A run that is no longer among the readings stays for a while, as ended.
  TopView update(const std::vector<RunReading>& readings, int64_t now_ns);

 private:
  struct RankTrack {
    RankStatus anchor = {};  // the reading that the next rate is taken from
    bool anchored = false;   // there is one
    int64_t rated_ns = 0;    // when the rates below were made; 0: they say nothing
    double rated_s = 0;      // the time they were taken over
    RankView rates = {};     // the rates only
    std::vector<std::vector<double>> recent = {};  // [device]
  };
  struct RunTrack {
    RunView view = {};
    std::vector<RankTrack> ranks = {};
    int64_t ended_ns = 0;  // 0: still there
  };

  static RankView rank_view(RankTrack& track, const RankReading& reading, int64_t now_ns);
  static void measure(RankTrack& track, const RankStatus& status, int64_t now_ns);

  std::map<std::string, RunTrack> runs_;  // by board and start: a name may be used again
};

}  // namespace lockstep::cli
