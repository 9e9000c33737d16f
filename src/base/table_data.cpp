#include "base/table_data.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <utility>

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
  enum class Kind { kValue, kMean, kRange, kList, kProduct, kShare };

  Kind kind = Kind::kValue;
  std::string unit = {};
  std::vector<double> values = {};
  std::string remark = {};  // "shared" of "4, shared"
};

std::string_view trim(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

// Removes ",198,400" after the 4 of "4,198,400" and adds it to the value.
void take_thousands(std::string_view& text, double& value) {
  const auto is_group = [&text] {
    return text.size() >= 4 && text[0] == ',' &&
           std::all_of(text.begin() + 1, text.begin() + 4, is_digit) &&
           (text.size() == 4 || !is_digit(text[4]));
  };
  while (is_group()) {
    double group = 0;
    std::from_chars(text.data() + 1, text.data() + 4, group);
    value = value * 1000 + (value < 0 ? -group : group);
    text.remove_prefix(4);
  }
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
  take_thousands(text, value);
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

// How many digits a number was written with, from the first that is not 0.
int significant_digits(std::string_view written) {
  written.remove_prefix(std::min(written.find_first_of("123456789"), written.size()));
  return static_cast<int>(std::count_if(written.begin(), written.end(), is_digit));
}

// The number in the unit that is written. What becomes smaller keeps its digits, so that 601 KiB
// are 0.587 MiB and not 0.5869140625.
double in_unit(double value, const UnitScale& unit, int digits) {
  const double scaled = value * unit.scale;
  if (unit.scale >= 1) return scaled;
  const std::string text = fmt::format("{:.{}g}", scaled, std::max(3, digits));
  double rounded = scaled;
  std::from_chars(text.data(), text.data() + text.size(), rounded);
  return rounded;
}

// A number, or two around `separator`, and then their unit.
std::optional<Quantities> quantities_around(std::string_view text, std::string_view separator,
                                            Quantities::Kind kind) {
  Quantities read{.kind = kind, .unit = {}, .values = {}};
  std::vector<int> digits;
  const auto take = [&] {
    const std::string_view before = text;
    const auto number = take_number(text);
    if (!number) return false;
    read.values.push_back(*number);
    digits.push_back(significant_digits(before.substr(0, before.size() - text.size())));
    return true;
  };
  if (!take()) return std::nullopt;
  if (!separator.empty()) {
    text = trim(text);
    if (!text.starts_with(separator)) return std::nullopt;
    text.remove_prefix(separator.size());
    if (!take()) return std::nullopt;
  }
  const UnitScale* unit = unit_named(trim(text));
  if (unit == nullptr) return std::nullopt;
  read.unit = unit->written;
  for (size_t i = 0; i < read.values.size(); ++i) {
    read.values[i] = in_unit(read.values[i], *unit, digits[i]);
  }
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

// Numbers between separators, all of one unit: "20.0 MiB / 16.0 MiB", "22 22 20".
std::optional<Quantities> parse_list(std::string_view text, std::string_view separator) {
  Quantities list{.kind = Quantities::Kind::kList};
  const auto parts = split(text, separator);
  if (parts.size() < 2) return std::nullopt;
  for (const auto& part : parts) {
    const auto value = quantities_around(part, "", Quantities::Kind::kValue);
    if (!value || (!list.values.empty() && value->unit != list.unit)) return std::nullopt;
    list.unit = value->unit;
    list.values.push_back(value->values.front());
  }
  return list;
}

// "4 × 64", and "3 × 11 11 10" where the rows differ.
std::optional<Quantities> parse_product(std::string_view text) {
  const auto parts = split(text, " × ");
  if (parts.size() != 2) return std::nullopt;
  auto product = quantities_around(parts[0], "", Quantities::Kind::kValue);
  auto factors = quantities_around(parts[1], "", Quantities::Kind::kValue);
  if (!factors) factors = parse_list(parts[1], " ");
  if (!product || !factors || !product->unit.empty() || !factors->unit.empty()) return std::nullopt;
  product->kind = Quantities::Kind::kProduct;
  product->values.insert(product->values.end(), factors->values.begin(), factors->values.end());
  return product;
}

// "< 0.001 %" and "4, shared": a number and what else is said of it.
std::optional<Quantities> parse_with_remark(std::string_view text) {
  constexpr std::string_view kLess = "< ";
  if (text.starts_with(kLess)) {
    auto bound = quantities_around(text.substr(kLess.size()), "", Quantities::Kind::kValue);
    if (bound) bound->remark = "less than";
    return bound;
  }
  const size_t comma = text.find(", ");
  if (comma == std::string_view::npos) return std::nullopt;
  auto value = quantities_around(text.substr(0, comma), "", Quantities::Kind::kValue);
  if (value) value->remark = text.substr(comma + 2);
  return value;
}

std::optional<Quantities> parse_quantities(const std::string& text) {
  using Kind = Quantities::Kind;
  if (const auto ms = minutes_of(text)) return Quantities{Kind::kValue, "ms", {*ms}};
  if (auto value = quantities_around(text, "", Kind::kValue)) return value;
  if (auto mean = quantities_around(text, "±", Kind::kMean)) return mean;
  if (auto range = quantities_around(text, "…", Kind::kRange)) return range;
  if (auto range = quantities_around(text, "to", Kind::kRange)) return range;
  if (auto share = quantities_around(text, "of", Kind::kShare)) return share;
  if (auto product = parse_product(text)) return product;
  if (auto list = parse_list(text, " / ")) return list;
  if (auto list = parse_list(text, " ")) return list;
  return parse_with_remark(text);
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

struct TextColumn {
  std::string title;
  std::vector<std::string> cells;
};

// "… weights" after "memory: peak" continues it: "memory weights". `above` is the beginning of the
// last title that was whole.
std::string continued_title(const std::string& title, std::string& above) {
  constexpr std::string_view kContinues = "… ";
  if (title.starts_with(kContinues)) return above + " " + title.substr(kContinues.size());
  above = title.substr(0, title.find_first_of(":,("));
  return title;
}

std::vector<TextColumn> columns_of(const Table& table) {
  std::vector<TextColumn> columns;
  std::string above;
  for (size_t i = 0; i < table.columns().size(); ++i) {
    columns.push_back({continued_title(table.columns()[i].header, above), {}});
    for (const auto& row : table.rows()) columns.back().cells.push_back(row[i]);
  }
  return columns;
}

// A column for each row.
std::vector<TextColumn> turned_round(const Table& table) {
  std::vector<TextColumn> columns = {{"", {}}};
  for (size_t i = 1; i < table.columns().size(); ++i) {
    columns.front().cells.push_back(table.columns()[i].header);
  }
  std::string above;
  for (const auto& row : table.rows()) {
    columns.push_back({continued_title(row.front(), above), {row.begin() + 1, row.end()}});
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
std::optional<Quantities> shape_of(const std::vector<std::optional<Quantities>>& read,
                                   const TextColumn& column) {
  size_t present = 0;
  std::map<std::string, size_t> units;
  for (size_t i = 0; i < read.size(); ++i) {
    present += is_missing(column.cells[i]) || column.cells[i] == kNotFinite ? 0 : 1;
    if (read[i]) ++units[read[i]->unit];
  }
  for (const auto& [unit, count] : units) {
    if (2 * count < present) continue;
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
  if (shape.kind == Kind::kShare) return {title, title + " of"};
  if (shape.kind == Kind::kProduct) {
    auto factors = split(title, " × ");
    if (factors.size() != 2) factors = {title, title + " each"};
    std::vector<std::string> names = {factors[0]};
    for (size_t i = 1; i < shape.values.size(); ++i) {
      names.push_back(shape.values.size() == 2 ? factors[1]
                                               : fmt::format("{} {}", factors[1], i - 1));
    }
    return names;
  }
  const size_t comma = title.rfind(", ");
  const std::string common = comma == std::string::npos ? "" : title.substr(0, comma + 2);
  auto names = split(std::string_view(title).substr(common.size()), " / ");
  for (auto& name : names) name = common + name;
  if (names.size() == shape.values.size()) return names;
  names.clear();
  for (size_t i = 0; i < shape.values.size(); ++i) names.push_back(fmt::format("{} {}", title, i));
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

void add_column(TableData& data, const TextColumn& column) {
  std::vector<std::optional<Quantities>> read;
  for (const auto& cell : column.cells) read.push_back(parse_quantities(cell));
  const auto shape = shape_of(read, column);
  const auto text_of = [&](size_t row) -> DataCell {
    if (is_missing(column.cells[row])) return {};
    return column.cells[row];
  };
  if (!shape) {
    append_column(data, {column_name(column.title), ""}, text_of);
    return;
  }
  for (auto& cell : read) {
    if (cell && cell->unit != shape->unit) cell.reset();
    const bool both_ends =
        cell && shape->kind == Quantities::Kind::kRange && cell->values.size() == 1;
    if (both_ends) cell->values.push_back(cell->values.front());
  }
  std::string title = column.title;
  const std::string unit = shape->unit.empty() ? unit_in_title(title) : shape->unit;
  const auto names = part_names(title, *shape);
  for (size_t part = 0; part < names.size(); ++part) {
    append_column(data, {column_name(names[part]), unit}, [&](size_t row) -> DataCell {
      if (read[row] && part < read[row]->values.size()) return read[row]->values[part];
      return {};
    });
  }
  const auto remark_of = [&](size_t row) -> DataCell {
    if (!read[row]) return text_of(row);
    return read[row]->remark.empty() ? DataCell{} : DataCell{read[row]->remark};
  };
  for (size_t row = 0; row < read.size(); ++row) {
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
