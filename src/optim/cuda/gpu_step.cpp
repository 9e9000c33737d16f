#include "optim/gpu_step.hpp"

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <fmt/format.h>
#include <torch/torch.h>

#include <cstring>
#include <map>
#include <utility>

#include "base/counted.hpp"
#include "device/capture.hpp"
#include "device/dtype_map.hpp"
#include "device/streams.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

constexpr int64_t kSlotDoubles = sizeof(UpdateSlot) / sizeof(double);
static_assert(sizeof(UpdateSlot) % sizeof(double) == 0 && offsetof(UpdateSlot, steps) == 0);

constexpr int64_t kRatesDoubles = sizeof(GroupRates) / sizeof(double);
static_assert(sizeof(GroupRates) % sizeof(double) == 0);

// Refuses changes that would need other kernels or other memory.
void check_kernels(const std::vector<GroupRates>& captured, const std::vector<GroupRates>& now) {
  const std::string help = "make a new CapturedStep after such a change";
  if (captured.size() != now.size()) {
    throw Error(Code::kCapture,
                fmt::format("the optimizer had {} when its step was captured, and has {}",
                            counted(captured.size(), "group"), now.size()),
                help);
  }
  for (size_t i = 0; i < now.size(); ++i) {
    if ((captured[i].momentum != 0) == (now[i].momentum != 0)) continue;
    throw Error(Code::kCapture,
                fmt::format("momentum of group {} was {} when the step was captured, and is {}", i,
                            captured[i].momentum, now[i].momentum),
                help);
  }
}

// This must not be the graph's own memory: earlier results of the same step may share it, and each
// replay would write them over what refresh() wrote. The allocator decides by the stream.
torch::Tensor memory_of(c10::Stream stream, size_t groups) {
  const c10::cuda::CUDAStreamGuard not_captured(stream);
  return torch::empty({static_cast<int64_t>(groups), kRatesDoubles},
                      torch::device(stream.device()).dtype(torch::kDouble));
}

// Rates of an optimizer's groups in a GPU's memory, for a captured step: before each replay they
// are written again where the host has changed them.
class CapturedRates {
 public:
  /// The result lives as long as the captured step.
  static std::shared_ptr<CapturedRates> make(Capture& capture, torch::Device gpu,
                                             RatesSource source) {
    const std::shared_ptr<CapturedRates> rates(new CapturedRates(gpu, std::move(source)));
    capture.before_replay([rates] { rates->refresh(); });
    return rates;
  }

  const GroupRates* on_gpu() const { return static_cast<const GroupRates*>(memory_.data_ptr()); }

 private:
  CapturedRates(torch::Device gpu, RatesSource source)
      : source_(std::move(source)),
        captured_(source_()),
        made_on_(gpu),
        memory_(memory_of(made_on_.get(), captured_.size())) {}

  void refresh() {
    auto now = source_();
    if (now == written_) return;
    check_kernels(captured_, now);
    if (written_.empty()) made_on_.get().synchronize();  // the memory may still be in use
    const torch::NoGradGuard no_grad;
    // Each change gets its own memory, which libtorch reuses when the copy is done.
    const auto staged =
        torch::empty(memory_.sizes(), torch::dtype(torch::kDouble).pinned_memory(true));
    std::memcpy(staged.data_ptr(), now.data(), now.size() * sizeof(GroupRates));
    memory_.copy_(staged, /*non_blocking=*/true);  // between two replays, on their stream
    written_ = std::move(now);
  }

  RatesSource source_;
  std::vector<GroupRates> captured_;  // as they were then: says which groups have momentum
  std::vector<GroupRates> written_;   // empty before the first replay
  const OwnStream made_on_;           // not captured; the allocator gave the memory for it
  torch::Tensor memory_;
};

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

std::vector<GpuSlots::Found> GpuSlots::of(const StepItems& items) {
  std::map<int, std::vector<size_t>> missing;  // [GPU]
  for (size_t i = 0; i < items.size(); ++i) {
    if (positions_.count(items[i].parameter.unsafeGetTensorImpl()) == 0) {
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
      positions_[items[indices[row]].parameter.unsafeGetTensorImpl()] = {blocks_.size() - 1,
                                                                         static_cast<int64_t>(row)};
    }
  }
  for (size_t i = 0; i < items.size(); ++i) {
    found[i].slot = address(positions_.at(items[i].parameter.unsafeGetTensorImpl()));
  }
  return found;
}

bool GpuSlots::any_moved(const StepItems& items) const {
  for (const StepItem& item : items) {
    const auto found = positions_.find(item.parameter.unsafeGetTensorImpl());
    if (found != positions_.end() &&
        blocks_[found->second.block].device() != item.weight.device()) {
      return true;
    }
  }
  return false;
}

std::unordered_map<c10::TensorImpl*, int64_t> GpuSlots::steps() const {
  std::vector<torch::Tensor> on_host;  // [block]
  for (const torch::Tensor& block : blocks_) on_host.push_back(block.cpu());
  std::unordered_map<c10::TensorImpl*, int64_t> steps;
  for (const auto& [parameter, position] : positions_) {
    const auto* slots = static_cast<const UpdateSlot*>(on_host[position.block].data_ptr());
    steps[parameter] = slots[position.row].steps;
  }
  return steps;
}

std::shared_ptr<const void> GpuSlots::memory() const {
  return std::make_shared<const std::vector<torch::Tensor>>(blocks_);
}

UpdateSlot* GpuSlots::address(const Position& position) const {
  return static_cast<UpdateSlot*>(blocks_[position.block].data_ptr()) + position.row;
}

torch::Tensor step_on_gpus(GpuOptimizer optimizer, const StepItems& items,
                           std::span<const GpuItemState> states, const RatesSource& rates,
                           const ScaledGradients& gradients, const StepExtras& extras) {
  std::map<int, std::vector<size_t>> by_gpu;  // [GPU] indices of items
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
                "make a new CapturedStep after load()");
  });
}

}  // namespace lockstep
