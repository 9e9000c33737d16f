#pragma once

// Everything that differs between libtorch 1.13 and 2.x, and between builds of either.

#include <ATen/autocast_mode.h>
#include <c10/core/Allocator.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/version.h>

#include <cstring>
#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

#define LOCKSTEP_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) ||           \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

namespace lockstep::compat {

#if LOCKSTEP_TORCH_AT_LEAST(2, 3)

/// A CPU allocator with the virtual functions of the libtorch in use.
class CpuAllocatorBase : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override { return allocate_block(bytes); }
  void copy_data(void* destination, const void* source, size_t bytes) const override {
    std::memcpy(destination, source, bytes);
  }
  virtual c10::DataPtr allocate_block(size_t bytes) const = 0;
};

#else

class CpuAllocatorBase : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) const override { return allocate_block(bytes); }
  virtual c10::DataPtr allocate_block(size_t bytes) const = 0;
};

#endif

/// Autocast settings that at::ThreadLocalState does not carry on every version.
struct AutocastDtypes {
  at::ScalarType cpu;
  at::ScalarType cuda;
  bool cache_enabled;

  static AutocastDtypes get() {
#if LOCKSTEP_TORCH_AT_LEAST(2, 4)
    return {at::autocast::get_autocast_dtype(at::kCPU), at::autocast::get_autocast_dtype(at::kCUDA),
            at::autocast::is_autocast_cache_enabled()};
#else
    return {at::autocast::get_autocast_cpu_dtype(), at::autocast::get_autocast_gpu_dtype(),
            at::autocast::is_autocast_cache_enabled()};
#endif
  }

  void set() const {
#if LOCKSTEP_TORCH_AT_LEAST(2, 4)
    at::autocast::set_autocast_dtype(at::kCPU, cpu);
    at::autocast::set_autocast_dtype(at::kCUDA, cuda);
#else
    at::autocast::set_autocast_cpu_dtype(cpu);
    at::autocast::set_autocast_gpu_dtype(cuda);
#endif
    at::autocast::set_autocast_cache_enabled(cache_enabled);
  }
};

/// Turns autocast for CPU operations on or off in this thread.
inline void enable_cpu_autocast(bool enabled) {
#if LOCKSTEP_TORCH_AT_LEAST(2, 4)
  at::autocast::set_autocast_enabled(at::kCPU, enabled);
#else
  at::autocast::set_cpu_enabled(enabled);
#endif
}

/// Guard: hooks registered on these tensors do not run for gradients that are only captured.
/// libtorch 1.13 never runs them there; 2.x does.
class HoldTensorHooks {
 public:
#if LOCKSTEP_TORCH_AT_LEAST(2, 0)
  explicit HoldTensorHooks(const std::vector<at::Tensor>& tensors) {
    std::unordered_set<const c10::TensorImpl*> seen;
    for (const auto& tensor : tensors) {
      if (!tensor.requires_grad() || !seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
      held_.emplace_back(tensor, std::exchange(torch::autograd::impl::hooks(tensor), {}));
    }
  }
  ~HoldTensorHooks() {
    for (auto& [tensor, hooks] : held_) torch::autograd::impl::hooks(tensor) = std::move(hooks);
  }

 private:
  using Hooks = std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>;
  std::vector<std::pair<at::Tensor, Hooks>> held_;

 public:
#else
  explicit HoldTensorHooks(const std::vector<at::Tensor>&) {}
#endif
  HoldTensorHooks(const HoldTensorHooks&) = delete;
  HoldTensorHooks& operator=(const HoldTensorHooks&) = delete;
};

/// AddressSanitizer can only see a use after free when freed blocks are not handed out again.
#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool kReuseCpuBlocks = false;
#else
inline constexpr bool kReuseCpuBlocks = true;
#endif

}  // namespace lockstep::compat
