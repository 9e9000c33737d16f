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

/// What a table says, for programs: with the digits that it shows. "77.8 ± 5.1 ms" becomes a mean
/// and a deviation in milliseconds, "40 … 44 ms" a least and a most, "1 / 2", "22 20" and "4 × 64"
/// several numbers, "4, shared" and "< 0.001 %" a number and a remark. All times are in
/// milliseconds and all sizes in MiB, unless the column's title names a unit: "total (s)". A cell
/// that is no quantity stays text.
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
