#pragma once

#include <cstdint>

namespace lockstep {

/// How elements of several ranks become one.
enum class ReduceOp : uint8_t {
  kSum,
  kMean,  ///< weighted: the sum of weight * value over the sum of the weights; floating point only
  kMax,
  kMin,
};

}  // namespace lockstep
