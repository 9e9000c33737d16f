#pragma once

#include <nlohmann/json.hpp>
#include <optional>

#include "cli/doctor/doctor.hpp"

// What the checks of `lockstep doctor` share.

namespace lockstep::cli {

/// A value of the wanted type at a JSON pointer, or nothing.
template <class T>
std::optional<T> fact(const nlohmann::json& facts, const char* pointer) {
  const nlohmann::json::json_pointer where(pointer);
  if (!facts.contains(where) || facts.at(where).is_null()) return std::nullopt;
  try {
    return facts.at(where).get<T>();
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;
  }
}

/// Where the facts that a check needs are missing.
inline Finding unknown(const char* check) {
  return {check, Level::kWarn, "could not be found out",
          "`lockstep doctor --json` shows the facts there are"};
}

}  // namespace lockstep::cli
