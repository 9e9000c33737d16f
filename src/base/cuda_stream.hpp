#pragma once

// CUDA's stream without CUDA's headers, for declarations that every build sees.
struct CUstream_st;

namespace lockstep {
using CudaStream = CUstream_st*;
}
