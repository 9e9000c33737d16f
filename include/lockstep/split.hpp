#pragma once

#include <cstdint>
#include <vector>

namespace lockstep {

/// Rows per piece when `rows` are divided by torch.chunk's rule, as DataParallel does: every piece
/// has ceil(rows / pieces) rows until the rows run out, so fewer than `pieces` pieces may come
/// back. 64 over 3 is 22, 22, 20; 9 over 4 is 3, 3, 3. No rows at all give `pieces` empty pieces.
std::vector<int64_t> chunk_rows(int64_t rows, int64_t pieces);

}  // namespace lockstep
