#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <torch/types.h>

#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "device/rng.hpp"
#include "lockstep/device.hpp"
#include "lockstep/pipeline.hpp"
#include "pipeline/split_backward.hpp"

namespace lockstep {

/// Where a micro-batch stands in a step: what its random numbers and its share depend on.
struct MicroBatchFacts {
  int index = 0;
  uint64_t step_seed = 0;
  bool wants_input_gradient = true;  ///< false: nobody waits for what the first stage would give
  torch::Tensor target;              ///< on the last stage's device, where a loss is computed
  bool has_loss = true;              ///< last stage only; false: it has no term in the batch's loss
  torch::Tensor loss_gradient;       ///< what goes backward into its loss; last stage only
};

/// Note [Micro-batches without a loss]
/// The mean over no terms is 0 / 0, and 0 times that is no zero. So the loss function is not called
/// for a micro-batch that has no term in the batch's loss: zeros go backward into the output of the
/// model instead, and every gradient that comes of them is the zero that one device would add.

/// One stage on its device: a module, and the micro-batches that went forward but not yet backward.
/// All calls come from the thread that works for the device.
class Stage {
 public:
  /// Moves the module's weights to the device. `loss` is empty for all but the last.
  Stage(int index, torch::nn::Sequential module, Device& device, bool recompute,
        std::function<torch::Tensor(const torch::Tensor&, const torch::Tensor&)> loss);

  int index() const { return index_; }
  bool is_last() const { return static_cast<bool>(loss_); }
  bool recomputes() const { return recompute_; }
  Device& device() const { return device_; }
  const torch::nn::Sequential& module() const { return module_; }

  /// The output for the next stage; of the last one the micro-batch's loss, 0 where it has none.
  /// Cut off from the graph.
  torch::Tensor forward(const MicroBatchFacts& facts, const torch::Tensor& input);

  /// The input's gradient, undefined where nobody wants it. `gradient` is the output's.
  torch::Tensor backward(const MicroBatchFacts& facts, const torch::Tensor& gradient);

  /// The same in two calls: here only what the stage before waits for,
  torch::Tensor backward_input(const MicroBatchFacts& facts, const torch::Tensor& gradient);
  /// and here the gradients of the weights.
  void backward_weight(int micro_batch);

  torch::Tensor evaluate(const torch::Tensor& input);

  /// Forgets micro-batches that a failed step left behind.
  void drop_micro_batches() { held_.clear(); }

 private:
  struct Held {
    torch::Tensor input;   // a leaf; requires a gradient where that is wanted
    torch::Tensor output;  // or loss; undefined where it is computed again
    std::optional<SplitBackward> split;
  };

  torch::Tensor compute(const MicroBatchFacts& facts, const torch::Tensor& input);
  torch::Tensor compute_for_later(const MicroBatchFacts& facts, const torch::Tensor& input);
  Held take(const MicroBatchFacts& facts);
  torch::Tensor root_gradient(const MicroBatchFacts& facts, const Held& held,
                              const torch::Tensor& gradient) const;

  int index_;
  torch::nn::Sequential module_;
  Device& device_;
  bool recompute_;
  std::function<torch::Tensor(const torch::Tensor&, const torch::Tensor&)> loss_;
  DeviceRng rng_;
  std::map<int, Held> held_;  // [micro-batch]
};

}  // namespace lockstep
