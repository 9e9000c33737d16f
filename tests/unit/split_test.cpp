#include "lockstep/split.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

#include "support.hpp"

namespace lockstep::test::split_test {
namespace {

using Rows = std::vector<int64_t>;

// The table was taken from torch.chunk itself.
TEST(ChunkRows, AgreesWithTorchChunk) {
  EXPECT_EQ(chunk_rows(64, 2), (Rows{32, 32}));
  EXPECT_EQ(chunk_rows(64, 3), (Rows{22, 22, 20}));
  EXPECT_EQ(chunk_rows(64, 5), (Rows{13, 13, 13, 13, 12}));
  EXPECT_EQ(chunk_rows(64, 7), (Rows{10, 10, 10, 10, 10, 10, 4}));
  EXPECT_EQ(chunk_rows(10, 4), (Rows{3, 3, 3, 1}));
  EXPECT_EQ(chunk_rows(9, 4), (Rows{3, 3, 3}));
  EXPECT_EQ(chunk_rows(5, 4), (Rows{2, 2, 1}));
  EXPECT_EQ(chunk_rows(2, 4), (Rows{1, 1}));
  EXPECT_EQ(chunk_rows(1, 1), (Rows{1}));
  EXPECT_EQ(chunk_rows(0, 3), (Rows{0, 0, 0}));
}

TEST(ChunkRows, KeepsEveryRowInFullPieces) {
  for (int64_t rows = 1; rows <= 130; ++rows) {
    for (int64_t pieces = 1; pieces <= 40; ++pieces) {
      SCOPED_TRACE(testing::Message() << rows << " over " << pieces);
      const Rows sizes = chunk_rows(rows, pieces);
      const int64_t full = (rows + pieces - 1) / pieces;
      ASSERT_EQ(std::accumulate(sizes.begin(), sizes.end(), int64_t{0}), rows);
      ASSERT_LE(static_cast<int64_t>(sizes.size()), pieces);
      ASSERT_EQ(static_cast<int64_t>(sizes.size()), (rows + full - 1) / full);
      for (size_t i = 0; i + 1 < sizes.size(); ++i) ASSERT_EQ(sizes[i], full);
      ASSERT_GE(sizes.back(), 1);
      ASSERT_LE(sizes.back(), full);
    }
  }
}

TEST(ChunkRows, SurvivesTheLargestNumbers) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  constexpr int64_t kHalf = int64_t{1} << 62;
  EXPECT_EQ(chunk_rows(kMost, 1), (Rows{kMost}));
  EXPECT_EQ(chunk_rows(kMost, 2), (Rows{kHalf, kHalf - 1}));
  EXPECT_EQ(chunk_rows(2, kMost), (Rows{1, 1}));
}

TEST(ChunkRows, RefusesWhatCannotBeDivided) {
  test::expect_error(Code::kSplit, {"-1 rows into 2 pieces"}, [] { chunk_rows(-1, 2); });
  test::expect_error(Code::kSplit, {"4 rows into 0 pieces"}, [] { chunk_rows(4, 0); });
  test::expect_error(Code::kSplit, {"4 rows into -3 pieces"}, [] { chunk_rows(4, -3); });
}

// The table was taken from torch.tensor_split itself.
TEST(TensorSplitRows, AgreesWithTorchTensorSplit) {
  EXPECT_EQ(tensor_split_rows(64, 2), (Rows{32, 32}));
  EXPECT_EQ(tensor_split_rows(64, 3), (Rows{22, 21, 21}));
  EXPECT_EQ(tensor_split_rows(64, 5), (Rows{13, 13, 13, 13, 12}));
  EXPECT_EQ(tensor_split_rows(64, 7), (Rows{10, 9, 9, 9, 9, 9, 9}));
  EXPECT_EQ(tensor_split_rows(10, 4), (Rows{3, 3, 2, 2}));
  EXPECT_EQ(tensor_split_rows(9, 4), (Rows{3, 2, 2, 2}));
  EXPECT_EQ(tensor_split_rows(2, 4), (Rows{1, 1, 0, 0}));
  EXPECT_EQ(tensor_split_rows(1, 1), (Rows{1}));
  EXPECT_EQ(tensor_split_rows(0, 3), (Rows{0, 0, 0}));
}

TEST(TensorSplitRows, KeepsEveryRowInPiecesThatDifferByOne) {
  for (int64_t rows = 0; rows <= 130; ++rows) {
    for (int64_t pieces = 1; pieces <= 40; ++pieces) {
      SCOPED_TRACE(testing::Message() << rows << " over " << pieces);
      const Rows sizes = tensor_split_rows(rows, pieces);
      ASSERT_EQ(static_cast<int64_t>(sizes.size()), pieces);
      ASSERT_EQ(std::accumulate(sizes.begin(), sizes.end(), int64_t{0}), rows);
      ASSERT_TRUE(std::is_sorted(sizes.rbegin(), sizes.rend()));
      ASSERT_LE(sizes.front() - sizes.back(), 1);
    }
  }
}

TEST(TensorSplitRows, SurvivesTheLargestNumbers) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  constexpr int64_t kHalf = int64_t{1} << 62;
  EXPECT_EQ(tensor_split_rows(kMost, 1), (Rows{kMost}));
  EXPECT_EQ(tensor_split_rows(kMost, 2), (Rows{kHalf, kHalf - 1}));
}

TEST(TensorSplitRows, RefusesWhatCannotBeDivided) {
  test::expect_error(Code::kSplit, {"-1 rows into 2 pieces"}, [] { tensor_split_rows(-1, 2); });
  test::expect_error(Code::kSplit, {"4 rows into 0 pieces"}, [] { tensor_split_rows(4, 0); });
  test::expect_error(Code::kSplit, {"4 rows into -3 pieces"}, [] { tensor_split_rows(4, -3); });
}

}  // namespace
}  // namespace lockstep::test::split_test
