#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/detail/tensor_tree.hpp"

namespace lockstep {

namespace detail {

/// What a checkpointed function returned: its tensors and their arrangement (structure_of).
struct CheckpointedOutput {
  std::vector<torch::Tensor> tensors;
  std::string structure;
};

/// Calls the function with these tensors in place of those of its arguments.
using CheckpointedCall = std::function<CheckpointedOutput(const std::vector<torch::Tensor>&)>;

/// Runs `first` now and `again` in backward, with the same inputs; returns the outputs' tensors.
std::vector<torch::Tensor> run_checkpointed(const std::vector<torch::Tensor>& inputs,
                                            const CheckpointedCall& first, CheckpointedCall again);

template <class T>
inline constexpr bool is_module_pointer = false;
template <class T>
inline constexpr bool is_module_pointer<std::shared_ptr<T>> =
    std::is_base_of_v<torch::nn::Module, T>;

template <class Function, class... Inputs>
decltype(auto) call_function_or_module(Function& function, Inputs&&... inputs) {
  if constexpr (is_module_pointer<std::remove_const_t<Function>>) {
    return function->forward(std::forward<Inputs>(inputs)...);
  } else if constexpr (std::is_base_of_v<torch::detail::ModuleHolderIndicator,
                                         std::remove_const_t<Function>>) {
    return function->forward(std::forward<Inputs>(inputs)...);
  } else {
    return function(std::forward<Inputs>(inputs)...);
  }
}

}  // namespace detail

/// Activation checkpointing, as torch.utils.checkpoint does it: calls a function or a module, keeps
/// only its inputs, and calls it again in backward to get what backward needs. Memory for the
/// activations inside is needed once for all functions that are checkpointed one after another.
///
///     for (auto& block : blocks) x = lockstep::checkpoint_activations(block, x);
///
/// Outputs and gradients have the bits that they have without it: the second call draws the same
/// random numbers and runs under the same Autocast. Inputs and the result may be any values;
/// tensors inside tuples, vectors, optionals and maps are found. Calls nest. Without grad mode it
/// is a plain call.
///
/// The function is copied and lives until backward, as must what it refers to. It must compute the
/// same both times (an Error names the first difference), must not change its inputs in place, and
/// must take tensors that require a gradient and were computed outside as arguments; parameters are
/// found. Its side effects, such as BatchNorm's running statistics, happen twice, as in PyTorch. It
/// is not for backward with create_graph.
template <class Function, class... Inputs>
auto checkpoint_activations(Function&& function, Inputs&&... inputs) {
  using Call = std::decay_t<Function>;
  using Arguments = std::tuple<std::decay_t<Inputs>...>;
  using Result = std::decay_t<decltype(detail::call_function_or_module(
      std::declval<Call&>(), std::declval<std::decay_t<Inputs>&>()...))>;
  static_assert(!std::is_void_v<Result>, "a function that is checkpointed returns its outputs");

  if (!torch::GradMode::is_enabled()) {
    return Result(detail::call_function_or_module(function, std::forward<Inputs>(inputs)...));
  }
  Arguments arguments(std::forward<Inputs>(inputs)...);
  const auto tensors = tensors_of(arguments);
  // The tensors are kept apart, where changes of them are noticed.
  replace_tensors(arguments, std::vector<torch::Tensor>(tensors.size()));
  Call call(std::forward<Function>(function));
  const auto call_with = [](Call& target, Arguments mine,
                            const std::vector<torch::Tensor>& given) -> Result {
    replace_tensors(mine, given);
    return std::apply(
        [&](auto&... parts) -> Result { return detail::call_function_or_module(target, parts...); },
        mine);
  };
  std::optional<Result> result;
  const auto outputs = detail::run_checkpointed(
      tensors,
      [&](const std::vector<torch::Tensor>& given) -> detail::CheckpointedOutput {
        result.emplace(call_with(call, arguments, given));
        return {tensors_of(*result), structure_of(*result)};
      },
      [call, arguments,
       call_with](const std::vector<torch::Tensor>& given) mutable -> detail::CheckpointedOutput {
        const Result again = call_with(call, arguments, given);
        return {tensors_of(again), structure_of(again)};
      });
  replace_tensors(*result, outputs);
  return std::move(*result);
}

}  // namespace lockstep
