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

std::string blas_name(const std::set<std::string>& libraries, const std::string& torch_config) {
  std::string all;
  for (const auto& path : libraries) all += path + "\n";
  const auto has = [&](std::string_view part) { return all.find(part) != std::string::npos; };
  // Debian keeps each flavour in a folder of its own name.
  if (has("openblas-openmp") || has("libopenblaso")) return "OpenBLAS (OpenMP)";
  if (has("openblas-pthread") || has("libopenblasp")) return "OpenBLAS (pthread)";
  if (has("openblas")) return "OpenBLAS (serial)";
  if (has("blis")) return "BLIS";
  if (has("mkl") || torch_config.find("BLAS_INFO=mkl") != std::string::npos) return "MKL";
  if (has("/libblas.so")) return "reference";
  return "unknown";
}

}  // namespace lockstep
