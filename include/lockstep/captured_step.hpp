#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

namespace lockstep {

struct CaptureOptions {
  bool enabled = true;  ///< false: every call runs the function as it is

  /// Calls that run the function as it is before it is captured, one at least. They train, too.
  /// Shapes that come later need one.
  int64_t warmup = 3;

  /// Shapes whose graphs are kept; the one that was not used the longest goes first.
  int max_shapes = 4;
};

/// What a captured step has cost and saved.
struct CaptureStats {
  int64_t captures = 0;  ///< also those of shapes that were dropped since
  int64_t replays = 0;
  int64_t graphs = 0;        ///< of the last replay: more than 1 where ranks talk between them
  int64_t memory_bytes = 0;  ///< held for the graphs' intermediate results, while they are kept
};

/// A user's training step as one CUDA graph: forward, scaled backward, bucket all-reduce, update
/// and scaler are recorded once and launched together ever after.
///
///     lockstep::CapturedStep step([&](const torch::Tensor& x, const torch::Tensor& y) {
///       auto loss = torch::mse_loss(net(x), y);
///       loss.backward();
///       optimizer.step({.zero_grad = true});
///       return loss;
///     });
///     for (...) loss = step(x, y);
///
/// Inputs are copied into memory of the step's own, unless they are that: see inputs(). What is
/// returned is the caller's and has no history. Rates of lockstep's optimizers may change between
/// calls, those of torch::optim may not. The function runs in the first calls of each shape, and on
/// the CPU always; from then on its host code does not run. It must not wait for the GPU (item(),
/// cpu(), printing a tensor), nor decide by values: that is an Error (kCapture) that names the
/// operation. It is thrown once, before the step has done anything; later calls run the function as
/// it is.
class CapturedStep {
 public:
  using Function = std::function<torch::Tensor(const std::vector<torch::Tensor>&)>;

  /// A function of tensors, or of one vector of them.
  template <class Step>
  requires(!std::is_same_v<std::remove_cvref_t<Step>, CapturedStep>) explicit CapturedStep(
      Step step, const CaptureOptions& options = {})
      : CapturedStep(Function(as_function(std::move(step))), options, nullptr) {}

  ~CapturedStep();
  CapturedStep(CapturedStep&&) noexcept;
  CapturedStep& operator=(CapturedStep&&) noexcept;

  /// One step. Tensors of the same shapes and dtypes as before replay what was captured.
  torch::Tensor operator()(const std::vector<torch::Tensor>& inputs);

  template <class... Tensors>
  requires(sizeof...(Tensors) > 0 && (std::is_same_v<Tensors, torch::Tensor> && ...)) torch::Tensor
  operator()(const Tensors&... inputs) {
    return (*this)(std::vector<torch::Tensor>{inputs...});
  }

  /// What the graphs of the last replay read; none where the last call replayed nothing. A loader
  /// may write the next batch of that shape there: given to the next call, they are not copied.
  std::vector<torch::Tensor> inputs() const;

  CaptureStats stats() const;

  /// Whether the last call replayed graphs; otherwise why it did not, such as "on the CPU".
  bool replayed() const;
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
