#pragma once

#include <cstdint>
#include <vector>

namespace lockstep {

/// Rows per piece by torch.chunk's rule, as DataParallel divides a batch: every piece has
/// ceil(rows / pieces) rows until the rows run out, so there may be fewer than `pieces` pieces. 64
/// over 3 is 22, 22, 20; 9 over 4 is 3, 3, 3. 0 rows give `pieces` empty pieces.
std::vector<int64_t> chunk_rows(int64_t rows, int64_t pieces);

/// Rows per piece by torch.tensor_split's rule, as a pipeline makes micro-batches: always `pieces`
/// pieces, of which the first rows % pieces have one row more. 64 over 3 is 22, 21, 21; 9 over 4 is
/// 3, 2, 2, 2.
std::vector<int64_t> tensor_split_rows(int64_t rows, int64_t pieces);

}  // namespace lockstep
