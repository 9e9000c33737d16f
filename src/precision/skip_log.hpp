#pragma once

#include <c10/core/Event.h>

#include <deque>
#include <functional>
#include <vector>

#include "lockstep/grad_scaler.hpp"
#include "precision/optimizer_gradients.hpp"

namespace lockstep {

/// Which updates were skipped, and why. On a GPU that is copied to the host behind the training:
/// it becomes known when the copy has arrived.
class SkipLog {
 public:
  explicit SkipLog(std::function<void(const SkippedStep&)> on_skip);

  ParameterNames& names() { return names_; }

  /// The first parameter that overflowed, in words.
  std::string overflowed_parameter(const std::vector<Finding>& findings) const;

  void add(const SkippedStep& skipped);

  /// `facts` on the GPU: found_inf and first of each GPU's finding, then the scale before and the
  /// scale after. Nobody waits.
  void follow(int64_t step, std::vector<Finding> findings, const torch::Tensor& facts);

  /// Takes in what has arrived; `wait`: all of it.
  void collect(bool wait);

  const std::vector<SkippedStep>& skipped() const { return skipped_; }

 private:
  struct Arriving {
    int64_t step;
    std::vector<Finding> findings;
    torch::Tensor facts;  // pinned: being written until the event has passed
    c10::Stream stream;
    c10::Event copied;
  };
  void take_in(Arriving& arrived);

  std::function<void(const SkippedStep&)> on_skip_;
  ParameterNames names_;
  std::deque<Arriving> arriving_;
  std::vector<SkippedStep> skipped_;
};

}  // namespace lockstep
