#include "lockstep/loaded_libraries.hpp"

#include <fstream>

namespace lockstep {

std::set<std::string> loaded_libraries(const std::vector<std::string_view>& parts) {
  std::set<std::string> found;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const size_t slash = line.find('/');
    if (slash == std::string::npos) continue;
    const std::string path = line.substr(slash);
    const std::string name = path.substr(path.rfind('/') + 1);
    if (name.find(".so") == std::string::npos) continue;
    for (const auto part : parts) {
      if (name.find(part) != std::string::npos) found.insert(path);
    }
  }
  return found;
}

// libblas.so decides where there is one: it is what libtorch calls, and an OpenBLAS that something
// else pulled in may well be mapped beside it. Debian keeps each flavour in a folder of its name.
Blas classify_blas(const std::set<std::string>& libraries, const std::string& torch_config) {
  const auto has = [](const std::string& path, const char* part) {
    return path.find(part) != std::string::npos;
  };
  const auto kind = [&](const std::string& path) {
    if (has(path, "openblas-openmp")) return Blas::kOpenBlasOpenMp;
    if (has(path, "openblas-pthread")) return Blas::kOpenBlasPthread;
    if (has(path, "openblas-serial")) return Blas::kOpenBlasSerial;
    if (has(path, "openblas")) return Blas::kOpenBlasOther;
    if (has(path, "mkl")) return Blas::kMkl;
    if (has(path, "blis")) return Blas::kBlis;
    return has(path, "/libblas.so") ? Blas::kReference : Blas::kUnknown;
  };
  for (const auto& path : libraries) {
    if (has(path, "/libblas.so")) return kind(path);
  }
  for (const auto& path : libraries) {
    if (kind(path) != Blas::kUnknown) return kind(path);
  }
  if (has(torch_config, "BLAS_INFO=mkl")) return Blas::kMkl;
  if (has(torch_config, "BLAS_INFO=open")) return Blas::kOpenBlasOther;
  return Blas::kUnknown;
}

const char* blas_title(Blas blas) {
  switch (blas) {
    case Blas::kOpenBlasOpenMp:
      return "OpenBLAS (OpenMP)";
    case Blas::kOpenBlasPthread:
      return "OpenBLAS (pthread)";
    case Blas::kOpenBlasSerial:
      return "OpenBLAS (serial)";
    case Blas::kOpenBlasOther:
      return "OpenBLAS";
    case Blas::kMkl:
      return "MKL";
    case Blas::kBlis:
      return "BLIS";
    case Blas::kReference:
      return "REFERENCE BLAS";
    case Blas::kUnknown:
      return "a BLAS of unknown kind";
  }
  return "";
}

}  // namespace lockstep
