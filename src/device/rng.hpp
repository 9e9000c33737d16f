#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

/// Note [Random numbers on workers]
/// libtorch draws from one global generator per physical device. Two workers that apply dropout at
/// the same time would share it in an order that changes from run to run. So each logical device
/// has generators of its own, which every random operation of a task uses unless it names another.
/// They are seeded for each task from the submitting thread's generator (its seed and its
/// position), the number of the device's tasks since that generator was last seeded or drawn from,
/// and the device's index. Hence the same program draws the same numbers every time, the numbers
/// after torch::manual_seed are always the same, and the submitting thread's own sequence does not
/// advance.
///
/// Note [How a seeding is noticed]
/// Seeding again with the same seed restores the same state, so the state alone does not tell
/// whether the count continues. mt19937 has 19937 bits of state in 624 words of 32 bits: the lower
/// 31 bits of the first word are read neither after that word was drawn nor before the first draw
/// after a seeding. next_seed() writes a mark there, which does not change any number that the
/// generator will give, and which every seeding overwrites. A missing mark means that the generator
/// was seeded or drawn from. (Restoring a state that was saved with a mark restores the mark too;
/// that is not a seeding, and the count continues.)
class DeviceRng {
 public:
  DeviceRng(c10::Device device, int index);

  /// Returns the seed of the task being submitted. Called on the submitting thread.
  uint64_t next_seed();

  /// How many tasks were submitted since the calling thread's generator was last seeded or drawn
  /// from. set_position() makes the next task go on from there.
  int64_t position();
  void set_position(int64_t position);

  /// Starts the sequence of a task. Called on the worker.
  void reseed(uint64_t seed);

  const at::Generator& generator_for(c10::DeviceType type) const;

  /// Draws from these.
  DeviceRng(at::Generator cpu, std::optional<at::Generator> cuda);

  /// What next_seed() last wrote into a generator.
  struct Mark {
    uint64_t number = 0;       ///< counts all marks of the process; 0 if there is none yet
    uint64_t fingerprint = 0;  ///< a hash of the generator's state without the mark
    uint32_t bits = 0;
  };

 private:
  // The mark in the generator of the calling thread.
  static Mark mark_of_thread();

  int index_;
  at::Generator cpu_;
  std::optional<at::Generator> cuda_;
  Mark own_mark_;           // in cpu_, for tasks that this device's worker submits itself
  uint64_t last_mark_ = 0;  // the mark of the last submitting thread's generator
  uint64_t tasks_since_mark_ = 0;
};

/// The generators that random operations of this thread draw from: "cpu", and one for each of
/// these GPUs, by its place among them: the first is "cuda:0".
std::map<std::string, at::Generator> generators_of_thread(const std::vector<c10::Device>& gpus);

/// The random numbers that this thread is about to draw, so that they can be drawn once more.
class RecordedRng {
 public:
  /// Records the states of the CPU and, if given, of this GPU.
  explicit RecordedRng(std::optional<c10::Device> gpu);

  class Replay;

 private:
  at::Generator cpu_;
  std::optional<at::Generator> cuda_;
  std::optional<c10::Device> default_gpu_;  // if cuda_ is of libtorch's generator of that GPU
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

/// Guard: this thread runs a function that will be run once more with the same random numbers.
/// Tasks for logical devices draw their own, which cannot be repeated, so they are refused.
class RepeatableScope {
 public:
  RepeatableScope();
  ~RepeatableScope();
  RepeatableScope(const RepeatableScope&) = delete;
  RepeatableScope& operator=(const RepeatableScope&) = delete;

  /// Throws inside such a scope; `device` is the name of the task's.
  static void require_none(const std::string& device);
};

/// Guard: random operations of this thread draw the recorded numbers. They come from generators of
/// the guard's own, since other threads may draw from libtorch's meanwhile. Only a GPU's default
/// generator is used itself, and put back: some of libtorch's kernels know no other.
class RecordedRng::Replay {
 public:
  explicit Replay(const RecordedRng& recorded);
  ~Replay();
  Replay(const Replay&) = delete;
  Replay& operator=(const Replay&) = delete;

 private:
  std::optional<at::Generator> borrowed_;  // a GPU's default generator
  at::Tensor borrowed_state_;              // what it goes back to
  DeviceRng rng_;
  UseRng use_;
};

}  // namespace lockstep
