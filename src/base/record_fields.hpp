#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

/// NaN and infinity have no JSON number; a diverged loss must survive the round trip.
nlohmann::json number_to_json(double number);

/// Reads fields of one JSON object and names the one that is missing, of the wrong type or out of
/// range.
class Fields {
 public:
  /// `where` names the object in errors: "a device".
  Fields(const nlohmann::json& object, std::string where);

  bool has(const char* name) const { return object_.contains(name); }
  const nlohmann::json& raw(const char* name) const;
  const nlohmann::json& list(const char* name) const;

  /// Any number: a loss, or a time on a clock that may begin later.
  double number(const char* name) const { return number(name, raw(name)); }
  std::vector<double> numbers(const char* name) const;
  /// 0 or more: a duration, a rate. What could not be measured is NaN, which is kept.
  double amount(const char* name) const;
  /// 0 to 1, or NaN.
  double share(const char* name) const;

  // The parser alone would take 1.5, true and numbers past the end of the type for an integer.
  /// `least` or more: bytes, elements, steps.
  int64_t count(const char* name, int64_t least = 0) const;
  std::vector<int64_t> counts(const char* name) const;
  /// The same within an int: ranks, stages.
  int small_count(const char* name, int least = 0) const;
  bool boolean(const char* name) const;

  template <class T>  // a text, a list of texts, or a map of texts
  T get(const char* name) const {
    try {
      return raw(name).get<T>();
    } catch (const nlohmann::json::exception&) {
      fail(name);
    }
  }

 private:
  [[noreturn]] void fail(const char* name) const;
  [[noreturn]] void fail_range(const char* name, const nlohmann::json& value,
                               const std::string& range) const;
  double number(const char* name, const nlohmann::json& value) const;
  int64_t integer(const char* name, const nlohmann::json& value, int64_t least) const;

  const nlohmann::json& object_;
  std::string where_;
};

template <class T>
nlohmann::json list_to_json(const std::vector<T>& items, nlohmann::json (*convert)(const T&)) {
  nlohmann::json list = nlohmann::json::array();
  for (const auto& item : items) list.push_back(convert(item));
  return list;
}

template <class T>
std::vector<T> list_from_json(const Fields& fields, const char* name,
                              T (*convert)(const nlohmann::json&)) {
  std::vector<T> items;
  for (const auto& value : fields.list(name)) items.push_back(convert(value));
  return items;
}

}  // namespace lockstep
