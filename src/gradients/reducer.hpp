#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "buckets/bucket_order.hpp"
#include "buckets/ready_tracker.hpp"
#include "device/parameter_notes.hpp"
#include "gradients/gradient_buckets.hpp"
#include "gradients/gradient_hooks.hpp"
#include "gradients/in_flight_buckets.hpp"
#include "gradients/nonfinite_gradients.hpp"
#include "gradients/recorded_gradients.hpp"
#include "gradients/sparse_gradients.hpp"
#include "gradients/trained_parameters.hpp"
#include "lockstep/error.hpp"
#include "lockstep/gradients.hpp"

namespace lockstep {

class Capture;

/// Averages gradients over the ranks while backward computes them.
///
///   hook -> parameter ready -> bucket ready -> launched, strictly in order -> finished
///           ReadyTracker       BucketOrder     InFlightBuckets
///
/// Note [No communication thread]: on the CPU there is no core to spare for one. The hooks
/// themselves move buckets whose peers have arrived, and the rest is finished when backward ends.
///
/// Note [Captured backward]: while a step is being captured, hooks run but nothing is computed.
/// Launching a bucket then cuts the graph: in every replay the host runs its all-reduce between the
/// graph that computes it and the next one, and likewise the wait for all buckets. Counters are
/// updated in every replay.
///
/// Note [Shared parameters]: two models may share a layer, and each may have a Reducer. Then the
/// parameter's grad cannot be a view of either bucket, since the other Reducer would average it
/// while it is in flight. It has memory of its own: each Reducer copies the sum of this backward
/// into its bucket, and copies the mean back at the end. A Reducer leaves a backward that does not
/// go through its own model's outputs to the other one.
///
/// Note [Backward without a forward]: a loss may reach the module's parameters without the wrapper,
/// as a GAN's generator loss does through the bare discriminator. These gradients are not averaged.
/// They count as a micro-step inside NoSync: zero_grad() or a synchronised backward settles them,
/// and an update with them is noticed.
///
/// Note [Sparse gradients]: those of an Embedding with sparse(true) have as many rows as the batch
/// has different indices, which no bucket can hold. They stay the parameters' own until backward
/// has ended, and are averaged then. Hooks number them after the dense ones.
class Reducer final : public GradientListener {
 public:
  /// Whether a Reducer of this process averages this parameter's gradients.
  static bool averages(const torch::Tensor& parameter);

  Reducer(ParametersByGradient parameters, const Communicator& comm, const DdpOptions& options);
  ~Reducer() override;

  /// A forward begins; `synchronise` tells whether its backward will be synchronised.
  void before_forward(bool synchronise);
  void after_forward(const std::vector<torch::Tensor>& outputs);

  /// Whether a backward that begins now is synchronised.
  void set_synchronise(bool synchronise) { synchronise_ = synchronise; }

  void set_weight(double weight);

  /// Refuses a parameter whose gradients would go unnoticed: one that was added, resized, moved or
  /// converted. `trained` are the module's parameters now.
  void require_unchanged(const ParametersByGradient& trained);

  /// Takes part in the next backward of the other ranks, without gradients of its own.
  void shadow_backward(bool counts_in_mean);

  /// Earlier micro-steps whose gradients the next one adds to; 0 if they were dropped.
  int64_t open_micro_steps() const {
    return window_.gradients_dropped() ? 0 : window_.micro_steps();
  }

  /// The other ranks have accumulated that many micro-steps, and so has this one, without gradients
  /// of its own.
  void shadow_window(int64_t micro_steps) { window_.follow(micro_steps); }

  /// Forgets what was accumulated or dropped without an average: a join has ended, in which each
  /// rank has had windows of its own.
  void drop_window() {
    window_.close();
    dropped_ = {};
    comparison_ = Comparison::kNone;
  }

  /// Whether another Reducer has one of the parameters too.
  bool shares_parameters() const;

  /// Says that backward gave no gradient to these dense parameters (kUnusedParameter).
  [[noreturn]] void refuse_missing(const std::vector<size_t>& awaited);

  /// Micro-steps whose gradients were applied without being averaged; 0 if none were.
  int64_t spoiled_micro_steps() const {
    const bool checks = !passive() && options_.check_unaveraged_updates;
    return checks && window_.weights_changed() ? window_.micro_steps() : 0;
  }

