#include "optim/gpu_slots.hpp"

#include <torch/torch.h>

#include <map>

#include "device/capture.hpp"

namespace lockstep {
namespace {

constexpr int64_t kSlotDoubles = sizeof(UpdateSlot) / sizeof(double);
static_assert(sizeof(UpdateSlot) % sizeof(double) == 0 && offsetof(UpdateSlot, steps) == 0);

}  // namespace

std::vector<GpuSlots::Found> GpuSlots::of(const StepItems& items) {
  std::map<int, std::vector<size_t>> missing;  // [GPU]
  for (size_t i = 0; i < items.size(); ++i) {
    if (places_.count(items[i].parameter.unsafeGetTensorImpl()) == 0) {
      missing[items[i].weight.device().index()].push_back(i);
    }
  }
  std::vector<Found> found(items.size());
  for (const auto& [gpu, indices] : missing) {
    require_not_capturing("an optimizer's first step, which makes its state,",
                          "let a step run before it is captured (CaptureOptions::warmup)");
    const auto options = torch::device(items[indices[0]].weight.device()).dtype(torch::kDouble);
    blocks_.push_back(torch::zeros({static_cast<int64_t>(indices.size()), kSlotDoubles}, options));
    for (size_t row = 0; row < indices.size(); ++row) {
      found[indices[row]].is_new = true;
      places_[items[indices[row]].parameter.unsafeGetTensorImpl()] = {blocks_.size() - 1,
                                                                      static_cast<int64_t>(row)};
    }
  }
  for (size_t i = 0; i < items.size(); ++i) {
    found[i].slot = address(places_.at(items[i].parameter.unsafeGetTensorImpl()));
  }
  return found;
}

bool GpuSlots::any_moved(const StepItems& items) const {
  for (const StepItem& item : items) {
    const auto place = places_.find(item.parameter.unsafeGetTensorImpl());
    if (place != places_.end() && blocks_[place->second.block].device() != item.weight.device()) {
      return true;
    }
  }
  return false;
}

std::unordered_map<c10::TensorImpl*, int64_t> GpuSlots::steps() const {
  std::vector<torch::Tensor> on_host;  // [block]
  for (const torch::Tensor& block : blocks_) on_host.push_back(block.cpu());
  std::unordered_map<c10::TensorImpl*, int64_t> steps;
  for (const auto& [parameter, place] : places_) {
    const auto* slots = static_cast<const UpdateSlot*>(on_host[place.block].data_ptr());
    steps[parameter] = slots[place.row].steps;
  }
  return steps;
}

std::shared_ptr<const void> GpuSlots::memory() const {
  return std::make_shared<const std::vector<torch::Tensor>>(blocks_);
}

UpdateSlot* GpuSlots::address(const Place& place) const {
  return static_cast<UpdateSlot*>(blocks_[place.block].data_ptr()) + place.row;
}

}  // namespace lockstep
