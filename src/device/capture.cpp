#include "device/capture.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <mutex>
#include <optional>

#include "lockstep/error.hpp"

namespace lockstep {
namespace {

std::atomic<bool> capturing{false};  // makes current() cheap while there is no capture
std::mutex capture_mutex;            // guards what follows
Capture* current_capture = nullptr;
std::optional<c10::Stream> captured_stream;

}  // namespace

Capture* Capture::current() {
  if (!capturing.load(std::memory_order_acquire)) return nullptr;
  const std::lock_guard lock(capture_mutex);
  if (current_capture == nullptr) return nullptr;
  const c10::impl::VirtualGuardImpl gpu(c10::DeviceType::CUDA);
  return gpu.getStream(captured_stream->device()) == *captured_stream ? current_capture : nullptr;
}

Capture::Current::Current(Capture& capture) {
  const std::lock_guard lock(capture_mutex);
  current_capture = &capture;
  captured_stream = capture.stream();
  capturing.store(true, std::memory_order_release);
}

Capture::Current::~Current() {
  const std::lock_guard lock(capture_mutex);
  current_capture = nullptr;
  capturing.store(false, std::memory_order_release);
}

void require_not_capturing(const std::string& what, const std::string& remedy) {
  if (Capture::current() == nullptr) return;
  throw Error(Code::kCapture, what + " cannot be part of a captured step", remedy);
}

}  // namespace lockstep
