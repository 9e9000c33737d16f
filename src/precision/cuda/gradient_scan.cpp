#include "precision/gradient_scan.hpp"

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "device/dtype_map.hpp"
#include "precision/scaler_kernels.hpp"

namespace lockstep {
namespace {

// Dense, in a dtype that the kernel reads.
torch::Tensor readable(const torch::Tensor& gradient) {
  switch (gradient.scalar_type()) {
    case torch::kHalf:
    case torch::kBFloat16:
    case torch::kFloat:
    case torch::kDouble:
      return gradient.is_non_overlapping_and_dense() ? gradient : gradient.detach().contiguous();
    default:
      return gradient.detach().to(torch::kFloat).contiguous();
  }
}

}  // namespace

GpuScan GpuScan::to(torch::Device device) const {
  const auto moved = [&](const torch::Tensor& scalar) {
    return scalar.to(device, /*non_blocking=*/true);
  };
  return {moved(found_inf), moved(first), moved(sum_of_squares)};
}

GpuScan scan_on_gpu(std::span<const torch::Tensor> gradients, std::span<const int32_t> ids,
                    bool squares) {
  const torch::Device device = gradients[0].device();
  const c10::cuda::CUDAGuard guard(device);
  std::vector<torch::Tensor> read;  // keeps copies alive until the kernel is queued
  std::vector<GpuScanItem> items;
  for (size_t i = 0; i < gradients.size(); ++i) {
    read.push_back(readable(gradients[i]));
    items.push_back({read.back().data_ptr(), read.back().numel(),
                     *dtype_of(read.back().scalar_type()), ids[i]});
  }
  const auto options = torch::device(device).dtype(torch::kDouble);
  static_assert(sizeof(GpuScanResult) == 4 * sizeof(double));
  const auto result = torch::empty({4}, options);
  const auto partials =
      squares ? torch::empty({gpu_scan_partials(items)}, options) : torch::Tensor();
  gpu_scan(items, static_cast<GpuScanResult*>(result.data_ptr()),
           squares ? static_cast<double*>(partials.data_ptr()) : nullptr,
           c10::cuda::getCurrentCUDAStream().stream());
  constexpr int64_t kFoundInf = offsetof(GpuScanResult, found_inf) / sizeof(float);
  constexpr int64_t kFirst = offsetof(GpuScanResult, first) / sizeof(int32_t);
  return {result.view(torch::kFloat).select(0, kFoundInf),
          result.view(torch::kInt).select(0, kFirst), result.select(0, 0)};
}

void settle_on_gpu(const torch::Tensor& scale, const std::vector<GpuScan>& scans,
                   const GpuSettleRules& rules, SkipRing* ring) {
  const c10::cuda::CUDAGuard guard(scale.device());
  std::vector<GpuScan> here;
  std::vector<GpuSettleFinding> findings;
  for (const GpuScan& scan : scans) {
    here.push_back(scan.to(scale.device()));
    findings.push_back(
        {here.back().found_inf.data_ptr<float>(), here.back().first.data_ptr<int32_t>()});
  }
  gpu_settle(static_cast<GpuScale*>(scale.data_ptr()), findings, rules, ring,
             c10::cuda::getCurrentCUDAStream().stream());
}

}  // namespace lockstep
