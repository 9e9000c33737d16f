#include "parallel/gradient_streams.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#if LOCKSTEP_CUDA
#include "parallel/cuda/accumulators.hpp"
#endif

namespace lockstep {

GradientStreams::GradientStreams(std::span<const TrainedParameter> parameters)
    : parameters_(parameters) {
  for (const auto& [name, tensor] : parameters_) {
    const bool known = std::find(gpus_.begin(), gpus_.end(), tensor.device()) != gpus_.end();
    if (tensor.is_cuda() && !known) gpus_.push_back(tensor.device());
  }
}

void GradientStreams::follow_current() {
#if LOCKSTEP_CUDA
  cuda::accumulate_on_current_stream(parameters_);
#endif
  streams_.clear();
  for (const auto& gpu : gpus_) {
    streams_.push_back(c10::impl::VirtualGuardImpl(gpu.type()).getStream(gpu));
  }
}

}  // namespace lockstep
