#pragma once

// Everything that differs between libtorch 1.13 and 2.x, and between builds of either.

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/Allocator.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/optim/optimizer.h>
#include <torch/version.h>

#include <cstring>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <type_traits>
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

/// Autocast of one kind of device, in this thread. CPU and CUDA only.
struct AutocastSwitch {
  bool enabled;
  at::ScalarType dtype;

  static AutocastSwitch get(at::DeviceType kind) {
#if LOCKSTEP_TORCH_AT_LEAST(2, 4)
    return {at::autocast::is_autocast_enabled(kind), at::autocast::get_autocast_dtype(kind)};
#else
    return kind == at::kCPU
               ? AutocastSwitch{at::autocast::is_cpu_enabled(),
                                at::autocast::get_autocast_cpu_dtype()}
               : AutocastSwitch{at::autocast::is_enabled(), at::autocast::get_autocast_gpu_dtype()};
#endif
  }

  void set(at::DeviceType kind) const {
#if LOCKSTEP_TORCH_AT_LEAST(2, 4)
    at::autocast::set_autocast_enabled(kind, enabled);
    at::autocast::set_autocast_dtype(kind, dtype);
#else
    if (kind == at::kCPU) {
      at::autocast::set_cpu_enabled(enabled);
      at::autocast::set_autocast_cpu_dtype(dtype);
    } else {
      at::autocast::set_enabled(enabled);
      at::autocast::set_autocast_gpu_dtype(dtype);
    }
#endif
  }
};

/// Turns autocast for CPU operations on or off in this thread.
inline void enable_cpu_autocast(bool enabled) {
  AutocastSwitch{enabled, AutocastSwitch::get(at::kCPU).dtype}.set(at::kCPU);
}

/// Whether CPU operations can be computed in fp16 under autocast: 2.5 is the first that promises
/// it.
inline constexpr bool kCpuAutocastHalf = LOCKSTEP_TORCH_AT_LEAST(2, 5);

/// Causal attention of [batch, heads, positions, head width] without a tensor of all weights; none
/// where libtorch has no such operation.
inline std::optional<at::Tensor> causal_attention([[maybe_unused]] const at::Tensor& query,
                                                  [[maybe_unused]] const at::Tensor& key,
                                                  [[maybe_unused]] const at::Tensor& value) {
#if LOCKSTEP_TORCH_AT_LEAST(2, 1)
  return at::scaled_dot_product_attention(query, key, value, {}, 0.0, /*is_causal=*/true);
#else
  return std::nullopt;
#endif
}

/// Whether somebody listens to the gradients that arrive at this node.
inline bool has_pre_hooks(torch::autograd::Node& node) {
#if LOCKSTEP_TORCH_AT_LEAST(2, 0)
  if (!node.tensor_pre_hooks().empty() || !node.retains_grad_hooks().empty()) return true;
#endif
  return !node.pre_hooks().empty();
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

// What the fused optimizers need.
namespace lockstep::compat {

/// Keys of Optimizer::state(): text that shows the parameter's address in 1.13, the address in 2.x.
using OptimizerStateKey =
    std::remove_cvref_t<decltype(std::declval<torch::optim::Optimizer&>().state())>::key_type;

template <class Key = OptimizerStateKey>
Key optimizer_state_key(c10::TensorImpl* parameter) {
  if constexpr (std::is_pointer_v<Key>) {
    return parameter;
  } else {
    std::ostringstream text;
    text << parameter;
    return text.str();
  }
}

}  // namespace lockstep::compat

// What ranks need that are threads on one GPU.
#include <c10/core/AutogradState.h>

namespace lockstep::compat {

/// Guard: backward runs on the thread that calls it, on GPUs too. Otherwise all ranks of a process
/// that share a GPU would share the engine's one thread for it, and wait for each other there.
/// libtorch 1.13 cannot do so.
class BackwardOnThisThread {
 public:
#if LOCKSTEP_TORCH_AT_LEAST(2, 0)
  BackwardOnThisThread() : before_(state().get_multithreading_enabled()) {
    state().set_multithreading_enabled(false);
  }
  ~BackwardOnThisThread() {
    state().set_multithreading_enabled(before_);
  }

 private:
  static c10::AutogradState& state() {
    return c10::AutogradState::get_tls_state();
  }
  bool before_;

 public:
#else
  BackwardOnThisThread() {}  // not defaulted: a guard is never an unused variable
#endif
  BackwardOnThisThread(const BackwardOnThisThread&) = delete;
  BackwardOnThisThread& operator=(const BackwardOnThisThread&) = delete;
};

}  // namespace lockstep::compat
