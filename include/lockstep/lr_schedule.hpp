#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace lockstep {

/// A learning rate after a number of updates, for a group whose optimizer was made with `base_lr`.
/// The functions below make the usual ones; any other will do.
using LrSchedule = std::function<double(int64_t updates, double base_lr)>;

/// base_lr times `factor`.
LrSchedule constant_lr(double factor = 1);

/// From start_factor to end_factor times base_lr within `updates`, and constant from then on:
/// PyTorch's LinearLR, and the usual warm-up.
LrSchedule linear_lr(double start_factor, double end_factor, int64_t updates);

/// From base_lr along half a cosine to `min_lr` within `updates`: PyTorch's CosineAnnealingLR,
/// which goes up again afterwards.
LrSchedule cosine_lr(int64_t updates, double min_lr = 0);

/// Multiplied by `gamma` after each `every` updates: PyTorch's StepLR.
LrSchedule step_lr(int64_t every, double gamma = 0.1);

/// Schedules one after another, each counted from its own beginning: PyTorch's SequentialLR. The
/// second begins after milestones[0] updates, the third after milestones[1], and so on.
LrSchedule sequential_lr(std::vector<LrSchedule> schedules, std::vector<int64_t> milestones);

/// Up from 1 / `warmup` of base_lr during the first `warmup` updates, then along a cosine to
/// `min_lr` at `updates`, where it stays.
LrSchedule warmup_cosine_lr(int64_t warmup, int64_t updates, double min_lr = 0);

/// Sets the learning rates of an optimizer's groups, each from its own base, by a schedule.
///
///     lockstep::LrScheduler scheduler(optimizer, lockstep::warmup_cosine_lr(100, 10'000));
///     checkpoint.add("scheduler", scheduler);
///     ... optimizer.step(); scheduler.step();
///
/// Any torch::optim or lockstep optimizer will do. Rates are computed from the number of updates
/// and not from the rate before, so they do not drift. Make it after the optimizer and before
/// Checkpoint::resume().
class LrScheduler {
 public:
  /// What the groups have now is their base. Sets the rates of the first update.
  LrScheduler(torch::optim::Optimizer& optimizer, LrSchedule schedule);

  /// Call it after each update, on every rank. Do not call it for an update that a GradScaler
  /// skipped.
  void step();

  int64_t updates() const { return state_.updates; }
  std::vector<double> rates() const;  ///< [group]
  double rate() const { return rates().front(); }

  /// What a Checkpoint saves.
  struct State {
    int64_t updates = 0;
    std::vector<double> base_lrs = {};  ///< [group]
  };
  const State& state() const { return state_; }

  /// Continues from there; sets the rates.
  void load(const State& state);

 private:
  void set_rates();

  torch::optim::Optimizer& optimizer_;
  LrSchedule schedule_;
  State state_;
};

}  // namespace lockstep
