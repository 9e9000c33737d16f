// The tables of practical 10.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "cli/lab/lab10.hpp"

namespace lockstep::cli::practical10 {
namespace {

const DeviceRecord* device_named(const RunSet& set_up, const std::string& name) {
  for (const auto& device : set_up.first().devices) {
    if (device.name == name) return &device;
  }
  return nullptr;
}

// "core 0", "shared by 4", "GPU 0, shared by 2".
std::string short_hardware(const DeviceRecord* device) {
  if (device == nullptr) return "—";
  const bool shared_cores = device->shared_by > 1 && device->on_cpu();
  return shared_cores ? fmt::format("shared by {}", device->shared_by) : device->hardware();
}

Table placement_table(const AnswerContext& context) {
  struct Row {
    std::string part;
    StageRecord stage;
    const DeviceRecord* device;
  };
  std::vector<Row> rows;
  for (const SetRow& part : {SetRow{"10.1", &context.base}, SetRow{"10.4", &context.one_process},
                             SetRow{"10.5", &context.same_device}}) {
    for (const auto& stage : pipeline_of(*part.set_up).stages) {
      rows.push_back({part.name, stage, device_named(*part.set_up, stage.device)});
    }
  }
  Table table = make_table<Row>(
      "Who uses which device",
      {{"part", [](const Row& row) { return row.part; }, Align::kLeft},
       {"rank", [](const Row& row) { return count_cell(row.stage.rank); }},
       {"stage", [](const Row& row) { return count_cell(row.stage.stage); }},
       {"device", [](const Row& row) { return row.stage.device; }, Align::kLeft},
       {"hardware", [](const Row& row) { return short_hardware(row.device); }, Align::kLeft},
       {"weights", [](const Row& row) { return format_count(row.stage.parameters); }},
       {"forward", [](const Row& row) { return format_ms(row.stage.forward_ms); }},
       {"backward",
        [](const Row& row) { return format_ms(row.stage.backward_ms + row.stage.weight_ms); }},
       {"peak",
        [](const Row& row) {
          return row.device != nullptr ? bytes_cell(row.device->peak_bytes) : "—";
        }}},
      rows);
  table.add_note(
      "10.1: the base. 10.4: one process. 10.5: all stages of a rank on one device. Forward and "
      "backward: mean time of one micro-batch in that stage. Peak: of the device.");
  return table;
}

Table synchronisation_table(const AnswerContext& context) {
  using Sync = Synchronisation;
  Table table = make_table<Sync>(
      "Synchronisation in one step of the base",
      {{"rank", [](const Sync& sync) { return count_cell(sync.rank); }},
       {"stage", [](const Sync& sync) { return count_cell(sync.stage); }},
       {"last backward ended", [](const Sync& sync) { return format_ms(sync.last_backward_ms); }},
       {"synchronised from", [](const Sync& sync) { return format_ms(sync.begin_ms); }},
       {"to", [](const Sync& sync) { return format_ms(sync.end_ms); }},
       {"hidden",
        [](const Sync& sync) {
          return sync.hidden_ms > 0 ? format_ms(sync.hidden_ms)
                                    : TableCell("0 ms", format_ms(0).value);
        }}},
      synchronisations_of(pipeline_of(context.base)));
  table.add_note(
      "Times from the start of the run's last step. Hidden: while other stages of the same rank "
      "still went backward.");
  return table;
}

// A column about the trace of a set-up's step.
template <class Text>
SetColumn trace_column(const std::string& title, const Text& text_of) {
  return {title, [text_of](const SetRow& row) { return text_of(pipeline_of(*row.set_up)); }};
}

SetColumn count_column(const std::string& title, int64_t ActionCounts::*count) {
  return trace_column(title, [count](const PipelineRecord& pipeline) {
    return count_cell(counts_of(pipeline).*count);
  });
}

SetColumn bubble_column(const std::string& title, double PipelineRecord::*bubble) {
  return {title,
          [bubble](const SetRow& row) { return format_percent(mean_of(*row.set_up, bubble)); }};
}

SetColumn span_column(const std::string& title, double PipelineRecord::*span_ms) {
  return {title, [span_ms](const SetRow& row) { return format_ms(mean_of(*row.set_up, span_ms)); }};
}

SetColumn held_column() {
  return trace_column(
      "held", [](const PipelineRecord& pipeline) { return count_cell(most_held(pipeline)); });
}

// "4 × 8", "3 × 11 11 10".
TableCell micro_batch_rows(const PipelineRecord& pipeline) {
  const auto& rows = pipeline.rows;
  if (rows.empty()) return count_cell(pipeline.micro_batches);
  if (all_equal(rows)) return product_cell(pipeline.micro_batches, rows.front());
  CellValue value{.kind = CellValue::Kind::kProduct,
                  .numbers = {static_cast<double>(pipeline.micro_batches)}};
  value.numbers.insert(value.numbers.end(), rows.begin(), rows.end());
  return {fmt::format("{} × {}", pipeline.micro_batches, format_rows(rows)), std::move(value)};
}

std::string order_cell(const SetRow& row) {
  if (row.base == nullptr) return "base";
  const auto order = order_of(pipeline_of(*row.set_up));
  if (order.empty()) return "—";
  return order == order_of(pipeline_of(*row.base)) ? "as base" : "other";
}

Table actions_table(const AnswerContext& context) {
  SetColumn micro_batches = trace_column("micro × rows", micro_batch_rows);
  micro_batches.align = Align::kLeft;
  const auto losses_cell = [&context](const SetRow& row) -> TableCell {
    const double apart = largest_deviation(context.single, {row.set_up});
    return apart < 0 ? "—" : format_share(apart);
  };
  Table table = make_table<SetRow>(
      "What a step does, counted in the trace",
      {name_column("part"),
       {"ranks", [](const SetRow& row) { return count_cell(row.first().world_size); }},
       micro_batches,
       count_column("forward", &ActionCounts::forwards),
       count_column("backward", &ActionCounts::backwards),
       count_column("sync", &ActionCounts::synchronisations),
       {"order", order_cell, Align::kLeft},
       {"loss gap", losses_cell}},
      parts_of(context));
  table.add_note(
      "Actions of all ranks in the last step; micro-batches and rows of rank 0. Order: whether "
      "every rank's devices ran the same actions in the same order. Loss gap: the largest in any "
      "step against one device with the same batch, where a part has that batch.");
  return table;
}

Table timing_table(const AnswerContext& context) {
  Table table = make_table<SetRow>(
      "Time and memory of each part",
      {name_column("part"), step_column(), bubble_column("bubble", &PipelineRecord::bubble),
       bubble_column("predicted", &PipelineRecord::predicted_bubble),
       trace_column(
           "overlap",
           [](const PipelineRecord& pipeline) { return format_share(overlap_of(pipeline)); }),
       peak_column(),
       trace_column(
           "message",
           [](const PipelineRecord& pipeline) { return bytes_cell(message_bytes(pipeline)); })},
      parts_of(context));
  table.add_note(
      "One run each. Bubble: measured, then predicted. Overlap: share of rank 0's computing time "
      "in which several of its devices computed. Peak: of the fullest device. Message: the largest "
      "output that went to the next stage.");
  if (sharing(context.base) > 1) table.add_note(shared_remark(context.base));
  return table;
}

TableCell span_ratio_cell(const SetRow& row) {
  const double span = mean_of(*row.set_up, &PipelineRecord::span_ms);
  if (!(span > 0)) return "—";
  return format_percent(mean_of(*row.set_up, &PipelineRecord::predicted_span_ms) / span);
}

// "20.0 MiB / 16.0 MiB", by device.
TableCell peaks_cell(const SetRow& row) {
  TableCell peaks;
  for (const auto& device : merged_devices(*row.set_up)) {
    const TableCell peak = bytes_cell(device.peak_bytes);
    peaks += (peaks.empty() ? "" : " / ") + peak;
    peaks.value.numbers.push_back(peak.value.numbers.front());
    peaks.value.unit = peak.value.unit;
  }
  if (peaks.value.numbers.size() > 1) peaks.value.kind = CellValue::Kind::kList;
  return peaks;
}

Table schedules_table(const AnswerContext& context) {
  Table table = make_table<SetRow>(
      fmt::format("Schedules: {} stages in one process, {} micro-batches, {} rows",
                  context.gpipe.devices, pipeline_of(context.gpipe).micro_batches,
                  rows_of(context.gpipe)),
      {name_column("schedule"),
       step_column(),
       speedup_column(),
       held_column(),
       {"peak per device", peaks_cell}},
      schedules_of(context));
  table.add_note(
      "Sequential: the same stages, one micro-batch after the other. Zero-bubble: 1f1b with each "
      "backward in two, of the input and of the weights, but for the first stage, whose input "
      "needs no gradient. Held: most micro-batches whose activations a stage kept at once.");
  add_method_note(table, context.gpipe);
  if (sharing(context.gpipe) > 1) table.add_note(shared_remark(context.gpipe));
  return table;
}

Table prediction_table(const AnswerContext& context) {
  Table table =
      make_table<SetRow>("Schedules: predicted and measured",
                         {name_column("schedule"),
                          bubble_column("bubble", &PipelineRecord::bubble),
                          bubble_column("predicted bubble", &PipelineRecord::predicted_bubble),
                          span_column("span", &PipelineRecord::span_ms),
                          span_column("predicted span", &PipelineRecord::predicted_span_ms),
                          {"ratio", span_ratio_cell}},
                         schedules_of(context));
  table.add_note(
      "Span: first action to last, without the update; ratio: predicted over measured. The "
      "prediction plays the schedule with the mean time of each stage.");
  return table;
}

Table simulated_table(const AnswerContext& context) {
  using Row = SimulatedSchedule;
  const auto all = simulate_schedules(context.gpipe);
  const double first = all.empty() ? 0 : all.front().simulation.makespan;
  Table table = make_table<Row>(
      "Schedules simulated with the stage times of gpipe's runs",
      {{"schedule", [](const Row& row) { return row.schedule.name; }, Align::kLeft},
       {"stages", [](const Row& row) { return count_cell(row.schedule.stages()); }},
       {"span", [](const Row& row) { return format_ms(row.simulation.makespan); }},
       {"against gpipe",
        [first](const Row& row) { return format_change(row.simulation.makespan / first - 1); }},
       {"bubble", [](const Row& row) { return format_percent(row.simulation.bubble); }},
       {"held",
        [](const Row& row) {
          const auto& held = row.simulation.peak_micro_batches;
          return count_cell(held.empty() ? 0 : *std::max_element(held.begin(), held.end()));
        }}},
      all);
  table.add_note(
      "Predicted with the same times for all, and messages that cost nothing. Interleaved: two "
      "half stages on each device. Zero-bubble: the backward is taken as half for the input, half "
      "for the weights.");
  return table;
}

Table communication_table(const AnswerContext& context) {
  struct Row {
    std::string part;
    AxisRecord axis;
  };
  std::vector<Row> rows;
  auto set_ups = parts_of(context);
  set_ups.push_back({"gpipe", &context.gpipe});
  for (const auto& set_up : set_ups) {
    for (const auto& axis : pipeline_of(*set_up.set_up).axes) {
      // An axis of one rank says nothing, except for the data axis: nobody to average with.
      if (axis.size >= 2 || axis.name == "data") rows.push_back({set_up.name, axis});
    }
  }
  const auto unless_alone = [](const auto& cell) {
    return [cell](const Row& row) -> TableCell { return row.axis.size > 1 ? cell(row) : "—"; };
  };
  Table table = make_table<Row>(
      "Communication per axis and step, on a rank",
      {{"part", [](const Row& row) { return row.part; }, Align::kLeft},
       {"axis", [](const Row& row) { return row.axis.name; }, Align::kLeft},
       {"size", [](const Row& row) { return count_cell(row.axis.size); }},
       {"calls", [](const Row& row) { return number_cell("{:g}", row.axis.calls); }},
       {"sent", unless_alone([](const Row& row) { return bytes_cell(row.axis.bytes); })},
       {"by shape",
        unless_alone([](const Row& row) { return bytes_cell(row.axis.predicted_bytes); })},
       {"time", unless_alone([](const Row& row) { return format_ms(row.axis.ms); })},
       {"by link", unless_alone([](const Row& row) { return format_ms(row.axis.predicted_ms); })}},
      rows);
  table.add_note(
      "Sent: bytes counted; by shape: predicted from the model's shapes. Time: measured, with the "
      "wait for the other side; by link: predicted from the bytes and a link measured before "
      "training. The pipeline's time: messages times the median wait for one.");
  return table;
}

}  // namespace

std::vector<NamedTable> tables_of(const AnswerContext& context) {
  return {
      {"placement", placement_table(context)}, {"synchronisation", synchronisation_table(context)},
      {"actions", actions_table(context)},     {"timing", timing_table(context)},
      {"schedules", schedules_table(context)}, {"prediction", prediction_table(context)},
      {"simulated", simulated_table(context)}, {"communication", communication_table(context)}};
}

}  // namespace lockstep::cli::practical10
