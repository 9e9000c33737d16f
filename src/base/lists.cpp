#include "base/lists.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <set>

namespace lockstep {
namespace {

constexpr int64_t kMostNumbers = 1 << 16;

}  // namespace

std::vector<std::string_view> split_list(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(separator, begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

std::optional<int> parse_whole_number(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::string format_number_list(const std::vector<int>& numbers) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin < numbers.size();) {
    size_t end = begin;
    while (end + 1 < numbers.size() && numbers[end + 1] - 1 == numbers[end]) ++end;
    parts.push_back(begin == end ? std::to_string(numbers[begin])
                                 : fmt::format("{}-{}", numbers[begin], numbers[end]));
    begin = end + 1;
  }
  return fmt::format("{}", fmt::join(parts, ","));
}

std::optional<std::vector<int>> parse_number_list(std::string_view text) {
  std::set<int> numbers;
  for (const std::string_view item : split_list(text, ',')) {
    const size_t dash = item.find('-', 1);
    const auto first = parse_whole_number(item.substr(0, dash));
    const auto last =
        dash == std::string_view::npos ? first : parse_whole_number(item.substr(dash + 1));
    // int64_t, since the last number may be the largest int.
    if (!first || !last || *first < 0 || *last < *first ||
        int64_t{*last} - *first >= kMostNumbers) {
      return std::nullopt;
    }
    for (int64_t number = *first; number <= *last; ++number) {
      numbers.insert(static_cast<int>(number));
    }
    if (static_cast<int64_t>(numbers.size()) > kMostNumbers) return std::nullopt;
  }
  return std::vector<int>(numbers.begin(), numbers.end());
}

}  // namespace lockstep
