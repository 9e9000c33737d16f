#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/detail/board.hpp"
#include "lockstep/device.hpp"
#include "lockstep/record.hpp"

namespace lockstep {

class GradientSync;

/// Measures a training loop into a record, and shows it on a board while it runs.
///
///     RunMeter meter("train", devices, steps);
///     for (...) { auto [x, y] = next_batch(); meter.begin_step(); ...; meter.end_step(loss); }
///     meter.fill(record);
///
/// What happens between end_step and begin_step, such as loading data, counts only toward the total
/// time. Each rank measures itself.
class RunMeter {
 public:
  /// The first steps warm up caches and allocators and are not measured: a quarter of them, at most
  /// five. `page` is this rank's page of the launcher's board (World::board_page); without one the
  /// meter makes a board of its own.
  RunMeter(const std::string& program, const Devices& devices, int64_t steps,
           const std::optional<BoardPage>& page = std::nullopt);
  ~RunMeter();
  RunMeter(const RunMeter&) = delete;
  RunMeter& operator=(const RunMeter&) = delete;

  /// Counts this synchronisation as communication from now on; it must outlive the meter.
  void watch(const GradientSync& sync) { sync_ = &sync; }

  /// The loop continues after this many steps of an earlier process. The board and injected faults
  /// count from there, and warm-up is that of the remaining steps. Call it before the first step.
  void resume_after(int64_t steps_done);

  void begin_step();

  /// Waits for the devices, so that the time includes the work and not only its launch.
  void end_step(const torch::Tensor& loss);

  /// Fills in the measured part of a record: devices, step_ms, warmup_steps, total_s, losses,
  /// resumed_after, samples_per_s (from record.effective_batch), and the cost of the watched
  /// synchronisation. Final bytes are those live now. What ranks sent each other is attributed to
  /// the first device.
  void fill(RunRecord& record) const;

  const std::vector<double>& losses() const { return losses_; }
  const std::vector<double>& step_ms() const { return step_ms_; }  ///< of the timed steps
  double last_step_ms() const { return last_step_ms_; }
  int64_t last_step_started_ns() const { return step_started_ns_; }
  int64_t last_step_ended_ns() const { return ended_ns_; }

 private:
  // Counters of one device whose increase over the timed steps is reported.
  struct Reading {
    double busy_seconds = 0;
    std::optional<double> queued_seconds;
    Traffic traffic;
  };

  // Likewise of the watched synchronisation.
  struct SyncReading {
    int64_t all_reduces = 0;
    int64_t bytes = 0;
    int64_t communication_ns = 0;
    int64_t exposed_ns = 0;
    Traffic traffic;
  };

  void make_board(const std::string& program);
  Reading read(const Device& device) const;
  SyncReading read_sync() const;
  int64_t steps_done() const { return resumed_after_ + static_cast<int64_t>(losses_.size()); }
  bool warming_up() const { return static_cast<int64_t>(losses_.size()) < warmup_steps_; }
  void count_step(const std::vector<Reading>& now, const SyncReading& sync_now);
  void show_clocks(const std::vector<Reading>& now, const SyncReading& sync_now,
                   int64_t since_ended_ns);
  void show_on_board();
  void fill_devices(RunRecord& record, double timed_seconds) const;
  void fill_sync(RunRecord& record) const;

  const Devices& devices_;
  const GradientSync* sync_ = nullptr;  // null: nothing is synchronised
  int64_t steps_;                       // of the whole training
  int64_t resumed_after_ = 0;           // steps of earlier processes
  int64_t warmup_steps_;
  int exceptions_at_start_;  // in flight when the meter was made
  int64_t started_ns_;
  int64_t step_started_ns_ = 0;
  int64_t ended_ns_ = 0;
  double last_step_ms_ = 0;
  std::vector<double> step_ms_;    // after warm-up
  std::vector<double> losses_;     // all steps of this process
  std::vector<Reading> at_begin_;  // [device], at begin_step
  std::vector<Reading> timed_;     // [device], summed over the timed steps
  SyncReading sync_at_begin_;
  SyncReading sync_timed_;
  std::optional<Board> board_;  // if no launcher provided a page
  std::optional<BoardPage> page_;
};

}  // namespace lockstep
