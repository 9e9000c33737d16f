#include "launch/number_list.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <charconv>
#include <cmath>
#include <set>

namespace lockstep {
namespace {

constexpr int kLongestRange = 4096;  // more cores or ranks than any host has

}  // namespace

std::string format_number_list(const std::vector<int>& numbers) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin < numbers.size();) {
    size_t end = begin;
    while (end + 1 < numbers.size() && numbers[end + 1] == numbers[end] + 1) ++end;
    parts.push_back(begin == end ? std::to_string(numbers[begin])
                                 : fmt::format("{}-{}", numbers[begin], numbers[end]));
    begin = end + 1;
  }
  return fmt::format("{}", fmt::join(parts, ","));
}

std::optional<std::vector<int>> parse_number_list(std::string_view text) {
  std::set<int> numbers;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t comma = std::min(text.find(',', begin), text.size());
    const std::string_view item = text.substr(begin, comma - begin);
    const size_t dash = item.find('-', 1);
    const auto first = parse_whole_number(item.substr(0, dash));
    const auto last =
        dash == std::string_view::npos ? first : parse_whole_number(item.substr(dash + 1));
    if (!first || !last || *first < 0 || *last < *first || *last - *first > kLongestRange) {
      return std::nullopt;
    }
    for (int number = *first; number <= *last; ++number) numbers.insert(number);
    begin = comma + 1;
  }
  return std::vector<int>(numbers.begin(), numbers.end());
}

std::optional<int> parse_whole_number(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::optional<double> parse_finite_number(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) {
    return std::nullopt;
  }
  return value;
}

std::string name_ranks(const std::vector<int>& ranks) {
  if (ranks.empty()) return "no rank";
  if (ranks.size() == 1) return fmt::format("rank {}", ranks[0]);
  const std::vector<int> but_last(ranks.begin(), ranks.end() - 1);
  // A list of dozens would fill the screen.
  if (ranks.size() > 8) return fmt::format("ranks {}", format_number_list(ranks));
  return fmt::format("ranks {} and {}", fmt::join(but_last, ", "), ranks.back());
}

}  // namespace lockstep
