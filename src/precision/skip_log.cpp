#include "precision/skip_log.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <utility>

namespace lockstep {

SkipLog::SkipLog(std::function<void(const SkippedStep&)> on_skip) : on_skip_(std::move(on_skip)) {}

std::string SkipLog::overflowed_parameter(const std::vector<Finding>& findings) const {
  for (const auto& finding : findings) {
    if (finding.first_nonfinite >= 0) {
      return names_.of((*finding.places)[static_cast<size_t>(finding.first_nonfinite)]);
    }
    if (finding.overflowed_peer >= 0) {
      return fmt::format("a parameter of rank {} of the model-parallel group",
                         finding.overflowed_peer);
    }
  }
  return "";
}

void SkipLog::add(const SkippedStep& skipped) {
  collect(/*wait=*/true);  // steps before this one come first
  skipped_.push_back(skipped);
  if (on_skip_) on_skip_(skipped);
}

void SkipLog::follow(int64_t step, std::vector<Finding> findings, const torch::Tensor& facts) {
  auto pinned = torch::empty(facts.sizes(), torch::TensorOptions().pinned_memory(true));
  pinned.copy_(facts, /*non_blocking=*/true);
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
  Arriving arriving{step, std::move(findings), std::move(pinned), guard.getStream(facts.device()),
                    c10::Event(c10::DeviceType::CUDA)};
  arriving.copied.record(arriving.stream);
  arriving_.push_back(std::move(arriving));
}

void SkipLog::collect(bool wait) {
  while (!arriving_.empty()) {
    if (wait) arriving_.front().stream.synchronize();
    if (!arriving_.front().copied.query()) return;
    Arriving arrived = std::move(arriving_.front());
    arriving_.pop_front();
    take_in(arrived);
  }
}

void SkipLog::take_in(Arriving& arrived) {
  const auto facts = arrived.facts.accessor<float, 1>();
  int64_t next = 0;
  bool overflowed = false;
  for (auto& finding : arrived.findings) {
    for (const auto& gpu : finding.on_gpus) {
      const bool found = facts[next] != 0;
      const auto first = static_cast<size_t>(facts[next + 1]);
      next += 2;
      if (!found || finding.first_nonfinite >= 0) continue;
      finding.first_nonfinite = gpu.gradients[first];
      overflowed = true;
    }
  }
  if (!overflowed) return;
  const SkippedStep skipped = {arrived.step, overflowed_parameter(arrived.findings), facts[next],
                               facts[next + 1]};
  skipped_.push_back(skipped);
  if (on_skip_) on_skip_(skipped);
}

}  // namespace lockstep
