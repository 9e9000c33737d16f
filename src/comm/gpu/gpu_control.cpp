#include "comm/gpu/gpu_control.hpp"

#include <fmt/format.h>

#include "lockstep/error.hpp"

namespace lockstep {

GpuControl::GpuControl(Backend& host, int channels, int64_t deadline_ns) : group_(host.group()) {
  for (int i = 0; i < channels; ++i) {
    channels_.push_back(
        host.split(0, host.rank(), host.group().name, {.deadline_ns = deadline_ns, .label = ""}));
  }
}

GpuControl::GpuControl(std::vector<std::unique_ptr<Backend>> channels)
    : group_(channels.front()->group()), channels_(std::move(channels)) {}

void GpuControl::guarded(const std::function<void()>& action) {
  {
    const std::lock_guard lock(broken_mutex_);
    if (broken_) std::rethrow_exception(broken_);
  }
  try {
    action();
  } catch (...) {
    const std::exception_ptr error = std::current_exception();
    if (keep_first(error)) end(error, farewell_of(error));
    throw;
  }
}

Call GpuControl::number(Call what, const CallContext& context) {
  what.sequence = ++sequence_;
  what.set_label(context.label);
  return what;
}

std::unique_ptr<GpuAgreement> GpuControl::agree(const Call& numbered, const CallContext& context,
                                                std::span<const std::byte> note) {
  return std::make_unique<GpuAgreement>(channel(0), numbered, note, context.deadline_ns);
}

std::unique_ptr<GpuControl> GpuControl::split(int colour, int key, std::string_view group_name,
                                              const Call& why, const CallContext& context) {
  std::vector<std::unique_ptr<Backend>> parts;
  try {
    for (const auto& channel : channels_) {
      parts.push_back(channel->split(colour, key, group_name,
                                     {.deadline_ns = context.deadline_ns, .label = ""}));
    }
  } catch (const Error&) {
    rethrow_as_part_of(group(), why);
  }
  return std::unique_ptr<GpuControl>(new GpuControl(std::move(parts)));
}

void GpuControl::abort(std::string_view reason) noexcept {
  if (broken()) return;
  std::exception_ptr error;
  try {
    error = std::make_exception_ptr(RankError(
        Code::kRankFailed, group().world_ranks[static_cast<size_t>(rank())],
        fmt::format("this rank gave up: {}", reason), "make a new communicator after an abort"));
  } catch (...) {
    error = std::current_exception();
  }
  if (keep_first(error)) end(error, reason);
}

bool GpuControl::broken() const {
  const std::lock_guard lock(broken_mutex_);
  return broken_ != nullptr;
}

bool GpuControl::keep_first(const std::exception_ptr& error) noexcept {
  const std::lock_guard lock(broken_mutex_);
  if (broken_) return false;
  broken_ = error;
  return true;
}

void GpuControl::end(const std::exception_ptr& error, std::string_view farewell) noexcept {
  for (const auto& channel : channels_) {
    if (channel) channel->abort(farewell);
  }
  if (failed_) failed_(error);
}

}  // namespace lockstep
