#pragma once

#include <cstddef>
#include <vector>

namespace lockstep {

/// Which gradients of a synchronised backward have come, and which are awaited still. Parameters
/// are numbers here, so that neither tensors nor ranks are needed to know what happens.
///
/// A parameter is awaited until it has got as many gradients as this backward gives it: one, or in
/// a static graph what the first backward gave it, or none where nothing reaches it.
class GradientTally {
 public:
  enum class Arrival {
    kLast,   ///< the parameter is ready
    kOther,  ///< more will come, or nobody knows yet how many: see learns()
    kLate,   ///< the parameter was ready already
  };

  GradientTally(size_t parameters, bool static_graph);

  /// The next backward may reach these, and those of other calls since the last; with no call, all.
  void add_reachable(const std::vector<bool>& reachable);

  /// A synchronised backward begins; gives the parameters that it is known to give no gradient.
  std::vector<size_t> begin_backward();

  /// A gradient came in a synchronised backward.
  Arrival arrive(size_t parameter);

  /// A gradient came in a backward that is not synchronised.
  void mark_used(size_t parameter) { used_[parameter] = true; }

  /// No gradient comes for it any more in this backward.
  void expect_none(size_t parameter) { left_[parameter] = 0; }

  /// Parameters that are awaited still, by number.
  std::vector<size_t> awaited() const;

  /// Whether this backward is the first of a static graph: all of its parameters stay awaited until
  /// it has ended.
  bool learns() const { return static_graph_ && static_arrivals_.empty(); }

  /// That backward has ended; gives the parameters that are ready, in the order of their last
  /// gradient. Those without any are awaited still.
  std::vector<size_t> learn();

  /// A backward has ended, synchronised or not.
  void end_backward() { reachable_.clear(); }

  /// The parameter's place holds zeros where it has no gradient.
  void mark_zero_filled(size_t parameter) { zero_filled_[parameter] = true; }
  bool zero_filled(size_t parameter) const { return zero_filled_[parameter]; }

  /// Parameters that got a gradient since the last end_window().
  const std::vector<bool>& used() const { return used_; }

  /// What was used and zero-filled is settled, by a synchronised backward or without this rank's.
  void end_window();

 private:
  const bool static_graph_;
  std::vector<int> left_;              // [parameter] gradients until it is ready; 0: ready
  std::vector<int> arrivals_;          // [parameter] in this backward
  std::vector<size_t> last_arrivals_;  // parameters of the backward that learns
  std::vector<int> static_arrivals_;   // [parameter] of a static graph; empty: not known yet
  std::vector<bool> reachable_;    // [parameter] from outputs since the last backward; empty: all
  std::vector<bool> used_;         // [parameter]
  std::vector<bool> zero_filled_;  // [parameter]
};

}  // namespace lockstep
