#pragma once

#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// Paths of the shared libraries mapped into this process whose file name has one of these parts.
std::set<std::string> loaded_libraries(const std::vector<std::string_view>& parts);

/// The BLAS that libtorch calls: "OpenBLAS (OpenMP)", "OpenBLAS (pthread)", "OpenBLAS (serial)",
/// "BLIS", "MKL", "reference" or "unknown", from the mapped libraries and libtorch's build
/// settings.
std::string blas_name(const std::set<std::string>& libraries, const std::string& torch_config);

}  // namespace lockstep
