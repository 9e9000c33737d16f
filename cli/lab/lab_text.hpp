#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/counted.hpp"
#include "cli/lab/lab_measures.hpp"
#include "lockstep/table.hpp"

namespace lockstep::cli {

// Texts with the numbers that they show, for sentences and for cells of tables.

/// "12": for example a number of rows.
TableCell count_cell(int64_t count);

/// A plain number, as this format for one double shows it: "{:.4g}".
TableCell number_cell(std::string_view format, double value);

/// "24.0 MiB", "4.56 s".
TableCell bytes_cell(int64_t bytes);
TableCell seconds_cell(double seconds);

/// "4 × 64".
TableCell product_cell(int64_t count, int64_t each);

/// "41.2 ± 0.8 ms": mean and deviation in one unit.
TableCell format_step_ms(double mean_ms, double stddev_ms);

/// "40.1 … 44.0 ms".
TableCell format_range(const Stats& step_ms);

/// "0.0412 ± 0.0008" and "0.0401 … 0.0440": the same in seconds, for columns that say so.
TableCell format_step_s(const Stats& step_ms);
std::string format_range_s(const Stats& step_ms);

/// "1.24": three digits, in seconds.
TableCell format_s(double seconds);

/// "41.2 ms".
TableCell format_ms(double ms);

/// "+2.68 ms", "-9.80 ms".
TableCell signed_ms(double ms);

/// The mean step time of a set-up: "41.2 ms"; and with its deviation: "41.2 ± 0.8 ms".
TableCell step_of(const RunSet& set_up);
TableCell step_with_deviation(const RunSet& set_up);

/// "1.87 ± 0.02".
TableCell format_speedup(const Comparison& comparison);

/// "1.62 times as fast as fp32", "1.20 times slower than fp32", "not measurably faster or slower
/// than fp32 (1.01 ± 0.02 times)".
std::string format_against(const Comparison& comparison, const std::string& whom);

/// "12 %".
TableCell format_percent(double fraction);

/// "85 %", "85 to 91 %".
TableCell percent_range(double least, double most);

/// "0 %", "0.012 %", "12 %", "140 %": two digits.
TableCell format_share(double fraction);

/// "at most 2.3 %", "less than 0.001 %".
std::string at_most(double fraction);

/// "-28 %", "+3 %", "±0 %".
TableCell format_change(double fraction);

/// "22 22 20".
TableCell format_rows(const std::vector<int64_t>& rows);

/// "32 rows each", "22, 22 and 20 rows", "64 rows".
std::string rows_text(const std::vector<int64_t>& rows);

/// "+10.0 MiB", "-10.0 MiB".
TableCell signed_bytes(int64_t bytes);

/// "10.0 MiB more than", "10.0 MiB less than", "as much as".
std::string against_text(int64_t bytes);

/// "4,198,400".
TableCell format_count(int64_t count);

/// "2, 4 and 8".
std::string listed(const std::vector<std::string>& words);

/// "2", "3, shared". One device has nothing to share its hardware with.
TableCell device_count(const RunSet& set_up);

/// How much of a proportional speed-up was reached, and whether that counts as proportional:
/// "96 %, yes", "cannot tell"; a dash for one device.
TableCell proportionality(const Comparison& comparison, const RunSet& set_up);

/// Why the times of a lab cannot be judged, for LabReport::warning: other programs, or runs of the
/// same set-up that differ too much. Empty if they can. `compared` are the comparisons that its
/// answers rest on.
std::string times_warning(const Disturbance& disturbance, const std::vector<Comparison>& compared);

/// Says that separate hardware would be needed to see more.
std::string shared_remark(const RunSet& set_up);

/// The same after a space where devices do share hardware, else nothing.
std::string sharing_sentence(const RunSet& set_up);

/// How far two loss curves are apart, as a sentence after a space; nothing if they cannot be
/// compared. `whose` says what the first is: "the single device's".
std::string loss_parity(const RunRecord& one, const RunRecord& many, const std::string& whose);

}  // namespace lockstep::cli
