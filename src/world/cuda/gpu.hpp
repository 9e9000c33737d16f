#pragma once

#include <c10/core/Stream.h>

#include "base/cuda_stream.hpp"
#include "world/gpu_choice.hpp"

// What src/world needs of CUDA's own headers; of builds with CUDA only.
namespace lockstep::cuda {

/// Which GPU it is, and which others it reaches.
GpuCard card_of(int gpu);

/// The stream as CUDA knows it.
CudaStream raw_stream(c10::Stream stream);

}  // namespace lockstep::cuda
