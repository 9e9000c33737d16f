#include "device/moment.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "lockstep/clock.hpp"
#if LOCKSTEP_CUDA
#include "device/cuda_support.hpp"
#endif

namespace lockstep {

Moment Moment::now(const Device& device) {
  Moment moment;
  moment.host_ns_ = monotonic_ns();
#if LOCKSTEP_CUDA
  if (device.plan().kind == DeviceKind::kCuda) {
    const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
    moment.event_ = cuda::record_time(guard.getStream(device.torch_device()));
  }
#else
  (void)device;
#endif
  return moment;
}

int64_t Moment::ns() const {
#if LOCKSTEP_CUDA
  if (event_) return cuda::time_ns(event_);
#endif
  return host_ns_;
}

}  // namespace lockstep
