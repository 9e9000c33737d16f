#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "comm/gpu/gpu_reduce.hpp"
#include "comm/gpu/gpu_runtime.hpp"
#include "lockstep/error.hpp"

// The same rules as reduce_loops.hpp, element by element: the inputs in their order, F16 and BF16
// in F32 and rounded once, products never fused with sums.

namespace lockstep {
namespace {

constexpr int kThreads = 256;
constexpr int kPackBytes = 16;            // what a thread reads or writes at once if all is aligned
constexpr int64_t kMostBlocks = 132 * 8;  // fills today's largest GPUs

struct Ranks {
  const void* inputs[kMostGpuReduceRanks];
  void* outputs[kMostGpuReduceRanks];
  double factors[kMostGpuReduceRanks];
  int input_count;
  int output_count;
};

// An element type: what lies in memory, and what is accumulated.
template <class T>
struct Plain {
  using Element = T;
  using Accumulator = T;
  __device__ static T widen(T x) { return x; }
  __device__ static T narrow(T x) { return x; }
};

// Truth values: any byte but 0 is true.
struct Truth : Plain<uint8_t> {
  __device__ static uint8_t widen(uint8_t x) { return x != 0 ? 1 : 0; }
};

struct Float16 {
  using Element = __half;
  using Accumulator = float;
  __device__ static float widen(__half x) { return __half2float(x); }
  __device__ static __half narrow(float x) { return __float2half_rn(x); }
};

struct BFloat16 {
  using Element = __nv_bfloat16;
  using Accumulator = float;
  __device__ static float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
  __device__ static __nv_bfloat16 narrow(float x) { return __float2bfloat16_rn(x); }
};

template <class T>
__device__ T add(T a, T b) {
  if constexpr (std::is_same_v<T, float>) {
    return __fadd_rn(a, b);
  } else if constexpr (std::is_same_v<T, double>) {
    return __dadd_rn(a, b);
  } else {
    return static_cast<T>(a + b);
  }
}

template <class T>
__device__ T scale(T value, double factor) {
  if constexpr (std::is_same_v<T, float>) {
    return __fmul_rn(value, static_cast<float>(factor));
  } else {
    return __dmul_rn(value, factor);
  }
}

template <ReduceOp kOp, class T>
__device__ T combine(T acc, T x) {
  if constexpr (kOp == ReduceOp::kMax) {
    return x > acc || x != x ? x : acc;
  } else if constexpr (kOp == ReduceOp::kMin) {
    return x < acc || x != x ? x : acc;
  } else {
    return add(acc, x);
  }
}

template <class Format, ReduceOp kOp>
__device__ typename Format::Accumulator load(typename Format::Element element, double factor) {
  const auto value = Format::widen(element);
  if constexpr (kOp == ReduceOp::kMean) {
    return scale(value, factor);
  } else {
    return value;
  }
}

template <class Element, int kElements>
struct alignas(kElements * sizeof(Element)) Pack {
  Element elements[kElements];
};

// Reduces kElements that lie together, from `begin`.
template <class Format, ReduceOp kOp, int kElements>
__device__ void reduce_pack(const Ranks& ranks, int64_t begin) {
  using Element = typename Format::Element;
  using Elements = Pack<Element, kElements>;
  const auto read = [&](int rank) {
    return *reinterpret_cast<const Elements*>(static_cast<const Element*>(ranks.inputs[rank]) +
                                              begin);
  };
  typename Format::Accumulator acc[kElements];
  Elements elements = read(0);
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    acc[i] = load<Format, kOp>(elements.elements[i], ranks.factors[0]);
  }
#pragma unroll 4
  for (int rank = 1; rank < ranks.input_count; ++rank) {
    elements = read(rank);
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      acc[i] = combine<kOp>(acc[i], load<Format, kOp>(elements.elements[i], ranks.factors[rank]));
    }
  }
#pragma unroll
  for (int i = 0; i < kElements; ++i) elements.elements[i] = Format::narrow(acc[i]);
  for (int rank = 0; rank < ranks.output_count; ++rank) {
    *reinterpret_cast<Elements*>(static_cast<Element*>(ranks.outputs[rank]) + begin) = elements;
  }
}

// `head` elements, then `packs` aligned packs, then the rest.
template <class Format, ReduceOp kOp>
__global__ void __launch_bounds__(kThreads)
    reduce_kernel(const __grid_constant__ Ranks ranks, int64_t head, int64_t packs, int64_t count) {
  constexpr int kElements = kPackBytes / sizeof(typename Format::Element);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t pack = first; pack < packs; pack += stride) {
    reduce_pack<Format, kOp, kElements>(ranks, head + pack * kElements);
  }
  for (int64_t i = first; i < count - packs * kElements; i += stride) {
    reduce_pack<Format, kOp, 1>(ranks, i < head ? i : i + packs * kElements);
  }
}

