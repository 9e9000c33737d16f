#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// The parts of "a,b,c"; an empty text is one empty part.
std::vector<std::string_view> split_list(std::string_view text, char separator);

/// A decimal integer; nullopt for anything else, including overflow.
std::optional<int> parse_whole_number(std::string_view text);

/// "0-3,8" for {0, 1, 2, 3, 8}; "" for none.
std::string format_number_list(const std::vector<int>& numbers);

/// The numbers of "0,2-5", ascending and without duplicates; nullopt if the text is no such list,
/// or one of more numbers than any job has ranks.
std::optional<std::vector<int>> parse_number_list(std::string_view text);

}  // namespace lockstep
