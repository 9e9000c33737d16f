#pragma once

// CUDA's stream type for declarations that are compiled without CUDA's headers too.
struct CUstream_st;

namespace lockstep {
using CudaStream = CUstream_st*;
}
