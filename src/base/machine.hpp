#pragma once

#include <set>
#include <string>
#include <string_view>
#include <vector>

// What this process runs on: the processor's instructions, and the libraries that are loaded.

namespace lockstep {

/// Vector instructions that kernels are compiled for, in ascending order.
enum class Instructions { kPlain, kAvx2, kAvx512 };

/// The best that this machine has. kAvx2 is AVX2 with F16C; kAvx512 adds F, BW, DQ and VL.
Instructions best_instructions();

/// What CPUID says of AMX.
struct AmxFacts {
  bool announced = false;      ///< leaf 7 announces tiles
  unsigned highest_leaf = 0;   ///< the last leaf there is
  unsigned most_palettes = 0;  ///< leaf 0x1d: the number of tile palettes
};

/// Whether tiles are announced but not described: some virtual machines cut CPUID off in between.
constexpr bool hides_amx(const AmxFacts& facts) {
  return facts.announced && (facts.highest_leaf < 0x1d || facts.most_palettes == 0);
}

/// If this machine hides AMX, tells oneDNN inside libtorch not to use it, since its bf16 products
/// would end the process with SIGILL. Does nothing if ONEDNN_MAX_CPU_ISA is set. Must be called
/// before libtorch's first matrix product.
void avoid_hidden_amx();

/// Paths of the shared libraries mapped into this process whose file name contains one of `parts`.
std::set<std::string> loaded_libraries(const std::vector<std::string_view>& parts);

/// Implementations of BLAS that lockstep distinguishes.
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

/// The BLAS that libtorch calls, judged by the mapped libraries and libtorch's build settings.
Blas classify_blas(const std::set<std::string>& libraries, const std::string& torch_config);

/// "OpenBLAS (OpenMP)".
const char* blas_title(Blas blas);

}  // namespace lockstep
