#include "lockstep/split.hpp"

#include <algorithm>

#include "lockstep/error.hpp"

namespace lockstep {
namespace {

void require_divisible(int64_t rows, int64_t pieces) {
  if (rows >= 0 && pieces >= 1) return;
  throw Error(
      Code::kSplit,
      "cannot divide " + std::to_string(rows) + " rows into " + std::to_string(pieces) + " pieces",
      "rows must be 0 or more, pieces 1 or more");
}

}  // namespace

std::vector<int64_t> chunk_rows(int64_t rows, int64_t pieces) {
  require_divisible(rows, pieces);
  if (rows == 0) return std::vector<int64_t>(static_cast<size_t>(pieces), 0);
  const int64_t piece = rows / pieces + (rows % pieces != 0 ? 1 : 0);
  std::vector<int64_t> sizes;
  for (int64_t left = rows; left > 0; left -= piece) sizes.push_back(std::min(piece, left));
  return sizes;
}

std::vector<int64_t> tensor_split_rows(int64_t rows, int64_t pieces) {
  require_divisible(rows, pieces);
  std::vector<int64_t> sizes(static_cast<size_t>(pieces), rows / pieces);
  for (int64_t i = 0; i < rows % pieces; ++i) sizes[static_cast<size_t>(i)] += 1;
  return sizes;
}

}  // namespace lockstep
