#include "base/table_data.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

namespace lockstep {
namespace {

struct UnitScale {
  std::string_view shown;
  std::string_view written;
  double scale;
};

constexpr UnitScale kUnitScales[] = {{"ns", "ms", 1e-6},
                                     {"µs", "ms", 1e-3},
                                     {"ms", "ms", 1},
                                     {"s", "ms", 1e3},
                                     {"B", "mib", 1.0 / (1 << 20)},
                                     {"KiB", "mib", 1.0 / 1024},
                                     {"MiB", "mib", 1},
                                     {"GiB", "mib", 1024},
                                     {"TiB", "mib", 1024.0 * 1024},
                                     {"%", "percent", 1},
                                     {"", "", 1}};

// Numbers of one unit, and what they are together.
struct Quantities {
  enum class Kind { kValue, kMean, kRange, kList };

  Kind kind = Kind::kValue;
  std::string unit;
  std::vector<double> values;
};

std::string_view trim(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

// Reads a number at the beginning of the text and removes it.
std::optional<double> take_number(std::string_view& text) {
  text = trim(text);
  if (text.starts_with("±0")) text.remove_prefix(std::string_view("±").size());
  if (text.starts_with('+')) text.remove_prefix(1);
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || !std::isfinite(value)) return std::nullopt;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return value;
}

const UnitScale* unit_named(std::string_view name) {
  for (const auto& unit : kUnitScales) {
    if (unit.shown == name) return &unit;
  }
  return nullptr;
}

// "2 min 05 s" as milliseconds.
std::optional<double> minutes_of(std::string_view text) {
  const auto minutes = take_number(text);
  text = trim(text);
  if (!minutes || !text.starts_with("min ")) return std::nullopt;
  text.remove_prefix(4);
  const auto seconds = take_number(text);
  if (!seconds || trim(text) != "s") return std::nullopt;
  return (*minutes * 60 + *seconds) * 1000;
}

// A number, or two around `separator`, and then their unit.
std::optional<Quantities> quantities_around(std::string_view text, std::string_view separator,
                                            Quantities::Kind kind) {
  Quantities read{.kind = kind, .unit = {}, .values = {}};
  const auto first = take_number(text);
  if (!first) return std::nullopt;
  read.values.push_back(*first);
  if (!separator.empty()) {
    text = trim(text);
    if (!text.starts_with(separator)) return std::nullopt;
    text.remove_prefix(separator.size());
    const auto second = take_number(text);
    if (!second) return std::nullopt;
    read.values.push_back(*second);
  }
  const UnitScale* unit = unit_named(trim(text));
  if (unit == nullptr) return std::nullopt;
  read.unit = unit->written;
  for (double& value : read.values) value *= unit->scale;
  return read;
}

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

std::optional<Quantities> parse_quantities(const std::string& text) {
  using Kind = Quantities::Kind;
  if (const auto ms = minutes_of(text)) return Quantities{Kind::kValue, "ms", {*ms}};
  if (auto value = quantities_around(text, "", Kind::kValue)) return value;
  if (auto mean = quantities_around(text, "±", Kind::kMean)) return mean;
  if (auto range = quantities_around(text, "…", Kind::kRange)) return range;
  Quantities list{.kind = Kind::kList, .unit = {}, .values = {}};
  const auto parts = split(text, " / ");
  if (parts.size() < 2) return std::nullopt;
  for (const auto& part : parts) {
    const auto value = quantities_around(part, "", Kind::kValue);
    if (!value || (!list.values.empty() && value->unit != list.unit)) return std::nullopt;
    list.unit = value->unit;
    list.values.push_back(value->values.front());
  }
  return list;
}

bool is_missing(const std::string& cell) {
  return cell.empty() || cell == "—" || cell == "-";
}

// "step time" as step_time; µ and other letters beyond ASCII are left out.
std::string column_name(std::string_view title) {
  std::string name;
  for (const char c : title) {
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

struct TextColumn {
  std::string title;
  std::vector<std::string> cells;
};

std::vector<TextColumn> columns_of(const Table& table) {
  std::vector<TextColumn> columns;
  for (size_t i = 0; i < table.columns().size(); ++i) {
    columns.push_back({table.columns()[i].header, {}});
    for (const auto& row : table.rows()) columns.back().cells.push_back(row[i]);
  }
  return columns;
}

// A column for each row. "… weights" below "memory: peak" continues it: "memory: weights".
std::vector<TextColumn> turned_round(const Table& table) {
  std::vector<TextColumn> columns = {{"", {}}};
  for (size_t i = 1; i < table.columns().size(); ++i) {
    columns.front().cells.push_back(table.columns()[i].header);
  }
  std::string above;
  for (const auto& row : table.rows()) {
    constexpr std::string_view kContinues = "… ";
    std::string title = row.front();
    if (title.starts_with(kContinues)) {
      title = above + " " + title.substr(kContinues.size());
    } else {
      above = title.substr(0, title.find(':'));
    }
    columns.push_back({title, {row.begin() + 1, row.end()}});
  }
  return columns;
}

// What most cells of a column are; none if they are texts.
std::optional<Quantities> shape_of(const std::vector<std::optional<Quantities>>& read,
                                   const TextColumn& column) {
  size_t present = 0;
  std::map<std::string, size_t> units;
  for (size_t i = 0; i < read.size(); ++i) {
    present += is_missing(column.cells[i]) ? 0 : 1;
    if (read[i]) ++units[read[i]->unit];
  }
  for (const auto& [unit, count] : units) {
    if (2 * count <= present) continue;
    Quantities shape{.kind = Quantities::Kind::kValue, .unit = unit, .values = {0}};
    for (const auto& cell : read) {
      if (cell && cell->unit == unit && cell->values.size() > shape.values.size()) shape = *cell;
    }
    return shape;
  }
  return std::nullopt;
}

// The names of the parts that a column is divided into.
std::vector<std::string> part_names(const std::string& title, const Quantities& shape) {
  using Kind = Quantities::Kind;
  if (shape.kind == Kind::kValue) return {title};
  if (shape.kind == Kind::kMean) return {title + " mean", title + " deviation"};
  if (shape.kind == Kind::kRange) return {title + " least", title + " most"};
  const size_t comma = title.rfind(", ");
  const std::string common = comma == std::string::npos ? "" : title.substr(0, comma + 2);
  auto names = split(std::string_view(title).substr(common.size()), " / ");
  for (auto& name : names) name = common + name;
  if (names.size() == shape.values.size()) return names;
  names.clear();
  for (size_t i = 0; i < shape.values.size(); ++i) names.push_back(fmt::format("{} {}", title, i));
  return names;
}

void add_column(TableData& data, const TextColumn& column) {
  std::vector<std::optional<Quantities>> read;
  for (const auto& cell : column.cells) read.push_back(parse_quantities(cell));
  const auto shape = shape_of(read, column);
  const auto names = shape ? part_names(column.title, *shape) : std::vector{column.title};
  for (size_t part = 0; part < names.size(); ++part) {
    DataColumn added{column_name(names[part]), shape ? shape->unit : ""};
    const auto taken = [&] {
      return std::any_of(data.columns.begin(), data.columns.end(),
                         [&](const DataColumn& other) { return other.header() == added.header(); });
    };
    const std::string name = added.name;
    for (int count = 2; taken(); ++count) added.name = fmt::format("{}_{}", name, count);
    data.columns.push_back(std::move(added));
    for (size_t row = 0; row < column.cells.size(); ++row) {
      DataCell& cell = data.rows[row].emplace_back();
      const bool number = shape && read[row] && read[row]->unit == shape->unit;
      if (number && part < read[row]->values.size()) {
        cell = read[row]->values[part];
      } else if (!number && part == 0 && !is_missing(column.cells[row])) {
        cell = column.cells[row];
      }
    }
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
  const bool by_measure = !table.columns().empty() && table.columns().front().header.empty();
  const auto columns = by_measure ? turned_round(table) : columns_of(table);
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
