#pragma once

#include <cstdint>
#include <span>

#include "base/cuda_stream.hpp"
#include "base/dtype.hpp"
#include "lockstep/reduce_op.hpp"

namespace lockstep {

/// Pointers travel as a kernel's parameters, so their number is bounded.
inline constexpr int kMostGpuReduceRanks = 64;

/// Queues on `stream` what reduce() of reduce_kernels.hpp does on the host, for memory that the
/// current GPU reaches: the inputs' elements, reduced in their order, to every output. An output
/// may be one of the inputs, but must not overlap one otherwise. The bits of an element depend on
/// the inputs alone, and are the host's (but for the payload of a NaN).
void gpu_reduce(Dtype dtype, ReduceOp op, std::span<const void* const> inputs,
                std::span<const double> factors, std::span<void* const> outputs, int64_t count,
                CudaStream stream);

}  // namespace lockstep
