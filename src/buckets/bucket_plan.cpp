#include "buckets/bucket_plan.hpp"

#include <algorithm>
#include <map>
#include <utility>

namespace lockstep {

int64_t padded_count(int64_t count, Dtype dtype) {
  const int64_t unit = std::max<int64_t>(1, kGradientAlignment / dtype_bytes(dtype));
  return (count + unit - 1) / unit * unit;
}

std::vector<PlannedBucket> plan_buckets(std::span<const ParameterSize> parameters,
                                        std::span<const size_t> order, const BucketLimits& limits) {
  struct Open {
    PlannedBucket bucket;
    int64_t bytes = 0;  // of the gradients without gaps, as PyTorch counts them
    int64_t limit_bytes = 0;
  };
  std::map<std::pair<Dtype, int>, Open> open;
  std::vector<PlannedBucket> closed;
  std::vector<std::pair<size_t, PlannedBucket>> unfilled;  // by the last parameter's position
  std::map<std::pair<Dtype, int>, size_t> last_position;
  for (size_t position = 0; position < order.size(); ++position) {
    const ParameterSize& parameter = parameters[order[position]];
    const auto key = std::make_pair(parameter.dtype, parameter.device);
    const auto [entry, first] = open.try_emplace(key);
    Open& current = entry->second;
    if (first) current.limit_bytes = limits.first_bytes;
    current.bucket.dtype = parameter.dtype;
    current.bucket.device = parameter.device;
    current.bucket.gradients.push_back({order[position], current.bucket.count});
    current.bucket.count += padded_count(parameter.count, parameter.dtype);
    current.bytes += parameter.count * dtype_bytes(parameter.dtype);
    last_position[key] = position;
    if (current.bytes >= current.limit_bytes) {
      closed.push_back(std::move(current.bucket));
      current = {.bucket = {}, .bytes = 0, .limit_bytes = limits.cap_bytes};
    }
  }
  for (auto& [key, rest] : open) {
    if (!rest.bucket.gradients.empty()) {
      unfilled.emplace_back(last_position[key], std::move(rest.bucket));
    }
  }
  std::sort(unfilled.begin(), unfilled.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  for (auto& [position, bucket] : unfilled) closed.push_back(std::move(bucket));
  return closed;
}

}  // namespace lockstep
