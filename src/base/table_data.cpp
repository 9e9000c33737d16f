#include "base/table_data.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <utility>

namespace lockstep {
namespace {

std::vector<std::string> split(std::string_view text, std::string_view separator) {
  std::vector<std::string> parts;
  for (size_t end = text.find(separator); end != std::string_view::npos;
       end = text.find(separator)) {
    parts.emplace_back(text.substr(0, end));
    text.remove_prefix(end + separator.size());
  }
  parts.emplace_back(text);
  return parts;
}

// A number that there is none of, in a column of numbers.
constexpr std::string_view kNotFinite = "not finite";

bool is_missing(const std::string& cell) {
  return cell.empty() || cell == "—" || cell == "-";
}

// "step time" as step_time, "rows/s" as rows_per_s; letters beyond ASCII are left out.
std::string column_name(std::string_view title) {
  constexpr std::pair<std::string_view, std::string_view> kSpelledOut[] = {
      {"/", " per "}, {"Δ", "delta "}, {"⌈", "ceil "}, {"×", " times "}};
  std::string spelled(title);
  for (const auto& [sign, word] : kSpelledOut) {
    for (size_t at = spelled.find(sign); at != std::string::npos;
         at = spelled.find(sign, at + word.size())) {
      spelled.replace(at, sign.size(), word);
    }
  }
  std::string name;
  for (const char c : spelled) {
    const bool plain = std::isalnum(static_cast<unsigned char>(c)) != 0;
    if (plain) {
      name += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    } else if (!name.empty() && name.back() != '_') {
      name += '_';
    }
  }
  while (name.ends_with('_')) name.pop_back();
  return name.empty() ? "name" : name;
}

struct SourceColumn {
  std::string title;
  std::vector<TableCell> cells;
};

// "… weights" after "memory: peak" continues it: "memory weights". `above` is the beginning of the
// last title that was whole.
std::string continued_title(const std::string& title, std::string& above) {
  constexpr std::string_view kContinues = "… ";
  if (title.starts_with(kContinues)) return above + " " + title.substr(kContinues.size());
  above = title.substr(0, title.find_first_of(":,("));
  return title;
}

std::vector<SourceColumn> columns_of(const Table& table) {
  std::vector<SourceColumn> columns;
  std::string above;
  for (size_t i = 0; i < table.columns().size(); ++i) {
    columns.push_back({continued_title(table.columns()[i].header, above), {}});
    for (size_t row = 0; row < table.rows().size(); ++row) {
      columns.back().cells.push_back({table.rows()[row][i], table.values()[row][i]});
    }
  }
  return columns;
}

// A column for each row.
std::vector<SourceColumn> transposed(const Table& table) {
  std::vector<SourceColumn> columns = {{"", {}}};
  for (size_t i = 1; i < table.columns().size(); ++i) {
    columns.front().cells.emplace_back(table.columns()[i].header);
  }
  std::string above;
  for (size_t row = 0; row < table.rows().size(); ++row) {
    const auto& texts = table.rows()[row];
    columns.push_back({continued_title(texts.front(), above), {}});
    for (size_t i = 1; i < texts.size(); ++i) {
      columns.back().cells.push_back({texts[i], table.values()[row][i]});
    }
  }
  return columns;
}

// Cuts "(s)" off the title of a column of plain numbers, and returns it as their unit.
std::string unit_in_title(std::string& title) {
  const size_t open = title.rfind(" (");
  if (open == std::string::npos || !title.ends_with(")")) return "";
  const std::string unit = title.substr(open + 2, title.size() - open - 3);
  if (unit.empty() || unit.find(' ') != std::string::npos) return "";
  title.erase(open);
  return column_name(unit);
}

// What at least half of a column's cells are that could be numbers; none if they are texts.
std::optional<CellValue> shape_of(const SourceColumn& column) {
  size_t present = 0;
  std::map<std::string, size_t> units;
  for (const TableCell& cell : column.cells) {
    present += is_missing(cell) || cell == kNotFinite ? 0 : 1;
    if (!cell.value.numbers.empty()) ++units[cell.value.unit];
  }
  for (const auto& [unit, count] : units) {
    if (2 * count < present) continue;
    CellValue shape{.unit = unit, .numbers = {0}};
    for (const TableCell& cell : column.cells) {
      const bool wider = cell.value.numbers.size() > shape.numbers.size();
      if (cell.value.unit == unit && wider) shape = cell.value;
    }
    return shape;
  }
  return std::nullopt;
}

// The names of the parts that a column is divided into.
std::vector<std::string> part_names(const std::string& title, const CellValue& shape) {
  using Kind = CellValue::Kind;
  if (shape.kind == Kind::kValue) return {title};
  if (shape.kind == Kind::kMean) return {title + " mean", title + " deviation"};
  if (shape.kind == Kind::kRange) return {title + " least", title + " most"};
  if (shape.kind == Kind::kShare) return {title, title + " of"};
  if (shape.kind == Kind::kProduct) {
    auto factors = split(title, " × ");
    if (factors.size() != 2) factors = {title, title + " each"};
    std::vector<std::string> names = {factors[0]};
    for (size_t i = 1; i < shape.numbers.size(); ++i) {
      names.push_back(shape.numbers.size() == 2 ? factors[1]
                                                : fmt::format("{} {}", factors[1], i - 1));
    }
    return names;
  }
  const size_t comma = title.rfind(", ");
  const std::string common = comma == std::string::npos ? "" : title.substr(0, comma + 2);
  auto names = split(std::string_view(title).substr(common.size()), " / ");
  for (auto& name : names) name = common + name;
  if (names.size() == shape.numbers.size()) return names;
  names.clear();
  for (size_t i = 0; i < shape.numbers.size(); ++i) names.push_back(fmt::format("{} {}", title, i));
  return names;
}

// Adds a column under a name that no other column has, and fills it row by row.
template <class CellOf>
void append_column(TableData& data, DataColumn column, const CellOf& cell_of) {
  const std::string name = column.name;
  const auto taken = [&] {
    return std::any_of(data.columns.begin(), data.columns.end(),
                       [&](const DataColumn& other) { return other.header() == column.header(); });
  };
  for (int count = 2; taken(); ++count) column.name = fmt::format("{}_{}", name, count);
  data.columns.push_back(std::move(column));
  for (size_t row = 0; row < data.rows.size(); ++row) data.rows[row].push_back(cell_of(row));
}

void add_column(TableData& data, const SourceColumn& column) {
  const auto shape = shape_of(column);
  const auto text_of = [&](size_t row) -> DataCell {
    if (is_missing(column.cells[row])) return {};
    return static_cast<const std::string&>(column.cells[row]);
  };
  if (!shape) {
    append_column(data, {column_name(column.title), ""}, text_of);
    return;
  }
  std::vector<CellValue> values;
  for (const TableCell& cell : column.cells) {
    values.push_back(cell.value.unit == shape->unit ? cell.value : CellValue{});
    auto& numbers = values.back().numbers;
    const bool both_ends = shape->kind == CellValue::Kind::kRange && numbers.size() == 1;
    if (both_ends) numbers.push_back(numbers.front());
  }
  std::string title = column.title;
  const std::string unit = shape->unit.empty() ? unit_in_title(title) : shape->unit;
  const auto names = part_names(title, *shape);
  for (size_t part = 0; part < names.size(); ++part) {
    append_column(data, {column_name(names[part]), unit}, [&](size_t row) -> DataCell {
      const auto& numbers = values[row].numbers;
      if (part >= numbers.size() || !std::isfinite(numbers[part])) return {};
      return numbers[part];
    });
  }
  const auto remark_of = [&](size_t row) -> DataCell {
    if (values[row].numbers.empty()) return text_of(row);
    return values[row].remark.empty() ? DataCell{} : DataCell{values[row].remark};
  };
  for (size_t row = 0; row < values.size(); ++row) {
    if (std::holds_alternative<std::monostate>(remark_of(row))) continue;
    append_column(data, {column_name(title) + "_remark", ""}, remark_of);
    return;
  }
}

std::string csv_field(const std::string& cell) {
  if (cell.find_first_of(",\"\r\n") == std::string::npos) return cell;
  std::string quoted = "\"";
  for (const char c : cell) {
    if (c == '"') quoted += '"';
    quoted += c;
  }
  return quoted + '"';
}

std::string csv_cell(const DataCell& cell) {
  if (const auto* number = std::get_if<double>(&cell)) return fmt::format("{:.12g}", *number);
  const auto* text = std::get_if<std::string>(&cell);
  return text != nullptr ? csv_field(*text) : "";
}

}  // namespace

TableData data_of(const Table& table) {
  const std::string corner = table.columns().empty() ? "?" : table.columns().front().header;
  const bool by_measure = corner.empty() || corner == "aspect";
  const auto columns = by_measure ? transposed(table) : columns_of(table);
  TableData data{.title = table.title(), .columns = {}, .rows = {}};
  if (columns.empty()) return data;
  data.rows.resize(columns.front().cells.size());
  for (const auto& column : columns) add_column(data, column);
  return data;
}

std::string csv_of(const TableData& data) {
  std::string text;
  for (size_t i = 0; i < data.columns.size(); ++i) {
    text += (i > 0 ? "," : "") + data.columns[i].header();
  }
  text += "\r\n";
  for (const auto& row : data.rows) {
    for (size_t i = 0; i < row.size(); ++i) text += (i > 0 ? "," : "") + csv_cell(row[i]);
    text += "\r\n";
  }
  return text;
}

nlohmann::json json_of(const TableData& data) {
  using nlohmann::json;
  json columns = json::array();
  for (const auto& [name, unit] : data.columns) columns.push_back({{"name", name}, {"unit", unit}});
  json rows = json::array();
  for (const auto& row : data.rows) {
    json& cells = rows.emplace_back(json::array());
    for (const auto& cell : row) {
      std::visit(
          [&cells](const auto& value) {
            if constexpr (std::is_same_v<std::decay_t<decltype(value)>, std::monostate>) {
              cells.push_back(nullptr);
            } else {
              cells.push_back(value);
            }
          },
          cell);
    }
  }
  return {{"title", data.title}, {"columns", std::move(columns)}, {"rows", std::move(rows)}};
}

}  // namespace lockstep
