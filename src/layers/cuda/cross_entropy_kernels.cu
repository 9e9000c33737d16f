#include "layers/layer_kernels.hpp"

#include <algorithm>
#include <cmath>

#include "layers/cuda/vectors.cuh"

namespace lockstep::layers {
namespace {

constexpr int kThreads = 512;
constexpr float kLog2E = 1.4426950408889634F;
constexpr float kLn2 = 0.6931471805599453F;
constexpr float kLowest = -1e30F;  // below any logit, and finite, so that differences are too

// The sum of 2^(value - largest) of some values. Logits are held times log2(e).
struct Softmax {
  float largest = kLowest;
  float sum = 0;

  __device__ void merge(float other_largest, float other_sum) {
    const float new_largest = fmaxf(largest, other_largest);
    sum = sum * exp2f(largest - new_largest) + other_sum * exp2f(other_largest - new_largest);
    largest = new_largest;
  }
};

// Returns the softmax over all threads' values, to each of them.
__device__ Softmax block_softmax(Softmax own) {
  __shared__ float2 of_warps[kThreads / 32];  // largest, sum
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const float largest = __shfl_xor_sync(0xffffffffU, own.largest, offset);
    const float sum = __shfl_xor_sync(0xffffffffU, own.sum, offset);
    own.merge(largest, sum);
  }
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = make_float2(own.largest, own.sum);
  __syncthreads();
  Softmax all;
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) {
    all.merge(of_warps[warp].x, of_warps[warp].y);
  }
  return all;
}

// One block for each row. kStaged: the row is kept in shared memory between the two passes, else it
// is read again. Each thread writes only what it alone has read.
template <class T, bool kStaged>
__global__ __launch_bounds__(kThreads, 2) void cross_entropy_kernel(CrossEntropy work) {
  extern __shared__ uint4 staged_bytes[];
  auto* staged = reinterpret_cast<Packed<T>*>(staged_bytes);
  T* logits = static_cast<T*>(work.logits) + int64_t{blockIdx.x} * work.classes;
  const int valid = static_cast<int>(work.valid_classes);
  const int valid_vectors = (valid + kVector - 1) / kVector;

  Softmax own;
#pragma unroll 4
  for (int v = threadIdx.x; v < valid_vectors; v += kThreads) {
    const auto packed = Packed<T>::load(logits + int64_t{v} * kVector);
    if constexpr (kStaged) staged[v] = packed;
    float values[kVector];
    packed.to_floats(values);
    float largest = kLowest;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      values[i] = v * kVector + i < valid ? values[i] * kLog2E : -INFINITY;
      largest = fmaxf(largest, values[i]);
    }
    if (largest > own.largest) {
      own.sum *= exp2f(own.largest - largest);
      own.largest = largest;
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) own.sum += exp2f(values[i] - own.largest);
  }
  const int64_t target = work.targets[blockIdx.x];
  const bool target_is_valid = target >= 0 && target < work.valid_classes;
  // Read before the barrier in block_softmax(), written behind it.
  const float target_logit =
      target_is_valid ? static_cast<float>(logits[target]) : __int_as_float(0x7fffffff);
  const Softmax all = block_softmax(own);
  const float log2_sum = all.largest + log2f(all.sum);
  if (threadIdx.x == 0) work.losses[blockIdx.x] = log2_sum * kLn2 - target_logit;
  if (!work.with_gradient) return;

  const float scale = target_is_valid ? kLogitGradientScale : target_logit;
  const int vectors = static_cast<int>(work.classes / kVector);
#pragma unroll 4
  for (int v = threadIdx.x; v < vectors; v += kThreads) {
    float values[kVector] = {};
    if (v < valid_vectors) {
      const auto packed = kStaged ? staged[v] : Packed<T>::load(logits + int64_t{v} * kVector);
      packed.to_floats(values);
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const int c = v * kVector + i;
      const float probability = exp2f(values[i] * kLog2E - log2_sum);
      values[i] = c < valid ? (probability - (c == target ? 1.0F : 0.0F)) * scale : 0.0F;
    }
    Packed<T>::rounded(values).store(logits + int64_t{v} * kVector);
  }
}

template <class T, class In>
__global__ __launch_bounds__(256) void scale_into_kernel(const In* in, T* out, int64_t count,
                                                         const float* factor, float constant) {
  const float scale = *factor * constant;
  const int64_t first = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * kVector;
  if (first + kVector <= count) {
    float values[kVector];
    load_floats(in + first, values);
#pragma unroll
    for (int i = 0; i < kVector; ++i) values[i] *= scale;
    Packed<T>::rounded(values).store(out + first);
    return;
  }
  for (int64_t i = first; i < count; ++i) {
    out[i] = static_cast<T>(static_cast<float>(in[i]) * scale);
  }
}

int max_shared_bytes() {
  int gpu = 0;
  int bytes = 0;
  if (cudaGetDevice(&gpu) != cudaSuccess ||
      cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, gpu) != cudaSuccess) {
    throw Error(Code::kEngine, "CUDA cannot report the size of shared memory",
                "`lockstep doctor` says what is wrong with this GPU");
  }
  return bytes;
}

template <class T>
void launch(const CrossEntropy& work, CudaStream stream) {
  constexpr int kStaticBytes = 1024;  // room for block_softmax()
  const int64_t row_bytes = (work.valid_classes + kVector - 1) / kVector * 16;
  const auto blocks = static_cast<unsigned>(work.rows);
  if (!work.with_gradient || row_bytes + kStaticBytes > max_shared_bytes()) {
    cross_entropy_kernel<T, false><<<blocks, kThreads, 0, stream>>>(work);
  } else {
    const auto bytes = static_cast<int>(row_bytes);
    const cudaError_t status = cudaFuncSetAttribute(
        cross_entropy_kernel<T, true>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (status != cudaSuccess) {
      throw Error(Code::kEngine,
                  std::string("shared memory for the loss: ") + cudaGetErrorString(status),
                  "`lockstep doctor` says whether this build was compiled for this GPU");
    }
    cross_entropy_kernel<T, true><<<blocks, kThreads, row_bytes, stream>>>(work);
  }
  check_launch("cross_entropy");
}

}  // namespace

void cross_entropy(const CrossEntropy& work, CudaStream stream) {
  with_half_type(work.dtype, [&](auto value) { launch<decltype(value)>(work, stream); });
}

void scale_into(const ScaleInto& work, CudaStream stream) {
  constexpr int kScaleThreads = 256;
  const int64_t per_block = int64_t{kScaleThreads} * kVector;
  const auto blocks = static_cast<unsigned>((work.count + per_block - 1) / per_block);
  with_half_type(work.dtype, [&](auto value) {
    using T = decltype(value);
    if (work.in_dtype == Dtype::kF32) {
      scale_into_kernel<<<blocks, kScaleThreads, 0, stream>>>(static_cast<const float*>(work.in),
                                                              static_cast<T*>(work.out), work.count,
                                                              work.factor, work.constant);
    } else {
      scale_into_kernel<<<blocks, kScaleThreads, 0, stream>>>(static_cast<const T*>(work.in),
                                                              static_cast<T*>(work.out), work.count,
                                                              work.factor, work.constant);
    }
  });
  check_launch("scale_into");
}

}  // namespace lockstep::layers
