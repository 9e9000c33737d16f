#include "pipeline/wire.hpp"

namespace lockstep {

void LocalWire::send(const ParcelName& name, const torch::Tensor& tensor, int64_t) {
  exchange_.put(name, {tensor, StreamOrder::now(device_), &device_});
}

torch::Tensor LocalWire::receive(const ParcelName& name, int64_t) {
  const Parcel parcel = exchange_.take(name);
  if (parcel.from == &device_) return parcel.tensor;
  parcel.order.hold_back(device_);
  const auto bytes = static_cast<int64_t>(parcel.tensor.nbytes());
  parcel.from->count_traffic_to(device_, bytes);
  stats_.messages += 1;
  stats_.bytes += bytes;
  keep_for_current_stream(parcel.tensor);
  return parcel.tensor.to(device_.torch_device(), parcel.tensor.scalar_type(),
                          /*non_blocking=*/true, /*copy=*/true);
}

}  // namespace lockstep
