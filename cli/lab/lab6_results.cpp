#include "cli/lab/lab6_results.hpp"

namespace lockstep::cli {

size_t Lab6Results::focus() const {
  size_t best = distributed.size() - 1;
  for (size_t i = 0; i < distributed.size(); ++i) {
    if (distributed[i].devices > 1 && sharing(distributed[i]) == 1) best = i;
  }
  return best;
}

Lab6Results collect_lab6(const Finished& finished) {
  Lab6Results results;
  for (const auto& [experiment, record] : finished) {
    if (experiment.role == Role::kSingle) {
      results.single.runs.push_back(record);
    } else {
      const bool ddp = experiment.role == Role::kDistributed;
      add_run(ddp ? results.distributed : results.data_parallel, experiment.devices, record);
    }
  }
  return results;
}

Imbalance imbalance_of(const RunSet& set_up) {
  const auto devices = merged_devices(set_up);
  Imbalance result{.least_busy = 1};
  for (const auto& device : devices) {
    result.least_busy = std::min(result.least_busy, device.busy_fraction);
    result.most_busy = std::max(result.most_busy, device.busy_fraction);
  }
  const int64_t first = devices.front().peak_bytes;
  const int64_t others = first - extra_on_first(devices, &DeviceRecord::peak_bytes);
  if (others > 0) result.memory = static_cast<double>(first) / static_cast<double>(others);
  return result;
}

}  // namespace lockstep::cli