// Elements before the first that is aligned on all ranks; `count` where there is none.
int64_t head_of(const Ranks& ranks, int64_t element_bytes, int64_t count) {
  const auto offset = [](const void* data) {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(data) % kPackBytes);
  };
  const int64_t misaligned = offset(ranks.inputs[0]);
  for (int i = 0; i < ranks.input_count; ++i) {
    if (offset(ranks.inputs[i]) != misaligned) return count;
  }
  for (int i = 0; i < ranks.output_count; ++i) {
    if (offset(ranks.outputs[i]) != misaligned) return count;
  }
  const int64_t missing_bytes = (kPackBytes - misaligned) % kPackBytes;
  return std::min(missing_bytes / element_bytes, count);
}

template <class Format, ReduceOp kOp>
void launch(const Ranks& ranks, int64_t count, CudaStream stream) {
  constexpr int64_t kElementBytes = sizeof(typename Format::Element);
  constexpr int64_t kElements = kPackBytes / kElementBytes;
  const int64_t head = head_of(ranks, kElementBytes, count);
  const int64_t packs = (count - head) / kElements;
  const int64_t work = std::max(packs, count - packs * kElements);
  const int64_t blocks = std::min((work + kThreads - 1) / kThreads, kMostBlocks);
  reduce_kernel<Format, kOp>
      <<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(ranks, head, packs, count);
  check_cuda(cudaGetLastError(), "the launch of a reduction");
}

template <class Format>
void launch_floating(ReduceOp op, const Ranks& ranks, int64_t count, CudaStream stream) {
  switch (op) {
    case ReduceOp::kSum:
      return launch<Format, ReduceOp::kSum>(ranks, count, stream);
    case ReduceOp::kMean:
      return launch<Format, ReduceOp::kMean>(ranks, count, stream);
    case ReduceOp::kMax:
      return launch<Format, ReduceOp::kMax>(ranks, count, stream);
    case ReduceOp::kMin:
      return launch<Format, ReduceOp::kMin>(ranks, count, stream);
  }
}

// Sums of signed integers are those of unsigned ones, where wrapping is defined.
template <class Signed, class Unsigned>
void launch_integer(ReduceOp op, const Ranks& ranks, int64_t count, CudaStream stream) {
  switch (op) {
    case ReduceOp::kSum:
      return launch<Plain<Unsigned>, ReduceOp::kSum>(ranks, count, stream);
    case ReduceOp::kMax:
      return launch<Plain<Signed>, ReduceOp::kMax>(ranks, count, stream);
    case ReduceOp::kMin:
      return launch<Plain<Signed>, ReduceOp::kMin>(ranks, count, stream);
    case ReduceOp::kMean:
      break;
  }
  throw Error(Code::kInternal, "a mean of integers reached the GPU");
}

void launch_truth(ReduceOp op, const Ranks& ranks, int64_t count, CudaStream stream) {
  if (op == ReduceOp::kMin) return launch<Truth, ReduceOp::kMin>(ranks, count, stream);
  launch<Truth, ReduceOp::kMax>(ranks, count, stream);
}

}  // namespace

void gpu_reduce(Dtype dtype, ReduceOp op, std::span<const void* const> inputs,
                std::span<const double> factors, std::span<void* const> outputs, int64_t count,
                CudaStream stream) {
  if (count == 0 || outputs.empty()) return;
  if (inputs.size() > kMostGpuReduceRanks || outputs.size() > kMostGpuReduceRanks) {
    throw Error(Code::kInternal, "more ranks than a reduction's kernel has parameters for");
  }
  Ranks ranks = {};
  std::copy(inputs.begin(), inputs.end(), ranks.inputs);
  std::copy(outputs.begin(), outputs.end(), ranks.outputs);
  std::copy(factors.begin(), factors.end(), ranks.factors);
  ranks.input_count = static_cast<int>(inputs.size());
  ranks.output_count = static_cast<int>(outputs.size());
  switch (dtype) {
    case Dtype::kBool:
      return launch_truth(op, ranks, count, stream);
    case Dtype::kU8:
      return launch_integer<uint8_t, uint8_t>(op, ranks, count, stream);
    case Dtype::kI8:
      return launch_integer<int8_t, uint8_t>(op, ranks, count, stream);
    case Dtype::kI16:
      return launch_integer<int16_t, uint16_t>(op, ranks, count, stream);
    case Dtype::kI32:
      return launch_integer<int32_t, uint32_t>(op, ranks, count, stream);
    case Dtype::kI64:
      return launch_integer<int64_t, uint64_t>(op, ranks, count, stream);
    case Dtype::kF16:
      return launch_floating<Float16>(op, ranks, count, stream);
    case Dtype::kBF16:
      return launch_floating<BFloat16>(op, ranks, count, stream);
    case Dtype::kF32:
      return launch_floating<Plain<float>>(op, ranks, count, stream);
    case Dtype::kF64:
      return launch_floating<Plain<double>>(op, ranks, count, stream);
  }
}

}  // namespace lockstep
