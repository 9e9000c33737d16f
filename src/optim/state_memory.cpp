#include "optim/state_memory.hpp"

#include <fmt/format.h>

#include <map>
#include <utility>

#include "device/capture.hpp"
#include "lockstep/error.hpp"
#include "lockstep/tensor_text.hpp"

namespace lockstep {
namespace {

constexpr int64_t kAlignBytes = 64;  // a cache line, and a vector of the widest instructions

torch::Tensor empty_like_weight(const torch::Tensor& weight) {
  return torch::empty_strided(weight.sizes(), weight.strides(),
                              weight.options().requires_grad(false));
}

}  // namespace

bool same_memory_order(const torch::Tensor& a, const torch::Tensor& b) {
  if (a.sizes() != b.sizes()) return false;
  for (int64_t d = 0; d < a.dim(); ++d) {
    if (a.size(d) > 1 && a.stride(d) != b.stride(d)) return false;
  }
  return true;
}

std::vector<torch::Tensor> zeros_like_all(std::span<const torch::Tensor> models) {
  std::vector<torch::Tensor> made(models.size());
  if (models.empty()) return made;
  require_not_capturing("an optimizer's first step, which makes its state,",
                        "let a step run before it is captured (CaptureOptions::warmup)");
  std::map<std::pair<torch::ScalarType, std::string>, std::vector<size_t>> alike;
  for (size_t i = 0; i < models.size(); ++i) {
    if (models[i].numel() == 0) {
      made[i] = empty_like_weight(models[i]);
    } else {
      alike[{models[i].scalar_type(), models[i].device().str()}].push_back(i);
    }
  }
  for (const auto& [kind, indices] : alike) {
    const auto options = models[indices[0]].options().requires_grad(false);
    const auto width = static_cast<int64_t>(models[indices[0]].element_size());
    const auto padded_bytes = [&](size_t i) {
      return (models[i].numel() * width + kAlignBytes - 1) / kAlignBytes * kAlignBytes;
    };
    int64_t bytes = 0;
    for (const size_t i : indices) bytes += padded_bytes(i);
    const torch::Tensor flat = torch::zeros({bytes / width}, options);
    auto* place = static_cast<char*>(flat.data_ptr());
    for (const size_t i : indices) {
      made[i] = torch::from_blob(
          place, models[i].sizes(), models[i].strides(), [flat](void*) {}, options);
      place += padded_bytes(i);
    }
  }
  return made;
}

torch::Tensor fit_state(const torch::Tensor& state, const torch::Tensor& weight,
                        std::string_view what) {
  if (state.sizes() != weight.sizes()) {
    throw Error(Code::kTensorMismatch,
                fmt::format("the optimizer's {} has shape {} and its parameter {}", what,
                            shape_text(state.sizes()), shape_text(weight.sizes())),
                "load a state that was saved for the same model, with the parameters in the same "
                "order");
  }
  if (state.dtype() == weight.dtype() && state.device() == weight.device() &&
      state.strides() == weight.strides()) {
    return state;
  }
  require_not_capturing("moving an optimizer's state",
                        "let a step run before it is captured (CaptureOptions::warmup)");
  torch::Tensor fitted = empty_like_weight(weight);
  fitted.copy_(state);
  return fitted;
}

}  // namespace lockstep
