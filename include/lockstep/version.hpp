#pragma once

#include <map>
#include <string>

namespace lockstep {

/// "0.1.0", from the project's CMakeLists.txt.
extern const char* const kVersion;

/// Versions of lockstep, the libtorch that is loaded, its BLAS, CUDA and the compiler. Needs
/// lockstep::lockstep; kVersion needs only lockstep::core.
std::map<std::string, std::string> describe_versions();

}  // namespace lockstep
