#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

// Which part of a whole tensor each rank has: how a checkpoint is stored in slices, and loaded by
// ranks that are divided in another way.

namespace lockstep {

using Shape = std::vector<int64_t>;

/// Elements of a shape; nothing if they do not fit an int64_t or a size is negative.
std::optional<int64_t> element_count(const Shape& shape);

/// A box of elements: where it lies in a rank's tensor and where in the whole one. With one number
/// each, it is a range of the tensors' elements in row-major order, whatever their shapes.
struct Block {
  Shape local;  ///< first element, in the rank's tensor
  Shape whole;  ///< first element, in the whole tensor
  Shape shape;

  bool operator==(const Block&) const = default;
};

/// What a rank has of a tensor. Without blocks, it has the whole tensor.
struct Slice {
  Shape whole;  ///< shape of the whole tensor
  Shape local;  ///< shape of the rank's tensor
  std::vector<Block> blocks;

  bool operator==(const Slice&) const = default;
};

/// The slice that is the whole tensor.
Slice whole_slice(Shape shape);

/// Consecutive elements of the whole tensor that are consecutive in the rank's tensor too.
struct Run {
  int64_t whole = 0;
  int64_t local = 0;
  int64_t count = 0;
};

/// A slice as runs, in the order of the whole tensor. Nothing if a block does not fit its tensors,
/// two blocks overlap in either, or there are more than 2^24 runs.
std::optional<std::vector<Run>> runs_of(const Slice& slice);

/// Whether the slices together are the whole tensor, each element once. All must be valid.
bool are_complete(const std::vector<Slice>& slices);

/// Copies the elements that both have from one slice's tensor to the other's. Returns how many
/// there are; without a destination it only counts them.
int64_t copy_common(std::span<const Run> from, const std::byte* source, std::span<const Run> to,
                    std::byte* destination, int64_t element_bytes);

}  // namespace lockstep
