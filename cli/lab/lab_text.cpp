#include "cli/lab/lab_text.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "lockstep/units.hpp"

namespace lockstep::cli {
namespace {

struct TimeUnit {
  const char* name;
  double per_ms;
};

TimeUnit unit_for(double ms) {
  if (ms < 1) return {"µs", 1e3};
  if (ms < 1000) return {"ms", 1};
  return {"s", 1e-3};
}

int decimals_for(double value) {
  if (value < 10) return 2;
  return value < 100 ? 1 : 0;
}

using Kind = CellValue::Kind;

constexpr const char* kMs = "ms";
constexpr const char* kMib = "mib";
constexpr const char* kPercent = "percent";

}  // namespace

TableCell count_cell(int64_t count) {
  return {std::to_string(count), {.numbers = {static_cast<double>(count)}}};
}

TableCell number_cell(std::string_view format, double value) {
  return {fmt::format(fmt::runtime(format), value), {.numbers = {value}}};
}

TableCell bytes_cell(int64_t bytes) {
  return {format_bytes(bytes),
          {.unit = kMib, .numbers = {static_cast<double>(bytes) / static_cast<double>(1_MiB)}}};
}

TableCell seconds_cell(double seconds) {
  return {format_seconds(seconds), {.unit = kMs, .numbers = {seconds * 1e3}}};
}

TableCell product_cell(int64_t count, int64_t each) {
  return {
      fmt::format("{} × {}", count, each),
      {.kind = Kind::kProduct, .numbers = {static_cast<double>(count), static_cast<double>(each)}}};
}

TableCell format_step_ms(double mean_ms, double stddev_ms) {
  const TimeUnit unit = unit_for(mean_ms);
  const int decimals = decimals_for(mean_ms * unit.per_ms);
  return {fmt::format("{:.{}f} ± {:.{}f} {}", mean_ms * unit.per_ms, decimals,
                      stddev_ms * unit.per_ms, decimals, unit.name),
          {.kind = Kind::kMean, .unit = kMs, .numbers = {mean_ms, stddev_ms}}};
}

TableCell format_range(const Stats& step_ms) {
  const TimeUnit unit = unit_for(step_ms.min);
  const int decimals = decimals_for(step_ms.min * unit.per_ms);
  return {fmt::format("{:.{}f} … {:.{}f} {}", step_ms.min * unit.per_ms, decimals,
                      step_ms.max * unit.per_ms, decimals, unit.name),
          {.kind = Kind::kRange, .unit = kMs, .numbers = {step_ms.min, step_ms.max}}};
}

namespace {

// Three digits of this number.
int decimals_for_s(double seconds) {
  if (!(seconds > 0)) return 2;
  return std::clamp(2 - static_cast<int>(std::floor(std::log10(seconds))), 0, 6);
}

}  // namespace

TableCell format_step_s(const Stats& step_ms) {
  const int decimals = decimals_for_s(step_ms.mean * 1e-3);
  const double mean = step_ms.mean * 1e-3;
  const double stddev = step_ms.stddev * 1e-3;
  return {fmt::format("{:.{}f} ± {:.{}f}", mean, decimals, stddev, decimals),
          {.kind = Kind::kMean, .numbers = {mean, stddev}}};
}

std::string format_range_s(const Stats& step_ms) {
  const int decimals = decimals_for_s(step_ms.max * 1e-3);
  return fmt::format("{:.{}f} … {:.{}f}", step_ms.min * 1e-3, decimals, step_ms.max * 1e-3,
                     decimals);
}

TableCell format_s(double seconds) {
  return {fmt::format("{:.{}f}", seconds, decimals_for_s(seconds)), {.numbers = {seconds}}};
}

TableCell format_ms(double ms) {
  return seconds_cell(ms / 1000);
}

TableCell signed_ms(double ms) {
  return {(ms < 0 ? "-" : "+") + format_ms(std::abs(ms)), {.unit = kMs, .numbers = {ms}}};
}

TableCell step_of(const RunSet& set_up) {
  return format_ms(pooled_step_ms(set_up).mean);
}

TableCell step_with_deviation(const RunSet& set_up) {
  const Stats step = pooled_step_ms(set_up);
  return format_step_ms(step.mean, step.stddev);
}

TableCell format_speedup(const Comparison& comparison) {
  const Stats& speedup = comparison.speedup;
  return {fmt::format("{:.2f} ± {:.2f}", speedup.mean, speedup.stddev),
          {.kind = Kind::kMean, .numbers = {speedup.mean, speedup.stddev}}};
}

std::string format_against(const Comparison& comparison, const std::string& whom) {
  const double speedup = comparison.speedup.mean;
  if (std::abs(speedup - 1) <= comparison.margin()) {
    return fmt::format("not measurably faster or slower than {} ({} times)", whom,
                       format_speedup(comparison));
  }
  if (speedup > 1) return fmt::format("{:.2f} times as fast as {}", speedup, whom);
  return fmt::format("{:.2f} times slower than {}", speedup > 0 ? 1 / speedup : 0, whom);
}

TableCell format_percent(double fraction) {
  return {fmt::format("{:.0f} %", fraction * 100), {.unit = kPercent, .numbers = {fraction * 100}}};
}

TableCell percent_range(double least, double most) {
  const std::string low = fmt::format("{:.0f}", least * 100);
  const std::string high = fmt::format("{:.0f}", most * 100);
  return {low == high ? low + " %" : fmt::format("{} to {} %", low, high),
          {.kind = Kind::kRange, .unit = kPercent, .numbers = {least * 100, most * 100}}};
}

TableCell format_share(double fraction) {
  const double percent = fraction * 100;
  const CellValue value{.unit = kPercent, .numbers = {percent}};
  if (percent == 0) return {"0 %", value};
  if (percent < 0.001) return {"< 0.001 %", value};
  return {percent < 10 ? fmt::format("{:.2g} %", percent) : fmt::format("{:.0f} %", percent),
          value};
}

std::string at_most(double fraction) {
  const std::string share = format_share(fraction);
  return share.starts_with("< ") ? "less than " + share.substr(2) : "at most " + share;
}

TableCell format_change(double fraction) {
  const double percent = std::round(fraction * 100);
  return {percent == 0 ? "±0 %" : fmt::format("{:+.0f} %", percent),
          {.unit = kPercent, .numbers = {fraction * 100}}};
}

TableCell format_rows(const std::vector<int64_t>& rows) {
  return {fmt::format("{}", fmt::join(rows, " ")),
          {.kind = rows.size() > 1 ? Kind::kList : Kind::kValue,
           .numbers = {rows.begin(), rows.end()}}};
}

std::string rows_text(const std::vector<int64_t>& rows) {
  if (rows.size() > 1 && all_equal(rows)) return counted(rows.front(), "row") + " each";
  std::vector<std::string> words;
  for (const int64_t count : rows) words.push_back(std::to_string(count));
  return listed(words) + (rows == std::vector<int64_t>{1} ? " row" : " rows");
}

TableCell signed_bytes(int64_t bytes) {
  const TableCell plain = bytes_cell(bytes);
  return {(bytes > 0 ? "+" : "") + plain, plain.value};
}

std::string against_text(int64_t bytes) {
  if (bytes == 0) return "as much as";
  return fmt::format("{} {} than", format_bytes(std::abs(bytes)), bytes > 0 ? "more" : "less");
}

TableCell format_count(int64_t count) {
  std::string digits = std::to_string(count);
  for (auto at = static_cast<int64_t>(digits.size()) - 3; at > 0; at -= 3) {
    digits.insert(static_cast<size_t>(at), ",");
  }
  return {std::move(digits), {.numbers = {static_cast<double>(count)}}};
}

std::string listed(const std::vector<std::string>& words) {
  if (words.size() < 2) return fmt::format("{}", fmt::join(words, ""));
  return fmt::format("{} and {}", fmt::join(words.begin(), words.end() - 1, ", "), words.back());
}

TableCell device_count(const RunSet& set_up) {
  const bool shared = set_up.devices > 1 && sharing(set_up) > 1;
  return {fmt::format("{}{}", set_up.devices, shared ? ", shared" : ""),
          {.numbers = {static_cast<double>(set_up.devices)}, .remark = shared ? "shared" : ""}};
}

TableCell proportionality(const Comparison& comparison, const RunSet& set_up) {
  if (set_up.devices == 1) return "—";
  if (sharing(set_up) > 1) return "cannot tell";
  TableCell cell = format_percent(comparison.efficiency);
  cell.value.remark = comparison.efficiency >= kProportional ? "yes" : "no";
  cell += ", " + cell.value.remark;
  return cell;
}

std::string times_warning(const Disturbance& disturbance, const std::vector<Comparison>& compared) {
  std::string reason;
  if (disturbance.disturbed()) {
    reason =
        disturbance.queued
            ? fmt::format("devices were ready to compute but had no core for up to {} of the time",
                          format_percent(*disturbance.queued))
            : fmt::format("other programs kept {:.1f} cores busy when the lab began",
                          disturbance.busy_cores);
  }
  for (const auto& comparison : compared) {
    if (!reason.empty() || !comparison.unsafe) continue;
    reason = fmt::format(
        "step times of the same set-up varied by {} between runs (speed-ups {:.2f} "
        "to {:.2f})",
        format_percent(comparison.noise), comparison.speedup.min, comparison.speedup.max);
  }
  if (reason.empty()) return "";
  return fmt::format(
      "The times in this report cannot be judged: {}. Close other programs and run "
      "the lab again. Memory, splits, traffic and losses are not affected.",
      reason);
}

std::string shared_remark(const RunSet& set_up) {
  return fmt::format(
      "All {} devices share the same hardware here ({}), so this run cannot show what "
      "separate hardware would gain.",
      sharing(set_up), set_up.first().devices.front().physical);
}

std::string sharing_sentence(const RunSet& set_up) {
  return sharing(set_up) > 1 ? " " + shared_remark(set_up) : "";
}

std::string loss_parity(const RunRecord& one, const RunRecord& many, const std::string& whose) {
  const size_t steps = one.losses.size();
  if (steps == 0 || steps != many.losses.size()) return "";
  const auto apart = loss_deviation(one, many);
  if (!apart) {
    return " In this run the loss did not stay finite; lower --lr before you trust its numbers.";
  }
  if (*apart == 0) {
    return fmt::format(" {} {} exactly.",
                       steps == 1 ? "Its loss equals" : fmt::format("All {} losses equal", steps),
                       whose);
  }
  return fmt::format(" Over {} the losses differ from {} by {}{}.", counted(steps, "step"), whose,
                     at_most(*apart), *apart < kSameNorm ? ", which is rounding" : "");
}

}  // namespace lockstep::cli
