#include "cli/lab5_tables.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "lockstep/split.hpp"
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

std::string format_range(const Stats& step) {
  const Unit unit = unit_for(step.min);
  const int decimals = decimals_for(step.min * unit.per_ms);
  return fmt::format("{:.{}f} … {:.{}f} {}", step.min * unit.per_ms, decimals,
                     step.max * unit.per_ms, decimals, unit.name);
}

std::string signed_bytes(int64_t bytes) {
  return (bytes > 0 ? "+" : "") + format_bytes(bytes);
}

std::string hardware_of(const DeviceRecord& device) {
  if (device.shared_by <= 1) return device.physical;
  const std::string shared = device.physical.ends_with("shared") ? "" : ", shared";
  return fmt::format("{}{} by {}", device.physical, shared, device.shared_by);
}

std::string verdict(const Comparison& comparison, const RunSet& set_up) {
  if (set_up.devices == 1) return "one device";
  if (sharing(set_up) > 1) return "cannot show: shared";
  const std::string share =
      fmt::format("{:.0f} % of {}×", comparison.efficiency * 100, set_up.devices);
  if (comparison.speedup.mean <= 1) return "no: slower";
  return (comparison.efficiency >= kProportional ? "yes: " : "no: ") + share;
}

void add_speed_row(Table& table, const char* name, const RunSet& set_up, const std::string& speedup,
                   const std::string& proportional) {
  const Stats step = pooled_step_ms(set_up);
  const std::string devices =
      fmt::format("{}{}", set_up.devices, sharing(set_up) > 1 ? ", shared" : "");
  table.add_row({name, devices, format_step_ms(step.mean, step.stddev), format_range(step),
                 format_seconds(mean_total_s(set_up)), speedup, proportional});
}

void add_speed_notes(Table& table, const Lab5Results& results) {
  const RunRecord& run = results.single.runs.front();
  table.add_note(fmt::format(
      "Mean ± deviation and range over {} runs of {} timed steps each, in turns; {} warm-up "
      "steps per run are left out.",
      results.single.runs.size(), run.step_ms.n, run.warmup_steps));
  const Comparison full = compare(results.single, results.full());
  const double speedup = full.speedup.mean;
  table.add_note(fmt::format(
      "DataParallel on {} is {:.2f} times {} one device.",
      results.full().devices == 1 ? "one device"
                                  : fmt::format("{} devices", results.full().devices),
      speedup >= 1 ? speedup : 1 / speedup, speedup >= 1 ? "as fast as" : "slower than"));
  if (results.others_busy_cores >= kDisturbingCores) {
    table.add_note(
        fmt::format("Warning: other programs kept {:.1f} cores busy when the lab began, which can "
                    "slow one set-up "
                    "more than another; close them and run again before you rely on this.",
                    results.others_busy_cores));
  }
  if (full.unsafe) {
    table.add_note(
        fmt::format("Warning: step times varied by {:.0f} % between runs (speed-ups {:.2f} to "
                    "{:.2f}); close other programs and run again before you rely on this.",
                    full.noise * 100, full.speedup.min, full.speedup.max));
  }
}

void add_memory_rows(Table& table, const char* name, const RunSet& set_up) {
  const auto devices = merged_devices(set_up);
  for (size_t i = 0; i < devices.size(); ++i) {
    const DeviceRecord& device = devices[i];
    const auto difference = [i](int64_t own, int64_t first) {
      return i == 0 ? std::string("—") : signed_bytes(own - first);
    };
    table.add_row({name, device.name, hardware_of(device), format_bytes(device.peak_bytes),
                   format_bytes(device.final_bytes),
                   difference(device.peak_bytes, devices[0].peak_bytes),
                   difference(device.final_bytes, devices[0].final_bytes)});
  }
}

}  // namespace

std::string format_step_ms(double mean_ms, double stddev_ms) {
  const Unit unit = unit_for(mean_ms);
  const int decimals = decimals_for(mean_ms * unit.per_ms);
  return fmt::format("{:.{}f} ± {:.{}f} {}", mean_ms * unit.per_ms, decimals,
                     stddev_ms * unit.per_ms, decimals, unit.name);
}

std::string format_rows(const std::vector<int64_t>& rows) {
  return fmt::format("{}", fmt::join(rows, " "));
}

