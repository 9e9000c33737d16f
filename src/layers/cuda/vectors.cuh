#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "base/dtype.hpp"
#include "lockstep/error.hpp"

// Kernels read and write 16 bytes at a time: eight half-precision values, computed as floats.
namespace lockstep::layers {

constexpr int kVector = 8;  // values

__device__ inline float2 as_floats(__half2 pair) {
  return __half22float2(pair);
}
__device__ inline float2 as_floats(__nv_bfloat162 pair) {
  return __bfloat1622float2(pair);
}
__device__ inline void round_to(float2 pair, __half2& out) {
  out = __float22half2_rn(pair);
}
__device__ inline void round_to(float2 pair, __nv_bfloat162& out) {
  out = __float22bfloat162_rn(pair);
}

template <class T>
struct PairOf;
template <>
struct PairOf<__half> {
  using Type = __half2;
};
template <>
struct PairOf<__nv_bfloat16> {
  using Type = __nv_bfloat162;
};

/// Eight values in their memory format.
template <class T>
struct alignas(16) Packed {
  typename PairOf<T>::Type pairs[kVector / 2];

  __device__ static Packed zeros() {
    const uint4 none = make_uint4(0, 0, 0, 0);  // the bits of eight zeros
    return *reinterpret_cast<const Packed*>(&none);
  }
  __device__ static Packed load(const T* from) {
    const uint4 bits = *reinterpret_cast<const uint4*>(from);
    return *reinterpret_cast<const Packed*>(&bits);
  }
  __device__ void store(T* to) const {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(this);
  }
  __device__ void to_floats(float (&values)[kVector]) const {
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i) {
      const float2 pair = as_floats(pairs[i]);
      values[2 * i] = pair.x;
      values[2 * i + 1] = pair.y;
    }
  }
  __device__ static Packed rounded(const float (&values)[kVector]) {
    Packed result;
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i) {
      round_to(make_float2(values[2 * i], values[2 * i + 1]), result.pairs[i]);
    }
    return result;
  }
};

/// Loads eight values of an array as floats.
template <class T>
__device__ inline void load_floats(const T* from, float (&values)[kVector]) {
  Packed<T>::load(from).to_floats(values);
}
template <>
__device__ inline void load_floats<float>(const float* from, float (&values)[kVector]) {
  const float4 low = reinterpret_cast<const float4*>(from)[0];
  const float4 high = reinterpret_cast<const float4*>(from)[1];
  values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
  values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
}

/// Throws if the launch before it failed.
inline void check_launch(const char* kernel) {
  const cudaError_t status = cudaGetLastError();
  if (status == cudaSuccess) return;
  throw Error(Code::kEngine,
              std::string("the kernel ") + kernel + " did not start: " + cudaGetErrorString(status),
              "`lockstep doctor` says whether this build was compiled for this GPU");
}

inline int multiprocessors() {
  int gpu = 0;
  int count = 0;
  if (cudaGetDevice(&gpu) != cudaSuccess ||
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, gpu) != cudaSuccess) {
    throw Error(Code::kEngine, "CUDA cannot report the number of multiprocessors",
                "`lockstep doctor` says what is wrong with this GPU");
  }
  return count;
}

/// Calls `run` with a value of the CUDA type for a half-precision dtype.
template <class Run>
void with_half_type(Dtype dtype, Run&& run) {
  if (dtype == Dtype::kF16) {
    run(__half());
  } else if (dtype == Dtype::kBF16) {
    run(__nv_bfloat16());
  } else {
    throw Error(Code::kInternal, "a kernel of half-precision values was asked for " +
                                     std::string(dtype_name(dtype)));
  }
}

}  // namespace lockstep::layers
