#pragma once

#include <map>
#include <string>

/// The version of these headers; CMake reads it from here.
#define LOCKSTEP_VERSION_MAJOR 0
#define LOCKSTEP_VERSION_MINOR 1
#define LOCKSTEP_VERSION_PATCH 0

/// Whether these headers are of the given version or a newer one:
/// `#if LOCKSTEP_VERSION_CHECK(0, 2, 0)`.
#define LOCKSTEP_VERSION_CHECK(major, minor, patch) \
  (LOCKSTEP_VERSION_MAJOR > (major) ||              \
   (LOCKSTEP_VERSION_MAJOR == (major) &&            \
    (LOCKSTEP_VERSION_MINOR > (minor) ||            \
     (LOCKSTEP_VERSION_MINOR == (minor) && LOCKSTEP_VERSION_PATCH >= (patch)))))

namespace lockstep {

/// "0.1.0": the version of the library that is linked, or loaded where it is a shared one.
extern const char* const kVersion;

/// Versions of lockstep, the libtorch that is loaded, its BLAS, CUDA, NCCL and the
/// compiler. Needs lockstep::lockstep; kVersion needs only lockstep::core.
std::map<std::string, std::string> describe_versions();

}  // namespace lockstep
