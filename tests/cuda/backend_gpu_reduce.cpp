#include <array>
#include <cmath>
#include <random>

#include "backend_gpu_view.hpp"
#include "comm/gpu/gpu_reduce.hpp"
#include "kernels/reduce_kernels.hpp"
#include "ranks/backend_elements.hpp"
#include "ranks/backend_world.hpp"

// The reduction's kernel against the host's: the same bits, for every type, operation, number of
// ranks, size and alignment.

namespace lockstep::test {
namespace {

constexpr std::array kDtypes = {Dtype::kBool, Dtype::kU8,  Dtype::kI8,   Dtype::kI16, Dtype::kI32,
                                Dtype::kI64,  Dtype::kF16, Dtype::kBF16, Dtype::kF32, Dtype::kF64};
constexpr std::array kOps = {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kMax, ReduceOp::kMin};

bool floating(Dtype dtype) {
  return epsilon_of(dtype) > 0;
}

// Random bytes; floating-point numbers of very different sizes, now and then infinite or NaN.
void fill(std::mt19937& random, std::byte* data, int64_t count, Dtype dtype) {
  const Elements elements(data, count, dtype);
  const auto width = static_cast<size_t>(dtype_bytes(dtype));
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t bits = (static_cast<uint64_t>(random()) << 32) | random();
    if (!floating(dtype)) {
      std::memcpy(data + static_cast<size_t>(i) * width, &bits, width);
    } else if (bits % 61 == 0) {
      elements.set(i, dtype == Dtype::kF16 ? 65504.0 : std::nan(""));
    } else {
      const double mantissa = static_cast<double>(static_cast<int64_t>(bits >> 40) % 256 - 128);
      elements.set(i, std::ldexp(mantissa, static_cast<int>(bits % 13) - 10));
    }
  }
}

// The payload of a NaN may differ.
bool same(const Elements& a, const Elements& b) {
  const auto width = static_cast<size_t>(dtype_bytes(a.buffer().dtype));
  const auto* left = static_cast<const std::byte*>(a.buffer().data);
  const auto* right = static_cast<const std::byte*>(b.buffer().data);
  for (int64_t i = 0; i < a.count(); ++i) {
    const size_t at = static_cast<size_t>(i) * width;
    if (std::memcmp(left + at, right + at, width) == 0) continue;
    if (!floating(a.buffer().dtype) || !std::isnan(a.get(i)) || !std::isnan(b.get(i))) return false;
  }
  return true;
}

struct ReduceCase {
  int ranks;
  int64_t count;
  bool aligned_alike;
};

void expect_same_as_host(std::mt19937& random, Dtype dtype, ReduceOp op, const ReduceCase& that) {
  const GpuStream stream;
  const int64_t width = dtype_bytes(dtype);
  std::vector<std::vector<std::byte>> host;
  std::vector<std::unique_ptr<GpuMemory>> gpu;
  std::vector<const void*> host_inputs;
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  std::vector<double> factors;
  for (int rank = 0; rank < that.ranks; ++rank) {
    host.emplace_back(static_cast<size_t>(that.count * width));
    fill(random, host.back().data(), that.count, dtype);
    gpu.push_back(std::make_unique<GpuMemory>((that.count + 8) * width));
    std::byte* at = gpu.back()->data() + (that.aligned_alike ? 1 : rank % 3) * width;
    gpu_copy(at, host.back().data(), that.count * width, stream.get());
    inputs.push_back(at);
    outputs.push_back(at);
    factors.push_back(0.1 + rank);
  }
  for (const auto& one : host) host_inputs.push_back(one.data());
  std::vector<std::byte> expected(static_cast<size_t>(that.count * width));
  const std::array<void*, 1> to = {expected.data()};
  reduce(dtype, op, host_inputs, factors, to, that.count);
  gpu_reduce(dtype, op, inputs, factors, outputs, that.count, stream.get());
  std::vector<std::byte> result(expected.size());
  for (const void* output : outputs) {
    gpu_copy(result.data(), output, that.count * width, stream.get());
    while (!stream.idle()) {
    }
    EXPECT_TRUE(same({result.data(), that.count, dtype}, {expected.data(), that.count, dtype}))
        << dtype_name(dtype) << ", op " << static_cast<int>(op) << ", " << that.ranks << " ranks, "
        << that.count << " elements";
  }
}

TEST(GpuReduce, GivesTheHostsBits) {
  const std::string missing = suite_under_test().missing("ipc");
  if (!missing.empty()) GTEST_SKIP() << missing;
  run_ranks({"ipc", 1, Ranks::kThreads}, [](Rank&) {
    std::mt19937 random(7);
    for (const Dtype dtype : kDtypes) {
      for (const ReduceOp op : kOps) {
        if (!reduces(dtype, op)) continue;
        for (const ReduceCase& that :
             {ReduceCase{1, 67, true}, ReduceCase{2, 1, true}, ReduceCase{3, 4099, true},
              ReduceCase{5, 1027, false}, ReduceCase{17, 300, true}}) {
          expect_same_as_host(random, dtype, op, that);
        }
      }
    }
    expect_same_as_host(random, Dtype::kF32, ReduceOp::kSum, {2, 3'000'017, true});
    expect_same_as_host(random, Dtype::kBF16, ReduceOp::kMean, {4, 3'000'017, true});
  });
}

}  // namespace
}  // namespace lockstep::test
