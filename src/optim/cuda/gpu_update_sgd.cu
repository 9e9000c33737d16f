#include "optim/cuda/gpu_update.cuh"

namespace lockstep {

void gpu_update_sgd(std::span<const GpuUpdateItem> items, bool store_gradients, CudaStream stream) {
  gpu::update_kinds<gpu::SgdUpdate<true>>(items, store_gradients, stream);
  gpu::update_kinds<gpu::SgdUpdate<false>>(items, store_gradients, stream);
}

}  // namespace lockstep
