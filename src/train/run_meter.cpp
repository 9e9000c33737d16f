#include "lockstep/run_meter.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>

#include "lockstep/clock.hpp"

namespace lockstep {

RunMeter::RunMeter(const std::string& program, const Devices& devices, int64_t steps)
    : devices_(devices),
      warmup_steps_(std::min<int64_t>(5, steps / 4)),
      started_ns_(monotonic_ns()),
      ended_ns_(started_ns_),
      at_begin_(devices.size()),
      timed_(devices.size()) {
  // A run must not fail because nobody can watch it: without shared memory there is no board.
  try {
    remove_stale_boards();
    const std::string run = fmt::format("{}-{}", program, ::getpid());
    board_ = Board::create(Board::default_path(run), 1, run);
    page_ = board_->page(0);
  } catch (const Error&) {
    return;
  }
  page_->start(program);
  for (size_t i = 0; i < devices.size(); ++i) {
    page_->set_device(static_cast<int>(i), {.name = devices[i].name(),
                                            .physical = devices[i].plan().physical(),
                                            .capacity_bytes = devices[i].capacity_bytes()});
  }
  page_->set_phase(Phase::kTraining);
}

RunMeter::~RunMeter() {
  if (page_) page_->set_phase(Phase::kFinished);
}

RunMeter::Reading RunMeter::read(const Device& device) const {
  return {device.busy_seconds(), device.traffic()};
}

void RunMeter::begin_step() {
  devices_.synchronize();
  if (static_cast<int64_t>(losses_.size()) == warmup_steps_) {
    for (size_t i = 0; i < devices_.size(); ++i) devices_[i].reset_peak_memory();
  }
  for (size_t i = 0; i < devices_.size(); ++i) at_begin_[i] = read(devices_[i]);
  step_started_ns_ = monotonic_ns();
}

void RunMeter::end_step(const torch::Tensor& loss) {
  devices_.synchronize();
  ended_ns_ = monotonic_ns();
  last_step_ms_ = static_cast<double>(ended_ns_ - step_started_ns_) * 1e-6;
  if (!warming_up()) {
    step_ms_.push_back(last_step_ms_);
    for (size_t i = 0; i < devices_.size(); ++i) {
      const Reading now = read(devices_[i]);
      timed_[i].busy_seconds += now.busy_seconds - at_begin_[i].busy_seconds;
      timed_[i].traffic.sent_bytes += now.traffic.sent_bytes - at_begin_[i].traffic.sent_bytes;
      timed_[i].traffic.received_bytes +=
          now.traffic.received_bytes - at_begin_[i].traffic.received_bytes;
    }
  }
  losses_.push_back(loss.item<double>());
  show_on_board();
}

void RunMeter::show_on_board() {
  if (!page_) return;
  page_->set_step(static_cast<int64_t>(losses_.size()));
  page_->set_loss(losses_.back());
  for (size_t i = 0; i < devices_.size(); ++i) {
    const MemoryUsage memory = devices_[i].memory();
    page_->update_device(static_cast<int>(i), memory.live_bytes, memory.peak_bytes,
                         static_cast<int64_t>(devices_[i].busy_seconds() * 1e9));
  }
}

void RunMeter::fill(RunRecord& record) const {
  const auto timed_steps = static_cast<int64_t>(step_ms_.size());
  const double timed_seconds = std::accumulate(step_ms_.begin(), step_ms_.end(), 0.0) * 1e-3;
  record.devices.clear();
  for (size_t i = 0; i < devices_.size(); ++i) {
    const SlotPlan& plan = devices_[i].plan();
    const MemoryUsage memory = devices_[i].memory();
    DeviceRecord device{.name = plan.name(),
                        .physical = plan.physical(),
                        .shared_by = plan.shared_by,
                        .threads = plan.threads,
                        .peak_bytes = memory.peak_bytes,
                        .final_bytes = memory.live_bytes};
    if (timed_steps > 0) {
      device.busy_fraction =
          timed_seconds > 0 ? std::min(1.0, timed_[i].busy_seconds / timed_seconds) : 0;
      device.sent_bytes_per_step = timed_[i].traffic.sent_bytes / timed_steps;
      device.received_bytes_per_step = timed_[i].traffic.received_bytes / timed_steps;
    }
    record.devices.push_back(device);
  }
  record.step_ms = summarize(step_ms_);
  record.warmup_steps = warmup_steps_;
  record.total_s = static_cast<double>(ended_ns_ - started_ns_) * 1e-9;
  record.losses = losses_;
  record.samples_per_s =
      timed_seconds > 0 ? static_cast<double>(record.effective_batch * timed_steps) / timed_seconds
                        : 0;
}

}  // namespace lockstep
