#include "cli/lab/lab6_tables.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "cli/lab/lab_text.hpp"
#include "lockstep/units.hpp"

namespace lockstep::cli {
namespace {

std::string busy_range(const RunSet& set_up) {
  const Imbalance imbalance = imbalance_of(set_up);
  if (set_up.devices == 1) return fmt::format("{:.0f} %", imbalance.most_busy * 100);
  return fmt::format("{:.0f} … {:.0f} %", imbalance.least_busy * 100, imbalance.most_busy * 100);
}

// "30.0 / 20.0 MiB": device 0 and the mean of the others.
std::string peak_pair(const RunSet& set_up) {
  const auto devices = merged_devices(set_up);
  const int64_t first = devices.front().peak_bytes;
  if (devices.size() == 1) return format_bytes(first);
  const int64_t others = first - extra_on_first(devices, &DeviceRecord::peak_bytes);
  return fmt::format("{} / {}", format_bytes(first), format_bytes(others));
}

void add_method_row(Table& table, const char* name, const Lab6Results& results,
                    const RunSet& set_up) {
  const Stats step = pooled_step_ms(set_up);
  const bool baseline = &set_up == &results.single;
  table.add_row({name, std::to_string(set_up.runs.front().world_size), device_count(set_up),
                 format_rows(set_up.runs.front().split), busy_range(set_up), peak_pair(set_up),
                 format_step_ms(step.mean, step.stddev), format_range(step),
                 baseline ? "1" : format_speedup(compare(results.single, set_up))});
}

void add_scaling_rows(Table& table, const char* name, const std::vector<RunSet>& sets) {
  for (const auto& set_up : sets) {
    const Comparison comparison = compare(sets.front(), set_up);
    const Stats step = pooled_step_ms(set_up);
    const bool first = &set_up == &sets.front();
    table.add_row({name, device_count(set_up), format_step_ms(step.mean, step.stddev),
                   format_range(step), first ? "1" : format_speedup(comparison),
                   first ? "—" : fmt::format("{:.0f} %", comparison.efficiency * 100),
                   first ? "baseline" : proportionality(comparison, set_up)});
  }
}

// Where a bucket's communication lies: before the end of backward, after it, or across.
std::string against_backward(const BucketRecord& bucket, double backward_ms) {
  if (bucket.finished_ms <= backward_ms) return "hidden: finished before";
  const std::string late = format_ms(bucket.finished_ms - backward_ms);
  if (bucket.launched_ms >= backward_ms) return fmt::format("launched after, {} late", late);
  return fmt::format("finished {} after", late);
}

}  // namespace

Table methods_table(const Lab6Results& results) {
  Table table("DataParallel (DP) against DistributedDataParallel (DDP)",
              {{"set-up"},
               {"processes", Align::kRight},
               {"devices"},
               {"rows per device"},
               {"busy", Align::kRight},
               {"peak, 0 / others", Align::kRight},
               {"step time", Align::kRight},
               {"range", Align::kRight},
               {"speed-up", Align::kRight}});
  add_method_row(table, "single", results, results.single);
  for (size_t i = 0; i < results.distributed.size(); ++i) {
    add_method_row(table, "DP", results, results.data_parallel[i]);
    add_method_row(table, "DDP", results, results.distributed[i]);
  }
  add_method_note(table, results.single);
  table.add_note("Peak: of device 0, and of the others on average.");
  const RunSet& ddp = results.distributed[results.focus()];
  const Comparison against = compare(results.data_parallel[results.focus()], ddp);
  const double speedup = against.speedup.mean;
  table.add_note(fmt::format("On {} device{} DDP is {:.2f} times {} DP.", ddp.devices,
                             ddp.devices > 1 ? "s" : "", speedup >= 1 ? speedup : 1 / speedup,
                             speedup >= 1 ? "as fast as" : "slower than"));
  add_noise_notes(table, results.others_busy_cores, against);
  return table;
}

Table balance_table(const Lab6Results& results) {
  std::vector<Column> columns = load_columns();
  columns.insert(columns.begin(), {"method"});
  Table table("Balance: device by device under both methods", std::move(columns));
  const auto add = [&table](const char* name, const RunSet& set_up) {
    for (auto cells : load_rows(set_up)) {
      cells.insert(cells.begin(), name);
      table.add_row(std::move(cells));
    }
  };
  const RunSet& ddp = results.distributed[results.focus()];
  add("DP", results.data_parallel[results.focus()]);
  add("DDP", ddp);
  table.add_note(
      "Under DP all devices belong to one process and device 0 serves the others; under DDP each "
      "belongs to a process of its own and holds weights, gradients and optimizer state alike.");
  if (sharing(ddp) > 1) {
    table.add_note("Devices that share hardware count as busy while they wait for it.");
  }
  return table;
}

Table overlap_table(const Lab6Results& results) {
  const RunSet& set_up = results.distributed[results.focus()];
  Table table(fmt::format("Overlap: the buckets of one step with {} rank{}", set_up.devices,
                          set_up.devices > 1 ? "s" : ""),
              {{"bucket", Align::kRight},
               {"parameters", Align::kRight},
               {"size", Align::kRight},
               {"launched", Align::kRight},
               {"finished", Align::kRight},
               {"against the end of backward"}});
  const RunRecord& run = set_up.runs.front();
  for (const auto& bucket : run.buckets) {
    table.add_row({std::to_string(bucket.index), std::to_string(bucket.parameters),
                   format_bytes(bucket.bytes), format_ms(bucket.launched_ms),
                   format_ms(bucket.finished_ms), against_backward(bucket, run.backward_ms)});
  }
  table.add_note(fmt::format(
      "Times of rank 0's last step in the first run, from the begin of backward, which ended after "
      "{}.",
      format_ms(run.backward_ms)));
  return table;
}

Table communication_table(const Lab6Results& results) {
  Table table("Communication per step", {{"ranks"},
                                         {"all-reduces", Align::kRight},
                                         {"bytes", Align::kRight},
                                         {"total", Align::kRight},
                                         {"hidden", Align::kRight},
                                         {"exposed", Align::kRight},
                                         {"hidden share", Align::kRight},
                                         {"exposed / step", Align::kRight}});
  for (const auto& set_up : results.distributed) {
    const Communication time = communication_of(set_up);
    const AllReduces& calls = set_up.runs.front().all_reduces;
    const double step_ms = pooled_step_ms(set_up).mean;
    table.add_row({device_count(set_up), fmt::format("{:g}", calls.count),
                   format_bytes(calls.bytes), format_ms(time.total_ms), format_ms(time.hidden_ms),
                   format_ms(time.exposed_ms), fmt::format("{:.0f} %", time.hidden_share() * 100),
                   fmt::format("{:.1f} %", step_ms > 0 ? 100 * time.exposed_ms / step_ms : 0)});
  }
  table.add_note(
      "Total: from launch to finish of the buckets, mean over ranks and runs, waiting for peers "
      "included. Exposed: what the training thread itself spent on it; the rest was hidden behind "
      "backward.");
  return table;
}

Table scaling_table(const Lab6Results& results) {
  Table table("Scaling: each method against itself on one device", {{"method"},
                                                                    {"devices"},
                                                                    {"step time", Align::kRight},
                                                                    {"range", Align::kRight},
                                                                    {"speed-up", Align::kRight},
                                                                    {"efficiency", Align::kRight},
                                                                    {"proportional?"}});
  add_scaling_rows(table, "DP", results.data_parallel);
  add_scaling_rows(table, "DDP", results.distributed);
  add_method_note(table, results.single);
  add_noise_notes(table, results.others_busy_cores,
                  compare(results.distributed.front(), results.distributed[results.focus()]));
  return table;
}

}  // namespace lockstep::cli
