#include "checkpoint/layout.hpp"

#include <gtest/gtest.h>

#include <numeric>

#include "lockstep/split.hpp"

namespace lockstep {
namespace {

// The slice of rank `rank` of `ranks` along `dim`, in `parts` equal parts that are each divided by
// tensor_split's rule.
Slice divided(const Shape& whole, size_t dim, int ranks, int rank, int64_t parts = 1) {
  const int64_t part_size = whole[dim] / parts;
  const auto rows = tensor_split_rows(part_size, ranks);
  const int64_t first = std::accumulate(rows.begin(), rows.begin() + rank, int64_t{0});
  const int64_t own = rows[static_cast<size_t>(rank)];
  Slice slice{whole, whole, {}};
  slice.local[dim] = parts * own;
  for (int64_t part = 0; part < parts; ++part) {
    Block block{Shape(whole.size(), 0), Shape(whole.size(), 0), slice.local};
    block.local[dim] = part * own;
    block.whole[dim] = part * part_size + first;
    block.shape[dim] = own;
    slice.blocks.push_back(block);
  }
  return slice;
}

Slice flat(const Shape& whole, int64_t first, int64_t count) {
  return {whole, {count}, {{{0}, {first}, {count}}}};
}

std::vector<int> values_of(const Slice& slice, const std::vector<int>& whole) {
  std::vector<int> values(static_cast<size_t>(*element_count(slice.local)));
  const auto runs = runs_of(slice).value();
  for (const Run& run : runs) {
    for (int64_t i = 0; i < run.count; ++i) {
      values[static_cast<size_t>(run.local + i)] = whole[static_cast<size_t>(run.whole + i)];
    }
  }
  return values;
}

TEST(Layout, ARowSliceIsOneRun) {
  const auto runs = runs_of(divided({6, 5}, 0, 3, 1)).value();
  ASSERT_EQ(runs.size(), 1U);
  EXPECT_EQ(runs[0].whole, 10);
  EXPECT_EQ(runs[0].local, 0);
  EXPECT_EQ(runs[0].count, 10);
}

TEST(Layout, AColumnSliceIsARunForEachRow) {
  const auto runs = runs_of(divided({3, 5}, 1, 2, 1)).value();
  ASSERT_EQ(runs.size(), 3U);
  EXPECT_EQ(runs[1].whole, 8);
  EXPECT_EQ(runs[1].local, 2);
  EXPECT_EQ(runs[1].count, 2);
}

TEST(Layout, AScalarAndAnEmptyTensorAreWhole) {
  EXPECT_EQ(runs_of(whole_slice({})).value().size(), 1U);
  EXPECT_TRUE(runs_of(whole_slice({0, 3})).value().empty());
  EXPECT_TRUE(are_complete({whole_slice({0, 3})}));
}

// Every way of storing a tensor can be read by every other way of dividing it.
TEST(Layout, AnyDivisionLoadsFromAnyOther) {
  const Shape whole = {6, 5, 2};
  std::vector<int> values(60);
  std::iota(values.begin(), values.end(), 0);
  std::vector<std::vector<Slice>> divisions = {{whole_slice(whole)}};
  for (size_t dim = 0; dim < 2; ++dim) {
    for (const int ranks : {2, 3, 5}) {
      for (const int64_t parts : {1, 2}) {
        if (whole[dim] % parts != 0 || whole[dim] / parts < ranks) continue;
        auto& slices = divisions.emplace_back();
        for (int rank = 0; rank < ranks; ++rank) {
          slices.push_back(divided(whole, dim, ranks, rank, parts));
        }
      }
    }
  }
  divisions.push_back({flat(whole, 0, 17), flat(whole, 17, 40), flat(whole, 57, 3)});
  for (const auto& stored : divisions) {
    EXPECT_TRUE(are_complete(stored));
    for (const auto& wanted : divisions) {
      for (const auto& slice : wanted) {
        const auto expected = values_of(slice, values);
        std::vector<int> loaded(expected.size(), -1);
        int64_t copied = 0;
        for (const auto& piece : stored) {
          const auto bytes = values_of(piece, values);
          copied += copy_common(*runs_of(piece), reinterpret_cast<const std::byte*>(bytes.data()),
                                *runs_of(slice), reinterpret_cast<std::byte*>(loaded.data()),
                                sizeof(int));
        }
        EXPECT_EQ(copied, static_cast<int64_t>(expected.size()));
        EXPECT_EQ(loaded, expected);
      }
    }
  }
}

TEST(Layout, RefusesWhatDoesNotFit) {
  EXPECT_FALSE(runs_of({{4, 4}, {2, 4}, {}}));                                // no blocks
  EXPECT_FALSE(runs_of({{4, 4}, {2, 4}, {{{0, 0}, {3, 0}, {2, 4}}}}));        // past the end
  EXPECT_FALSE(runs_of({{4, 4}, {2, 4}, {{{0, 0}, {-1, 0}, {2, 4}}}}));       // before the start
  EXPECT_FALSE(runs_of({{4, 4}, {2, 4}, {{{0, 0}, {0, 0}, {1, 4}}}}));        // half of it
  EXPECT_FALSE(runs_of({{4}, {4}, {{{0}, {0}, {2}}, {{2}, {1}, {2}}}}));      // overlaps
  EXPECT_FALSE(runs_of({{4, 4}, {2, 4}, {{{0, 0, 0}, {0, 0, 0}, {2, 4}}}}));  // other dimensions
  EXPECT_FALSE(element_count({int64_t{1} << 40, int64_t{1} << 40}));
  EXPECT_EQ(element_count({int64_t{1} << 40, int64_t{1} << 40, 0}), 0);
}

TEST(Layout, RefusesMoreRunsThanMemoryHolds) {
  const int64_t rows = int64_t{1} << 40;
  EXPECT_FALSE(runs_of({{rows, 2}, {rows, 1}, {{{0, 0}, {0, 0}, {rows, 1}}}}));
}

TEST(Layout, KnowsAHoleAndAnOverlap) {
  const Shape whole = {4, 3};
  EXPECT_TRUE(are_complete({divided(whole, 0, 2, 0), divided(whole, 0, 2, 1)}));
  EXPECT_FALSE(are_complete({divided(whole, 0, 2, 0)}));
  EXPECT_FALSE(are_complete({divided(whole, 0, 2, 0), divided(whole, 0, 2, 0)}));
  EXPECT_FALSE(are_complete({whole_slice(whole), divided(whole, 0, 2, 0)}));
  EXPECT_FALSE(are_complete({}));
}

}  // namespace
}  // namespace lockstep
