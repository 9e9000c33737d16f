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

}  // namespace

std::string format_step_ms(double mean_ms, double stddev_ms) {
  const TimeUnit unit = unit_for(mean_ms);
  const int decimals = decimals_for(mean_ms * unit.per_ms);
  return fmt::format("{:.{}f} ± {:.{}f} {}", mean_ms * unit.per_ms, decimals,
                     stddev_ms * unit.per_ms, decimals, unit.name);
}

std::string format_range(const Stats& step_ms) {
  const TimeUnit unit = unit_for(step_ms.min);
  const int decimals = decimals_for(step_ms.min * unit.per_ms);
  return fmt::format("{:.{}f} … {:.{}f} {}", step_ms.min * unit.per_ms, decimals,
                     step_ms.max * unit.per_ms, decimals, unit.name);
}

namespace {

// Three digits of this number.
int decimals_for_s(double seconds) {
  if (!(seconds > 0)) return 2;
  return std::clamp(2 - static_cast<int>(std::floor(std::log10(seconds))), 0, 6);
}

}  // namespace

std::string format_step_s(const Stats& step_ms) {
  const int decimals = decimals_for_s(step_ms.mean * 1e-3);
  return fmt::format("{:.{}f} ± {:.{}f}", step_ms.mean * 1e-3, decimals, step_ms.stddev * 1e-3,
                     decimals);
}

std::string format_range_s(const Stats& step_ms) {
  const int decimals = decimals_for_s(step_ms.max * 1e-3);
  return fmt::format("{:.{}f} … {:.{}f}", step_ms.min * 1e-3, decimals, step_ms.max * 1e-3,
                     decimals);
}

std::string format_s(double seconds) {
  return fmt::format("{:.{}f}", seconds, decimals_for_s(seconds));
}

std::string format_ms(double ms) {
  return format_seconds(ms / 1000);
}

std::string signed_ms(double ms) {
  return (ms < 0 ? "-" : "+") + format_ms(std::abs(ms));
}

std::string step_of(const RunSet& set_up) {
  return format_ms(pooled_step_ms(set_up).mean);
}

std::string step_with_deviation(const RunSet& set_up) {
  const Stats step = pooled_step_ms(set_up);
  return format_step_ms(step.mean, step.stddev);
}

std::string format_speedup(const Comparison& comparison) {
  return fmt::format("{:.2f} ± {:.2f}", comparison.speedup.mean, comparison.speedup.stddev);
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

std::string format_percent(double fraction) {
  return fmt::format("{:.0f} %", fraction * 100);
}

std::string percent_range(double least, double most) {
  const std::string low = fmt::format("{:.0f}", least * 100);
  const std::string high = fmt::format("{:.0f}", most * 100);
  return low == high ? low + " %" : fmt::format("{} to {} %", low, high);
}

std::string format_share(double fraction) {
  const double percent = fraction * 100;
  if (percent == 0) return "0 %";
  if (percent < 0.001) return "< 0.001 %";
  return percent < 10 ? fmt::format("{:.2g} %", percent) : fmt::format("{:.0f} %", percent);
}

std::string at_most(double fraction) {
  const std::string share = format_share(fraction);
  return share.starts_with("< ") ? "less than " + share.substr(2) : "at most " + share;
}

std::string format_change(double fraction) {
  const double percent = std::round(fraction * 100);
  return percent == 0 ? "±0 %" : fmt::format("{:+.0f} %", percent);
}

std::string format_rows(const std::vector<int64_t>& rows) {
  return fmt::format("{}", fmt::join(rows, " "));
}

std::string rows_text(const std::vector<int64_t>& rows) {
  if (rows.size() > 1 && all_equal(rows)) return counted(rows.front(), "row") + " each";
  std::vector<std::string> words;
  for (const int64_t count : rows) words.push_back(std::to_string(count));
  return listed(words) + (rows == std::vector<int64_t>{1} ? " row" : " rows");
}

std::string signed_bytes(int64_t bytes) {
  return (bytes > 0 ? "+" : "") + format_bytes(bytes);
}

std::string against_text(int64_t bytes) {
  if (bytes == 0) return "as much as";
  return fmt::format("{} {} than", format_bytes(std::abs(bytes)), bytes > 0 ? "more" : "less");
}

std::string format_count(int64_t count) {
  std::string digits = std::to_string(count);
  for (auto at = static_cast<int64_t>(digits.size()) - 3; at > 0; at -= 3) {
    digits.insert(static_cast<size_t>(at), ",");
  }
  return digits;
}

std::string listed(const std::vector<std::string>& words) {
  if (words.size() < 2) return fmt::format("{}", fmt::join(words, ""));
  return fmt::format("{} and {}", fmt::join(words.begin(), words.end() - 1, ", "), words.back());
}

std::string device_count(const RunSet& set_up) {
  const bool shared = set_up.devices > 1 && sharing(set_up) > 1;
  return fmt::format("{}{}", set_up.devices, shared ? ", shared" : "");
}

std::string proportionality(const Comparison& comparison, const RunSet& set_up) {
  if (set_up.devices == 1) return "—";
  if (sharing(set_up) > 1) return "cannot tell";
  return fmt::format("{}, {}", format_percent(comparison.efficiency),
                     comparison.efficiency >= kProportional ? "yes" : "no");
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
