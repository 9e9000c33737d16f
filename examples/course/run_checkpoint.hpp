#pragma once

#include <cstdint>
#include <string>

#include "course/options.hpp"
#include "lockstep/checkpoint.hpp"
#include "lockstep/world.hpp"

namespace course {

/// --checkpoint: what a run saves, and where it goes on.
class RunCheckpoint {
 public:
  /// Checks the folder. `world` is null in a program of one process. Collective.
  RunCheckpoint(const Options& options, const lockstep::World* world);

  lockstep::Checkpoint& parts() { return checkpoint_; }

  /// Loads the latest checkpoint, if there is one, says so in a line, and returns the number of
  /// steps that are done. One that was saved with other flags, or later than --steps, is an Error.
  int64_t resume();

  /// Called after each step: saves if it is due. False: the run was asked to stop, and is saved.
  [[nodiscard]] bool step(int64_t steps_done) { return checkpoint_.step(steps_done); }

  /// Saves the last step, unless step() did, before anything of the run changes.
  void save_last(int64_t steps_done);

  /// Waits for the last save. An Error if any has failed.
  void finish() { checkpoint_.finish(); }

 private:
  const Options& options_;
  bool prints_;
  int64_t resumed_after_ = 0;
  lockstep::Checkpoint checkpoint_;
};

}  // namespace course
