#include "device/streams.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "lockstep/clock.hpp"
#include "lockstep/device_event.hpp"
#include "lockstep/error.hpp"

#if LOCKSTEP_CUDA
#include "device/cuda/support.hpp"
#endif

namespace lockstep {
namespace {

c10::Stream take_stream(torch::Device gpu) {
#if LOCKSTEP_CUDA
  return cuda::take_stream(gpu.index());
#else
  throw Error(Code::kInternal, "a stream of " + gpu.str() + " in a build without CUDA");
#endif
}

c10::Stream current_stream(torch::Device device) {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(device);
}

}  // namespace

OwnStream::OwnStream(torch::Device gpu) : stream_(take_stream(gpu)) {}

OwnStream::~OwnStream() {
#if LOCKSTEP_CUDA
  cuda::give_back_stream(stream_);
#endif
}

StreamOrder StreamOrder::now(const Device& device) {
  StreamOrder order;
  if (device.plan().kind == DeviceKind::kCpu) return order;
  order.event_.emplace(c10::DeviceType::CUDA);
  order.event_->record(current_stream(device.torch_device()));
  return order;
}

void StreamOrder::hold_back(const Device& device) const {
  if (event_) event_->block(current_stream(device.torch_device()));
}

void keep_for_current_stream(const torch::Tensor& tensor) {
  if (tensor.defined() && tensor.is_cuda() && !tensor.is_sparse()) {
    tensor.record_stream(current_stream(tensor.device()));
  }
}

DeviceEvent DeviceEvent::now(torch::Device device) {
  if (device.is_cuda()) return of(current_stream(device));
  DeviceEvent event;
  event.host_ns_ = monotonic_ns();
  return event;
}

#if LOCKSTEP_CUDA

DeviceEvent DeviceEvent::of(c10::Stream stream) {
  DeviceEvent event;
  event.event_ = cuda::record_time(stream);
  return event;
}

int64_t DeviceEvent::ns() const {
  return event_ ? cuda::time_ns(event_) : host_ns_;
}

int64_t DeviceEvent::since(const DeviceEvent& earlier) const {
  return event_ ? cuda::ns_between(earlier.event_, event_) : host_ns_ - earlier.host_ns_;
}

bool DeviceEvent::reached() const {
  return !event_ || cuda::is_reached(event_);
}

#else

DeviceEvent DeviceEvent::of(c10::Stream) {
  return now(torch::kCPU);
}

int64_t DeviceEvent::ns() const {
  return host_ns_;
}

int64_t DeviceEvent::since(const DeviceEvent& earlier) const {
  return host_ns_ - earlier.host_ns_;
}

bool DeviceEvent::reached() const {
  return true;
}

#endif

}  // namespace lockstep
