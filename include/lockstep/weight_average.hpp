#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace lockstep {

class ShardedModel;
template <class Module>
class FullyShardedDataParallel;

/// How fast a WeightAverage forgets.
struct WeightAverageOptions {
  double decay = 0.999;  ///< after each update: decay * average + (1 - decay) * weight

  /// After n updates the decay is (1 + n) / (10 + n) at most, so that the average does not stay
  /// near the first weights of a short training.
  bool warmup = false;

  /// Averages floating-point buffers too, such as BatchNorm's statistics. Without it an evaluation
  /// uses the model's own.
  bool buffers = false;
};

/// The exponential moving average of a model's weights, which often evaluates better than the
/// weights: torch.optim.swa_utils.AveragedModel with an avg_fn of that kind.
///
///     lockstep::WeightAverage average(*net, {.decay = 0.999});
///     ... optimizer.step(); average.update();
///     {
///       const lockstep::UseAverage averaged(average);
///       evaluate(net);                    // with the averages
///     }                                   // the weights are back
///
/// Under MasterWeights it averages the float32 weights; construct it after them. Ranks with the
/// same weights have the same averages, so nothing is sent. A rank with a part of the model, such
/// as the shards of a FullyShardedDataParallel, averages that part; UseAverage is then collective.
/// The model must outlive the average. Checkpoint::add() saves it.
class WeightAverage {
 public:
  explicit WeightAverage(torch::nn::Module& module, const WeightAverageOptions& options = {});
  explicit WeightAverage(ShardedModel& model, const WeightAverageOptions& options = {});
  template <class Module>
  explicit WeightAverage(FullyShardedDataParallel<Module>& fsdp,
                         const WeightAverageOptions& options = {})
      : WeightAverage(fsdp.sharded(), options) {}
  ~WeightAverage();
  WeightAverage(const WeightAverage&) = delete;
  WeightAverage& operator=(const WeightAverage&) = delete;

  /// Call it after each update of the weights. The first one takes the weights as they are. It
  /// cannot be part of a CapturedStep: call it after the step.
  void update();

  int64_t updates() const;
  double decay() const;  ///< of the next update

  /// An average: its name in the module, the weight that it is of, and its values.
  struct Entry {
    std::string name;
    torch::Tensor of;       ///< the parameter or buffer itself
    torch::Tensor average;  ///< float64 for a weight in float64, else float32
  };
  const std::vector<Entry>& entries() const;

  /// Continues after this many updates, with the averages that entries() have now.
  void set_updates(int64_t updates);

 private:
  friend class UseAverage;
  struct State;
  void exchange();

  std::unique_ptr<State> state_;
};

/// Guard: the module has the averages in place of its weights, to evaluate or to save them. The
/// module must not be trained while the guard lives.
class UseAverage {
 public:
  explicit UseAverage(WeightAverage& average);
  ~UseAverage();
  UseAverage(const UseAverage&) = delete;
  UseAverage& operator=(const UseAverage&) = delete;

 private:
  WeightAverage& average_;
};

}  // namespace lockstep
