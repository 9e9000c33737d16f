#pragma once

#include <exception>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "device/parameter_notes.hpp"
#include "device/storage_watch.hpp"
#include "gradients/gradient_hooks.hpp"
#include "gradients/part_sums.hpp"
#include "gradients/trained_parameters.hpp"
#include "gradients/virtual_shards.hpp"
#include "lockstep/error.hpp"
#include "lockstep/fully_sharded_data_parallel.hpp"
#include "lockstep/master_weights.hpp"
#include "sharding/unit_gradients.hpp"
#include "sharding/unit_plan.hpp"
#include "sharding/whole_parameters.hpp"
#include "verify/step_recorder.hpp"

namespace lockstep {

/// A unit with its memory.
struct ShardedUnit {
  ShardedUnit(UnitPlan planned, const Communicator& comm, const ShardOptions& options)
      : plan(std::move(planned)), weights(make_whole_parameters(plan, comm, options)) {
    if (plan.trained) gradients.emplace(plan, comm, options);
  }
  ShardedUnit(const ShardedUnit&) = delete;  // the gradients refer to the plan
  ShardedUnit& operator=(const ShardedUnit&) = delete;

  bool is_ready() const { return fresh && !gathering && weights->has_memory(); }

  UnitPlan plan;
  std::unique_ptr<WholeParameters> weights;
  std::optional<UnitGradients> gradients;
  std::optional<Work> gathering;  // begun before it was needed
  std::optional<Work> reducing;
  bool fresh = true;  // the whole parameters are those of all ranks' shards
};

/// What makes a sharded model work:
///
///   operation uses a unit  -> gathered, and the one before it released      before_use()
///   gradient computed      -> copied into its unit's flat gradient          gradient_computed()
///   unit's gradients there -> reduce-scatter                                gradient_accumulated()
///   backward ended         -> rest averaged, shards' grads set              end_backward()
///
/// Note [Fresh parameters] The whole parameters are those of the shards until an optimizer changes
/// these, which no hook reports. So they count as stale after each averaged backward, in every
/// forward from then until the next backward (the one before it may have been an evaluation, or a
/// loss that was only looked at, before the update), and whenever a shard's version or first
/// element has changed when a forward begins. All ranks run one program, so all come to the same
/// decision; if they do not, their collectives differ, which is an Error. A forward in eval mode is
/// an evaluation even if gradients are enabled.
///
/// Note [Evaluation before an update] If ranks share parameters, a rank that has evaluated and then
/// updates would write what others still read. So evaluations that may be followed by an update end
/// together.
///
/// Note [Which unit is released] When an operation uses a unit, all units of other groups are
/// released, except those that the first step used next. Only an outermost operation does so: one
/// that is part of another may run while that one has addresses of a unit's parameters.
struct ShardedModel::State final : GradientListener, StorageWatcher {
  State(std::shared_ptr<torch::nn::Module> trained, const Communicator& ranks,
        const ShardOptions& chosen);
  ~State() override;

  // Construction.
  void check_module() const;
  void divide(ShardedUnit& unit);
  void hold_master(const UnitParameter& parameter, const MasterWeights& masters,
                   const torch::Tensor& master, torch::Tensor& flat, const UnitPlan& plan) const;

  // Whole parameters.
  void before_use(std::span<const size_t> used, bool outermost) noexcept override;
  void make_ready(std::span<const size_t> used);
  void see_updates();
  bool shares_memory() const;
  void begin_gather(ShardedUnit& unit);
  void finish_gather(ShardedUnit& unit);
  void follow_order(size_t group);
  bool is_next(const ShardedUnit& unit) const;
  void prefetch_next();
  void release_others(std::span<const size_t> used);
  void release_unused();
  void mark_stale(bool frozen_too = false);
  void notice_changes();
  void expect_update();
  void note_whole(bool whole) const;
  void take_over_changes();
  void poison(std::span<const size_t> used) noexcept;
  void rethrow_failure();

  class Parts;  // with virtual shards

  // Forward.
  void require_ended();
  void require_unchanged();
  void require_own_memory();
  void require_not_gathered(const char* what);
  void share_buffers() const;
  void end_evaluation();

