#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "device/parallel_ranges.hpp"
#include "kernels/update_kernels.hpp"

namespace lockstep {

/// Runs `update(piece's index, part)` over all elements of all pieces, divided evenly over this
/// thread's cores: one large piece and many small ones balance alike. Cuts lie at multiples of a
/// block from a piece's begin, so that parts stay aligned.
template <class Update>
void for_each_part(std::span<const UpdatePiece> pieces, std::span<const Dtype> dtypes,
                   Update&& update) {
  constexpr int64_t kBlock = 64;             // elements
  constexpr int64_t kGrainBlocks = 512;      // below that, waking another thread costs more
  std::vector<int64_t> ends(pieces.size());  // [piece] in blocks, over all pieces
  int64_t blocks = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    blocks += (pieces[i].count + kBlock - 1) / kBlock;
    ends[i] = blocks;
  }
  parallel_ranges(blocks, kGrainBlocks, [&](int64_t begin, int64_t end) {
    auto i = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin());
    for (; begin < end; ++i) {
      const UpdatePiece& piece = pieces[i];
      const int64_t first_block = i == 0 ? 0 : ends[i - 1];
      const int64_t from = (begin - first_block) * kBlock;
      const int64_t to = std::min(piece.count, (end - first_block) * kBlock);
      const auto at = [&](void* array) -> void* {
        return array == nullptr ? nullptr
                                : static_cast<char*>(array) + from * dtype_bytes(dtypes[i]);
      };
      update(i, UpdatePiece{at(piece.weight), at(piece.gradient), at(piece.momentum),
                            at(piece.variance), to - from});
      begin = ends[i];
    }
  });
}

}  // namespace lockstep
