#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

namespace lockstep {

/// The value of a JSON text from outside. Nothing if it is not valid JSON, or nests deeper than any
/// file of lockstep: copying or printing such a value would exhaust the stack.
std::optional<nlohmann::json> parse_json(std::string_view text);

/// The whole number that a value is, if it is one from `least` to `most`. The JSON library would
/// also take 1.5, true, and numbers that do not fit.
std::optional<int64_t> whole_number_in(const nlohmann::json& value, int64_t least, int64_t most);

}  // namespace lockstep
