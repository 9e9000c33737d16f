#pragma once

#include <cstdint>
#include <span>

#include "base/dtype.hpp"
#include "lockstep/reduce_op.hpp"

namespace lockstep {

/// Reduces `count` elements of all inputs, in order, and writes the result to every output.
///
/// An output may be one of the inputs, but must not overlap one otherwise. `factors` has one number
/// per input and is used only for kMean, which multiplies input r by factors[r]. F16 and BF16 are
/// reduced in F32 and rounded once. Integers wrap. For BOOL, sum and max are "or", min is "and".
/// The maximum and minimum of values that include a NaN is NaN.
///
/// The bits of a result depend only on the inputs, not on its index, on count or on alignment.
void reduce(Dtype dtype, ReduceOp op, std::span<const void* const> inputs,
            std::span<const double> factors, std::span<void* const> outputs, int64_t count);

/// Whether op is defined for the dtype: all are but the mean of integers and BOOL.
bool reduces(Dtype dtype, ReduceOp op);

/// The kernel for one dtype, operation and set of instructions.
using ReduceKernel = void (*)(const void* const* inputs, const double* factors, int64_t input_count,
                              void* const* outputs, int64_t output_count, int64_t count);

/// [dtype][op]; null if reduces() is false.
struct ReduceKernels {
  ReduceKernel kernels[10][4];
};

const ReduceKernels& plain_reduce_kernels();
#ifdef __x86_64__
const ReduceKernels& avx2_reduce_kernels();
const ReduceKernels& avx512_reduce_kernels();
#endif

}  // namespace lockstep
