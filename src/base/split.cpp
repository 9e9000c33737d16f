#include "lockstep/split.hpp"

#include <algorithm>

#include "lockstep/error.hpp"

namespace lockstep {

std::vector<int64_t> chunk_rows(int64_t rows, int64_t pieces) {
  if (rows < 0 || pieces < 1) {
    throw Error(Code::kSplit,
                "cannot divide " + std::to_string(rows) + " rows into " + std::to_string(pieces) +
                    " pieces",
                "rows must be 0 or more, pieces 1 or more");
  }
  if (rows == 0) return std::vector<int64_t>(static_cast<size_t>(pieces), 0);
  const int64_t piece = rows / pieces + (rows % pieces != 0 ? 1 : 0);
  std::vector<int64_t> sizes;
  for (int64_t left = rows; left > 0; left -= piece) sizes.push_back(std::min(piece, left));
  return sizes;
}

}  // namespace lockstep
