#include "lockstep/run_meter.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <numeric>

#include "base/fault.hpp"
#include "lockstep/clock.hpp"
#include "lockstep/distributed_data_parallel.hpp"
#include "lockstep/verify.hpp"

namespace lockstep {
namespace {

Traffic operator-(const Traffic& a, const Traffic& b) {
  return {a.sent_bytes - b.sent_bytes, a.received_bytes - b.received_bytes};
}

void add(Traffic& sum, const Traffic& more) {
  sum.sent_bytes += more.sent_bytes;
  sum.received_bytes += more.received_bytes;
}

int64_t warmup_of(int64_t steps) {
  return std::min<int64_t>(5, steps / 4);
}

}  // namespace

RunMeter::RunMeter(const std::string& program, const Devices& devices, int64_t steps,
                   const std::optional<BoardPage>& page)
    : devices_(devices),
      steps_(steps),
      warmup_steps_(warmup_of(steps)),
      exceptions_at_start_(std::uncaught_exceptions()),
      started_ns_(monotonic_ns()),
      ended_ns_(started_ns_),
      at_begin_(devices.size()),
      timed_(devices.size()),
      page_(page) {
  if (!page_) make_board(program);
  if (!page_) return;
  page_->start(program);
  for (size_t i = 0; i < devices.size(); ++i) {
    page_->set_device(static_cast<int>(i), {.name = devices[i].name(),
                                            .physical = devices[i].plan().physical(),
                                            .capacity_bytes = devices[i].capacity_bytes()});
  }
  page_->set_phase(Phase::kTraining);
}

// A run must not fail for lack of a board: without shared memory it runs without one.
void RunMeter::make_board(const std::string& program) {
  try {
    remove_stale_boards();
    const std::string run = fmt::format("{}-{}", program, ::getpid());
    board_ = Board::create(Board::default_path(run), 1, run);
    page_ = board_->page(0);
  } catch (const Error&) {
    page_.reset();
  }
}

// While an exception propagates the run is not finished; its handler reports the failure.
RunMeter::~RunMeter() {
  if (page_ && std::uncaught_exceptions() == exceptions_at_start_)
    page_->set_phase(Phase::kFinished);
}

RunMeter::Reading RunMeter::read(const Device& device) const {
  return {device.busy_seconds(), device.queued_seconds(), device.traffic()};
}

RunMeter::SyncReading RunMeter::read_sync() const {
  if (sync_ == nullptr) return {};
  const DdpStats stats = sync_->stats();
  const CommStats comm = sync_->comm().stats();
  return {.all_reduces = stats.all_reduces,
          .bytes = stats.bytes,
          .communication_ns = stats.communication_ns,
          .exposed_ns = stats.exposed_ns,
          .traffic = {comm.sent_bytes, comm.received_bytes}};
}

void RunMeter::resume_after(int64_t steps_done) {
  resumed_after_ = steps_done;
  warmup_steps_ = warmup_of(std::max<int64_t>(0, steps_ - steps_done));
  if (page_) page_->set_step(steps_done);
}

void RunMeter::begin_step() {
  FaultInjector::of_process().begin_step(steps_done() + 1);
  devices_.synchronize();
  if (static_cast<int64_t>(losses_.size()) == warmup_steps_) {
    for (size_t i = 0; i < devices_.size(); ++i) devices_[i].reset_peak_memory();
  }
  for (size_t i = 0; i < devices_.size(); ++i) at_begin_[i] = read(devices_[i]);
  sync_at_begin_ = read_sync();
  step_started_ns_ = monotonic_ns();
}

void RunMeter::end_step(const torch::Tensor& loss) {
  devices_.synchronize();
  const int64_t now_ns = monotonic_ns();
  const int64_t since_ended_ns = now_ns - ended_ns_;
  ended_ns_ = now_ns;
  last_step_ms_ = static_cast<double>(ended_ns_ - step_started_ns_) * 1e-6;
  std::vector<Reading> now;
  for (size_t i = 0; i < devices_.size(); ++i) now.push_back(read(devices_[i]));
  const SyncReading sync_now = read_sync();
  if (!warming_up()) {
    step_ms_.push_back(last_step_ms_);
    count_step(now, sync_now);
  }
  losses_.push_back(loss.item<double>());
  verify_loss(loss);
  if (!page_) return;
  show_clocks(now, sync_now, since_ended_ns);
  show_on_board();
}

void RunMeter::count_step(const std::vector<Reading>& now, const SyncReading& sync_now) {
  for (size_t i = 0; i < devices_.size(); ++i) {
    timed_[i].busy_seconds += now[i].busy_seconds - at_begin_[i].busy_seconds;
    if (now[i].queued_seconds && at_begin_[i].queued_seconds) {
      timed_[i].queued_seconds = timed_[i].queued_seconds.value_or(0) + *now[i].queued_seconds -
                                 *at_begin_[i].queued_seconds;
    }
    add(timed_[i].traffic, now[i].traffic - at_begin_[i].traffic);
  }
  sync_timed_.all_reduces += sync_now.all_reduces - sync_at_begin_.all_reduces;
  sync_timed_.bytes += sync_now.bytes - sync_at_begin_.bytes;
  sync_timed_.communication_ns += sync_now.communication_ns - sync_at_begin_.communication_ns;
  sync_timed_.exposed_ns += sync_now.exposed_ns - sync_at_begin_.exposed_ns;
  add(sync_timed_.traffic, sync_now.traffic - sync_at_begin_.traffic);
}

// Assigns all time since the last step's end to one of three clocks. A rank is as busy as its
// busiest device.
void RunMeter::show_clocks(const std::vector<Reading>& now, const SyncReading& sync_now,
                           int64_t since_ended_ns) {
  const int64_t step_ns = ended_ns_ - step_started_ns_;
  const int64_t exposed_ns =
      std::clamp<int64_t>(sync_now.exposed_ns - sync_at_begin_.exposed_ns, 0, step_ns);
  double busy_seconds = 0;
  for (size_t i = 0; i < devices_.size(); ++i) {
    busy_seconds = std::max(busy_seconds, now[i].busy_seconds - at_begin_[i].busy_seconds);
  }
  const int64_t busy_ns =
      std::clamp<int64_t>(static_cast<int64_t>(busy_seconds * 1e9), 0, step_ns - exposed_ns);
  page_->add_clock(Activity::kBusy, busy_ns);
  page_->add_clock(Activity::kCommunicating, exposed_ns);
  page_->add_clock(Activity::kIdle, since_ended_ns - exposed_ns - busy_ns);
}

void RunMeter::show_on_board() {
  page_->set_step(steps_done());
  page_->set_loss(losses_.back());
  for (size_t i = 0; i < devices_.size(); ++i) {
    const MemoryUsage memory = devices_[i].memory();
    page_->update_device(static_cast<int>(i), memory.live_bytes, memory.peak_bytes,
                         static_cast<int64_t>(devices_[i].busy_seconds() * 1e9));
  }
}

void RunMeter::fill(RunRecord& record) const {
  const double timed_seconds = std::accumulate(step_ms_.begin(), step_ms_.end(), 0.0) * 1e-3;
  fill_devices(record, timed_seconds);
  if (sync_ != nullptr) fill_sync(record);
  record.step_ms = summarize(step_ms_);
  record.warmup_steps = warmup_steps_;
  record.total_s = static_cast<double>(ended_ns_ - started_ns_) * 1e-9;
  record.losses = losses_;
  record.resumed_after = resumed_after_;
  record.samples_per_s =
      timed_seconds > 0
          ? static_cast<double>(record.effective_batch * record.step_ms.n) / timed_seconds
          : 0;
}

void RunMeter::fill_devices(RunRecord& record, double timed_seconds) const {
  const auto timed_steps = static_cast<int64_t>(step_ms_.size());
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
      Traffic traffic = timed_[i].traffic;
      if (i == 0) add(traffic, sync_timed_.traffic);
      device.busy_fraction =
          timed_seconds > 0 ? std::min(1.0, timed_[i].busy_seconds / timed_seconds) : 0;
      if (timed_[i].queued_seconds && timed_seconds > 0) {
        device.queued_fraction =
            std::clamp(*timed_[i].queued_seconds / timed_seconds, 0.0, 1 - device.busy_fraction);
      }
      device.sent_bytes_per_step = traffic.sent_bytes / timed_steps;
      device.received_bytes_per_step = traffic.received_bytes / timed_steps;
    }
    record.devices.push_back(device);
  }
}

