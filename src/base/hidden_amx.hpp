#pragma once

namespace lockstep {

/// What a processor says of AMX.
struct AmxFacts {
  bool announced = false;      ///< that it has tiles
  unsigned highest_leaf = 0;   ///< of CPUID
  unsigned most_palettes = 0;  ///< leaf 0x1d: what tiles can be like
};

/// Whether tiles are announced, but not what they can be like: some virtual machines cut CPUID off
/// in between.
constexpr bool hides_amx(const AmxFacts& facts) {
  return facts.announced && (facts.highest_leaf < 0x1d || facts.most_palettes == 0);
}

/// Where this machine does so, tells oneDNN inside libtorch to do without AMX, since its products
/// of bf16 would end the process with SIGILL. Leaves ONEDNN_MAX_CPU_ISA alone where it is set. To
/// be called before libtorch's first product.
void avoid_hidden_amx();

}  // namespace lockstep
