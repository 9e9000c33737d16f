#include "cli/lab/lab5_tables.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "cli/lab/lab_text.hpp"
#include "lockstep/split.hpp"
#include "lockstep/units.hpp"

namespace lockstep::cli {
namespace {

void add_speed_row(Table& table, const char* name, const RunSet& set_up, const std::string& speedup,
                   const std::string& proportional) {
  const Stats step = pooled_step_ms(set_up);
  table.add_row({name, device_count(set_up), format_step_ms(step.mean, step.stddev),
                 format_range(step), format_seconds(mean_total_s(set_up)), speedup, proportional});
}

void add_speed_notes(Table& table, const Lab5Results& results) {
  add_method_note(table, results.single);
  const Comparison full = compare(results.single, results.full());
  const double speedup = full.speedup.mean;
  table.add_note(fmt::format(
      "DataParallel on {} is {:.2f} times {} one device.",
      results.full().devices == 1 ? "one device"
                                  : fmt::format("{} devices", results.full().devices),
      speedup >= 1 ? speedup : 1 / speedup, speedup >= 1 ? "as fast as" : "slower than"));
  add_noise_notes(table, results.others_busy_cores, full);
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
    add_speed_row(table, "DataParallel", set_up, format_speedup(comparison),
                  proportionality(comparison, set_up));
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
  Table table("Where the load is: DataParallel, device by device", load_columns());
  for (auto& cells : load_rows(results.full())) table.add_row(std::move(cells));
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
