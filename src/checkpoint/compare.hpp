#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/reader.hpp"

namespace lockstep {

/// How a tensor or value of one checkpoint differs from that of another.
struct Difference {
  enum class Kind { kValues, kOnlyFirst, kOnlySecond, kOtherShape, kOtherDtype };

  std::string section;
  std::string name;  ///< of a tensor; empty: the section's value
  Kind kind = Kind::kValues;
  int64_t elements = 0;  ///< that differ
  double largest = 0;    ///< |a - b|; NaN if one of the two is
};

/// What differs, by section and name; empty: nothing. Reads and verifies all tensors.
std::vector<Difference> compare(const CheckpointReader& first, const CheckpointReader& second);

/// Compares elements of one dtype bit by bit.
Difference compare_elements(Dtype dtype, std::span<const std::byte> first,
                            std::span<const std::byte> second);

}  // namespace lockstep
