#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/board.hpp"
#include "lockstep/device.hpp"
#include "lockstep/record.hpp"

namespace lockstep {

/// Measures a training loop into a record, and shows it on a board while it runs.
///
///     RunMeter meter("train", devices, steps);
///     for (...) { auto [x, y] = next_batch(); meter.begin_step(); ...; meter.end_step(loss); }
///     meter.fill(record);
///
/// What happens between end_step and begin_step, such as loading data, counts to the total time
/// only.
class RunMeter {
 public:
  /// The first steps warm up caches and allocators and are left out of the figures: a quarter of
  /// them, at most five.
  RunMeter(const std::string& program, const Devices& devices, int64_t steps);
  ~RunMeter();

  void begin_step();

  /// Waits for the devices, so that the step's time is the work's and not only its launch.
  void end_step(const torch::Tensor& loss);

  /// The measured part of a record: devices, step_ms, warmup_steps, total_s, losses, samples_per_s
  /// (from record.effective_batch). Final bytes are those live now.
  void fill(RunRecord& record) const;

  const std::vector<double>& losses() const { return losses_; }
  double last_step_ms() const { return last_step_ms_; }

 private:
  // Readings of one device whose increase over the timed steps is reported.
  struct Reading {
    double busy_seconds = 0;
    Traffic traffic;
  };

  Reading read(const Device& device) const;
  bool warming_up() const { return static_cast<int64_t>(losses_.size()) < warmup_steps_; }
  void show_on_board();

  const Devices& devices_;
  int64_t warmup_steps_;
  int64_t started_ns_;
  int64_t step_started_ns_ = 0;
  int64_t ended_ns_ = 0;
  double last_step_ms_ = 0;
  std::vector<double> step_ms_;    // after warm-up
  std::vector<double> losses_;     // all steps
  std::vector<Reading> at_begin_;  // [device], at begin_step
  std::vector<Reading> timed_;     // [device], summed over the timed steps
  std::optional<Board> board_;     // where this process has none from a launcher
  std::optional<BoardPage> page_;
};

}  // namespace lockstep
