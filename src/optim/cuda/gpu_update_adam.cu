#include "optim/cuda/gpu_update.cuh"

namespace lockstep {

void gpu_update_adam(std::span<const GpuUpdateItem> items, bool store_gradients,
                     CudaStream stream) {
  gpu::update_kinds<gpu::AdamUpdate>(items, store_gradients, stream);
}

}  // namespace lockstep
