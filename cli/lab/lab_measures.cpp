#include "cli/lab/lab_measures.hpp"

#include <cmath>

namespace lockstep::cli {
namespace {

RunSet per_row(RunSet set_up) {
  for (auto& run : set_up.runs) {
    run.step_ms.mean /= static_cast<double>(std::max<int64_t>(1, run.effective_batch));
  }
  return set_up;
}

}  // namespace

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
  return set_up.runs.front().effective_batch;
}

double rows_per_s(const RunSet& set_up) {
  const double step_ms = pooled_step_ms(set_up).mean;
  return step_ms > 0 ? static_cast<double>(rows_of(set_up)) / step_ms * 1000 : 0;
}

double ms_per_row(const RunSet& set_up) {
  return pooled_step_ms(set_up).mean / static_cast<double>(std::max<int64_t>(1, rows_of(set_up)));
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
