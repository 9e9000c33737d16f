#pragma once

namespace lockstep {

/// "0.1.0", from the project's CMakeLists.txt.
extern const char* const kVersion;

}  // namespace lockstep
