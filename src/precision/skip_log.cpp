#include "precision/skip_log.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <utility>

namespace lockstep {

SkipLog::SkipLog(std::function<void(const SkippedStep&)> on_skip) : on_skip_(std::move(on_skip)) {}

std::string SkipLog::overflowed_parameter(const std::vector<Finding>& findings) const {
  for (const auto& finding : findings) {
    if (finding.first >= 0) return names_.of(finding.first);
    if (finding.overflowed_peer >= 0) {
      return fmt::format("a parameter of rank {} of the model-parallel group",
                         finding.overflowed_peer);
    }
  }
  return "";
}

void SkipLog::add(const SkippedStep& skipped) {
  skipped_.push_back(skipped);
  if (on_skip_) on_skip_(skipped);
}

void SkipLog::read(SkipRing& ring) {
  const uint64_t written = std::atomic_ref(ring.written).load(std::memory_order_acquire);
  if (written > SkipRing::kEntries) read_ = std::max(read_, written - SkipRing::kEntries);
  while (read_ < written) {
    const SkipRing::Entry entry = ring.entries[read_++ % SkipRing::kEntries];
    add({entry.update, names_.of(entry.parameter), entry.scale_before, entry.scale_after});
  }
}

}  // namespace lockstep
