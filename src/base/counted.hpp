#pragma once

#include <concepts>
#include <string>
#include <string_view>

namespace lockstep {

/// A number of things as messages and tables say it: "1 rank", "3 ranks", "2 processes".
std::string counted(std::integral auto count, std::string_view noun) {
  std::string text = std::to_string(count) + " " + std::string(noun);
  if (count != 1) text += noun.ends_with('s') || noun.ends_with("ch") ? "es" : "s";
  return text;
}

}  // namespace lockstep
