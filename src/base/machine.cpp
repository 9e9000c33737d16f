#include "base/machine.hpp"

#include <cstdlib>
#include <fstream>
#include <mutex>

#ifdef __x86_64__
#include <cpuid.h>
#endif

#include "lockstep/version.hpp"

namespace lockstep {
namespace {

#ifdef __x86_64__
bool has_f16c() {  // clang 14's __builtin_cpu_supports does not know it
  unsigned int a = 0;
  unsigned int b = 0;
  unsigned int c = 0;
  unsigned int d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

Instructions detect_instructions() {
#ifdef __x86_64__
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()) {
    return has_avx512() ? Instructions::kAvx512 : Instructions::kAvx2;
  }
#endif
  return Instructions::kPlain;
}

AmxFacts amx_facts() {
  AmxFacts facts;
#ifdef __x86_64__
  constexpr unsigned kAmxTile = 1U << 24;  // leaf 7, edx
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  facts.highest_leaf = __get_cpuid_max(0, nullptr);
  facts.announced = __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kAmxTile) != 0;
  if (__get_cpuid_count(0x1d, 0, &a, &b, &c, &d) != 0) facts.most_palettes = a;
#endif
  return facts;
}

}  // namespace

const char* const kVersion = LOCKSTEP_VERSION;

Instructions best_instructions() {
  static const Instructions best = detect_instructions();
  return best;
}

void avoid_hidden_amx() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (hides_amx(amx_facts())) {
      ::setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16", /*overwrite=*/0);
    }
  });
}

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

// libblas.so decides if there is one: libtorch calls it, while something else may have loaded an
// OpenBLAS of its own. Debian keeps each implementation in a folder named after it.
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
