#pragma once

#include <cstddef>
#include <optional>
#include <vector>

namespace lockstep {

/// Decides which bucket is launched next. Buckets are launched strictly by number: ranks may be
/// ready in different orders but must make the same calls. Buckets are numbered in the order in
/// which parameters are expected to be ready. At first that is the reverse of their registration,
/// since backward reaches the last layer first. A BucketOrder that learns then takes the order seen
/// in the first synchronised backward, once all ranks agree on it.
class BucketOrder {
 public:
  /// `learns` is false if one backward's order does not predict the next one's.
  BucketOrder(size_t parameters, bool learns);

  /// The parameters in the order in which they are expected to be ready.
  const std::vector<size_t>& expected() const { return expected_; }

  /// A synchronised backward begins. `gradients` holds the number each bucket waits for.
  void begin_backward(std::vector<size_t> gradients);

  /// The parameter is ready; its gradient belongs to `bucket`.
  void mark_ready(size_t parameter, size_t bucket);

  /// The next bucket to launch; none if it still waits for gradients or all were launched.
  std::optional<size_t> take_ready();

  /// A synchronised backward has ended, on this rank or on those it follows in a join.
  void end_backward();

  /// Whether the expected order may still change.
  bool changes() const { return stage_ != Stage::kSettled; }

  /// The order this rank proposes, given once, after the first synchronised backward.
  std::optional<std::vector<size_t>> take_proposal();

  /// Takes the order that the ranks agreed on; returns whether it differs from expected().
  bool agree(std::vector<size_t> order);

 private:
  enum class Stage { kWatching, kSeen, kSettled };

  std::vector<size_t> expected_;
  std::vector<size_t> seen_;  // order of the first synchronised backward
  Stage stage_;
  std::vector<size_t> missing_;  // [bucket] gradients it still waits for
  size_t next_ = 0;              // the bucket to launch next
};

}  // namespace lockstep
