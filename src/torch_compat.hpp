#pragma once

// Everything that differs between libtorch 1.13 and 2.x, and between builds of either.

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
#if LOCKSTEP_TORCH_AT_LEAST(2, 4)
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#endif

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

/// Whether fused_sgd_ and fused_adamw_ are there.
inline constexpr bool kFusedCudaUpdates = LOCKSTEP_TORCH_AT_LEAST(2, 4);

/// PyTorch's fused updates of tensor lists on one GPU. Gradients are divided by grad_scale, and
/// nothing changes where found_inf is 1; both are float scalars on that GPU, or undefined.
struct FusedScaling {
  at::Tensor grad_scale;
  at::Tensor found_inf;
};

#if LOCKSTEP_TORCH_AT_LEAST(2, 4)

inline std::optional<at::Tensor> if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

inline void fused_sgd_(at::TensorList weights, at::TensorList gradients, at::TensorList momenta,
                       double weight_decay, double momentum, double lr, double dampening,
                       bool nesterov, bool is_first_step, const FusedScaling& scaling) {
  at::_fused_sgd_(weights, gradients, momenta, weight_decay, momentum, lr, dampening, nesterov,
                  /*maximize=*/false, is_first_step, if_defined(scaling.grad_scale),
                  if_defined(scaling.found_inf));
}

inline void fused_adamw_(at::TensorList weights, at::TensorList gradients, at::TensorList exp_avgs,
                         at::TensorList exp_avg_sqs, at::TensorList steps, double lr, double beta1,
                         double beta2, double weight_decay, double eps,
                         const FusedScaling& scaling) {
  at::_fused_adamw_(weights, gradients, exp_avgs, exp_avg_sqs, /*max_exp_avg_sqs=*/{}, steps, lr,
                    beta1, beta2, weight_decay, eps, /*amsgrad=*/false, /*maximize=*/false,
                    if_defined(scaling.grad_scale), if_defined(scaling.found_inf));
}

#else

inline void fused_sgd_(at::TensorList, at::TensorList, at::TensorList, double, double, double,
                       double, bool, bool, const FusedScaling&) {
  TORCH_INTERNAL_ASSERT(kFusedCudaUpdates);
}

inline void fused_adamw_(at::TensorList, at::TensorList, at::TensorList, at::TensorList,
                         at::TensorList, double, double, double, double, double,
                         const FusedScaling&) {
  TORCH_INTERNAL_ASSERT(kFusedCudaUpdates);
}

#endif

}  // namespace lockstep::compat
