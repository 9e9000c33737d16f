#pragma once

#include <functional>
#include <vector>

#include "lockstep/communicator.hpp"
#include "sharding/unit_plan.hpp"

namespace lockstep {

/// The gradients of one trained unit: whole while backward computes them, then averaged over the
/// ranks, each of which keeps those of its shards.
///
///   closed --write--> open --begin_reduce--> reducing --finish_reduce--> closed
///
/// Stage 1 keeps the memory of the whole gradients, and the averaged ones are a part of it. Stages
/// 2 and 3 free it when they are averaged.
class UnitGradients {
 public:
  /// Collective.
  UnitGradients(UnitPlan& unit, const Communicator& comm, const ShardOptions& options);

  /// Returns the memory of a parameter's first gradient since the last average, for a layer to
  /// write the gradient there; undefined if another has been given that memory already.
  torch::Tensor claim(size_t parameter);

  /// Takes over a parameter's first gradient since the last average. Returns the memory that it was
  /// computed in or copied to, for autograd to adopt as the grad of the module's parameter.
  torch::Tensor write(size_t parameter, const torch::Tensor& gradient);

  /// The parameter's grad is complete for this backward; copies it here if it is elsewhere.
  void accumulated(size_t parameter);

  bool is_open() const { return state_ == State::kOpen; }

  /// Whether all parameters got a gradient since begin_backward().
  bool is_complete() const { return arrived_count_ == arrived_.size(); }
  void begin_backward();
  const std::vector<bool>& arrived() const { return arrived_; }  ///< [parameter], in this backward

  /// Begins the mean over the ranks; parameters without a gradient count as zeros. Collective.
  Work begin_reduce(double weight);

  /// Adds the mean to the shards' grads. `used`: [parameter] whether any rank had a gradient;
  /// empty: all had. The others' grads stay as they are.
  void finish_reduce(const std::vector<bool>& used);

  /// Takes the gradients of a virtual shard away, flat: zeros where a parameter has none. They are
  /// there until the next ones are written.
  torch::Tensor take_part();

  /// Adds the mean over all virtual shards, which `fill` writes, to the shards' grads. `used` as
  /// above.
  void put_mean(const std::function<void(const torch::Tensor& mean)>& fill,
                const std::vector<bool>& used);

  /// [parameter] whether this rank had a gradient in the average that is under way.
  const std::vector<bool>& had_gradient() const { return present_; }

  /// After a backward that was not averaged: what this rank has accumulated of its shards becomes
  /// their grads, so that dropping these is noticed.
  void show_local();

  /// Drops what was accumulated and not averaged.
  void drop();

 private:
  enum class State { kClosed, kOpen, kReducing };
  enum class Origin { kNone, kLocal, kMean };  // of a shard's grad

  void open();
  void let_go();
  torch::Tensor memory_of_mean() const;
  void keep_given();
  static void keep(std::vector<torch::Tensor>& tensors);
  torch::Tensor view(size_t parameter) const;
  torch::Tensor own_part(size_t parameter) const;

  UnitPlan& unit_;
  Communicator comm_;
  const bool resident_;
  const bool offloaded_;
  State state_ = State::kClosed;
  torch::Tensor whole_;        // flat; undefined while closed, unless resident
  torch::Tensor mean_;         // flat, of this rank's shard
  std::vector<bool> present_;  // [parameter] has a gradient in whole_
  std::vector<bool> arrived_;  // [parameter] in this backward
  size_t arrived_count_ = 0;
  std::vector<Origin> origin_;  // [parameter]

  // Tensors in whole_ that others may have kept: see Note [Kept gradients].
  std::vector<torch::Tensor> given_;    // [parameter] the shard's grad
  std::vector<torch::Tensor> claimed_;  // [parameter] what claim() returned since the last average
};

}  // namespace lockstep