  // Gradients.
  void offer_gradient_memory();
  torch::Tensor gradient_computed(size_t parameter, const torch::Tensor& gradient) override;
  void output_reached() override;
  void gradient_accumulated(size_t parameter) override;
  void begin_backward();
  void end_backward();
  void begin_average();
  void end_average();
  void keep_local_gradients();
  void drop_gradients();
  void end_step();
  void settle_missing();
  [[noreturn]] void refuse_missing(std::vector<std::string> missing);
  std::vector<bool> used_anywhere(const std::vector<bool>& used) const;
  std::vector<bool> used_of_unit(const ShardedUnit& unit, const std::vector<bool>& used) const;
  void begin_reduce(ShardedUnit& unit);
  void advance_reduces();
  void finish_reduce(ShardedUnit& unit);
  void finish_reduces();
  void check_gradient(size_t parameter, const torch::Tensor& gradient);
  void check_window();
  bool window_was_dropped();

  [[noreturn]] void fail(const Error& error);
  bool gathers_on_use() const { return options.stage == ShardStage::kParameters; }

  std::shared_ptr<torch::nn::Module> module;
  std::shared_ptr<const Communicator> comm;
  const ShardOptions options;
  std::vector<std::unique_ptr<ShardedUnit>> units;
  std::vector<TrainedParameter> trained;            // the module's, that are sharded
  std::vector<std::pair<size_t, size_t>> location;  // [trained] unit, parameter
  std::vector<ParameterForm> forms;                 // [trained]
  std::vector<TrainedParameter> trained_shards;     // of this rank, those that have elements
  std::map<const c10::TensorImpl*, torch::Tensor> shard_of;  // [parameter of the module]
  std::vector<std::unique_ptr<WatchedStorage>> watched;

  // kStepping: from begin_step() to the end of that step.
  enum class Phase { kIdle, kForwarded, kBackward, kStepping } phase = Phase::kIdle;
  int no_sync_depth = 0;
  bool backward_averages = true;
  bool last_forward_averaged = true;      // only then are buffers sent before the next forward
  bool awaits_training_backward = false;  // a forward that trains waits for its backward
  bool end_is_queued = false;

  // The unit whose last gradient was the last to arrive. It is averaged when the next one arrives:
  // until then autograd itself holds that gradient, as a user would who wants to keep it.
  ShardedUnit* complete = nullptr;
  int gathered_guards = 0;
  double weight = 1;
  bool shown = false;  // gradients of the open window, as grads of this rank's shards
  bool shown_nonzero = false;
  bool update_follows = true;  // since the last average no backward has begun
  std::exception_ptr failure;  // of an operation that could not say so

  static constexpr size_t kNoGroup = std::numeric_limits<size_t>::max();
  std::vector<size_t> order;  // groups, as the first step used them
  bool order_known = false;
  size_t order_next = 0;
  size_t last_group = kNoGroup;

  ShardStats stats;
  std::vector<std::shared_ptr<const ClaimGradientMemory>> claims;  // [trained]
  std::optional<AccumulationWindow> window;
  std::optional<AccumulationWindow> marks;  // for Note [Fresh parameters]
  std::optional<GradientStreams> streams;
  std::unique_ptr<Parts> parts;
  std::optional<WatchedForward> forward_watch;  // for `lockstep verify`
  std::optional<GradientHooks> hooks;  // last, so that no hook runs before all else is ready
};

/// Steps of virtual shards: see docs/same_bits.md. Each part's gradients are taken out of their
/// units when its backward has ended, and the mean of all parts is scattered to the shards.
class ShardedModel::State::Parts final : public PartOwner {
 public:
  /// Refuses what cannot have the same bits; changes nothing.
  explicit Parts(State& state);

  torch::Tensor step(const PartLoss& loss_of, const PartStep& how);
  VirtualShards& shards() { return shards_; }

  void begin_part(bool last) override;
  void take_gradients(const BatchPart& part, double weight) override;
  void average(double sum_of_weights) override;

 private:
  bool has_accumulated() const;
  void begin_sums();

  State& state_;
  VirtualShards shards_;
  std::vector<std::unique_ptr<PartSums>> sums_;  // [unit]; null: not trained
  std::vector<bool> used_;                       // [trained] in any part of this rank
  bool accumulates_ = false;                     // the last step was inside NoSync
};

/// A misuse of the wrapper: gradients or weights would be lost.
Error sharding_misuse(const std::string& message, const std::string& help);

}  // namespace lockstep
