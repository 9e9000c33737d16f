#include "world/comm_state.hpp"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <algorithm>

#include "base/machine.hpp"
#include "base/running_clock.hpp"
#include "device/dtype_map.hpp"
#include "device/streams.hpp"
#include "lockstep/error.hpp"
#include "lockstep/tensor_text.hpp"
#include "world/gpu_backends.hpp"

namespace lockstep {
namespace {

c10::Stream current_stream_on(c10::Device device) {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(device);
}

void order_streams(c10::Stream first, c10::Stream then) {
  if (first == then) return;
  c10::Event event(c10::DeviceType::CUDA);
  event.record(first);
  event.block(then);
}

Dtype require_usable(const char* operation, const torch::Tensor& tensor) {
  if (!tensor.defined()) {
    throw Error(Code::kTensorMismatch, fmt::format("{} was given an undefined tensor", operation),
                "give every rank a tensor of the same count and dtype");
  }
  if (tensor.layout() != torch::kStrided || !tensor.is_contiguous()) {
    throw Error(Code::kTensorMismatch,
                fmt::format("{} was given a tensor of shape {} that is not dense and contiguous",
                            operation, shape_text(tensor.sizes())),
                "pass tensor.contiguous(), and copy the result back");
  }
  const auto dtype = dtype_of(tensor.scalar_type());
  if (!dtype) {
    throw Error(
        Code::kTensorMismatch,
        fmt::format("{} cannot move {} tensors", operation, dtype_text(tensor.scalar_type())),
        "use a real floating-point, integer or bool type");
  }
  return *dtype;
}

// What the backend gets for the tensor. Where it is the tensor itself, memory that was made for
// another stream than the call's must not be handed out again before the call is done.
torch::Tensor stage(const torch::Tensor& tensor, Route::Way way) {
  switch (way) {
    case Route::Way::kDirect:
      keep_for_current_stream(tensor);
      return tensor.detach();
    case Route::Way::kThroughHost:
      return tensor.is_cpu() ? tensor.detach() : tensor.detach().cpu();
    case Route::Way::kStay:
      break;
  }
  return {};
}

}  // namespace

void SideStream::follow_current() const {
  order_streams(current_stream_on(stream().device()), stream());
}

void SideStream::hold_back_current() const {
  order_streams(stream(), current_stream_on(stream().device()));
}

CommState::CommState(std::unique_ptr<Backend> on_host, std::unique_ptr<Backend> on_gpu,
                     int number_of_gpu, std::chrono::milliseconds limit)
    : host(std::move(on_host)), gpu(std::move(on_gpu)), gpu_index(number_of_gpu), timeout(limit) {
  avoid_hidden_amx();
  if (gpu) host->while_waiting([on_gpu = gpu.get()] { return on_gpu->progress(); });
}

CommState::~CommState() {
  host->while_waiting(nullptr);
}

CallContext CommState::context(const Backend& backend, const CallOptions& options) const {
  const auto limit = options.timeout.value_or(timeout);
  return {.deadline_ns =
              running_ns() + std::chrono::duration_cast<std::chrono::nanoseconds>(limit).count(),
          .label = options.label,
          .stream = backend.on_gpu() ? current_cuda_stream(gpu_index) : nullptr};
}

Route Route::of(const CommState& state, std::initializer_list<torch::Tensor> tensors) {
  const auto on_cpu = [](const torch::Tensor& tensor) {
    return !tensor.defined() || tensor.is_cpu();
  };
  if (std::all_of(tensors.begin(), tensors.end(), on_cpu)) return {*state.host};
  const bool reached = std::all_of(tensors.begin(), tensors.end(), [&](const auto& tensor) {
    return !tensor.defined() || state.reaches(tensor.device());
  });
  if (reached) return {*state.gpu};
  return {*state.host, state.host->size() == 1 ? Way::kStay : Way::kThroughHost};
}

Route Route::of_message(const CommState& state, const torch::Tensor& tensor) {
  Route route = of(state, {tensor});
  if (route.way == Way::kStay) route.way = Way::kThroughHost;
  return route;
}

StagedTensor::StagedTensor(const char* operation, const torch::Tensor& tensor, Route::Way way)
    : dtype_(require_usable(operation, tensor)), original_(tensor), staged_(stage(tensor, way)) {}

int64_t StagedTensor::bytes() const {
  return static_cast<int64_t>(original_.nbytes());
}

void StagedTensor::keep_for_current_stream() const {
  lockstep::keep_for_current_stream(staged_);
}

void StagedTensor::copy_back() const {
  if (!staged_.defined() || staged_.device() == original_.device()) return;
  const torch::NoGradGuard no_grad;
  original_.copy_(staged_);
}

void StagedTensor::copy_from(const StagedTensor& input) const {
  const torch::NoGradGuard no_grad;
  original_.view({-1}).copy_(input.original_.view({-1}));
}

}  // namespace lockstep
