#include "base/json_text.hpp"

namespace lockstep {
namespace {

constexpr int kDeepestJson = 100;

struct TooDeep {};

}  // namespace

std::optional<nlohmann::json> parse_json(std::string_view text) {
  using json = nlohmann::json;
  const auto guard = [](int depth, json::parse_event_t event, json& /*parsed*/) {
    const bool opens =
        event == json::parse_event_t::object_start || event == json::parse_event_t::array_start;
    if (opens && depth > kDeepestJson) throw TooDeep();
    return true;
  };
  try {
    return json::parse(text, guard);
  } catch (const json::exception&) {
    return std::nullopt;
  } catch (const TooDeep&) {
    return std::nullopt;
  }
}

std::optional<int64_t> whole_number_in(const nlohmann::json& value, int64_t least, int64_t most) {
  if (!value.is_number_integer()) return std::nullopt;
  if (value.is_number_unsigned() && value.get<uint64_t>() > uint64_t{INT64_MAX}) {
    return std::nullopt;
  }
  const auto number = value.get<int64_t>();
  return number < least || number > most ? std::nullopt : std::optional(number);
}

}  // namespace lockstep
