#pragma once

#include <cstddef>
#include <optional>
#include <vector>

namespace lockstep {

/// In which order buckets are launched: strictly by number, since ranks may be ready in different
/// orders but must make the same calls. What number a bucket has follows from the order in which
/// parameters are expected to be ready: first the reverse of their own, since backward reaches the
/// last layer first; then, where it learns, the one that was seen in the first synchronised
/// backward, once all ranks agree on it.
class LaunchOrder {
 public:
  /// `learns`: false where the order says nothing about the next backward's.
  LaunchOrder(size_t parameters, bool learns);

  /// Parameters in the order in which they are expected to be ready.
  const std::vector<size_t>& expected() const { return expected_; }

  /// A synchronised backward begins; `gradients`: how many each bucket waits for.
  void begin_backward(std::vector<size_t> gradients);

  /// The parameter, whose gradient lies in that bucket, is ready.
  void mark_ready(size_t parameter, size_t bucket);

  /// The next bucket to launch; none where it still waits for gradients, or all were launched.
  std::optional<size_t> take_ready();

  /// A synchronised backward has ended, this rank's or one of the others'.
  void end_backward();

  /// Whether the expected order may still change.
  bool changes() const { return stage_ != Stage::kSettled; }

  /// The order this rank has to offer, once, after the first synchronised backward.
  std::optional<std::vector<size_t>> take_proposal();

  /// What ranks agreed on; gives whether it differs from what was expected.
  bool agree(std::vector<size_t> order);

 private:
  enum class Stage { kWatching, kSeen, kSettled };

  std::vector<size_t> expected_;
  std::vector<size_t> seen_;  // of the first synchronised backward
  Stage stage_;
  std::vector<size_t> missing_;  // [bucket] gradients until it is ready
  size_t next_ = 0;              // bucket to launch
};

}  // namespace lockstep
