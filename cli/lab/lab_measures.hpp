#pragma once

#include <cstdint>
#include <optional>

#include "cli/lab/lab_results.hpp"

namespace lockstep::cli {

/// Most bytes that one device held at once, over all devices and repetitions.
int64_t peak_of(const RunSet& set_up);

/// What rank 0's peak is made of; none where no run recorded it.
std::optional<MemorySplit> memory_of(const RunSet& set_up);

/// The first step's gradients; none where no run recorded them.
std::optional<GradientCheck> gradients_of(const RunSet& set_up);

/// Rows of an optimizer step, over all ranks.
int64_t rows_of(const RunSet& set_up);

/// Rows trained in a second, from the mean step time.
double rows_per_s(const RunSet& set_up);

/// Milliseconds for one row.
double ms_per_row(const RunSet& set_up);

/// How much faster `other` trains a row than `base`: for steps of different numbers of rows.
Comparison compare_per_row(const RunSet& base, const RunSet& other);

/// Norm of other's first gradient over that of base's; none where it was not recorded or is 0.
std::optional<double> norm_ratio(const RunSet& base, const RunSet& other);

/// Gradient norms and losses this close are equal but for rounding.
inline constexpr double kSameNorm = 1e-3;

/// Largest distance of a loss from the reference's in the same step, relative to that. None where
/// the curves differ in length or are not finite.
std::optional<double> loss_deviation(const RunRecord& reference, const RunRecord& run);

/// By what fraction `bytes` is more or less than `before`: -0.25 is a quarter less.
double relative_change(int64_t before, int64_t bytes);

}  // namespace lockstep::cli