  /// Whether a forward still waits for its backward.
  bool awaits_backward() const { return phase_ == Phase::kForwarded; }

  /// Windows that were dropped before a synchronised forward.
  struct DroppedWindows {
    int64_t count = 0;
    int64_t micro_steps = 0;  ///< of the last one
  };

  /// The dropped windows so far, given once when the replicas must be compared. See Note [Perturbed
  /// weights].
  std::optional<DroppedWindows> take_due_comparison();

  /// Rearranges the buckets once, after the first synchronised backward, into the order in which
  /// rank 0's gradients became ready. Collective.
  void rebuild_if_due();

  const DdpStats& stats();  ///< waits for the GPU; not while a backward runs
  int64_t synchronised_backwards() const { return stats_.synchronised_backwards; }
  std::vector<GradientBucket> buckets() const;
  void record_to(Trace* trace, int rank, int row) { in_flight_.record_to(trace, rank, row); }

  torch::Tensor gradient_computed(size_t parameter, const torch::Tensor& gradient) override;
  void output_reached() override;
  void gradient_accumulated(size_t parameter) override;

 private:
  enum class Phase { kIdle, kForwarded, kBackward };

  bool passive() const { return !averages_; }  // see has_work()
  bool is_sparse(size_t parameter) const { return parameter >= parameters_.size(); }
  void sparse_gradient_accumulated();
  bool is_shared(size_t parameter) const;
  bool concerns(size_t parameter) const;
  void offer_gradient_memory();
  void put_into_bucket(size_t parameter);
  void copy_back_shared();

  void begin_backward();
  void mark_unused(size_t parameter);
  void mark_ready(size_t parameter);
  void launch_ready_buckets();
  void launch(size_t bucket, double weight);
  void end_backward();
  void finish_backward();
  void learn_static_graph();
  void settle_missing();
  void settle_unused();
  void count_step();

  // See Note [Captured backward].
  void join_capture(Capture& capture);
  void record_launch(size_t bucket);
  void record_wait();
  void count(std::function<void()> change);

  void check_ended();
  void check_window(bool synchronise);
  void check_decision();
  void check_gradient(const TrainedParameter& target, const torch::Tensor& gradient, bool sparse);
  [[noreturn]] void refuse_late(size_t parameter);
  [[noreturn]] void fail(Code code, const std::string& message, const std::string& help);

  std::vector<TrainedParameter> all_parameters_;         // the dense ones first
  std::span<const TrainedParameter> parameters_;         // whose gradients are dense
  std::span<const TrainedParameter> sparse_parameters_;  // see Note [Sparse gradients]
  std::vector<ParameterForm> forms_;                     // [parameter]
  std::vector<ParameterForm> sparse_forms_;              // [sparse parameter]
  std::vector<std::shared_ptr<std::atomic<int>>>
      owners_;  // [any parameter] how many Reducers have it
  const Communicator comm_;
  const DdpOptions options_;
  const bool averages_;
  std::optional<GradientBuckets> buckets_;  // none if this Reducer is passive
  std::vector<std::shared_ptr<const ClaimGradientMemory>> claims_;  // [parameter] or empty
  SparseGradients sparse_;

  Phase phase_ = Phase::kIdle;
  bool synchronise_ = true;        // outside any NoSync
  bool forward_decision_ = true;   // what the last forward announced
  bool backward_decision_ = true;  // of the current backward
  bool end_is_queued_ = false;     // the current backward went through an output
  bool outputs_watched_ = false;   // of the last forward
  double weight_ = 1;
  Capture* capture_ = nullptr;  // the capture that this step is part of, if any
  AccumulationWindow window_;
  DroppedWindows dropped_;
  enum class Comparison { kNone, kAfterBackward, kDue } comparison_ = Comparison::kNone;
  GradientStreams streams_;

  std::mutex mutex_;  // hooks of several GPUs run on several threads
  ReadyTracker ready_;
  BucketOrder order_;

  DdpStats stats_;
  NonfiniteGradients nonfinite_;
  InFlightBuckets in_flight_;
  SpoiledGradients spoil_;  // does nothing unless a bug is planted

  std::optional<GradientHooks> hooks_;  // last, so that no hook runs before all else is ready
};

}  // namespace lockstep
