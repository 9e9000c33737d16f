#pragma once

// What kernels over lists of tensors share. The list is a parameter of the kernel, so that a
// captured launch contains it. It is cut into chunks of elements, one for each block. A chunk that
// is whole and aligned is read and written kWidth elements at a time.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <type_traits>

#include "base/dtype.hpp"
#include "lockstep/error.hpp"

namespace lockstep::gpu {

constexpr int kThreads = 256;
constexpr int kWidth = 4;                                // elements of a pack
constexpr size_t kMostParameterBytes = 32764;            // of a kernel, since CUDA 12.1 and sm_70
constexpr int64_t kMostChunks = (int64_t{1} << 31) - 1;  // blocks of a launch

template <class T>
constexpr size_t kPackBytes = sizeof(T) * kWidth < 16 ? sizeof(T) * kWidth : 16;

template <class T>
struct alignas(kPackBytes<T>) Pack {
  T at[kWidth];
};

inline bool is_aligned(const void* address, int64_t element_bytes) {
  const auto bytes = static_cast<uintptr_t>(element_bytes) * kWidth;
  return reinterpret_cast<uintptr_t>(address) % (bytes < 16 ? bytes : 16) == 0;
}

/// The type in which an element is computed.
template <class T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

__device__ inline float widen(float x) {
  return x;
}
__device__ inline double widen(double x) {
  return x;
}
__device__ inline float widen(__half x) {
  return __half2float(x);
}
__device__ inline float widen(__nv_bfloat16 x) {
  return __bfloat162float(x);
}

template <class T>
__device__ inline T narrow(Wide<T> x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else {
    return x;
  }
}

/// Returns the entry that a chunk belongs to: the last one that begins at or before it.
template <class Table>
__device__ inline int entry_of(const Table& table, int chunk) {
  int low = 0;
  int high = table.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (table.entries[middle].first_chunk <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw Error(Code::kEngine,
              std::string("CUDA could not ") + what + ": " + cudaGetErrorString(status),
              "if an earlier kernel failed, CUDA_LAUNCH_BLOCKING=1 shows which");
}

}  // namespace lockstep::gpu
