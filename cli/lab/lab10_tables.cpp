#include "cli/lab/lab10_tables.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "cli/lab/lab10_measures.hpp"
#include "cli/lab/lab_measures.hpp"
#include "cli/lab/lab_text.hpp"
#include "lockstep/units.hpp"

namespace lockstep::cli {
namespace {

const DeviceRecord* device_named(const RunSet& set_up, const std::string& name) {
  for (const auto& device : set_up.runs.front().devices) {
    if (device.name == name) return &device;
  }
  return nullptr;
}

void add_placement_rows(Table& table, const std::string& name, const RunSet& set_up) {
  for (const auto& stage : pipeline_of(set_up).stages) {
    const DeviceRecord* device = device_named(set_up, stage.device);
    table.add_row({name, std::to_string(stage.rank), std::to_string(stage.stage), stage.device,
                   device != nullptr ? hardware_of(*device) : "—", std::to_string(stage.layers),
                   std::to_string(stage.parameters), format_ms(stage.forward_ms),
                   format_ms(stage.backward_ms + stage.weight_ms),
                   device != nullptr ? format_bytes(device->peak_bytes) : "—"});
  }
}

// "4 × 8", "3 × 11 11 10".
std::string micro_batch_rows(const PipelineRecord& pipeline) {
  const auto& rows = pipeline.rows;
  if (rows.empty()) return std::to_string(pipeline.micro_batches);
  const bool even = std::all_of(rows.begin(), rows.end(),
                                [&rows](int64_t count) { return count == rows.front(); });
  return fmt::format("{} × {}", pipeline.micro_batches,
                     even ? std::to_string(rows.front()) : format_rows(rows));
}

std::string order_cell(const RunSet& base, const RunSet& set_up) {
  if (&base == &set_up) return "base";
  const auto order = order_of(pipeline_of(set_up));
  if (order.empty()) return "—";
  return order == order_of(pipeline_of(base)) ? "as base" : "other";
}

std::string losses_cell(const RunSet& single, const RunSet& set_up) {
  const double apart = largest_deviation(single, {&set_up});
  if (apart < 0) return "—";
  return apart == 0 ? "equal" : at_most(apart) + " apart";
}

std::string bubble_cell(const RunSet& set_up, double PipelineRecord::*bubble) {
  return fmt::format("{:.0f} %", mean_of(set_up, bubble) * 100);
}

std::string span_ratio(const RunSet& set_up) {
  const double span = mean_of(set_up, &PipelineRecord::span_ms);
  if (!(span > 0)) return "—";
  return fmt::format("{:.0f} %", mean_of(set_up, &PipelineRecord::predicted_span_ms) / span * 100);
}

// "20.0 MiB / 16.0 MiB", by device.
std::string peaks_cell(const RunSet& set_up) {
  std::vector<std::string> peaks;
  for (const auto& device : merged_devices(set_up))
    peaks.push_back(format_bytes(device.peak_bytes));
  return fmt::format("{}", fmt::join(peaks, " / "));
}

void add_schedule_row(Table& table, const std::string& name, const RunSet& sequential,
                      const RunSet& set_up) {
  const Stats step = pooled_step_ms(set_up);
  table.add_row({name, format_step_ms(step.mean, step.stddev),
                 &sequential == &set_up ? "1" : format_speedup(compare(sequential, set_up)),
                 bubble_cell(set_up, &PipelineRecord::predicted_bubble),
                 bubble_cell(set_up, &PipelineRecord::bubble),
                 format_ms(mean_of(set_up, &PipelineRecord::predicted_span_ms)),
                 format_ms(mean_of(set_up, &PipelineRecord::span_ms)), span_ratio(set_up),
                 std::to_string(most_held(pipeline_of(set_up))), peaks_cell(set_up)});
}

void add_axis_rows(Table& table, const std::string& name, const RunSet& set_up) {
  for (const auto& axis : pipeline_of(set_up).axes) {
    // An axis of one rank says nothing, but for the data axis: nobody to average with.
    if (axis.size < 2 && axis.name != "data") continue;
    table.add_row({name, axis.name, std::to_string(axis.size), fmt::format("{:g}", axis.calls),
                   format_bytes(axis.predicted_bytes), format_bytes(axis.bytes),
                   format_ms(axis.predicted_ms), format_ms(axis.ms)});
  }
}

}  // namespace

std::vector<NamedSet> parts_of(const Lab10Results& results) {
  std::vector<NamedSet> parts = {{"10.1 base", &results.base}};
  const int64_t base_count = pipeline_of(results.base).micro_batches;
  for (const auto& [count, runs] : results.micro_batches) {
    if (count != base_count) parts.emplace_back(fmt::format("10.2 {} micro-batches", count), &runs);
  }
  for (const auto& [rows, runs] : results.batches) {
    if (rows != rows_of(results.base))
      parts.emplace_back(fmt::format("10.3 batch {}", rows), &runs);
  }
  parts.emplace_back("10.4 one process", &results.one_process);
  parts.emplace_back("10.5 same device", &results.same_device);
  return parts;
}

std::vector<NamedSet> schedules_of(const Lab10Results& results) {
  return {{"sequential", &results.sequential},
          {"gpipe", &results.gpipe},
          {"1f1b", &results.one_f_one_b},
          {"zero-bubble", &results.zero_bubble}};
}

Comparison noisiest_of(const Lab10Results& results) {
  Comparison noisiest = compare(results.sequential, results.gpipe);
  for (const RunSet* set_up : {&results.one_f_one_b, &results.zero_bubble}) {
    const Comparison other = compare(results.sequential, *set_up);
    if (other.noise > noisiest.noise) noisiest = other;
  }
  return noisiest;
}

Table placement_table(const Lab10Results& results) {
  Table table("Who uses which device", {{"part"},
                                        {"rank", Align::kRight},
                                        {"stage", Align::kRight},
                                        {"device"},
                                        {"hardware"},
                                        {"layers", Align::kRight},
                                        {"parameters", Align::kRight},
                                        {"forward", Align::kRight},
                                        {"backward", Align::kRight},
                                        {"device peak", Align::kRight}});
  add_placement_rows(table, "10.1 base", results.base);
  add_placement_rows(table, "10.4 one process", results.one_process);
  add_placement_rows(table, "10.5 same device", results.same_device);
  table.add_note("Forward and backward: mean time of one micro-batch in that stage.");
  return table;
}

Table synchronisation_table(const Lab10Results& results) {
  Table table("Synchronisation in one step of the base", {{"rank", Align::kRight},
                                                          {"stage", Align::kRight},
                                                          {"last backward ended", Align::kRight},
                                                          {"synchronised from", Align::kRight},
                                                          {"to", Align::kRight},
                                                          {"hidden", Align::kRight}});
  for (const auto& sync : synchronisations_of(pipeline_of(results.base))) {
    table.add_row({std::to_string(sync.rank), std::to_string(sync.stage),
                   format_ms(sync.last_backward_ms), format_ms(sync.begin_ms),
                   format_ms(sync.end_ms), sync.hidden_ms > 0 ? format_ms(sync.hidden_ms) : "—"});
  }
  table.add_note(
      "Times from the begin of the run's last step. Hidden: while other stages of the same rank "
      "still went backward.");
  return table;
}

Table actions_table(const Lab10Results& results) {
  Table table("What a step does, counted in the trace", {{"part"},
                                                         {"processes", Align::kRight},
                                                         {"micro-batches × rows"},
                                                         {"forward", Align::kRight},
                                                         {"backward", Align::kRight},
                                                         {"sync", Align::kRight},
                                                         {"all-reduces", Align::kRight},
                                                         {"devices", Align::kRight},
                                                         {"order"},
                                                         {"losses"}});
  for (const auto& [name, set_up] : parts_of(results)) {
    const PipelineRecord& pipeline = pipeline_of(*set_up);
    const ActionCounts counts = counts_of(pipeline);
    const RunRecord& run = set_up->runs.front();
    table.add_row({name, std::to_string(run.world_size), micro_batch_rows(pipeline),
                   std::to_string(counts.forwards), std::to_string(counts.backwards),
                   std::to_string(counts.synchronisations),
                   fmt::format("{:g}", run.all_reduces.count),
                   std::to_string(devices_used(pipeline)), order_cell(results.base, *set_up),
                   losses_cell(results.single, *set_up)});
  }
  table.add_note(
      "Actions of all ranks in the last step; rows of each micro-batch on rank 0; all-reduces per "
      "step on a rank. Order: whether every rank's devices ran the same actions in the same order. "
      "Losses: against one device with the same batch, where a part has that batch.");
  return table;
}

Table timing_table(const Lab10Results& results) {
  Table table("Time and memory of each part", {{"part"},
                                               {"step time", Align::kRight},
                                               {"bubble, predicted", Align::kRight},
                                               {"measured", Align::kRight},
                                               {"overlap", Align::kRight},
                                               {"held", Align::kRight},
                                               {"peak", Align::kRight},
                                               {"message", Align::kRight}});
  for (const auto& [name, set_up] : parts_of(results)) {
    const PipelineRecord& pipeline = pipeline_of(*set_up);
    const Stats step = pooled_step_ms(*set_up);
    table.add_row({name, format_step_ms(step.mean, step.stddev),
                   bubble_cell(*set_up, &PipelineRecord::predicted_bubble),
                   bubble_cell(*set_up, &PipelineRecord::bubble),
                   format_share(overlap_of(pipeline)), std::to_string(most_held(pipeline)),
                   format_bytes(peak_of(*set_up)), format_bytes(message_bytes(pipeline))});
  }
  table.add_note(
      "One run each. Overlap: share of rank 0's computing time in which several of its devices "
      "computed. Held: most micro-batches whose activations a stage kept at once. Peak: of the "
      "fullest device. Message: the largest output that went to the next stage.");
  if (sharing(results.base) > 1) table.add_note(shared_remark(results.base));
  return table;
}

Table schedules_table(const Lab10Results& results) {
  Table table(fmt::format("Schedules: {} stages in one process, {} micro-batches, {} rows",
                          results.gpipe.devices, pipeline_of(results.gpipe).micro_batches,
                          rows_of(results.gpipe)),
              {{"schedule"},
               {"step time", Align::kRight},
               {"speed-up", Align::kRight},
               {"bubble, predicted", Align::kRight},
               {"measured", Align::kRight},
               {"span, predicted", Align::kRight},
               {"measured", Align::kRight},
               {"ratio", Align::kRight},
               {"held", Align::kRight},
               {"peak per device", Align::kRight}});
  for (const auto& [name, set_up] : schedules_of(results)) {
    add_schedule_row(table, name, results.sequential, *set_up);
  }
  table.add_note(
      "Sequential: the same stages, one micro-batch after the other. Zero-bubble: 1f1b with each "
      "backward in two, of the input and of the weights, but for the first stage, whose input "
      "needs "
      "no gradient. Span: first action to last, without the update; ratio: predicted over "
      "measured. "
      "Held: most micro-batches whose activations a stage kept at once.");
  add_method_note(table, results.gpipe);
  if (sharing(results.gpipe) > 1) table.add_note(shared_remark(results.gpipe));
  add_noise_notes(table, results.others_busy_cores, noisiest_of(results));
  return table;
}

Table simulated_table(const Lab10Results& results) {
  Table table("Schedules simulated with the stage times of gpipe's runs",
              {{"schedule"},
               {"stages", Align::kRight},
               {"span", Align::kRight},
               {"against gpipe", Align::kRight},
               {"bubble", Align::kRight},
               {"held", Align::kRight}});
  const auto all = simulate_schedules(results.gpipe);
  for (const auto& [schedule, simulation] : all) {
    const auto& held = simulation.peak_micro_batches;
    table.add_row({schedule.name, std::to_string(schedule.stages()), format_ms(simulation.makespan),
                   format_change(simulation.makespan / all.front().simulation.makespan - 1),
                   fmt::format("{:.0f} %", simulation.bubble * 100),
                   std::to_string(held.empty() ? 0 : *std::max_element(held.begin(), held.end()))});
  }
  table.add_note(
      "Predicted with the same times for all, and messages that cost nothing. Interleaved: two "
      "half "
      "stages on each device. Zero-bubble: the backward is taken as half for the input, half for "
      "the weights.");
  return table;
}

Table communication_table(const Lab10Results& results) {
  Table table("Communication per axis and step, on a rank", {{"part"},
                                                             {"axis"},
                                                             {"size", Align::kRight},
                                                             {"calls", Align::kRight},
                                                             {"bytes, predicted", Align::kRight},
                                                             {"counted", Align::kRight},
                                                             {"time, predicted", Align::kRight},
                                                             {"measured", Align::kRight}});
  for (const auto& [name, set_up] : parts_of(results)) add_axis_rows(table, name, *set_up);
  add_axis_rows(table, "gpipe", results.gpipe);
  table.add_note(
      "Bytes sent: predicted from the model's shapes, and counted. Time: predicted from those "
      "bytes and a link measured before training, and measured, with the wait for the other side. "
      "The pipeline's: messages times the median wait for one.");
  return table;
}

}  // namespace lockstep::cli
