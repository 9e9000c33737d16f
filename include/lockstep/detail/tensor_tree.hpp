#pragma once

#include <torch/types.h>

#include <array>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace lockstep {

/// Visits the tensors inside a value: a tensor, or a pair, tuple, array, vector, optional or map of
/// such values, at any depth. The order is fixed, so that a value can be taken apart and put
/// together again. Any other type has no tensors.
template <class Value, class Visit>
void for_each_tensor(Value& value, Visit&& visit);

namespace detail {

template <class T, template <class...> class Template>
inline constexpr bool is_instance_of = false;
template <template <class...> class Template, class... Arguments>
inline constexpr bool is_instance_of<Template<Arguments...>, Template> = true;

template <class T>
inline constexpr bool is_std_array = false;
template <class T, size_t N>
inline constexpr bool is_std_array<std::array<T, N>> = true;

// libtorch 1.13 has an optional of its own.
template <class T>
inline constexpr bool is_optional =
    is_instance_of<T, std::optional> || is_instance_of<T, c10::optional>;

template <class T>
inline constexpr bool is_tuple_like = is_instance_of<T, std::tuple> || is_instance_of<T, std::pair>;
template <class T>
inline constexpr bool is_sequence = is_instance_of<T, std::vector> || is_std_array<T>;

template <class Map, class Visit>
void for_each_value_by_key(Map& map, Visit&& visit) {
  if constexpr (is_instance_of<std::remove_const_t<Map>, std::map>) {
    for (auto& [key, value] : map) visit(value);
  } else {  // the order of a hash map may differ between two maps with the same keys
    std::map<typename Map::key_type, typename Map::mapped_type*> sorted;
    for (auto& [key, value] : map)
      sorted.emplace(key, const_cast<typename Map::mapped_type*>(&value));
    for (auto& [key, value] : sorted) visit(*value);
  }
}

/// Whether a type contains only tensors, so that it can be gathered.
template <class T>
struct HoldsOnlyTensors : std::is_same<T, torch::Tensor> {};
template <class... T>
struct HoldsOnlyTensors<std::tuple<T...>> : std::conjunction<HoldsOnlyTensors<T>...> {};
template <class A, class B>
struct HoldsOnlyTensors<std::pair<A, B>>
    : std::conjunction<HoldsOnlyTensors<A>, HoldsOnlyTensors<B>> {};
template <class T>
struct HoldsOnlyTensors<std::vector<T>> : HoldsOnlyTensors<T> {};
template <class T, size_t N>
struct HoldsOnlyTensors<std::array<T, N>> : HoldsOnlyTensors<T> {};
template <class T>
requires is_optional<T>
struct HoldsOnlyTensors<T> : HoldsOnlyTensors<typename T::value_type> {
};
template <class K, class T>
struct HoldsOnlyTensors<std::map<K, T>> : HoldsOnlyTensors<T> {};
template <class K, class T>
struct HoldsOnlyTensors<std::unordered_map<K, T>> : HoldsOnlyTensors<T> {};

}  // namespace detail

template <class Value, class Visit>
void for_each_tensor(Value& value, Visit&& visit) {
  using Plain = std::remove_const_t<Value>;
  if constexpr (std::is_same_v<Plain, torch::Tensor>) {
    visit(value);
  } else if constexpr (detail::is_tuple_like<Plain>) {
    std::apply([&](auto&... parts) { (for_each_tensor(parts, visit), ...); }, value);
  } else if constexpr (detail::is_sequence<Plain>) {
    using Part = typename Plain::value_type;
    if constexpr (!std::is_arithmetic_v<Part>) {
      for (auto& part : value) for_each_tensor(part, visit);
    }
  } else if constexpr (detail::is_optional<Plain>) {
    if (value) for_each_tensor(*value, visit);
  } else if constexpr (detail::is_instance_of<Plain, std::map> ||
                       detail::is_instance_of<Plain, std::unordered_map>) {
    detail::for_each_value_by_key(value, [&](auto& part) { for_each_tensor(part, visit); });
  }
}

/// The tensors of a value, in visiting order.
template <class Value>
std::vector<torch::Tensor> tensors_of(const Value& value) {
  std::vector<torch::Tensor> tensors;
  for_each_tensor(value, [&](const torch::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

/// Replaces the value's tensors by `tensors`, in visiting order. Their number must be the same.
template <class Value>
void replace_tensors(Value& value, const std::vector<torch::Tensor>& tensors) {
  auto next = tensors.begin();
  for_each_tensor(value, [&](torch::Tensor& tensor) { tensor = *next++; });
}

/// Describes how a value is built: "(T,{mean:T,scale:T})". Values with the same text have matching
/// tensors.
template <class Value>
std::string structure_of(const Value& value) {
  if constexpr (std::is_same_v<Value, torch::Tensor>) {
    return value.defined() ? "T" : "-";
  } else if constexpr (detail::is_tuple_like<Value>) {
    std::string text = "(";
    std::apply([&](const auto&... parts) { ((text += structure_of(parts) + ","), ...); }, value);
    return text + ")";
  } else if constexpr (detail::is_sequence<Value>) {
    std::string text = "[";
    if constexpr (std::is_arithmetic_v<typename Value::value_type>) return "_";
    for (const auto& part : value) text += structure_of(part) + ",";
    return text + "]";
  } else if constexpr (detail::is_optional<Value>) {
    return value ? "?" + structure_of(*value) : "?";
  } else if constexpr (detail::is_instance_of<Value, std::map> ||
                       detail::is_instance_of<Value, std::unordered_map>) {
    std::map<std::string, std::string> parts;
    for (const auto& [key, part] : value) {
      if constexpr (std::is_arithmetic_v<std::remove_cvref_t<decltype(key)>>) {
        parts.emplace(std::to_string(key), structure_of(part));
      } else {
        parts.emplace(std::string(key), structure_of(part));
      }
    }
    std::string text = "{";
    for (const auto& [key, part] : parts) text += key + ":" + part + ",";
    return text + "}";
  } else {
    return "_";
  }
}

}  // namespace lockstep
