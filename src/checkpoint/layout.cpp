#include "checkpoint/layout.hpp"

#include <algorithm>
#include <cstring>
#include <limits>

namespace lockstep {
namespace {

// A manifest may claim any size for its files, which are not read yet: 16 million rows of a tensor
// that is divided by columns are enough.
constexpr int64_t kMostRuns = int64_t{1} << 24;

// Whether `block` lies inside a tensor of this shape.
bool fits(const Shape& first, const Shape& shape, const Shape& tensor) {
  if (first.size() != tensor.size() || shape.size() != tensor.size()) return false;
  for (size_t d = 0; d < tensor.size(); ++d) {
    if (first[d] < 0 || shape[d] < 0 || first[d] > tensor[d] || shape[d] > tensor[d] - first[d]) {
      return false;
    }
  }
  return true;
}

int64_t flat_index(const Shape& index, const Shape& tensor) {
  int64_t flat = 0;
  for (size_t d = 0; d < tensor.size(); ++d) flat = flat * tensor[d] + index[d];
  return flat;
}

// Appends the runs of a box that fits both tensors. Returns false if there are too many.
bool add_runs(const Block& block, const Shape& whole, const Shape& local, std::vector<Run>& runs) {
  if (std::find(block.shape.begin(), block.shape.end(), 0) != block.shape.end()) return true;
  // Dimensions from `inner` on are consecutive in both tensors.
  size_t inner = block.shape.size();
  int64_t count = 1;
  while (inner > 0) {
    --inner;
    count *= block.shape[inner];
    if (block.shape[inner] != whole[inner] || block.shape[inner] != local[inner]) break;
  }
  const auto boxes =
      element_count({block.shape.begin(), block.shape.begin() + static_cast<long>(inner)});
  if (!boxes || *boxes > kMostRuns - static_cast<int64_t>(runs.size())) return false;
  Shape offset(block.shape.size(), 0);
  for (;;) {
    Shape in_whole = block.whole;
    Shape in_local = block.local;
    for (size_t d = 0; d < offset.size(); ++d) {
      in_whole[d] += offset[d];
      in_local[d] += offset[d];
    }
    runs.push_back({flat_index(in_whole, whole), flat_index(in_local, local), count});
    size_t d = inner;
    while (d > 0 && ++offset[d - 1] == block.shape[d - 1]) offset[--d] = 0;
    if (d == 0) return true;
  }
}

bool overlap(std::vector<Run>& runs, int64_t Run::*where) {
  std::sort(runs.begin(), runs.end(),
            [&](const Run& a, const Run& b) { return a.*where < b.*where; });
  for (size_t i = 1; i < runs.size(); ++i) {
    if (runs[i].*where < runs[i - 1].*where + runs[i - 1].count) return true;
  }
  return false;
}

}  // namespace

std::optional<int64_t> element_count(const Shape& shape) {
  int64_t count = 1;
  bool empty = false;
  for (const int64_t size : shape) {
    if (size < 0) return std::nullopt;
    empty = empty || size == 0;
  }
  if (empty) return 0;
  for (const int64_t size : shape) {
    if (count > std::numeric_limits<int64_t>::max() / size) return std::nullopt;
    count *= size;
  }
  return count;
}

Slice whole_slice(Shape shape) {
  return {shape, shape, {}};
}

std::optional<std::vector<Run>> runs_of(const Slice& slice) {
  const auto in_whole = element_count(slice.whole);
  const auto in_local = element_count(slice.local);
  if (!in_whole || !in_local) return std::nullopt;
  std::vector<Run> runs;
  if (slice.blocks.empty()) {
    if (slice.whole != slice.local) return std::nullopt;
    if (*in_whole > 0) runs.push_back({0, 0, *in_whole});
    return runs;
  }
  for (const auto& block : slice.blocks) {
    const bool boxes =
        fits(block.whole, block.shape, slice.whole) && fits(block.local, block.shape, slice.local);
    const bool range =
        fits(block.whole, block.shape, {*in_whole}) && fits(block.local, block.shape, {*in_local});
    if (!boxes && !range) return std::nullopt;
    if (!(boxes ? add_runs(block, slice.whole, slice.local, runs)
                : add_runs(block, {*in_whole}, {*in_local}, runs))) {
      return std::nullopt;
    }
  }
  int64_t covered = 0;
  for (const Run& run : runs) covered += run.count;
  if (covered != *in_local || overlap(runs, &Run::local) || overlap(runs, &Run::whole)) {
    return std::nullopt;
  }
  return runs;
}

bool are_complete(const std::vector<Slice>& slices) {
  if (slices.empty()) return false;
  std::vector<Run> all;
  for (const auto& slice : slices) {
    if (slice.whole != slices.front().whole) return false;
    const auto runs = runs_of(slice);
    if (!runs) return false;
    all.insert(all.end(), runs->begin(), runs->end());
  }
  int64_t covered = 0;
  for (const Run& run : all) covered += run.count;
  return covered == *element_count(slices.front().whole) && !overlap(all, &Run::whole);
}

int64_t copy_common(std::span<const Run> from, const std::byte* source, std::span<const Run> to,
                    std::byte* destination, int64_t element_bytes) {
  int64_t copied = 0;
  for (size_t f = 0, t = 0; f < from.size() && t < to.size();) {
    const int64_t from_end = from[f].whole + from[f].count;
    const int64_t to_end = to[t].whole + to[t].count;
    const int64_t begin = std::max(from[f].whole, to[t].whole);
    const int64_t end = std::min(from_end, to_end);
    if (begin < end) {
      if (destination != nullptr) {
        std::memcpy(destination + (to[t].local + begin - to[t].whole) * element_bytes,
                    source + (from[f].local + begin - from[f].whole) * element_bytes,
                    static_cast<size_t>((end - begin) * element_bytes));
      }
      copied += end - begin;
    }
    if (from_end <= to_end) ++f;
    if (to_end <= from_end) ++t;
  }
  return copied;
}

}  // namespace lockstep
