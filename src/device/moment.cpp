#include "lockstep/moment.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "lockstep/clock.hpp"
#if LOCKSTEP_CUDA
#include "device/cuda/time.hpp"
#endif

namespace lockstep {

Moment Moment::now(torch::Device device) {
  if (device.is_cuda()) {
    return of(c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(device));
  }
  Moment moment;
  moment.host_ns_ = monotonic_ns();
  return moment;
}

#if LOCKSTEP_CUDA

Moment Moment::of(c10::Stream stream) {
  Moment moment;
  moment.event_ = cuda::record_time(stream);
  return moment;
}

int64_t Moment::ns() const {
  return event_ ? cuda::time_ns(event_) : host_ns_;
}

int64_t Moment::since(const Moment& earlier) const {
  return event_ ? cuda::ns_between(earlier.event_, event_) : host_ns_ - earlier.host_ns_;
}

bool Moment::reached() const {
  return !event_ || cuda::is_reached(event_);
}

#else

Moment Moment::of(c10::Stream) {
  return now(torch::kCPU);
}

int64_t Moment::ns() const {
  return host_ns_;
}

int64_t Moment::since(const Moment& earlier) const {
  return host_ns_ - earlier.host_ns_;
}

bool Moment::reached() const {
  return true;
}

#endif

}  // namespace lockstep
