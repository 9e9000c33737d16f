#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <map>

#include "device/dtype_map.hpp"
#include "lockstep/error.hpp"
#include "optim/gpu_step.hpp"

namespace lockstep {
namespace {

using Indices = std::vector<size_t>;  // of items

void* address_of(const torch::Tensor& tensor) {
  return tensor.defined() ? tensor.data_ptr() : nullptr;
}

GpuUpdateItem update_item(const StepItem& item, const GpuItemState& state) {
  GpuUpdateItem update;
  update.weight = item.weight.data_ptr();
  update.gradient = item.gradient.data_ptr();
  update.momentum = address_of(state.momentum);
  update.variance = address_of(state.variance);
  update.low = item.has_master() ? item.parameter.data_ptr() : nullptr;
  update.slot = state.slot;
  update.count = item.weight.numel();
  update.dtype = *dtype_of(item.weight.scalar_type());
  update.gradient_dtype = *dtype_of(item.gradient.scalar_type());
  return update;
}

// A step's scalars on one GPU, and their addresses.
struct NumbersHere {
  NumbersHere(const ScaledGradients& given, const StepExtras& extras, torch::Device device,
              const torch::Tensor& norm)
      : scale(moved(given.scale, device)),
        found_inf(moved(given.found_inf, device)),
        squares(extras.max_norm ? moved(given.sum_of_squares, device) : torch::Tensor()) {
    numbers.inverse_scale = given.inverse_scale;
    numbers.scale = static_cast<const float*>(address_of(scale));
    numbers.found_inf = static_cast<const float*>(address_of(found_inf));
    numbers.sum_of_squares = static_cast<const double*>(address_of(squares));
    numbers.max_norm = extras.max_norm.value_or(0);
    if (norm.defined() && norm.device() == device) numbers.norm = norm.data_ptr<double>();
  }
  static torch::Tensor moved(const torch::Tensor& scalar, torch::Device device) {
    return scalar.defined() ? scalar.to(device, /*non_blocking=*/true) : scalar;
  }

  torch::Tensor scale;
  torch::Tensor found_inf;
  torch::Tensor squares;
  GpuStepNumbers numbers;
};

}  // namespace

torch::Tensor step_on_gpus(GpuOptimizer optimizer, const StepItems& items,
                           std::span<const GpuItemState> states, const RatesSource& rates,
                           const ScaledGradients& gradients, const StepExtras& extras) {
  std::map<int, Indices> by_gpu;
  for (size_t i = 0; i < items.size(); ++i) {
    by_gpu[items[i].weight.device().index()].push_back(i);
  }
  torch::Tensor norm;
  if (extras.max_norm) {
    norm = torch::empty({}, items[0].weight.options().dtype(torch::kDouble).requires_grad(false));
  }
  const bool scaled = gradients.scale.defined() || gradients.inverse_scale != 1;
  const bool changed = scaled || extras.max_norm.has_value();
  const auto groups = rates();
  Capture* const capture = Capture::current();
  for (const auto& [gpu, indices] : by_gpu) {
    const torch::Device device = items[indices[0]].weight.device();
    const c10::cuda::CUDAGuard guard(device);
    const CudaStream stream = c10::cuda::getCurrentCUDAStream().stream();
    const NumbersHere here(gradients, extras, device, norm);
    std::vector<GpuPrepareItem> prepares;
    std::vector<GpuUpdateItem> updates;
    for (const size_t i : indices) {
      prepares.push_back({states[i].slot, states[i].start, static_cast<int32_t>(items[i].group),
                          items[i].weight.scalar_type() == torch::kDouble});
      if (items[i].weight.numel() > 0) updates.push_back(update_item(items[i], states[i]));
    }
    const auto captured =
        capture != nullptr ? CapturedRates::make(*capture, device, rates) : nullptr;
    gpu_prepare(optimizer, prepares, groups, captured ? captured->on_gpu() : nullptr, here.numbers,
                stream);
    const bool store = changed && !extras.zero_grad;
    if (optimizer == GpuOptimizer::kSgd) {
      gpu_update_sgd(updates, store, stream);
    } else {
      gpu_update_adam(updates, store, stream);
    }
  }
  items.finish(changed, extras);
  return norm;
}

void keep_for_replays(const std::shared_ptr<GpuSlots>& slots,
                      const std::vector<GpuItemState>& states) {
  Capture* const capture = Capture::current();
  if (capture == nullptr) return;
  capture->keep(slots->memory());
  capture->keep(std::make_shared<std::vector<GpuItemState>>(states));
  capture->before_replay([&slots, captured = slots] {
    if (slots == captured) return;
    throw Error(Code::kCapture,
                "the optimizer's state was loaded or moved since its step was captured",
                "make the CapturedStep anew after load()");
  });
}

}  // namespace lockstep
