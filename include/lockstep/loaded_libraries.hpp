#pragma once

#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// Paths of the shared libraries mapped into this process whose file name has one of these parts.
std::set<std::string> loaded_libraries(const std::vector<std::string_view>& parts);

/// Implementations of BLAS that lockstep tells apart.
enum class Blas {
  kOpenBlasOpenMp,
  kOpenBlasPthread,
  kOpenBlasSerial,
  kOpenBlasOther,
  kMkl,
  kBlis,
  kReference,
  kUnknown
};

/// The one that libtorch calls, from the mapped libraries and libtorch's build settings.
Blas classify_blas(const std::set<std::string>& libraries, const std::string& torch_config);

/// "OpenBLAS (OpenMP)".
const char* blas_title(Blas blas);

}  // namespace lockstep
