#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <optional>

namespace lockstep {

/// Note [Random numbers on workers]
/// libtorch draws from one global generator per physical device. Two workers that drop out units at
/// the same time would share it in an order that changes from run to run. So each logical device
/// has generators of its own, and while a worker runs a task every random operation that names no
/// generator takes them. They are seeded anew for each task from the submitting thread's generator
/// state, a count of tasks since that state last changed, and the device's index: the same program
/// gives the same numbers every time, torch::manual_seed governs them, and the submitting thread's
/// own sequence is not advanced. One thing cannot be seen
/// from a state: seeding again with the same seed when nothing was drawn in between; the count then
/// goes on.
class DeviceRng {
 public:
  DeviceRng(c10::Device device, int index);

  /// The seed of the task being submitted. Called on the submitting thread.
  uint64_t next_seed();

  /// Starts the sequence of a task. Called on the worker.
  void reseed(uint64_t seed);

  const at::Generator& generator_for(c10::DeviceType type) const;

 private:
  int index_;
  at::Generator cpu_;
  std::optional<at::Generator> cuda_;
  uint64_t last_fingerprint_ = 0;
  uint64_t tasks_since_change_ = 0;
};

/// Guard: random operations of this thread draw from `rng`.
class UseRng {
 public:
  explicit UseRng(DeviceRng& rng);
  ~UseRng();
  UseRng(const UseRng&) = delete;
  UseRng& operator=(const UseRng&) = delete;

 private:
  DeviceRng* previous_;
  bool was_included_;
};

}  // namespace lockstep
