#include "device/stream_order.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "device/device_state.hpp"

namespace lockstep {
namespace {

c10::Stream current_stream(torch::Device device) {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(device);
}

}  // namespace

StreamOrder StreamOrder::now(const Device& device) {
  StreamOrder order;
  if (!device.state_->stream) return order;
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

}  // namespace lockstep
