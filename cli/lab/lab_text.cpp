#include "cli/lab/lab_text.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "lockstep/units.hpp"

namespace lockstep::cli {
namespace {

struct Unit {
  const char* name;
  double per_ms;
};

Unit unit_for(double ms) {
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
  const Unit unit = unit_for(mean_ms);
  const int decimals = decimals_for(mean_ms * unit.per_ms);
  return fmt::format("{:.{}f} ± {:.{}f} {}", mean_ms * unit.per_ms, decimals,
                     stddev_ms * unit.per_ms, decimals, unit.name);
}

std::string format_range(const Stats& step_ms) {
  const Unit unit = unit_for(step_ms.min);
  const int decimals = decimals_for(step_ms.min * unit.per_ms);
  return fmt::format("{:.{}f} … {:.{}f} {}", step_ms.min * unit.per_ms, decimals,
                     step_ms.max * unit.per_ms, decimals, unit.name);
}

std::string format_ms(double ms) {
  return format_seconds(ms / 1000);
}

std::string format_speedup(const Comparison& comparison) {
  return fmt::format("{:.2f} ± {:.2f}", comparison.speedup.mean, comparison.speedup.stddev);
}

std::string format_against(const Comparison& comparison, const std::string& whom) {
  const double speedup = comparison.speedup.mean;
  if (std::abs(speedup - 1) <= comparison.margin()) {
    return fmt::format("no faster than {} within the noise ({} times)", whom,
                       format_speedup(comparison));
  }
  if (speedup > 1) return fmt::format("{:.2f} times as fast as {}", speedup, whom);
  return fmt::format("{:.2f} times slower than {}", speedup > 0 ? 1 / speedup : 0, whom);
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

std::string signed_bytes(int64_t bytes) {
  return (bytes > 0 ? "+" : "") + format_bytes(bytes);
}

std::string hardware_of(const DeviceRecord& device) {
  if (device.shared_by <= 1) return device.physical;
  const std::string shared = device.physical.ends_with("shared") ? "" : ", shared";
  return fmt::format("{}{} by {}", device.physical, shared, device.shared_by);
}

std::string device_count(const RunSet& set_up) {
  return fmt::format("{}{}", set_up.devices, sharing(set_up) > 1 ? ", shared" : "");
}

std::vector<Column> load_columns() {
  return {{"device"},
          {"hardware"},
          {"rows", Align::kRight},
          {"busy", Align::kRight},
          {"peak", Align::kRight},
          {"final", Align::kRight},
          {"sent/step", Align::kRight},
          {"received/step", Align::kRight},
          {"extra, peak / final"}};
}

std::vector<std::vector<std::string>> load_rows(const RunSet& set_up) {
  const auto devices = merged_devices(set_up);
  const auto& split = set_up.runs.front().split;
  const std::string extra =
      fmt::format("{} / {}", signed_bytes(extra_on_first(devices, &DeviceRecord::peak_bytes)),
                  signed_bytes(extra_on_first(devices, &DeviceRecord::final_bytes)));
  std::vector<std::vector<std::string>> rows;
  for (size_t i = 0; i < devices.size(); ++i) {
    const DeviceRecord& device = devices[i];
    rows.push_back(
        {device.name, hardware_of(device), std::to_string(i < split.size() ? split[i] : 0),
         fmt::format("{:.0f} %", device.busy_fraction * 100), format_bytes(device.peak_bytes),
         format_bytes(device.final_bytes), format_bytes(device.sent_bytes_per_step),
         format_bytes(device.received_bytes_per_step), i == 0 && devices.size() > 1 ? extra : "—"});
  }
  return rows;
}

std::string proportionality(const Comparison& comparison, const RunSet& set_up) {
  if (set_up.devices == 1) return "one device";
  if (sharing(set_up) > 1) return "cannot show: shared";
  if (comparison.speedup.mean <= 1) return "no: slower";
  return fmt::format("{}: {:.0f} % of {}×", comparison.efficiency >= kProportional ? "yes" : "no",
                     comparison.efficiency * 100, set_up.devices);
}

void add_method_note(Table& table, const RunSet& set_up) {
  const RunRecord& run = set_up.runs.front();
  table.add_note(fmt::format(
      "Mean ± deviation and range over {} runs of {} timed steps each, in turns; {} warm-up "
      "steps per run are left out.",
      set_up.runs.size(), run.step_ms.n, run.warmup_steps));
}

void add_noise_notes(Table& table, double others_busy_cores, const Comparison& comparison) {
  if (others_busy_cores >= kDisturbingCores) {
    table.add_note(
        fmt::format("Warning: other programs kept {:.1f} cores busy when the lab began, which can "
                    "slow one set-up more than another; close them and run again before you rely "
                    "on this.",
                    others_busy_cores));
  }
  if (comparison.unsafe) {
    table.add_note(
        fmt::format("Warning: step times varied by {:.0f} % between runs (speed-ups {:.2f} to "
                    "{:.2f}); close other programs and run again before you rely on this.",
                    comparison.noise * 100, comparison.speedup.min, comparison.speedup.max));
  }
}

std::string noise_remark(double others_busy_cores, const Comparison& comparison) {
  if (others_busy_cores >= kDisturbingCores) {
    return fmt::format(" Other programs kept {:.1f} cores busy, so this proves little.",
                       others_busy_cores);
  }
  if (!comparison.unsafe) return "";
  return fmt::format(" The runs varied by {:.0f} %, so take this as a rough figure.",
                     comparison.noise * 100);
}

std::string shared_remark(const RunSet& set_up) {
  return fmt::format(
      "All {} devices share the same hardware here ({}), so this run cannot show what "
      "separate hardware would gain.",
      sharing(set_up), set_up.runs.front().devices.front().physical);
}

std::string loss_parity(const RunRecord& one, const RunRecord& many, const std::string& whose) {
  const size_t steps = one.losses.size();
  if (steps == 0 || steps != many.losses.size()) return "";
  double largest = 0;
  for (size_t i = 0; i < steps; ++i) {
    const double a = one.losses[i];
    const double b = many.losses[i];
    if (!std::isfinite(a) || !std::isfinite(b)) {
      return " In this run the loss did not stay finite; lower --lr before you trust its numbers.";
    }
    largest = std::max(largest, std::abs(a - b) / std::max(std::abs(a), 1e-12));
  }
  if (largest == 0) return fmt::format(" All {} losses equal {} exactly.", steps, whose);
  return fmt::format(" Over {} steps the losses differ from {} by at most {:.2g} %{}.", steps,
                     whose, largest * 100, largest < 1e-3 ? ", which is rounding" : "");
}

}  // namespace lockstep::cli
