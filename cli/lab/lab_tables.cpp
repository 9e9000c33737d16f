#include "cli/lab/lab_tables.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace lockstep::cli {

Table make_transposed_table(std::string title, const std::vector<SetColumn>& columns,
                            const std::vector<SetRow>& set_ups) {
  std::vector<Column> headers = {{""}};
  for (const auto& row : set_ups) headers.push_back({row.name, Align::kRight});
  Table table(std::move(title), std::move(headers));
  for (const auto& column : columns) {
    std::vector<TableCell> cells = {column.title};
    for (const auto& row : set_ups) cells.push_back(column.cell(row));
    table.add_row(std::move(cells));
  }
  return table;
}

SetColumn name_column(const std::string& title) {
  return {title, [](const SetRow& row) { return row.name; }, Align::kLeft};
}

SetColumn devices_column(const std::string& title) {
  return {title, [](const SetRow& row) { return device_count(*row.set_up); }, Align::kLeft};
}

SetColumn step_column(const std::string& title) {
  return {title, [](const SetRow& row) {
            const Stats step = pooled_step_ms(*row.set_up);
            return format_step_ms(step.mean, step.stddev);
          }};
}

SetColumn range_column() {
  return {"range", [](const SetRow& row) { return format_range(pooled_step_ms(*row.set_up)); }};
}

SetColumn speedup_column() {
  return {"speed-up", [](const SetRow& row) {
            return row.base == nullptr ? count_cell(1)
                                       : format_speedup(compare(*row.base, *row.set_up));
          }};
}

SetColumn proportional_column() {
  return {"proportional?",
          [](const SetRow& row) {
            return row.base == nullptr
                       ? "—"
                       : proportionality(compare(*row.base, *row.set_up), *row.set_up);
          },
          Align::kLeft};
}

SetColumn peak_column() {
  return {"peak", [](const SetRow& row) { return bytes_cell(peak_of(*row.set_up)); }};
}

SetColumn micro_rows_column() {
  return {"micro × rows",
          [](const SetRow& row) {
            const int64_t micro_steps = row.first().accum_steps;
            return product_cell(micro_steps, rows_of(*row.set_up) / micro_steps);
          },
          Align::kLeft};
}

TableCell part_cell(const RunSet& set_up, int64_t MemorySplit::*bytes) {
  const auto split = memory_of(set_up);
  return split ? bytes_cell((*split).*bytes) : "—";
}

SetColumn part_column(const MemoryPart& part) {
  return {part.column,
          [bytes = part.bytes](const SetRow& row) { return part_cell(*row.set_up, bytes); }};
}

TableCell skipped_cell(const RunRecord& run) {
  return run.scale ? count_cell(std::ssize(run.skipped_steps)) : "—";
}

TableCell scale_cell(const RunRecord& run) {
  return run.scale ? number_cell("{:g}", *run.scale) : "—";
}

std::vector<DeviceRow> device_rows(const std::vector<SetRow>& set_ups) {
  std::vector<DeviceRow> rows;
  for (const auto& row : set_ups) {
    const auto devices = merged_devices(*row.set_up);
    const auto& split = row.first().split;
    for (size_t i = 0; i < devices.size(); ++i) {
      rows.push_back({row.name, devices, i, i < split.size() ? split[i] : 0});
    }
  }
  return rows;
}

Table load_table(const std::string& title, const std::vector<SetRow>& set_ups) {
  using Row = DeviceRow;
  const auto rows = device_rows(set_ups);
  const auto bytes = [](int64_t DeviceRecord::*member) {
    return [member](const Row& row) { return bytes_cell(row.device().*member); };
  };
  const bool queued = std::any_of(rows.begin(), rows.end(), [](const Row& row) {
    return row.device().queued_fraction.has_value();
  });
  std::vector<TableColumn<Row>> columns = {
      {"device", [](const Row& row) { return row.device().name; }, Align::kLeft},
      {"hardware", [](const Row& row) { return row.device().hardware(); }, Align::kLeft},
      {"rows", [](const Row& row) { return count_cell(row.rows); }},
      {"busy", [](const Row& row) { return format_percent(row.device().busy_fraction); }}};
  if (queued) {
    columns.push_back({"no core", [](const Row& row) -> TableCell {
                         const auto& fraction = row.device().queued_fraction;
                         return fraction ? format_percent(*fraction) : "—";
                       }});
  }
  columns.insert(columns.end(), {{"peak", bytes(&DeviceRecord::peak_bytes)},
                                 {"sent/step", bytes(&DeviceRecord::sent_bytes_per_step)},
                                 {"received", bytes(&DeviceRecord::received_bytes_per_step)}});
  if (set_ups.size() > 1) {
    columns.insert(columns.begin(),
                   {"method", [](const Row& row) { return row.name; }, Align::kLeft});
  }
  Table table = make_table(title, columns, rows);
  if (queued) {
    table.add_note(
        "Busy: processor time. No core: ready to compute, but other threads had the cores. The "
        "rest: waiting for other devices.");
  }
  return table;
}

void add_busy_note(Table& table, const RunSet& set_up) {
  if (sharing(set_up) > 1 && !on_cores(set_up)) {
    table.add_note("Devices that share a GPU count as busy while they wait for it.");
  }
}

void add_proportional_note(Table& table) {
  table.add_note(
      fmt::format("Proportional: the speed-up over the number of devices; from {} on it counts as "
                  "proportional.",
                  format_percent(kProportional)));
}

void add_method_note(Table& table, const RunSet& set_up) {
  const RunRecord& run = set_up.first();
  table.add_note(
      fmt::format("Mean ± deviation over {} of {} each, in turns; {} per run {} left out.",
                  counted(set_up.runs.size(), "run"), counted(run.step_ms.n, "timed step"),
                  counted(run.warmup_steps, "warm-up step"), run.warmup_steps == 1 ? "is" : "are"));
}

}  // namespace lockstep::cli
