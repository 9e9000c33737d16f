#include <fmt/format.h>
#include <unistd.h>

#include "board_layout.hpp"
#include "board_mapping.hpp"
#include "lockstep/board.hpp"
#include "lockstep/clock.hpp"

namespace lockstep {

using namespace board_layout;

namespace {

void touch(RankPage& page) {
  page.updated_ns.store(monotonic_ns(), std::memory_order_relaxed);
}

DevicePage& device_page(RankPage& page, int index) {
  if (index < 0 || index >= kBoardDevices) {
    board_error(fmt::format("the board has no room for logical device {}", index),
                fmt::format("devices are numbered 0 to {}", kBoardDevices - 1));
  }
  return page.devices[static_cast<size_t>(index)];
}

void raise_to(std::atomic<int64_t>& highest, int64_t value) {
  int64_t seen = highest.load(std::memory_order_relaxed);
  while (seen < value && !highest.compare_exchange_weak(seen, value, std::memory_order_release)) {
  }
}

}  // namespace

BoardPage::BoardPage(std::shared_ptr<const BoardMapping> mapping, int rank)
    : mapping_(std::move(mapping)), rank_(rank) {
  mapping_->check_rank(rank);
  if (mapping_->access() != Access::kWrite) {
    board_error(fmt::format("the board {} is open for reading only", mapping_->path()),
                "ranks take their page with BoardPage::attach");
  }
}

BoardPage BoardPage::attach(const std::string& path, int rank) {
  return {open_mapping(path, Access::kWrite), rank};
}

void BoardPage::start(std::string_view program) {
  RankPage& page = mapping_->page(rank_);
  const int64_t before = page.pid.exchange(::getpid(), std::memory_order_acq_rel);
  if (before != 0 && before != ::getpid()) {
    // The process that held this rank before may have died in the middle of a write.
    page.program.release();
    page.collective_start.release();
    page.collective_finish.release();
    for (auto& device : page.devices) device.identity.release();
  }
  page.program.store(Text<64>::of(program));
  page.started_ns.store(monotonic_ns(), std::memory_order_relaxed);
  set_phase(Phase::kStarting);
}

void BoardPage::set_phase(Phase phase) {
  RankPage& page = mapping_->page(rank_);
  page.phase.store(static_cast<uint32_t>(phase), std::memory_order_release);
  touch(page);
}

void BoardPage::set_step(int64_t step) {
  RankPage& page = mapping_->page(rank_);
  page.step.store(step, std::memory_order_relaxed);
  touch(page);
}

void BoardPage::set_loss(double loss) {
  RankPage& page = mapping_->page(rank_);
  page.loss.store(loss, std::memory_order_relaxed);
  touch(page);
}

void BoardPage::add_clock(Activity activity, int64_t nanoseconds) {
  auto& clock = mapping_->page(rank_).clocks_ns.at(static_cast<size_t>(activity));
  clock.fetch_add(nanoseconds, std::memory_order_relaxed);
}

void BoardPage::set_device(int index, const DeviceStatus& status) {
  RankPage& page = mapping_->page(rank_);
  device_page(page, index)
      .identity.store({.name = Text<32>::of(status.name),
                       .physical = Text<64>::of(status.physical),
                       .capacity_bytes = status.capacity_bytes});
  update_device(index, status.live_bytes, status.peak_bytes, status.busy_ns);
  raise_to(page.device_count, index + 1);
}

void BoardPage::update_device(int index, int64_t live_bytes, int64_t peak_bytes, int64_t busy_ns) {
  RankPage& page = mapping_->page(rank_);
  DevicePage& device = device_page(page, index);
  device.live_bytes.store(live_bytes, std::memory_order_relaxed);
  device.peak_bytes.store(peak_bytes, std::memory_order_relaxed);
  device.busy_ns.store(busy_ns, std::memory_order_relaxed);
  touch(page);
}

void BoardPage::begin_collective(int64_t sequence, std::string_view operation, int64_t bytes,
                                 int64_t bucket) {
  RankPage& page = mapping_->page(rank_);
  touch(page);
  const std::lock_guard lock(mapping_->writing());
  page.collective_start.store({.sequence = sequence,
                               .operation = Text<24>::of(operation),
                               .bytes = bytes,
                               .bucket = bucket,
                               .started_ns = monotonic_ns()});
}

void BoardPage::finish_collective(int64_t sequence) {
  RankPage& page = mapping_->page(rank_);
  touch(page);
  const std::lock_guard lock(mapping_->writing());
  page.collective_finish.store({.sequence = sequence, .finished_ns = monotonic_ns()});
}

bool BoardPage::record_first_error(Code code, std::string_view message, int blamed_rank) {
  RankPage& page = mapping_->page(rank_);
  auto none = static_cast<uint32_t>(ErrorState::kNone);
  const auto writing = static_cast<uint32_t>(ErrorState::kWriting);
  if (!page.error_state.compare_exchange_strong(none, writing)) return false;
  touch(page);
  page.error.store({.code = static_cast<int64_t>(code),
                    .at_ns = monotonic_ns(),
                    .blamed_rank = blamed_rank,
                    .message = Text<496>::of(message)});
  page.error_state.store(static_cast<uint32_t>(ErrorState::kComplete), std::memory_order_release);
  set_phase(Phase::kFailed);
  return true;
}

}  // namespace lockstep
