#include "gradients/gradient_buckets.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <memory>

#include "base/mutation.hpp"
#include "device/capture.hpp"
#include "device/dtype_map.hpp"
#include "lockstep/error.hpp"
#include "lockstep/tensor_text.hpp"

namespace lockstep {
namespace {

// -1 is the CPU, as in libtorch.
int device_key(const torch::Tensor& tensor) {
  return tensor.is_cpu() ? -1 : tensor.device().index();
}

ParameterSize size_of(const TrainedParameter& parameter) {
  const auto dtype = dtype_of(parameter.tensor.scalar_type());
  if (!dtype) {
    throw Error(Code::kTensorMismatch,
                fmt::format("parameter {} is {}, which cannot be averaged", parameter.name,
                            dtype_text(parameter.tensor.scalar_type())),
                "use a real floating-point type, or freeze it with requires_grad_(false)");
  }
  return {parameter.tensor.numel(), *dtype, device_key(parameter.tensor)};
}

// Autograd keeps a gradient in its parameter's own layout where that is dense.
std::vector<int64_t> strides_of(const torch::Tensor& parameter) {
  if (parameter.is_non_overlapping_and_dense()) return parameter.strides().vec();
  return torch::empty(parameter.sizes(), torch::kMeta).strides().vec();
}

}  // namespace

void move_to_own_memory(const torch::Tensor& kept) {
  const torch::NoGradGuard no_grad;
  auto copy = std::make_unique<torch::Tensor>(kept.clone());
  void* address = copy->data_ptr();
  kept.storage().unsafeGetStorageImpl()->set_data_ptr(c10::DataPtr(
      address, copy.release(), [](void* tensor) { delete static_cast<torch::Tensor*>(tensor); },
      kept.device()));
}

GradientBuckets::GradientBuckets(const Communicator& comm,
                                 std::span<const TrainedParameter> parameters,
                                 std::span<const size_t> order, const BucketLimits& limits)
    : parameters_(parameters), limits_(limits) {
  std::map<int, int64_t> bytes;
  std::map<int, torch::Device> devices;
  for (const auto& parameter : parameters_) {
    const ParameterSize size = size_of(parameter);
    sizes_.push_back(size);
    strides_.push_back(strides_of(parameter.tensor));
    bytes[size.device] += padded_count(size.count, size.dtype) * dtype_bytes(size.dtype);
    devices.emplace(size.device, parameter.tensor.device());
  }
  for (const auto& [key, device] : devices) {
    memory_[key] = comm.allocate(bytes[key], torch::TensorOptions(torch::kUInt8).device(device));
  }
  arrange(order);
}

void GradientBuckets::arrange(std::span<const size_t> order) {
  std::vector<size_t> held;  // parameters whose grad is a view of a bucket
  const bool again = !locations_.empty();
  for (size_t i = 0; again && i < parameters_.size(); ++i) {
    if (holds_grad(i)) held.push_back(i);
  }
  if (again) claim_all();
  plan_ = plan_buckets(sizes_, order, limits_);
  locations_.assign(parameters_.size(), {});
  buckets_.clear();
  std::map<int, int64_t> used_bytes;
  for (size_t bucket = 0; bucket < plan_.size(); ++bucket) {
    const PlannedBucket& planned = plan_[bucket];
    int64_t& begin = used_bytes[planned.device];
    GradientBucket& made = buckets_.emplace_back();
    made.index = static_cast<int64_t>(bucket);
    made.gradients = memory_.at(planned.device)
                         .narrow(0, begin, planned.bytes())
                         .view(scalar_type_of(planned.dtype));
    begin += planned.bytes();
    for (const auto& gradient : planned.gradients) {
      made.parameters.push_back(parameters_[gradient.parameter].name);
      Location& location = locations_[gradient.parameter] = {bucket, gradient.offset, {}};
      location.memory = memory_of(location, gradient.parameter);
    }
  }
  for (const auto& [device, bytes] : memory_) {
    if (again) bytes.zero_();  // keeps the gaps zero
  }
  for (const size_t parameter : held) adopt_grad(parameter);
}

torch::Tensor GradientBuckets::memory_of(const Location& location, size_t parameter) const {
  const torch::Tensor& flat = buckets_[location.bucket].gradients;
  const int64_t count = parameters_[parameter].tensor.numel();
  char* begin = static_cast<char*>(flat.data_ptr()) +
                location.offset * static_cast<int64_t>(flat.element_size());
  return torch::from_blob(
      begin, {count}, [flat](void*) {}, flat.options());
}

torch::Tensor GradientBuckets::claim(size_t parameter) {
  Location& location = locations_[parameter];
  // A step that is being captured computes nothing now, and its replays overwrite what is kept.
  const bool is_kept =
      location.memory.storage().use_count() > 1 && !is_planted(Mutation::kKeptGradientOverwritten);
  if (is_kept && Capture::current() == nullptr) {
    move_to_own_memory(location.memory);
    location.memory = memory_of(location, parameter);
  }
  return view(parameter);
}

void GradientBuckets::claim_all() {
  for (size_t i = 0; i < parameters_.size(); ++i) claim(i);
}

void GradientBuckets::set_micro_steps(int64_t count) {
  for (auto& bucket : buckets_) bucket.micro_steps = count;
}

torch::Tensor GradientBuckets::view(size_t parameter) const {
  // Detached, since an optimizer's zero_grad calls detach_(), which autograd refuses for a view.
  return locations_[parameter]
      .memory.as_strided(parameters_[parameter].tensor.sizes(), strides_[parameter], 0)
      .detach();
}

bool GradientBuckets::holds(size_t parameter, const torch::Tensor& gradient) const {
  if (!gradient.defined() || gradient.layout() != torch::kStrided) return false;
  return gradient.data_ptr() == locations_[parameter].memory.data_ptr() &&
         gradient.strides() == torch::IntArrayRef(strides_[parameter]);
}

bool GradientBuckets::holds_grad(size_t parameter) const {
  return holds(parameter, parameters_[parameter].tensor.grad());
}

void GradientBuckets::adopt_grad(size_t parameter) {
  const torch::NoGradGuard no_grad;
  torch::Tensor gradient = claim(parameter);
  gradient.copy_(parameters_[parameter].tensor.grad());
  parameters_[parameter].tensor.mutable_grad() = gradient;
}

}  // namespace lockstep