Table speed_table(const Lab5Results& results) {
  Table table("Speed: one device against DataParallel", {{"set-up"},
                                                         {"devices"},
                                                         {"step time", Align::kRight},
                                                         {"range", Align::kRight},
                                                         {"total time", Align::kRight},
                                                         {"speed-up", Align::kRight},
                                                         {"proportional?"}});
  add_speed_row(table, "single", results.single, "1", "baseline");
  for (const auto& set_up : results.data_parallel) {
    const Comparison comparison = compare(results.single, set_up);
    add_speed_row(
        table, "DataParallel", set_up,
        fmt::format("{:.2f} ± {:.2f}", comparison.speedup.mean, comparison.speedup.stddev),
        verdict(comparison, set_up));
  }
  add_speed_notes(table, results);
  return table;
}

Table memory_table(const Lab5Results& results) {
  Table table("Memory per device", {{"set-up"},
                                    {"device"},
                                    {"hardware"},
                                    {"peak", Align::kRight},
                                    {"final", Align::kRight},
                                    {"peak − device 0", Align::kRight},
                                    {"final − device 0", Align::kRight}});
  add_memory_rows(table, "single", results.single);
  add_memory_rows(table, "DataParallel", results.full());
  table.add_note(
      "Peak: most bytes live at once in the timed steps. Final: bytes live after the last step.");
  return table;
}

Table split_table(const Lab5Results& results) {
  Table table("How DataParallel divides the batch", {{"rows", Align::kRight},
                                                     {"devices", Align::kRight},
                                                     {"used", Align::kRight},
                                                     {"rows per device, measured"},
                                                     {"⌈rows / devices⌉", Align::kRight},
                                                     {"torch.chunk's rule"},
                                                     {"split"}});
  for (const auto& split : results.splits) {
    const auto rule = chunk_rows(split.rows, split.devices);
    const auto& measured = split.record.split;
    const bool equal = std::adjacent_find(measured.begin(), measured.end(),
                                          std::not_equal_to<>()) == measured.end();
    const std::string kind = measured.size() < static_cast<size_t>(split.devices)
                                 ? (equal ? "equal, some idle" : "uneven, some idle")
                                 : (equal ? "equal" : "uneven");
    table.add_row({std::to_string(split.rows), std::to_string(split.devices),
                   std::to_string(measured.size()), format_rows(measured),
                   std::to_string(rule.empty() ? 0 : rule.front()),
                   measured == rule ? "the same" : "DIFFERS: " + format_rows(rule), kind});
  }
  return table;
}

Table bottleneck_table(const Lab5Results& results) {
  Table table("Where the load is: DataParallel, device by device",
              {{"device"},
               {"hardware"},
               {"rows", Align::kRight},
               {"busy", Align::kRight},
               {"peak", Align::kRight},
               {"final", Align::kRight},
               {"sent/step", Align::kRight},
               {"received/step", Align::kRight},
               {"extra, peak / final"}});
  const auto devices = merged_devices(results.full());
  const auto& split = results.full().runs.front().split;
  const std::string extra =
      fmt::format("{} / {}", signed_bytes(extra_on_first(devices, &DeviceRecord::peak_bytes)),
                  signed_bytes(extra_on_first(devices, &DeviceRecord::final_bytes)));
  for (size_t i = 0; i < devices.size(); ++i) {
    const DeviceRecord& device = devices[i];
    table.add_row(
        {device.name, hardware_of(device), std::to_string(i < split.size() ? split[i] : 0),
         fmt::format("{:.0f} %", device.busy_fraction * 100), format_bytes(device.peak_bytes),
         format_bytes(device.final_bytes), format_bytes(device.sent_bytes_per_step),
         format_bytes(device.received_bytes_per_step), i == 0 && devices.size() > 1 ? extra : "—"});
  }
  table.add_note(
      "Extra: what device 0 has more than the others have on average. It keeps the whole "
      "batch, "
      "the gathered output with the loss, the summed gradients and the optimizer's state.");
  if (sharing(results.full()) > 1) {
    table.add_note("Devices that share hardware count as busy while they wait for it.");
  }
  return table;
}

}  // namespace lockstep::cli
