#include "layers/layer_kernels.hpp"

#include <algorithm>

#include "layers/cuda/vectors.cuh"

namespace lockstep::layers {
namespace {

constexpr int kLanes = 32;         // threads along a row: 256 columns
constexpr int kGroups = 8;         // rows of a block at a time
constexpr int kRowsOfBlock = 256;  // rows a block takes, and sums
constexpr int kSumThreads = 256;   // of kernels that sum
constexpr int kBlocksPerProcessor = 8;

// A kernel that follows another over the same tensors begins at their end, which is still in the
// cache.

// The derivative of x / 2 · (1 + tanh(inner)), inner = √(2/π) · (x + 0.044715 · x³).
__device__ float gelu_slope(float x) {
  constexpr float kFactor = 0.7978845608028654F;
  constexpr float kCube = 0.044715F;
  const float square = x * x;
  const float inner = kFactor * x * (1 + kCube * square);
  const float tanh = 1 - __fdividef(2, 1 + __expf(2 * inner));
  const float inner_slope = kFactor * (1 + 3 * kCube * square);
  return 0.5F * (1 + tanh) + 0.5F * x * (1 - tanh * tanh) * inner_slope;
}

template <Undone kWhat>
__device__ float undo(float gradient, float kept) {
  if constexpr (kWhat == Undone::kRelu) return kept <= 0 ? 0 : gradient;
  return gradient * gelu_slope(kept);
}

// Sums the rounded values, because the weight's gradient is computed from them.
template <class T, Undone kWhat>
__global__ void __launch_bounds__(kLanes* kGroups)
    undo_rows(int64_t rows, int64_t width, T* gradient, const T* kept, float* partials) {
  __shared__ float sums[kGroups][kLanes * kVector];
  const int64_t column =
      (static_cast<int64_t>(blockIdx.x) * kLanes + threadIdx.x) * static_cast<int64_t>(kVector);
  const int64_t part = static_cast<int64_t>(gridDim.y - 1 - blockIdx.y);
  const int64_t first = part * kRowsOfBlock;
  const int64_t end = first + kRowsOfBlock < rows ? first + kRowsOfBlock : rows;
  float total[kVector] = {};
  if (column < width) {
#pragma unroll 4
    for (int64_t row = first + threadIdx.y; row < end; row += kGroups) {
      const int64_t at = row * width + column;
      float values[kVector];
      load_floats(gradient + at, values);
      if constexpr (kWhat != Undone::kNothing) {
        float of_forward[kVector];
        load_floats(kept + at, of_forward);
#pragma unroll
        for (int i = 0; i < kVector; ++i) values[i] = undo<kWhat>(values[i], of_forward[i]);
        const auto rounded = Packed<T>::rounded(values);
        rounded.store(gradient + at);
        rounded.to_floats(values);
      }
#pragma unroll
      for (int i = 0; i < kVector; ++i) total[i] += values[i];
    }
  }
  if (partials == nullptr) return;
#pragma unroll
  for (int i = 0; i < kVector; ++i) sums[threadIdx.y][threadIdx.x * kVector + i] = total[i];
  __syncthreads();
  const int mine = static_cast<int>(threadIdx.y * kLanes + threadIdx.x);  // of 256 columns
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kLanes * kVector + mine;
  if (at >= width) return;
  float sum = 0;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) sum += sums[group][mine];
  partials[part * width + at] = sum;
}

template <class T>
__global__ void add_partials(int64_t count, int64_t width, const float* partials, T* sums) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (column >= width) return;
  float sum = 0;
#pragma unroll 16
  for (int64_t i = 0; i < count; ++i) sum += partials[i * width + column];
  sums[column] = static_cast<T>(sum);
}

// Sums over the threads of a block in a fixed order; only thread 0 gets the whole sum.
__device__ double sum_of_block(double mine) {
  __shared__ double of_threads[kSumThreads];
  of_threads[threadIdx.x] = mine;
  for (int half = kSumThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) of_threads[threadIdx.x] += of_threads[threadIdx.x + half];
  }
  return of_threads[threadIdx.x];
}

template <class X, class Target>
__global__ void __launch_bounds__(kSumThreads)
    sum_squares(int64_t count, const X* x, const Target* target, double* partials) {
  float sum = 0;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kSumThreads * kVector;
  for (int64_t at = (static_cast<int64_t>(blockIdx.x) * kSumThreads + threadIdx.x) * kVector;
       at < count; at += stride) {
    float values[kVector];
    float wanted[kVector];
    load_floats(x + at, values);
    load_floats(target + at, wanted);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float difference = values[i] - wanted[i];
      sum += difference * difference;
    }
  }
  const double whole = sum_of_block(static_cast<double>(sum));
  if (threadIdx.x == 0) partials[blockIdx.x] = whole;
}

