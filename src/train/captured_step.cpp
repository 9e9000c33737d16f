#include "lockstep/captured_step.hpp"

#include <algorithm>
#include <optional>
#include <utility>

#include "lockstep/error.hpp"
#if LOCKSTEP_CUDA
#include "train/cuda/captured_graphs.hpp"
#endif

namespace lockstep {

struct CapturedStep::State {
  State(Function given, const CaptureOptions& chosen) : step(std::move(given)), options(chosen) {}

  torch::Tensor run(const std::vector<torch::Tensor>& inputs) {
    const torch::Tensor result = step(inputs);
    return result.defined() ? result.detach() : result;
  }

  // The GPU on which the step can be captured; if there is none, sets why_not.
  std::optional<torch::Device> find_gpu(const std::vector<torch::Tensor>& inputs) {
    const auto on_gpu = std::find_if(inputs.begin(), inputs.end(), [](const torch::Tensor& input) {
      return input.defined() && input.is_cuda();
    });
    if (!options.enabled) {
      why_not = "it is off";
    } else if (on_gpu == inputs.end()) {
      why_not = "no input is on a GPU";
    } else {
      return on_gpu->device();
    }
    return std::nullopt;
  }

  Function step;
  CaptureOptions options;
  std::string why_not = "it has not run yet";
#if LOCKSTEP_CUDA
  std::unique_ptr<cuda::CapturedGraphs> graphs;  // null before the first call on a GPU
#endif
};

CapturedStep::CapturedStep(Function step, const CaptureOptions& options, std::nullptr_t)
    : state_(std::make_unique<State>(std::move(step), options)) {}

CapturedStep::~CapturedStep() = default;
CapturedStep::CapturedStep(CapturedStep&&) noexcept = default;
CapturedStep& CapturedStep::operator=(CapturedStep&&) noexcept = default;

torch::Tensor CapturedStep::operator()(const std::vector<torch::Tensor>& inputs) {
  State& state = *state_;
  const auto gpu = state.find_gpu(inputs);
  if (!gpu) return state.run(inputs);
#if LOCKSTEP_CUDA
  if (!state.graphs) state.graphs = std::make_unique<cuda::CapturedGraphs>(*gpu, state.options);
  if (state.graphs->device() != *gpu) {
    throw Error(
        Code::kCapture,
        "the step began on " + state.graphs->device().str() + " and is called on " + gpu->str(),
        "make a CapturedStep for each GPU");
  }
  state.why_not = "the call failed";
  torch::Tensor result = state.graphs->call(state.step, inputs);
  state.why_not = state.graphs->why_not();
  return result;
#else
  state.why_not = "this build of lockstep has no CUDA";
  return state.run(inputs);
#endif
}

std::vector<torch::Tensor> CapturedStep::inputs() const {
#if LOCKSTEP_CUDA
  if (replayed()) return state_->graphs->inputs();
#endif
  return {};
}

CaptureStats CapturedStep::stats() const {
#if LOCKSTEP_CUDA
  if (state_->graphs) return state_->graphs->stats();
#endif
  return {};
}

bool CapturedStep::replayed() const {
  return state_->why_not.empty();
}

std::string CapturedStep::why_not() const {
  return state_->why_not;
}

}  // namespace lockstep
