#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "cli/lab/lab_measures.hpp"
#include "cli/lab/lab_text.hpp"
#include "lockstep/table.hpp"

namespace lockstep::cli {

/// A column of a table: its title and what it says of a row.
template <class Row>
struct TableColumn {
  std::string title;
  std::function<TableCell(const Row&)> cell;
  Align align = Align::kRight;
};

template <class Row>
Table make_table(std::string title, const std::vector<TableColumn<Row>>& columns,
                 const std::vector<Row>& rows) {
  std::vector<Column> headers;
  for (const auto& column : columns) headers.push_back({column.title, column.align});
  Table table(std::move(title), std::move(headers));
  for (const auto& row : rows) {
    std::vector<TableCell> cells;
    for (const auto& column : columns) cells.push_back(column.cell(row));
    table.add_row(std::move(cells));
  }
  return table;
}

/// A set-up under a name: a row of a table, or a bar or a line of a chart.
struct SetRow {
  std::string name;
  const RunSet* set_up;
  const RunSet* base = nullptr;  ///< what it is compared with; null: it is the base itself

  const RunRecord& first() const { return set_up->first(); }
};

using SetColumn = TableColumn<SetRow>;

/// The same table turned round: a line for each column, and a column for each set-up.
Table make_transposed_table(std::string title, const std::vector<SetColumn>& columns,
                            const std::vector<SetRow>& set_ups);

// Columns that several labs have.
SetColumn name_column(const std::string& title);
SetColumn devices_column(const std::string& title = "devices");
SetColumn step_column(const std::string& title = "step time");
SetColumn range_column();
SetColumn speedup_column();       ///< over the base, whose own cell is 1
SetColumn proportional_column();  ///< whether that speed-up is proportional to the devices
SetColumn peak_column();
SetColumn micro_rows_column();  ///< "4 × 64": micro-steps and their rows

/// The bytes of one part of the peak, a dash where they were not recorded.
TableCell part_cell(const RunSet& set_up, int64_t MemorySplit::*bytes);

/// A column of them.
SetColumn part_column(const MemoryPart& part);

/// The number of optimizer steps that a scaler skipped, and its final scale; a dash without one.
TableCell skipped_cell(const RunRecord& run);
TableCell scale_cell(const RunRecord& run);

/// One device of a set-up, over all its repetitions.
struct DeviceRow {
  std::string name;  ///< of the set-up
  std::vector<DeviceRecord> all;
  size_t index = 0;
  int64_t rows = 0;  ///< of the batch

  const DeviceRecord& device() const { return all[index]; }
};

std::vector<DeviceRow> device_rows(const std::vector<SetRow>& set_ups);

/// What each device of these set-ups does and holds; set-ups are named where there are several.
Table load_table(const std::string& title, const std::vector<SetRow>& set_ups);

/// Says that waiting counts as busy if the devices of the set-up share a GPU. On cores it does not.
void add_busy_note(Table& table, const RunSet& set_up);

/// Says what the cells of proportional_column() mean.
void add_proportional_note(Table& table);

/// Says how the step times of a table were taken, with the figures of one set-up.
void add_method_note(Table& table, const RunSet& set_up);

}  // namespace lockstep::cli
