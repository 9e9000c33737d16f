#pragma once

#include <cstddef>
#include <vector>

namespace lockstep {

/// Tracks which parameters are ready in a synchronised backward and which are still awaited.
/// Parameters are numbers here, so the logic can be tested without tensors and ranks.
///
/// A parameter is ready once it has received as many gradients as this backward gives it: one; in a
/// static graph as many as in the first backward; none if nothing reaches it.
class ReadyTracker {
 public:
  enum class Arrival {
    kLast,   ///< the parameter is ready
    kOther,  ///< more will come, or their number is not known yet: see learns()
    kLate,   ///< the parameter was already ready
  };

  ReadyTracker(size_t parameters, bool static_graph);

  /// The next backward may reach these parameters, and those of earlier calls since the last
  /// backward. Without any call it may reach all.
  void add_reachable(const std::vector<bool>& reachable);

  /// A synchronised backward begins; returns the parameters that will get no gradient.
  std::vector<size_t> begin_backward();

  /// A gradient arrived in a synchronised backward.
  Arrival arrive(size_t parameter);

  /// A gradient arrived in a backward that is not synchronised.
  void mark_used(size_t parameter) { used_[parameter] = true; }

  /// The parameter gets no further gradient in this backward.
  void expect_none(size_t parameter) { left_[parameter] = 0; }

  /// The parameters that are still awaited, in ascending order.
  std::vector<size_t> awaited() const;

  /// Whether this is the first backward of a static graph. All parameters stay awaited until it has
  /// ended.
  bool learns() const { return static_graph_ && static_arrivals_.empty(); }

  /// Ends that backward; returns the parameters that are ready, in the order of their last
  /// gradient. Parameters without a gradient are still awaited.
  std::vector<size_t> learn();

  /// A backward has ended, synchronised or not.
  void end_backward() { reachable_.clear(); }

  /// The parameter has no gradient, and its part of the bucket was filled with zeros.
  void mark_zero_filled(size_t parameter) { zero_filled_[parameter] = true; }
  bool zero_filled(size_t parameter) const { return zero_filled_[parameter]; }

  /// The parameters that got a gradient since the last end_window().
  const std::vector<bool>& used() const { return used_; }

  /// A synchronised backward has ended, on this rank or on those it follows in a join: forgets what
  /// was used and zero-filled.
  void end_window();

 private:
  const bool static_graph_;
  std::vector<int> left_;              // [parameter] gradients it still waits for; 0: ready
  std::vector<int> arrivals_;          // [parameter] gradients in this backward
  std::vector<size_t> last_arrivals_;  // while learning: parameters by their last gradient
  std::vector<int> static_arrivals_;   // [parameter] in a static graph; empty: not known yet
  std::vector<bool> reachable_;    // [parameter] from outputs since the last backward; empty: all
  std::vector<bool> used_;         // [parameter]
  std::vector<bool> zero_filled_;  // [parameter]
};

}  // namespace lockstep
