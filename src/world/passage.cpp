#include "world/passage.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "device/dtype_map.hpp"
#include "device/stream_order.hpp"
#include "lockstep/error.hpp"
#include "lockstep/tensor_text.hpp"

namespace lockstep {
namespace {

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
torch::Tensor sent_for(const torch::Tensor& tensor, Route::Way way) {
  switch (way) {
    case Route::Way::kWhereTheyLie:
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

Route Route::of(const CommState& state, std::initializer_list<torch::Tensor> tensors) {
  const auto on_cpu = [](const torch::Tensor& tensor) {
    return !tensor.defined() || tensor.is_cpu();
  };
  if (std::all_of(tensors.begin(), tensors.end(), on_cpu)) return {*state.host};
  const bool reached = std::all_of(tensors.begin(), tensors.end(), [&](const auto& tensor) {
    return tensor.defined() && state.reaches(tensor.device());
  });
  if (reached) return {*state.gpu};
  return {*state.host, state.host->size() == 1 ? Way::kStay : Way::kThroughHost};
}

Route Route::of_message(const CommState& state, const torch::Tensor& tensor) {
  Route route = of(state, {tensor});
  if (route.way == Way::kStay) route.way = Way::kThroughHost;
  return route;
}

Passage::Passage(const char* operation, const torch::Tensor& tensor, Route::Way way)
    : dtype_(require_usable(operation, tensor)), original_(tensor), sent_(sent_for(tensor, way)) {}

int64_t Passage::bytes() const {
  return static_cast<int64_t>(original_.nbytes());
}

void Passage::keep_for_current_stream() const {
  lockstep::keep_for_current_stream(sent_);
}

void Passage::copy_back() const {
  if (!sent_.defined() || sent_.device() == original_.device()) return;
  const torch::NoGradGuard no_grad;
  original_.copy_(sent_);
}

}  // namespace lockstep
