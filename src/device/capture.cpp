#include "device/capture.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <mutex>
#include <optional>

#include "lockstep/error.hpp"

namespace lockstep {
namespace {

std::atomic<bool> goes_on{false};  // so that asking costs nothing while there is none
std::mutex mutex;                  // guards what follows
Capture* going_on = nullptr;
std::optional<c10::Stream> recorded;

}  // namespace

Capture* Capture::current() {
  if (!goes_on.load(std::memory_order_acquire)) return nullptr;
  const std::lock_guard lock(mutex);
  if (going_on == nullptr) return nullptr;
  const c10::impl::VirtualGuardImpl gpu(c10::DeviceType::CUDA);
  return gpu.getStream(recorded->device()) == *recorded ? going_on : nullptr;
}

Capture::Current::Current(Capture& capture) {
  const std::lock_guard lock(mutex);
  going_on = &capture;
  recorded = capture.stream();
  goes_on.store(true, std::memory_order_release);
}

Capture::Current::~Current() {
  const std::lock_guard lock(mutex);
  going_on = nullptr;
  goes_on.store(false, std::memory_order_release);
}

void require_not_capturing(const std::string& what, const std::string& remedy) {
  if (Capture::current() == nullptr) return;
  throw Error(Code::kCapture, what + " cannot be part of a captured step", remedy);
}

}  // namespace lockstep
