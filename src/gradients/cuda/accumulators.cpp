#include "gradients/gradient_hooks.hpp"

#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

namespace lockstep::cuda {

void accumulate_on_current_stream(std::span<const TrainedParameter> parameters) {
  for (const auto& [name, tensor] : parameters) {
    if (!tensor.is_cuda()) continue;
    const auto current = c10::cuda::getCurrentCUDAStream(tensor.device().index()).unwrap();
    const auto accumulator = torch::autograd::impl::grad_accumulator(tensor);
    if (!accumulator) continue;  // frozen since it was wrapped
    if (accumulator->input_metadata(0).stream() == current) continue;
    accumulator->clear_input_metadata();
    accumulator->add_input_metadata(tensor);  // notes the current stream
  }
}

}  // namespace lockstep::cuda
