#include "base/record_fields.hpp"

#include <fmt/format.h>

#include <cmath>
#include <utility>

#include "lockstep/error.hpp"

namespace lockstep {
namespace {

using nlohmann::json;

constexpr const char* kRemedy = "make the record again, with --json";

// Nothing where the value is no number.
std::optional<double> number_from_json(const json& value) {
  if (value.is_number()) return value.get<double>();
  if (value == "nan") return std::nan("");
  if (value == "inf") return INFINITY;
  if (value == "-inf") return -INFINITY;
  return std::nullopt;
}

}  // namespace

json number_to_json(double number) {
  if (std::isfinite(number)) return number;
  return std::isnan(number) ? "nan" : (number > 0 ? "inf" : "-inf");
}

Fields::Fields(const json& object, std::string where) : object_(object), where_(std::move(where)) {
  if (!object.is_object())
    throw Error(Code::kRecord, fmt::format("{} is not a JSON object", where_), kRemedy);
}

const json& Fields::raw(const char* name) const {
  const auto found = object_.find(name);
  if (found == object_.end())
    throw Error(Code::kRecord, fmt::format("{} has no \"{}\"", where_, name), kRemedy);
  return *found;
}

const json& Fields::list(const char* name) const {
  const json& value = raw(name);
  if (!value.is_array()) fail(name);
  return value;
}

std::vector<double> Fields::numbers(const char* name) const {
  std::vector<double> values;
  for (const auto& value : list(name)) values.push_back(number(name, value));
  return values;
}

double Fields::amount(const char* name) const {
  const double value = number(name);
  if (value < 0) fail_range(name, raw(name), "0 or more");
  return value;
}

double Fields::share(const char* name) const {
  const double value = number(name);
  if (value < 0 || value > 1) fail_range(name, raw(name), "0 to 1");
  return value;
}

int64_t Fields::count(const char* name, int64_t least) const {
  return integer(name, raw(name), least);
}

std::vector<int64_t> Fields::counts(const char* name) const {
  std::vector<int64_t> values;
  for (const auto& value : list(name)) values.push_back(integer(name, value, 0));
  return values;
}

bool Fields::boolean(const char* name) const {
  const json& value = raw(name);
  if (!value.is_boolean()) fail(name);
  return value.get<bool>();
}

int Fields::small_count(const char* name, int least) const {
  const int64_t value = count(name, least);
  if (value != static_cast<int>(value)) fail_range(name, raw(name), "at most 2147483647");
  return static_cast<int>(value);
}

void Fields::fail(const char* name) const {
  throw Error(Code::kRecord, fmt::format("\"{}\" of {} has the wrong type", name, where_), kRemedy);
}

void Fields::fail_range(const char* name, const json& value, const std::string& range) const {
  throw Error(Code::kRecord,
              fmt::format("\"{}\" of {} is {}; it must be {}", name, where_, value.dump(), range),
              kRemedy);
}

double Fields::number(const char* name, const json& value) const {
  const auto number = number_from_json(value);
  if (!number) fail(name);
  return *number;
}

int64_t Fields::integer(const char* name, const json& value, int64_t least) const {
  if (!value.is_number_integer()) fail(name);
  if (value.is_number_unsigned() && value.get<uint64_t>() > uint64_t{INT64_MAX}) fail(name);
  const auto number = value.get<int64_t>();
  if (number < least) fail_range(name, value, fmt::format("{} or more", least));
  return number;
}

}  // namespace lockstep
