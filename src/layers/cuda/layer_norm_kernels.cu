#include "layers/layer_kernels.hpp"

#include <algorithm>
#include <type_traits>

#include "layers/cuda/vectors.cuh"

// A group of threads holds one row in registers: a warp up to a width of 1024, 128 threads up to
// 4096, a block up to 8192. So each value is read once.

namespace lockstep::layers {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 2;  // of backward, whose registers do not allow more

__device__ float warp_sum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffU, value, offset);
  }
  return value;
}

// Returns the sums of a and b over the threads of a group, to each of them. All threads of the
// block must call it.
template <int kGroup>
__device__ float2 group_sums(float a, float b) {
  a = warp_sum(a);
  b = warp_sum(b);
  if constexpr (kGroup > 32) {
    __shared__ float2 of_warps[kThreads / 32];
    const int warp = threadIdx.x / 32;
    __syncthreads();  // the sums before these have been read
    if (threadIdx.x % 32 == 0) of_warps[warp] = make_float2(a, b);
    __syncthreads();
    const int first = warp / (kGroup / 32) * (kGroup / 32);
    a = 0;
    b = 0;
#pragma unroll
    for (int i = 0; i < kGroup / 32; ++i) {
      a += of_warps[first + i].x;
      b += of_warps[first + i].y;
    }
  }
  return make_float2(a, b);
}

template <class T, class W, int kGroup, int kVectors>
__global__ __launch_bounds__(kThreads) void forward_kernel(NormForward work) {
  const int64_t row = int64_t{blockIdx.x} * (kThreads / kGroup) + threadIdx.x / kGroup;
  const int lane = threadIdx.x % kGroup;
  const int vectors = static_cast<int>(work.width / kVector);
  const bool active = row < work.rows;
  const int64_t begin = active ? row * work.width : 0;
  const auto* x = static_cast<const T*>(work.x) + begin;
  const auto* branch = static_cast<const T*>(work.branch);
  const auto holds = [&](int v) { return active && lane + v * kGroup < vectors; };

  Packed<T> held[kVectors];
  float total = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    held[v] = Packed<T>::zeros();
    if (!holds(v)) continue;
    const int64_t at = int64_t{lane + v * kGroup} * kVector;
    held[v] = Packed<T>::load(x + at);
    float values[kVector];
    held[v].to_floats(values);
    if (branch) {
      float more[kVector];
      load_floats(branch + begin + at, more);
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[i] += more[i];
      held[v] = Packed<T>::rounded(values);
      held[v].store(static_cast<T*>(work.sum) + begin + at);
      held[v].to_floats(values);  // the norm is that of the rounded sum, as backward will see it
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) total += values[i];
  }
  const float mean = group_sums<kGroup>(total, 0).x / static_cast<float>(work.width);

  float squares = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!holds(v)) continue;
    float values[kVector];
    held[v].to_floats(values);
#pragma unroll
    for (int i = 0; i < kVector; ++i) squares += (values[i] - mean) * (values[i] - mean);
  }
  const float variance = group_sums<kGroup>(squares, 0).x / static_cast<float>(work.width);
  const float rstd = rsqrtf(variance + work.eps);
  if (active && lane == 0) {
    work.mean[row] = mean;
    work.rstd[row] = rstd;
  }

#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!holds(v)) continue;
    const int64_t at = int64_t{lane + v * kGroup} * kVector;
    float values[kVector];
    float weight[kVector];
    float bias[kVector];
    held[v].to_floats(values);
    load_floats(static_cast<const W*>(work.weight) + at, weight);
    load_floats(static_cast<const W*>(work.bias) + at, bias);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      values[i] = (values[i] - mean) * rstd * weight[i] + bias[i];
    }
    Packed<T>::rounded(values).store(static_cast<T*>(work.normed) + begin + at);
  }
}

