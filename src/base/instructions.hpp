#pragma once

namespace lockstep {

/// Vector instructions that kernels are compiled for, from the least to the most.
enum class Instructions { kPlain, kAvx2, kAvx512 };

/// The most that this machine has. kAvx2 is AVX2 with F16C; kAvx512 adds F, BW, DQ and VL.
Instructions best_instructions();

}  // namespace lockstep
