#pragma once

// Programs of this repository, started as a user starts them.

#include <string>
#include <utility>
#include <vector>

#include "cli/child.hpp"
#include "support.hpp"

namespace lockstep::test {

using cli::ChildResult;
using Arguments = std::vector<std::string>;

inline const std::string kBin = std::string(LOCKSTEP_BIN) + "/";

inline ChildResult run(const std::string& program, Arguments arguments) {
  const cli::Interrupts interrupts;
  return cli::run_child({.program = kBin + program, .arguments = std::move(arguments)}, interrupts);
}

inline Arguments join(Arguments first, const Arguments& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

/// How often `part` is in `text`.
inline size_t count(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

}  // namespace lockstep::test
