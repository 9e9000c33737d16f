#include "precision/gradient_scan.hpp"

#include <algorithm>
#include <vector>

#include "device/parallel_ranges.hpp"
#include "kernels/scan_kernels.hpp"

namespace lockstep {
namespace {

constexpr int64_t kBlocksPerThread = 16;  // fewer are not worth waking another thread

struct ScanPart {
  int64_t gradient;  // index
  torch::ScalarType dtype;
  void* data;
  int64_t count;

  BlockScan scan() const {
    return dtype == torch::kDouble ? scan_block(static_cast<const double*>(data), count)
                                   : scan_block(static_cast<const float*>(data), count);
  }
  bool unscale(float inverse_scale) const {
    return dtype == torch::kDouble ? unscale_block(static_cast<double*>(data), count, inverse_scale)
                                   : unscale_block(static_cast<float*>(data), count, inverse_scale);
  }
};

// Whether its elements can be read and written in memory order.
bool flat(const torch::Tensor& gradient) {
  return (gradient.scalar_type() == torch::kFloat || gradient.scalar_type() == torch::kDouble) &&
         gradient.is_non_overlapping_and_dense();
}

torch::Tensor flattened(const torch::Tensor& gradient) {
  const bool is_double = gradient.scalar_type() == torch::kDouble;
  return gradient.detach().to(is_double ? torch::kDouble : torch::kFloat).contiguous();
}

void append_blocks(std::vector<ScanPart>& blocks, const torch::Tensor& gradient, int64_t index) {
  auto* bytes = static_cast<char*>(gradient.data_ptr());
  const auto element_bytes = static_cast<int64_t>(gradient.element_size());
  for (int64_t begin = 0; begin < gradient.numel(); begin += kScanBlock) {
    blocks.push_back({index, gradient.scalar_type(), bytes + begin * element_bytes,
                      std::min(kScanBlock, gradient.numel() - begin)});
  }
}

template <class Work>
void for_each_block(const std::vector<ScanPart>& blocks, const Work& work) {
  parallel_ranges(static_cast<int64_t>(blocks.size()), kBlocksPerThread,
                  [&](int64_t begin, int64_t end) {
                    for (int64_t i = begin; i < end; ++i) work(static_cast<size_t>(i));
                  });
}

}  // namespace

GradientScan scan_gradients(std::span<const torch::Tensor> gradients) {
  std::vector<torch::Tensor> converted;  // copies of those that are not flat
  std::vector<ScanPart> blocks;
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined()) continue;
    if (flat(gradients[i])) {
      append_blocks(blocks, gradients[i], static_cast<int64_t>(i));
    } else {
      converted.push_back(flattened(gradients[i]));
      append_blocks(blocks, converted.back(), static_cast<int64_t>(i));
    }
  }
  std::vector<BlockScan> found(blocks.size());
  for_each_block(blocks, [&](size_t i) { found[i] = blocks[i].scan(); });
  GradientScan scan;
  for (size_t i = 0; i < found.size(); ++i) {
    scan.sum_of_squares += found[i].sum_of_squares;
    if (!found[i].finite && scan.first_nonfinite < 0) scan.first_nonfinite = blocks[i].gradient;
  }
  return scan;
}

int64_t unscale_gradients(std::span<const torch::Tensor> gradients, float inverse_scale) {
  std::vector<ScanPart> blocks;
  std::vector<torch::Tensor> elsewhere(gradients.size());  // [gradient], defined if not flat
  bool any_elsewhere = false;
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined()) continue;
    if (flat(gradients[i])) {
      append_blocks(blocks, gradients[i], static_cast<int64_t>(i));
    } else {
      elsewhere[i] = gradients[i];
      any_elsewhere = true;
    }
  }
  std::vector<char> finite(blocks.size());
  for_each_block(blocks, [&](size_t i) { finite[i] = blocks[i].unscale(inverse_scale) ? 1 : 0; });
  int64_t first = any_elsewhere ? scan_gradients(elsewhere).first_nonfinite : -1;
  for (size_t i = 0; i < finite.size(); ++i) {
    if (finite[i] != 0) continue;
    if (first < 0 || blocks[i].gradient < first) first = blocks[i].gradient;
    break;
  }
  const torch::NoGradGuard no_grad;
  for (const auto& gradient : elsewhere) {
    if (gradient.defined()) gradient.mul_(inverse_scale);
  }
  return first;
}

}  // namespace lockstep
