#include "slurm_lists.hpp"

#include <fmt/format.h>

#include <charconv>
#include <optional>

#include "lockstep/error.hpp"

namespace lockstep {
namespace {

constexpr size_t kMostItems = 1 << 16;

[[noreturn]] void bad_list(const std::string& variable, std::string_view text,
                           std::string_view form) {
  throw Error(Code::kWorld, fmt::format("{}=\"{}\" is no list that SLURM writes", variable, text),
              fmt::format("it should look like {}; unset it if SLURM did not set it", form));
}

std::optional<int> number(std::string_view digits) {
  int value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  const bool whole = end == digits.data() + digits.size() && !digits.empty() && digits[0] != '-';
  return error == std::errc() && whole ? std::optional(value) : std::nullopt;
}

// At commas that are not inside brackets.
std::vector<std::string_view> split_outside_brackets(std::string_view text) {
  std::vector<std::string_view> parts;
  size_t begin = 0;
  int depth = 0;
  for (size_t i = 0; i <= text.size(); ++i) {
    if (i == text.size() || (text[i] == ',' && depth == 0)) {
      parts.push_back(text.substr(begin, i - begin));
      begin = i + 1;
    } else if (text[i] == '[') {
      ++depth;
    } else if (text[i] == ']') {
      --depth;
    }
  }
  return parts;
}

// "01-03,07" without its brackets; nullopt where it is not of that form. Leading zeros stay.
std::optional<std::vector<std::string>> expand_ranges(std::string_view ranges) {
  std::vector<std::string> all;
  for (const std::string_view range : split_outside_brackets(ranges)) {
    const size_t dash = range.find('-');
    const std::string_view low = range.substr(0, dash);
    const std::string_view high = dash == std::string_view::npos ? low : range.substr(dash + 1);
    const auto first = number(low);
    const auto last = number(high);
    if (!first || !last || *last < *first || static_cast<size_t>(*last - *first) >= kMostItems)
      return std::nullopt;
    for (int i = *first; i <= *last; ++i) all.push_back(fmt::format("{:0{}}", i, low.size()));
    if (all.size() > kMostItems) return std::nullopt;
  }
  return all;
}

// One name with any number of brackets, the first of which is expanded here.
bool expand_name(std::string_view name, const std::string& before,
                 std::vector<std::string>& hosts) {
  const size_t open = name.find('[');
  const size_t close = name.find(']');
  if (open == std::string_view::npos) {
    if (close != std::string_view::npos || hosts.size() >= kMostItems) return false;
    hosts.push_back(before + std::string(name));
    return !hosts.back().empty();
  }
  if (close == std::string_view::npos || close < open) return false;
  const auto middle = expand_ranges(name.substr(open + 1, close - open - 1));
  if (!middle) return false;
  for (const auto& part : *middle) {
    if (!expand_name(name.substr(close + 1), before + std::string(name.substr(0, open)) + part,
                     hosts))
      return false;
  }
  return true;
}

}  // namespace

std::vector<std::string> expand_slurm_hosts(const std::string& variable, std::string_view text) {
  std::vector<std::string> hosts;
  for (const std::string_view name : split_outside_brackets(text)) {
    if (!expand_name(name, "", hosts)) bad_list(variable, text, "n[01-03,07],gpu2");
  }
  return hosts;
}

std::vector<int> expand_slurm_counts(const std::string& variable, std::string_view text) {
  std::vector<int> counts;
  for (const std::string_view part : split_outside_brackets(text)) {
    const size_t open = part.find("(x");
    const bool repeated = open != std::string_view::npos && part.back() == ')';
    const auto count = number(part.substr(0, open));
    const auto times = repeated
                           ? number(part.substr(open + 2, part.size() - open - 3))
                           : (open == std::string_view::npos ? std::optional(1) : std::nullopt);
    if (!count || !times || *count < 1 || *times < 1 ||
        counts.size() + static_cast<size_t>(*times) > kMostItems)
      bad_list(variable, text, "2(x3),1");
    counts.insert(counts.end(), static_cast<size_t>(*times), *count);
  }
  return counts;
}

int slurm_port(std::string_view job_id, std::string_view step_id, int offset) {
  constexpr int kFirstPort = 12'000;
  constexpr uint32_t kPorts = 20'000;
  uint32_t sum = 0;
  for (const char digit : fmt::format("{}.{}", job_id, step_id)) {
    sum = sum * 31 + static_cast<unsigned char>(digit);
  }
  return kFirstPort + static_cast<int>((sum + static_cast<uint32_t>(offset)) % kPorts);
}

}  // namespace lockstep