__global__ void __launch_bounds__(kSumThreads)
    mean_of_partials(int64_t partial_count, const double* partials, double count, float* loss) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < partial_count; i += kSumThreads) sum += partials[i];
  const double whole = sum_of_block(sum);
  if (threadIdx.x == 0) *loss = static_cast<float>(whole / count);
}

template <class X, class Target>
__global__ void __launch_bounds__(kSumThreads)
    scale_differences(int64_t count, const X* x, const Target* target, const float* upstream,
                      X* gradient) {
  const int64_t block = static_cast<int64_t>(gridDim.x - 1 - blockIdx.x);
  const int64_t at = (block * kSumThreads + threadIdx.x) * kVector;
  if (at >= count) return;
  const float factor = 2 * *upstream / static_cast<float>(count);
  float values[kVector];
  float wanted[kVector];
  load_floats(x + at, values);
  load_floats(target + at, wanted);
#pragma unroll
  for (int i = 0; i < kVector; ++i) values[i] = (values[i] - wanted[i]) * factor;
  Packed<X>::rounded(values).store(gradient + at);
}

template <Undone kWhat>
void launch_undo(const UndoActivation& work, CudaStream stream) {
  const int64_t columns = kLanes * kVector;
  const dim3 grid(static_cast<unsigned>((work.width + columns - 1) / columns),
                  static_cast<unsigned>(undo_partials(work.rows)));
  with_half_type(work.dtype, [&](auto value) {
    using T = decltype(value);
    undo_rows<T, kWhat><<<grid, dim3(kLanes, kGroups), 0, stream>>>(
        work.rows, work.width, static_cast<T*>(work.gradient), static_cast<const T*>(work.kept),
        work.partials);
    check_launch("undo_rows");
    if (work.partials == nullptr) return;
    const auto blocks = static_cast<unsigned>((work.width + kSumThreads - 1) / kSumThreads);
    add_partials<<<blocks, kSumThreads, 0, stream>>>(undo_partials(work.rows), work.width,
                                                     work.partials, static_cast<T*>(work.sums));
    check_launch("add_partials");
  });
}

template <class Run>
void with_types(const SquaredError& work, Run&& run) {
  with_half_type(work.dtype, [&](auto value) {
    using X = decltype(value);
    const auto* x = static_cast<const X*>(work.x);
    if (work.target_dtype == Dtype::kF32) {
      run(x, static_cast<const float*>(work.target));
    } else {
      run(x, static_cast<const X*>(work.target));
    }
  });
}

}  // namespace

int64_t undo_partials(int64_t rows) {
  return (rows + kRowsOfBlock - 1) / kRowsOfBlock;
}

void undo_activation(const UndoActivation& work, CudaStream stream) {
  switch (work.what) {
    case Undone::kNothing:
      return launch_undo<Undone::kNothing>(work, stream);
    case Undone::kRelu:
      return launch_undo<Undone::kRelu>(work, stream);
    case Undone::kGeluTanh:
      return launch_undo<Undone::kGeluTanh>(work, stream);
  }
}

int64_t squared_error_partials() {
  return static_cast<int64_t>(multiprocessors()) * kBlocksPerProcessor;
}

void squared_error_forward(const SquaredError& work, double* partials, float* loss,
                           CudaStream stream) {
  const int64_t blocks = squared_error_partials();
  with_types(work, [&](auto* x, auto* target) {
    sum_squares<<<static_cast<unsigned>(blocks), kSumThreads, 0, stream>>>(work.count, x, target,
                                                                           partials);
    check_launch("sum_squares");
  });
  mean_of_partials<<<1, kSumThreads, 0, stream>>>(blocks, partials, static_cast<double>(work.count),
                                                  loss);
  check_launch("mean_of_partials");
}

void squared_error_backward(const SquaredError& work, const float* upstream, void* gradient,
                            CudaStream stream) {
  const int64_t threads = (work.count + kVector - 1) / kVector;
  const auto blocks = static_cast<unsigned>((threads + kSumThreads - 1) / kSumThreads);
  with_types(work, [&](auto* x, auto* target) {
    using X = std::remove_cvref_t<decltype(*x)>;
    scale_differences<<<blocks, kSumThreads, 0, stream>>>(work.count, x, target, upstream,
                                                          static_cast<X*>(gradient));
    check_launch("scale_differences");
  });
}

}  // namespace lockstep::layers
