#include "course/result_table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <string>

#include "lockstep/units.hpp"

namespace course {
namespace {

using lockstep::Align;
using lockstep::DeviceRecord;
using lockstep::RunRecord;
using lockstep::Table;

std::string device_label(const DeviceRecord& device) {
  if (device.shared_by <= 1) return fmt::format("{} ({})", device.name, device.physical);
  const char* shared = device.physical.ends_with("shared") ? "" : ", shared";
  return fmt::format("{} ({}{} by {})", device.name, device.physical, shared, device.shared_by);
}

// Rows of a batch that pass through a device: a pipeline's all pass through each of its.
int64_t rows_on(const RunRecord& record, size_t device) {
  if (record.pipeline) {
    const auto& rows = record.pipeline->rows;
    return std::accumulate(rows.begin(), rows.end(), int64_t{0});
  }
  return device < record.split.size() ? record.split[device] : 0;
}

std::string percent(double fraction) {
  return fmt::format("{:.0f} %", fraction * 100);
}

std::string step_note(const RunRecord& record) {
  const auto& step = record.step_ms;
  return fmt::format(
      "step time {:.3f} ms ± {:.3f} (median {:.3f}, {:.3f} to {:.3f}, {} steps after {} of "
      "warm-up), {:.0f} samples/s, {} in all",
      step.mean, step.stddev, step.median, step.min, step.max, step.n, record.warmup_steps,
      record.samples_per_s, lockstep::format_seconds(record.total_s));
}

// Time of a step that a rank spent on its own work. Ranks wait for each other in every step, so
// their step times are the same, and only this tells who made the others wait.
double own_ms(const RankReport& report) {
  return report.record.step_ms.mean - report.record.exposed_comm_ms;
}

std::string slowest_note(const std::vector<RankReport>& reports) {
  double sum_ms = 0;
  size_t slowest = 0;
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    sum_ms += own_ms(reports[rank]);
    if (own_ms(reports[rank]) > own_ms(reports[slowest])) slowest = rank;
  }
  const double mean_ms = sum_ms / static_cast<double>(reports.size());
  return fmt::format("slowest rank: {}, {:.3f} ms of its own work a step, {:.2f} times the mean",
                     slowest, own_ms(reports[slowest]),
                     mean_ms > 0 ? own_ms(reports[slowest]) / mean_ms : 1.0);
}

std::string overlap_note(const RunRecord& job) {
  const double hidden_ms = std::max(0.0, job.comm_ms - job.exposed_comm_ms);
  return fmt::format(
      "communication {:.3f} ms a step ({} in {:.3g} all-reduce{}): {:.3f} ms ({}) hidden behind "
      "backward, {:.3f} ms exposed",
      job.comm_ms, lockstep::format_bytes(job.all_reduces.bytes), job.all_reduces.count,
      job.all_reduces.count == 1 ? "" : "s", hidden_ms, percent(hidden_ms / job.comm_ms),
      job.exposed_comm_ms);
}

std::string accumulation_note(const RunRecord& job) {
  return fmt::format("{} micro-steps in each step: effective batch {}, {:.3f} ms a micro-step",
                     job.accum_steps, job.effective_batch,
                     job.step_ms.mean / static_cast<double>(job.accum_steps));
}

std::string precision_note(const RunRecord& job) {
  if (!job.scale) return fmt::format("matrix products in {}, without a scaler", job.amp);
  return fmt::format("matrix products in {}; scale {:g} at the end, {} step{} skipped", job.amp,
                     *job.scale, job.skipped_steps.size(),
                     job.skipped_steps.size() == 1 ? "" : "s");
}

std::string capture_note(const lockstep::CaptureRecord& capture) {
  if (!capture.captured) return fmt::format("the step was not captured: {}", capture.reason);
  return fmt::format("captured into {} CUDA graph{}, replayed in {} steps; they hold {}",
                     capture.graphs, capture.graphs == 1 ? "" : "s", capture.replays,
                     lockstep::format_bytes(capture.memory_bytes));
}

std::string memory_note(const lockstep::MemorySplit& memory) {
  return fmt::format(
      "peak memory of rank 0: weights {}, gradients {}, optimizer {}, low-precision copies {}, "
      "activations and the rest {}",
      lockstep::format_bytes(memory.weights), lockstep::format_bytes(memory.gradients),
      lockstep::format_bytes(memory.optimizer_state), lockstep::format_bytes(memory.low_precision),
      lockstep::format_bytes(memory.activations));
}

}  // namespace

Table device_table(const RunRecord& record) {
  Table table("Result", {{"device"},
                         {"rows", Align::kRight},
                         {"busy", Align::kRight},
                         {"peak memory", Align::kRight},
                         {"memory at rest", Align::kRight},
                         {"sent a step", Align::kRight},
                         {"received a step", Align::kRight}});
  for (size_t i = 0; i < record.devices.size(); ++i) {
    const auto& device = record.devices[i];
    table.add_row({device_label(device),
                   std::to_string(i < record.split.size() ? record.split[i] : 0),
                   percent(device.busy_fraction), lockstep::format_bytes(device.peak_bytes),
                   lockstep::format_bytes(device.final_bytes),
                   lockstep::format_bytes(device.sent_bytes_per_step),
                   lockstep::format_bytes(device.received_bytes_per_step)});
  }
  table.add_note(step_note(record));
  if (record.capture) table.add_note(capture_note(*record.capture));
  return table;
}

Table rank_table(const RunRecord& job, const std::vector<RankReport>& reports) {
  Table table("Result", {{"rank", Align::kRight},
                         {"device"},
                         {"rows", Align::kRight},
                         {"busy", Align::kRight},
                         {"communicating", Align::kRight},
                         {"peak memory", Align::kRight},
                         {"memory at rest", Align::kRight}});
  const std::string home = reports.front().record.host.at("name");
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    const RunRecord& record = reports[rank].record;
    const std::string& host = record.host.at("name");
    for (size_t i = 0; i < record.devices.size(); ++i) {
      const auto& device = record.devices[i];
      table.add_row(
          {std::to_string(rank), device_label(device) + (host == home ? "" : " of " + host),
           std::to_string(rows_on(record, i)), percent(device.busy_fraction),
           percent(record.step_ms.mean > 0 ? record.exposed_comm_ms / record.step_ms.mean : 0),
           lockstep::format_bytes(device.peak_bytes), lockstep::format_bytes(device.final_bytes)});
    }
  }
  table.add_note(step_note(job));
  if (job.capture) table.add_note(capture_note(*job.capture));
  if (job.accum_steps > 1) table.add_note(accumulation_note(job));
  if (job.amp != "off") table.add_note(precision_note(job));
  if (job.memory) table.add_note(memory_note(*job.memory));
  if (job.comm_ms > 0) table.add_note(overlap_note(job));
  if (reports.size() > 1 && !job.pipeline) table.add_note(slowest_note(reports));
  return table;
}

}  // namespace course
