#pragma once

#include <cstdint>
#include <vector>

namespace lockstep {

/// Rows per piece when `rows` are divided by torch.chunk's rule, as DataParallel does: every piece
/// has ceil(rows / pieces) rows until the rows run out, so fewer than `pieces` pieces may come
/// back. 64 over 3 is 22, 22, 20; 9 over 4 is 3, 3, 3. No rows at all give `pieces` empty pieces.
std::vector<int64_t> chunk_rows(int64_t rows, int64_t pieces);

/// Rows per piece by torch.tensor_split's rule, as a pipeline makes micro-batches: always `pieces`
/// of them, the first rows % pieces one row larger. 64 over 3 is 22, 21, 21; 9 over 4 is 3, 2, 2,
/// 2.
std::vector<int64_t> tensor_split_rows(int64_t rows, int64_t pieces);

}  // namespace lockstep