// Adds up what the groups of a block found for each column, one group after the other, and writes
// it as the block's row of `partials`. `shared` holds one float for each column and group.
template <int kGroup, int kVectors>
__device__ void write_partials(const float (&found)[kVectors][kVector], float* shared, int width,
                               float* partials) {
  constexpr int kGroups = kThreads / kGroup;
  const int group = threadIdx.x / kGroup;
  const int lane = threadIdx.x % kGroup;
  __syncthreads();  // what was in `shared` has been read
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int at = (lane + v * kGroup) * kVector;
    if (at >= width) continue;
#pragma unroll
    for (int i = 0; i < kVector; ++i) shared[group * width + at + i] = found[v][i];
  }
  __syncthreads();
  for (int column = threadIdx.x; column < width; column += kThreads) {
    float total = 0;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) total += shared[g * width + column];
    partials[column] = total;
  }
}

template <class T, class W, int kGroup, int kVectors>
__global__ __launch_bounds__(kThreads,
                             kBlocksPerMultiprocessor) void backward_kernel(NormBackward work) {
  constexpr int kGroups = kThreads / kGroup;
  extern __shared__ float shared[];
  const int group = threadIdx.x / kGroup;
  const int lane = threadIdx.x % kGroup;
  const int vectors = static_cast<int>(work.width / kVector);
  const float one_over_width = 1 / static_cast<float>(work.width);
  const auto* sum = static_cast<const T*>(work.sum);
  const auto* normed_gradient = static_cast<const T*>(work.normed_gradient);
  const auto* sum_gradient = static_cast<const T*>(work.sum_gradient);
  const auto* weight = static_cast<const W*>(work.weight);

  float weight_found[kVectors][kVector] = {};
  float bias_found[kVectors][kVector] = {};
  for (int64_t first = int64_t{blockIdx.x} * kGroups; first < work.rows;
       first += int64_t{gridDim.x} * kGroups) {
    const int64_t row = first + group;
    const bool active = row < work.rows;
    const int64_t begin = active ? row * work.width : 0;
    const float mean = active ? work.mean[row] : 0;
    const float rstd = active ? work.rstd[row] : 0;
    const auto holds = [&](int v) { return active && lane + v * kGroup < vectors; };

    Packed<T> sums[kVectors];
    Packed<T> gradients[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!holds(v)) continue;
      const int64_t at = begin + int64_t{lane + v * kGroup} * kVector;
      sums[v] = Packed<T>::load(sum + at);
      gradients[v] = Packed<T>::load(normed_gradient + at);
    }
    float a = 0;  // of weight · gradient
    float b = 0;  // of weight · gradient · normed x
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!holds(v)) continue;
      float x[kVector];
      float dy[kVector];
      float w[kVector];
      sums[v].to_floats(x);
      gradients[v].to_floats(dy);
      load_floats(weight + (lane + v * kGroup) * kVector, w);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float normed = (x[i] - mean) * rstd;
        a += w[i] * dy[i];
        b += w[i] * dy[i] * normed;
        weight_found[v][i] += dy[i] * normed;
        bias_found[v][i] += dy[i];
      }
    }
    const float2 totals = group_sums<kGroup>(a, b);
    a = totals.x * one_over_width;
    b = totals.y * one_over_width;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!holds(v)) continue;
      const int64_t at = begin + int64_t{lane + v * kGroup} * kVector;
      float x[kVector];
      float dy[kVector];
      float w[kVector];
      float dx[kVector] = {};
      sums[v].to_floats(x);
      gradients[v].to_floats(dy);
      load_floats(weight + (lane + v * kGroup) * kVector, w);
      if (sum_gradient) load_floats(sum_gradient + at, dx);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float normed = (x[i] - mean) * rstd;
        dx[i] += rstd * (w[i] * dy[i] - a - normed * b);
      }
      Packed<T>::rounded(dx).store(static_cast<T*>(work.x_gradient) + at);
    }
  }
  if (!work.partials) return;
  const int width = static_cast<int>(work.width);
  float* own = work.partials + int64_t{blockIdx.x} * width;
  write_partials<kGroup, kVectors>(weight_found, shared, width, own);
  write_partials<kGroup, kVectors>(bias_found, shared, width, own + int64_t{gridDim.x} * width);
}

