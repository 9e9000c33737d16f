#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "cli/doctor/doctor.hpp"

namespace lockstep::cli {

/// Whether libtorch can use the GPUs that the driver has.
Finding check_cuda(const nlohmann::json& facts);

/// Whether lockstep was built with its GPU code, and that for these GPUs. For a libtorch with CUDA.
Finding check_gpu_code(const nlohmann::json& facts);

/// How ranks on GPUs will talk to each other. For a libtorch with CUDA.
Finding check_gpu_ranks(const nlohmann::json& facts);

/// Whether code that CMake built for `architectures` ("80-real,90") runs on a GPU of this compute
/// capability ("9.0"): machine code serves its own major version from its minor one on, and
/// intermediate code, which all but -real architectures hold, whatever is newer.
bool gpu_code_serves(const std::string& architectures, const std::string& capability);

}  // namespace lockstep::cli
