#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace lockstep::fuzz {

/// A target under the name of its file.
struct Target {
  const char* name;
  int (*run)(const uint8_t* data, size_t size);
};

/// All targets; CMake makes this list from the files of the folder.
std::span<const Target> targets();

}  // namespace lockstep::fuzz
