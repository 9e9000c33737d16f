// Cells of a table, one per line, some with numbers, as `tables.json` and CSV files give them.

#include "lockstep/table.hpp"

#include <nlohmann/json.hpp>

#include "base/table_data.hpp"
#include "fuzz.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  using namespace lockstep::fuzz;
  constexpr size_t kMostRows = 32;
  Input input(data, size);
  Table table(std::string(input.until('\n')),
              {{std::string(input.until('\n'))}, {std::string(input.until('\n')), Align::kRight}});
  for (size_t row = 0; row < kMostRows && !input.empty(); ++row) {
    TableCell first(std::string(input.until('\n')));
    first.value.kind = static_cast<CellValue::Kind>(first.size() % 6);
    first.value.numbers.assign(first.size() % 4, static_cast<double>(first.size()));
    first.value.unit = first.starts_with('m') ? "ms" : "";
    table.add_row({std::move(first), std::string(input.until('\n'))});
  }
  const TableData data_rows = data_of(table);
  for (const auto& row : data_rows.rows) {
    require(row.size() == data_rows.columns.size(), "every row has a cell for each column");
  }
  json_of(data_rows).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  csv_of(data_rows);
  table.markdown();
  for (const size_t width : {10U, 40U, 80U}) table.terminal(false, width);
  return 0;
}