// Sums the columns of partials, [2, count, width]: blockIdx.y 0 gives the weight's gradient, 1 the
// bias's. A block has 32 columns, with eight threads for each.
template <class W>
__global__ __launch_bounds__(kThreads) void sum_partials_kernel(const float* partials, int count,
                                                                int width, W* weight_gradient,
                                                                W* bias_gradient) {
  __shared__ float shared[kThreads / 32][32];
  const int lane = threadIdx.x % 32;
  const int part = threadIdx.x / 32;
  const int column = blockIdx.x * 32 + lane;
  const float* from = partials + int64_t{blockIdx.y} * count * width;
  float total = 0;
  if (column < width) {
    for (int i = part; i < count; i += kThreads / 32) total += from[int64_t{i} * width + column];
  }
  shared[part][lane] = total;
  __syncthreads();
  if (part != 0 || column >= width) return;
  total = 0;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) total += shared[i][lane];
  (blockIdx.y == 0 ? weight_gradient : bias_gradient)[column] = static_cast<W>(total);
}

int group_of(int64_t width) {
  return width <= 1024 ? 32 : width <= 4096 ? 128 : 256;
}

template <int kValue>
using Constant = std::integral_constant<int, kValue>;

// Calls run with {threads of a group, vectors of a thread} as constants.
template <class Run>
void with_shape(int64_t width, Run&& run) {
  const int64_t vectors = (width / kVector + 31) / 32;  // a lane, where a warp holds the row
  if (width > 4096) {
    run(Constant<256>(), Constant<4>());
  } else if (width > 1024) {
    run(Constant<128>(), Constant<4>());
  } else if (vectors == 4) {
    run(Constant<32>(), Constant<4>());
  } else if (vectors == 3) {
    run(Constant<32>(), Constant<3>());
  } else if (vectors == 2) {
    run(Constant<32>(), Constant<2>());
  } else {
    run(Constant<32>(), Constant<1>());
  }
}

// Calls run with a value of the rows' type and one of the weights' type.
template <class Run>
void with_types(Dtype dtype, Dtype weight_dtype, Run&& run) {
  with_half_type(dtype, [&](auto value) {
    if (weight_dtype == Dtype::kF32) {
      run(value, float());
    } else {
      run(value, value);
    }
  });
}

}  // namespace

void layer_norm_forward(const NormForward& work, CudaStream stream) {
  with_types(work.dtype, work.weight_dtype, [&](auto value, auto weight) {
    with_shape(work.width, [&](auto group, auto vectors) {
      constexpr int kGroup = decltype(group)::value;
      constexpr int kRows = kThreads / kGroup;
      const auto blocks = static_cast<unsigned>((work.rows + kRows - 1) / kRows);
      forward_kernel<decltype(value), decltype(weight), kGroup, decltype(vectors)::value>
          <<<blocks, kThreads, 0, stream>>>(work);
    });
  });
  check_launch("layer_norm_forward");
}

int64_t layer_norm_partials(int64_t rows, int64_t width) {
  const int64_t groups = kThreads / group_of(width);
  return std::min<int64_t>((rows + groups - 1) / groups,
                           int64_t{multiprocessors()} * kBlocksPerMultiprocessor);
}

void layer_norm_backward(const NormBackward& work, CudaStream stream) {
  const auto blocks = static_cast<unsigned>(layer_norm_partials(work.rows, work.width));
  with_types(work.dtype, work.weight_dtype, [&](auto value, auto weight) {
    using W = decltype(weight);
    with_shape(work.width, [&](auto group, auto vectors) {
      constexpr int kGroup = decltype(group)::value;
      const size_t shared_bytes =
          work.partials ? sizeof(float) * (kThreads / kGroup) * static_cast<size_t>(work.width) : 0;
      backward_kernel<decltype(value), W, kGroup, decltype(vectors)::value>
          <<<blocks, kThreads, shared_bytes, stream>>>(work);
    });
    check_launch("layer_norm_backward");
    if (!work.partials) return;
    const dim3 grid(static_cast<unsigned>((work.width + 31) / 32), 2);
    sum_partials_kernel<W><<<grid, kThreads, 0, stream>>>(
        work.partials, static_cast<int>(blocks), static_cast<int>(work.width),
        static_cast<W*>(work.weight_gradient), static_cast<W*>(work.bias_gradient));
    check_launch("sum_partials");
  });
}

}  // namespace lockstep::layers
