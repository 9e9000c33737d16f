#include "cli/lab/lab_measures.hpp"

#include <cmath>

namespace lockstep::cli {
namespace {

constexpr double kNoisy = 0.10;      // of speed-ups
constexpr double kVeryNoisy = 0.25;  // of step times, even if speed-ups agree

Stats run_means(const RunSet& set_up) {
  std::vector<double> means;
  for (const auto& run : set_up.runs) means.push_back(run.step_ms.mean);
  return summarize(means);
}

double relative_deviation(const Stats& stats) {
  return stats.mean > 0 ? stats.stddev / stats.mean : 0;
}

RunSet per_row(RunSet set_up) {
  for (auto& run : set_up.runs) {
    run.step_ms.mean /= static_cast<double>(std::max<int64_t>(1, run.effective_batch));
  }
  return set_up;
}

}  // namespace

Disturbance disturbance_of(const LabRuns& runs, const std::vector<std::string>& timed) {
  Disturbance found{.busy_cores = runs.others_busy_cores};
  for (const auto& what : timed) {
    for (const auto& set_up : runs.all(what)) {
      for (const auto& device : merged_devices(set_up)) {
        if (!device.queued_fraction || device.shared_by > 1 || device.threads > 1) continue;
        found.queued = std::max(found.queued.value_or(0), *device.queued_fraction);
      }
    }
  }
  return found;
}

Stats pooled_step_ms(const RunSet& set_up) {
  Stats pooled;
  for (const auto& run : set_up.runs) {
    const Stats& step = run.step_ms;
    pooled.min = pooled.n == 0 ? step.min : std::min(pooled.min, step.min);
    pooled.max = pooled.n == 0 ? step.max : std::max(pooled.max, step.max);
    pooled.mean += step.mean * static_cast<double>(step.n);
    pooled.n += step.n;
  }
  if (pooled.n == 0) return pooled;
  pooled.mean /= static_cast<double>(pooled.n);
  double squares = 0;  // within each run, and of each run's mean around the common one
  for (const auto& run : set_up.runs) {
    const auto n = static_cast<double>(run.step_ms.n);
    const double apart = run.step_ms.mean - pooled.mean;
    squares += std::max(0.0, n - 1) * run.step_ms.stddev * run.step_ms.stddev + n * apart * apart;
  }
  if (pooled.n > 1) pooled.stddev = std::sqrt(squares / static_cast<double>(pooled.n - 1));
  return pooled;
}

double mean_total_s(const RunSet& set_up) {
  std::vector<double> totals;
  for (const auto& run : set_up.runs) totals.push_back(run.total_s);
  return summarize(totals).mean;
}

std::vector<DeviceRecord> merged_devices(const RunSet& set_up) {
  if (set_up.runs.empty()) return {};
  std::vector<DeviceRecord> merged = set_up.runs.front().devices;
  for (size_t index = 0; index < merged.size(); ++index) {
    DeviceRecord& device = merged[index];
    std::vector<double> busy;
    std::vector<double> queued;
    for (const auto& run : set_up.runs) {
      if (index >= run.devices.size()) continue;
      const DeviceRecord& one = run.devices[index];
      busy.push_back(one.busy_fraction);
      if (one.queued_fraction) queued.push_back(*one.queued_fraction);
      device.peak_bytes = std::max(device.peak_bytes, one.peak_bytes);
      device.final_bytes = std::max(device.final_bytes, one.final_bytes);
    }
    device.busy_fraction = summarize(busy).mean;
    if (!queued.empty()) device.queued_fraction = summarize(queued).mean;
  }
  return merged;
}

Communication communication_of(const RunSet& set_up) {
  Communication sum;
  for (const auto& run : set_up.runs) {
    const auto share = static_cast<double>(set_up.runs.size());
    sum.total_ms += run.comm_ms / share;
    sum.exposed_ms += run.exposed_comm_ms / share;
  }
  sum.hidden_ms = std::max(0.0, sum.total_ms - sum.exposed_ms);
  return sum;
}

double exposed_share(const RunSet& set_up) {
  const double step_ms = pooled_step_ms(set_up).mean;
  return step_ms > 0 ? communication_of(set_up).exposed_ms / step_ms : 0;
}

int sharing(const RunSet& set_up) {
  int most = 1;
  for (const auto& device : merged_devices(set_up)) most = std::max(most, device.shared_by);
  return most;
}

bool on_cores(const RunSet& set_up) {
  return set_up.first().devices.front().on_cpu();
}

bool all_equal(const std::vector<int64_t>& rows) {
  return std::adjacent_find(rows.begin(), rows.end(), std::not_equal_to<>()) == rows.end();
}

int64_t extra_on_first(const std::vector<DeviceRecord>& devices, int64_t DeviceRecord::*bytes) {
  if (devices.size() < 2) return 0;
  int64_t others = 0;
  for (size_t i = 1; i < devices.size(); ++i) others += devices[i].*bytes;
  return devices[0].*bytes - others / static_cast<int64_t>(devices.size() - 1);
}

int64_t others_mean(const std::vector<DeviceRecord>& devices, int64_t DeviceRecord::*bytes) {
  return devices[0].*bytes - extra_on_first(devices, bytes);
}

int64_t traffic(const DeviceRecord& device) {
  return device.sent_bytes_per_step + device.received_bytes_per_step;
}

Imbalance imbalance_of(const std::vector<DeviceRecord>& devices) {
  Imbalance result{.least_busy = devices.front().busy_fraction};
  for (const auto& device : devices) {
    result.least_busy = std::min(result.least_busy, device.busy_fraction);
    result.most_busy = std::max(result.most_busy, device.busy_fraction);
  }
  const int64_t others = others_mean(devices, &DeviceRecord::peak_bytes);
  if (others > 0) {
    result.memory = static_cast<double>(devices[0].peak_bytes) / static_cast<double>(others);
  }
  return result;
}

int64_t peak_of(const RunSet& set_up) {
  int64_t peak = 0;
  for (const auto& device : merged_devices(set_up)) peak = std::max(peak, device.peak_bytes);
  return peak;
}

std::optional<MemorySplit> memory_of(const RunSet& set_up) {
  for (const auto& run : set_up.runs) {
    if (run.memory) return run.memory;
  }
  return std::nullopt;
}

std::optional<GradientCheck> gradients_of(const RunSet& set_up) {
  for (const auto& run : set_up.runs) {
    if (run.gradient_check) return run.gradient_check;
  }
  return std::nullopt;
}

int64_t rows_of(const RunSet& set_up) {
  return set_up.first().effective_batch;
}

double rows_per_s(const RunSet& set_up) {
  const double step_ms = pooled_step_ms(set_up).mean;
  return step_ms > 0 ? static_cast<double>(rows_of(set_up)) / step_ms * 1000 : 0;
}

double ms_per_row(const RunSet& set_up) {
  return pooled_step_ms(set_up).mean / static_cast<double>(std::max<int64_t>(1, rows_of(set_up)));
}

Comparison compare(const RunSet& base, const RunSet& other) {
  std::vector<double> speedups;
  for (size_t i = 0; i < std::min(base.runs.size(), other.runs.size()); ++i) {
    const double own = other.runs[i].step_ms.mean;
    if (own > 0) speedups.push_back(base.runs[i].step_ms.mean / own);
  }
  Comparison comparison;
  comparison.speedup = summarize(speedups);
  comparison.efficiency = comparison.speedup.mean / other.devices;
  comparison.noise =
      std::max(relative_deviation(run_means(base)), relative_deviation(run_means(other)));
  const bool undecided = comparison.speedup.min < 1 && comparison.speedup.max > 1 &&
                         comparison.speedup.max - comparison.speedup.min > kNoisy;
  comparison.unsafe =
      relative_deviation(comparison.speedup) > kNoisy || comparison.noise > kVeryNoisy || undecided;
  return comparison;
}

Comparison compare_per_row(const RunSet& base, const RunSet& other) {
  return compare(per_row(base), per_row(other));
}

std::optional<double> norm_ratio(const RunSet& base, const RunSet& other) {
  const auto of_base = gradients_of(base);
  const auto of_other = gradients_of(other);
  if (!of_base || !of_other || !(of_base->norm > 0) || !std::isfinite(of_other->norm)) return {};
  return of_other->norm / of_base->norm;
}

std::optional<double> loss_deviation(const RunRecord& reference, const RunRecord& run) {
  const size_t steps = reference.losses.size();
  if (steps == 0 || steps != run.losses.size()) return std::nullopt;
  double largest = 0;
  for (size_t i = 0; i < steps; ++i) {
    const double apart = std::abs(run.losses[i] - reference.losses[i]);
    if (!std::isfinite(apart)) return std::nullopt;
    largest = std::max(largest, apart / std::max(std::abs(reference.losses[i]), 1e-12));
  }
  return largest;
}

double relative_change(int64_t before, int64_t bytes) {
  return before > 0 ? static_cast<double>(bytes) / static_cast<double>(before) - 1 : 0;
}

}  // namespace lockstep::cli
