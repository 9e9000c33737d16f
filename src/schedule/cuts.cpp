#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/counted.hpp"
#include "lockstep/error.hpp"
#include "lockstep/split.hpp"
#include "schedule/checks.hpp"

namespace lockstep {
namespace {

constexpr int64_t kMaxLayers = 4096;

void require_cut(int64_t layers, int64_t stages) {
  if (stages < 1 || stages > layers) {
    throw Error(
        Code::kSchedule,
        fmt::format("{} cannot be cut into {}", counted(layers, "layer"), counted(stages, "stage")),
        layers < 1    ? "a pipeline needs a layer for each stage"
        : layers == 1 ? "use 1 stage"
                      : fmt::format("use 1 to {} stages", layers));
  }
  if (stages > kMaxStages) {
    throw Error(Code::kSchedule, fmt::format("{} stages are too many", stages),
                fmt::format("use at most {} stages", kMaxStages));
  }
}

// sums[i] is the cost of the first i layers.
std::vector<double> running_sums(std::span<const double> cost) {
  std::vector<double> sums{0};
  for (size_t layer = 0; layer < cost.size(); ++layer) {
    if (!std::isfinite(cost[layer]) || cost[layer] < 0) {
      throw Error(Code::kSchedule, fmt::format("layer {} costs {}", layer, cost[layer]),
                  "costs must be 0 or more");
    }
    sums.push_back(sums.back() + cost[layer]);
  }
  return sums;
}

// The least that the costliest of `stages` stages can cost.
double least_peak(const std::vector<double>& sums, size_t stages) {
  // best[i] is that of the first i layers in `count` stages.
  std::vector<double> best = sums;
  for (size_t count = 2; count <= stages; ++count) {
    std::vector<double> next(sums.size());
    size_t cut = count - 1;
    for (size_t end = count; end < sums.size(); ++end) {
      // A later cut makes the stages before it cost more and the one after it less: the best cut is
      // where the two cross, and it only moves forward as `end` does.
      const auto peak = [&](size_t at) { return std::max(best[at], sums[end] - sums[at]); };
      while (cut + 1 < end && peak(cut + 1) <= peak(cut)) ++cut;
      next[end] = peak(cut);
    }
    best = std::move(next);
  }
  return best.back();
}

// needed[i] is the smallest number of stages of at most `peak` that hold the layers from i on.
std::vector<size_t> stages_needed(const std::vector<double>& sums, double peak) {
  const size_t layers = sums.size() - 1;
  std::vector<size_t> needed(sums.size(), 0);
  size_t end = layers;
  for (size_t begin = layers; begin-- > 0;) {
    while (sums[end] - sums[begin] > peak) --end;
    needed[begin] = needed[end] + 1;
  }
  return needed;
}

}  // namespace

std::vector<int64_t> cut_by_count(int64_t layers, int64_t stages) {
  require_cut(layers, stages);
  return tensor_split_rows(layers, stages);
}

std::vector<int64_t> cut_by_cost(std::span<const double> cost, int64_t stages) {
  require_cut(static_cast<int64_t>(cost.size()), stages);
  if (static_cast<int64_t>(cost.size()) > kMaxLayers) {
    throw Error(Code::kSchedule, fmt::format("{} layers are too many to cut by cost", cost.size()),
                fmt::format("cut by cost at most {} layers", kMaxLayers));
  }
  const std::vector<double> sums = running_sums(cost);
  const double peak = least_peak(sums, static_cast<size_t>(stages));
  const std::vector<size_t> needed = stages_needed(sums, peak);
  // Many cuts may have this peak. Each stage takes what is closest to an even share of the rest.
  std::vector<int64_t> sizes;
  size_t begin = 0;
  for (auto left = static_cast<size_t>(stages); left > 0; --left) {
    const double share = (sums.back() - sums[begin]) / static_cast<double>(left);
    const auto distance = [&](size_t end) { return std::abs(sums[end] - sums[begin] - share); };
    const size_t last = cost.size() - (left - 1);  // every later stage gets a layer
    size_t end = begin + 1;
    while (end < last && needed[end] > left - 1) ++end;
    while (end < last && sums[end + 1] - sums[begin] <= peak &&
           distance(end + 1) <= distance(end)) {
      ++end;
    }
    sizes.push_back(static_cast<int64_t>(end - begin));
    begin = end;
  }
  return sizes;
}

}  // namespace lockstep
