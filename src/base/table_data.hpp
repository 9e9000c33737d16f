#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <variant>
#include <vector>

#include "lockstep/table.hpp"

namespace lockstep {

/// A column of numbers or texts: {"step_time_mean", "ms"}.
struct DataColumn {
  std::string name;  ///< lower-case letters, digits and underscores
  std::string unit;  ///< "ms", "mib", "percent"; "" for texts and plain numbers

  std::string header() const { return unit.empty() ? name : name + "_" + unit; }
};

/// Nothing, a number in its column's unit, or a text.
using DataCell = std::variant<std::monostate, double, std::string>;

/// What a table says, for programs: the numbers of its cells. Several in one cell, such as a mean
/// and its deviation, are several columns, and a remark has a column of its own. The title of a
/// column of plain numbers may name their unit: "total (s)". A cell without numbers stays text.
struct TableData {
  std::string title;
  std::vector<DataColumn> columns;
  std::vector<std::vector<DataCell>> rows;
};

/// A table whose first column has no title, or the title "aspect", has a row for each measure; it
/// is turned round.
TableData data_of(const Table& table);

/// Header and rows as in RFC 4180.
std::string csv_of(const TableData& data);

/// {"title", "columns": [{"name", "unit"}], "rows": [[…]]}.
nlohmann::json json_of(const TableData& data);

}  // namespace lockstep