void RunMeter::fill_sync(RunRecord& record) const {
  const auto timed_steps = static_cast<int64_t>(step_ms_.size());
  if (timed_steps > 0) {
    const auto ms_per_step = [&](int64_t ns) {
      return static_cast<double>(ns) * 1e-6 / static_cast<double>(timed_steps);
    };
    record.all_reduces = {
        .count = static_cast<double>(sync_timed_.all_reduces) / static_cast<double>(timed_steps),
        .bytes = sync_timed_.bytes / timed_steps};
    record.comm_ms = ms_per_step(sync_timed_.communication_ns);
    record.exposed_comm_ms = ms_per_step(sync_timed_.exposed_ns);
  }
  const DdpStats stats = sync_->stats();
  const auto since_backward = [&](int64_t ns) {
    return static_cast<double>(ns - stats.backward_started_ns) * 1e-6;
  };
  record.buckets.clear();
  for (const auto& bucket : stats.last_step) {
    record.buckets.push_back({.index = static_cast<int>(bucket.index),
                              .bytes = bucket.bytes,
                              .parameters = bucket.parameters,
                              .launched_ms = since_backward(bucket.launched_ns),
                              .finished_ms = since_backward(bucket.finished_ns)});
  }
  record.backward_ms = since_backward(stats.backward_finished_ns);
}

}  // namespace lockstep
