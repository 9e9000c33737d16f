#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// "0-3,8" for {0,1,2,3,8}; "" for none.
std::string format_number_list(const std::vector<int>& numbers);

/// The numbers of "0,2-5", ascending and each once; nothing where the text is not such a list.
std::optional<std::vector<int>> parse_number_list(std::string_view text);

/// A whole decimal number; anything else, an overflow included, is nothing.
std::optional<int> parse_whole_number(std::string_view text);

/// A finite decimal number; anything else is nothing.
std::optional<double> parse_finite_number(std::string_view text);

/// "rank 2", "ranks 0, 1 and 3".
std::string name_ranks(const std::vector<int>& ranks);

}  // namespace lockstep
