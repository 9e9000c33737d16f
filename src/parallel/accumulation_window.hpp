#pragma once

#include <torch/types.h>

#include <cstdint>
#include <span>
#include <vector>

#include "parallel/gradient_buckets.hpp"

namespace lockstep {

/// The micro-steps since the last synchronised backward, and whether the weights stayed as they
/// were: an update in between would use gradients that no other rank has seen.
///
/// What a module changes in its own forward or backward, as Embedding's max_norm does, is not an
/// update: only changes between one micro-step's backward and the next forward count.
class AccumulationWindow {
 public:
  explicit AccumulationWindow(std::span<const TrainedParameter> parameters)
      : parameters_(parameters) {}

  /// An unsynchronised backward has ended.
  void add_micro_step();

  /// A forward has ended, inside the window or not.
  void forward_ended();

  /// The window of another rank, which this one follows, has that many micro-steps.
  void follow(int64_t micro_steps);

  /// A synchronised backward has ended, or the gradients were dropped.
  void close() { micro_steps_ = 0; }

  int64_t micro_steps() const { return micro_steps_; }

  /// Whether the weights changed since the last micro-step.
  bool weights_changed() const { return micro_steps_ > 0 && read_marks() != marks_; }

  /// Whether no gradient of the window is left.
  bool gradients_dropped() const;

 private:
  // What an update changes: libtorch's count of changes, and on the CPU, since torch::optim updates
  // past that count, the first element. A GPU would have to be waited for.
  struct Mark {
    uint32_t version = 0;
    double first = 0;
    bool operator==(const Mark&) const = default;
  };

  std::vector<Mark> read_marks() const;

  std::span<const TrainedParameter> parameters_;
  int64_t micro_steps_ = 0;
  std::vector<Mark> marks_;  // [parameter], after the last micro-step or forward
};

}  // namespace lockstep
