#pragma once

#include <functional>
#include <string>
#include <vector>

#include "lockstep/grad_scaler.hpp"
#include "precision/gpu_scale.hpp"
#include "precision/optimizer_gradients.hpp"

namespace lockstep {

/// Which updates were skipped, and why. What a GPU decided it writes to a ring, and it becomes
/// known here when that is read.
class SkipLog {
 public:
  explicit SkipLog(std::function<void(const SkippedStep&)> on_skip);

  ParameterNames& names() { return names_; }

  /// The first parameter that overflowed, in words; the host knows the findings.
  std::string overflowed_parameter(const std::vector<Finding>& findings) const;

  void add(const SkippedStep& skipped);

  /// Takes in what the GPU has written so far.
  void read(SkipRing& ring);

  const std::vector<SkippedStep>& skipped() const { return skipped_; }

 private:
  std::function<void(const SkippedStep&)> on_skip_;
  ParameterNames names_;
  uint64_t read_ = 0;  // entries of the ring
  std::vector<SkippedStep> skipped_;
};

}  // namespace lockstep
