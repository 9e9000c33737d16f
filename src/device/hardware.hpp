#pragma once

#include <map>
#include <string>

namespace lockstep {

/// Versions of the libtorch, CUDA and NCCL that are loaded, of those that are. Unlike
/// describe_versions() it computes nothing, so a rank can call it first of all.
std::map<std::string, std::string> library_versions();

}  // namespace lockstep
