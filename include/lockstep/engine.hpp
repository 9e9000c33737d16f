#pragma once

#include <map>
#include <string>

namespace lockstep {

/// What runs underneath: lockstep, libtorch (as loaded), its BLAS, CUDA and the compiler.
std::map<std::string, std::string> describe_versions();

}  // namespace lockstep
