#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <torch/types.h>

#include <functional>
#include <map>
#include <optional>
#include <utility>

#include "device/rng.hpp"
#include "lockstep/device.hpp"
#include "lockstep/pipeline.hpp"
#include "pipeline/split_backward.hpp"

namespace lockstep {

/// What a stage must know of a micro-batch in a step.
struct MicroBatchFacts {
  int index = 0;
  int64_t part = 0;  ///< its number among those of all data ranks, with virtual shards; else index
  uint64_t step_seed = 0;
  bool wants_input_gradient = true;  ///< false in stage 0 where x requires none
  torch::Tensor target;              ///< last stage only, where a loss is computed
  bool has_loss = true;              ///< last stage only; false: no term in the batch's loss
  torch::Tensor loss_gradient;       ///< last stage only: the gradient of its loss
  bool compares_loss = false;        ///< its rows take part in a LossComparison
};

/// The loss of rows of two micro-batches together, and the mean of their own losses by rows. They
/// differ if the loss is not a mean over rows, as that of a function that ignores some targets.
struct LossComparison {
  double together = 0;
  double apart = 0;

  bool differs() const;
};

/// Note [Micro-batches without a loss]
/// The mean over no terms is 0 / 0, and 0 times that is not zero. So the loss function is not
/// called for a micro-batch that has no term in the batch's loss: zeros go backward from the output
/// of the model instead, and every gradient they produce is the zero that one device would add.

/// One stage on its device: a module, and the micro-batches that went forward but not yet backward.
/// All calls come from the thread that works for the device.
class Stage {
 public:
  /// Moves the module's weights to the device. `loss` is empty in all but the last stage.
  Stage(int index, torch::nn::Sequential module, Device& device, bool recompute,
        std::function<torch::Tensor(const torch::Tensor&, const torch::Tensor&)> loss);

  int index() const { return index_; }
  bool is_last() const { return static_cast<bool>(loss_); }
  bool recomputes() const { return recompute_; }
  Device& device() const { return device_; }
  const torch::nn::Sequential& module() const { return module_; }

  /// Returns the output for the next stage; in the last stage the micro-batch's loss, or 0 if it
  /// has none. The result is detached from the graph.
  torch::Tensor forward(const MicroBatchFacts& facts, const torch::Tensor& input);

  /// Returns the input's gradient, undefined if it is not wanted. `gradient` is the output's.
  torch::Tensor backward(const MicroBatchFacts& facts, const torch::Tensor& gradient);

  /// The same in two calls: first what the previous stage waits for, later the weights' gradients.
  torch::Tensor backward_input(const MicroBatchFacts& facts, const torch::Tensor& gradient);
  void backward_weight(int micro_batch);

  /// Whether backward_input() has left the weights' gradients of this micro-batch to
  /// backward_weight().
  bool awaits_weights(int micro_batch) const;

  torch::Tensor evaluate(const torch::Tensor& input);

  /// Drops micro-batches that a failed step left behind.
  void drop_micro_batches() {
    held_.clear();
    compared_ = {};
  }

  /// The comparison of two micro-batches' losses in the last step, if the plan asked for one.
  std::optional<LossComparison> take_comparison() {
    compared_ = {};  // a first micro-batch without a second
    return std::exchange(comparison_, {});
  }

 private:
  struct Held {
    torch::Tensor input;   // a leaf; requires a gradient if that is wanted
    torch::Tensor output;  // or loss; undefined in a stage that recomputes
    std::optional<SplitBackward> split;
  };

  torch::Tensor compute(const MicroBatchFacts& facts, const torch::Tensor& input);
  torch::Tensor compute_for_later(const MicroBatchFacts& facts, const torch::Tensor& input);
  Held take(const MicroBatchFacts& facts);
  void compare_loss(const MicroBatchFacts& facts, const torch::Tensor& output,
                    const torch::Tensor& loss);
  torch::Tensor root_gradient(const MicroBatchFacts& facts, const Held& held,
                              const torch::Tensor& gradient) const;

  int index_;
  torch::nn::Sequential module_;
  Device& device_;
  bool recompute_;
  std::function<torch::Tensor(const torch::Tensor&, const torch::Tensor&)> loss_;
  DeviceRng rng_;
  std::map<int, Held> held_;  // [micro-batch]

  // The first of two micro-batches whose losses are compared; undefined until it was computed.
  struct Compared {
    torch::Tensor output, target;
  } compared_;
  std::optional<LossComparison> comparison_;
};

}  // namespace lockstep
