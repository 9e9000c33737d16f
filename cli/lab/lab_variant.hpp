#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::cli {

/// One way to train in practical 7 and homework 2; everything else is alike in all of them.
struct Variant {
  int64_t accum_steps = 1;  ///< micro-steps in an optimizer step
  int64_t row_factor = 1;   ///< rows of a micro-step, in multiples of --batch
  std::string amp = "off";
  bool sync_every_step = false;
  bool divide = true;       ///< the loss, by accum_steps
  bool scaler = true;       ///< where amp is not off
  int64_t overflow_at = 0;  ///< optimizer step with a planted infinite gradient; 0: none

  bool operator==(const Variant&) const = default;

  /// Rows of an optimizer step, in multiples of --batch.
  int64_t effective_factor() const { return accum_steps * row_factor; }

  std::string program() const;                 ///< that can train so
  std::string name() const;                    ///< of its records: "accum4-sync"
  std::string title() const;                   ///< for people: "fp32, 4 micro-steps"
  std::vector<std::string> arguments() const;  ///< beyond the flags that all share
};

}  // namespace lockstep::cli
