#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

namespace lockstep {

/// How a CapturedStep warms up, and how many shapes it keeps.
struct CaptureOptions {
  bool enabled = true;  ///< false: every call runs the function

  /// Calls that run the function before it is captured, at least one. They train like any other.
  /// Later shapes need one.
  int64_t warmup = 3;

  /// Shapes whose graphs are kept; the least recently used is dropped first.
  int max_shapes = 4;
};

/// What a captured step has cost and saved.
struct CaptureStats {
  int64_t captures = 0;  ///< including those of shapes that were dropped since
  int64_t replays = 0;
  int64_t graphs = 0;        ///< of the last replay; more than 1 if ranks communicate between them
  int64_t memory_bytes = 0;  ///< held for the graphs' intermediate results
};

/// A user's training step as CUDA graphs: forward, scaled backward, bucket all-reduce, update and
/// scaler are recorded once and launched together from then on.
///
///     lockstep::CapturedStep step([&](const torch::Tensor& x, const torch::Tensor& y) {
///       auto loss = torch::mse_loss(net(x), y);
///       loss.backward();
///       optimizer.step({.zero_grad = true});
///       return loss;
///     });
///     for (...) loss = step(x, y);
///
/// Inputs are copied into memory that the step owns, unless they are that memory: see inputs(). The
/// result belongs to the caller and is detached. Learning rates of lockstep's optimizers may change
/// between calls, those of torch::optim may not. The function runs in the first calls of each
/// shape, and always on the CPU; after that its host code does not run. It must not wait for the
/// GPU (item(), cpu(), printing a tensor) or branch on values: that is an Error (kCapture) that
/// names the operation. It is thrown once, before the step has done anything; later calls run the
/// function.
class CapturedStep {
 public:
  using Function = std::function<torch::Tensor(const std::vector<torch::Tensor>&)>;

  /// Takes a function of tensors, or of one vector of them.
  template <class Step>
  requires(!std::is_same_v<std::remove_cvref_t<Step>, CapturedStep>) explicit CapturedStep(
      Step step, const CaptureOptions& options = {})
      : CapturedStep(Function(as_function(std::move(step))), options, nullptr) {}

  ~CapturedStep();
  CapturedStep(CapturedStep&&) noexcept;
  CapturedStep& operator=(CapturedStep&&) noexcept;

  /// Runs one step. Inputs with known shapes and dtypes replay what was captured for them.
  torch::Tensor operator()(const std::vector<torch::Tensor>& inputs);

  template <class... Tensors>
  requires(sizeof...(Tensors) > 0 && (std::is_same_v<Tensors, torch::Tensor> && ...)) torch::Tensor
  operator()(const Tensors&... inputs) {
    return (*this)(std::vector<torch::Tensor>{inputs...});
  }

  /// The tensors that the graphs of the last replay read; empty if the last call did not replay. A
  /// loader may write the next batch of that shape into them: passed to the next call, they are not
  /// copied.
  std::vector<torch::Tensor> inputs() const;

  CaptureStats stats() const;

  /// Whether the last call replayed graphs.
  bool replayed() const;
  /// Why it did not, such as "no input is on a GPU"; empty if it did.
  std::string why_not() const;

 private:
  struct State;
  CapturedStep(Function step, const CaptureOptions& options, std::nullptr_t);

  template <class Step>
  static Function as_function(Step step) {
    if constexpr (std::is_invocable_v<Step&, const std::vector<torch::Tensor>&>) {
      return Function(std::move(step));
    } else {
      return [step = std::move(step)](const std::vector<torch::Tensor>& inputs) mutable {
        return apply(step, inputs, std::make_index_sequence<arity<Step>()>());
      };
    }
  }
  template <class Step, size_t N = 1>
  static constexpr size_t arity() {
    static_assert(N <= 16, "a step takes up to 16 tensors, or a vector of them");
    if constexpr (takes<Step>(std::make_index_sequence<N>())) {
      return N;
    } else {
      return arity<Step, N + 1>();
    }
  }
  template <class Step, size_t... I>
  static constexpr bool takes(std::index_sequence<I...>) {
    return std::is_invocable_v<Step&, decltype((void)I, std::declval<const torch::Tensor&>())...>;
  }
  template <class Step, size_t... I>
  static torch::Tensor apply(Step& step, const std::vector<torch::Tensor>& inputs,
                             std::index_sequence<I...>) {
    return step(inputs.at(I)...);
  }

  std::unique_ptr<State> state_;
};

}  // namespace lockstep
