#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "buckets/bucket_order.hpp"
#include "buckets/ready_tracker.hpp"
#include "lockstep/distributed_data_parallel.hpp"
#include "parallel/accumulation_window.hpp"
#include "parallel/bucket_flight.hpp"
#include "parallel/gradient_buckets.hpp"
#include "parallel/gradient_hooks.hpp"
#include "parallel/gradient_streams.hpp"
#include "parallel/model_tensors.hpp"
#include "parallel/nonfinite_gradients.hpp"

namespace lockstep {

class Capture;

/// Averages gradients over the ranks while backward computes them.
///
///   hook -> parameter ready -> bucket ready -> launched, strictly in order -> finished
///           GradientTally      LaunchOrder                                   BucketFlight
///
/// Note [No communication thread]: on the CPU there is no core to spare. The hooks themselves move
/// buckets whose peers have come, and what is left is finished when backward ends.
///
/// Note [Captured backward]: while a step is captured, hooks run but nothing is computed. Launching
/// a bucket then means to cut the graph: its all-reduce runs on the host in every replay, between
/// the graph that computes it and the next, as does the wait for all of them. What this class
/// counts is counted in every replay.
///
/// Note [Shared parameters]: two models may share a layer, and each may have a Reducer. Then the
/// parameter's grad can lie in neither one's bucket, since the other's average would go through it
/// while it is on its way. It has memory of its own: each Reducer copies the sum of this backward
/// into its bucket, and the mean back at the end. A Reducer leaves a backward to the other one if
/// that backward does not go through its own model's outputs.
///
/// Note [Backward without a forward]: a loss may reach the module's parameters without the wrapper,
/// as a GAN's generator loss does through the bare discriminator. Nobody averages these gradients;
/// they count as a micro-step inside NoSync, so that zero_grad() or a synchronised backward settles
/// them, and an update does not go unnoticed.
class Reducer final : public GradientListener {
 public:
  Reducer(std::vector<TrainedParameter> parameters, const Communicator& comm,
          const DdpOptions& options);
  ~Reducer() override;

  /// A forward begins; its backward will be synchronised or not.
  void before_forward(bool synchronise);
  void after_forward(const std::vector<torch::Tensor>& outputs);

  /// Whether a backward would be synchronised now; asked when it begins.
  void set_synchronise(bool synchronise) { synchronise_ = synchronise; }

  void set_weight(double weight);

  /// Refuses a parameter whose gradients would come by unseen: one that was added, resized, moved
  /// or converted. `trained` are those of the module now.
  void require_unchanged(const std::vector<TrainedParameter>& trained);

  /// Takes part in the others' next backward without gradients of its own.
  void shadow_backward(bool counts_in_mean);

  /// Micro-steps before this one whose gradients it adds to; 0 where they were dropped.
  int64_t open_micro_steps() const {
    return window_.gradients_dropped() ? 0 : window_.micro_steps();
  }

  /// The others have accumulated so many, and so has this rank, without gradients of its own.
  void shadow_window(int64_t micro_steps) { window_.follow(micro_steps); }

  /// What was accumulated without an average is forgotten.
  void drop_window() { window_.close(); }

  /// Micro-steps whose gradients were applied without having been averaged; 0: none.
  int64_t spoiled_micro_steps() const {
    const bool asked = !passive() && options_.check_unaveraged_updates;
    return asked && window_.weights_changed() ? window_.micro_steps() : 0;
  }

  /// Whether a forward still waits for its backward.
  bool awaits_backward() const { return phase_ == Phase::kForwarded; }

  /// Windows that were dropped before a synchronised forward.
  struct DroppedWindows {
    int64_t count = 0;
    int64_t micro_steps = 0;  ///< of the last one
  };

  /// Those so far, once the replicas are to be compared. See Note [Perturbed weights].
  std::optional<DroppedWindows> take_due_comparison();

  /// Puts the buckets in the order in which rank 0's became ready, once, after the first
  /// synchronised backward. Collective.
  void rebuild_if_due();

  const DdpStats& stats();  ///< waits for the GPU; not while a backward runs
  int64_t synchronised_backwards() const { return stats_.synchronised_backwards; }
  std::vector<GradientBucket> buckets() const;
  void record_to(Trace* trace, int rank, int row) { flight_.record_to(trace, rank, row); }

  torch::Tensor gradient_computed(size_t parameter, const torch::Tensor& gradient) override;
  void output_reached() override;
  void gradient_accumulated(size_t parameter) override;

 private:
  enum class Phase { kIdle, kForwarded, kBackward };

  bool passive() const { return !buckets_; }
  bool is_shared(size_t parameter) const { return *owners_[parameter] > 1; }
  bool concerns(size_t parameter) const;
  void put_into_bucket(size_t parameter);
  void take_shared_means();

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

  // In reducer_capture.cpp.
  void join_capture(Capture& capture);
  void record_launch(size_t bucket);
  void record_wait();
  void count(std::function<void()> change);

  // In reducer_checks.cpp.
  void check_ended();
  void check_window(bool synchronise);
  void check_decision();
  void check_gradient(const TrainedParameter& target, const torch::Tensor& gradient);
  [[noreturn]] void refuse_late(size_t parameter);
  [[noreturn]] void refuse_missing(const std::vector<size_t>& awaited);
  [[noreturn]] void fail(Code code, const std::string& message, const std::string& help);

  std::vector<TrainedParameter> parameters_;
  std::vector<ParameterForm> forms_;                       // [parameter]
  std::vector<std::shared_ptr<std::atomic<int>>> owners_;  // [parameter] Reducers that average it
  const Communicator comm_;
  const DdpOptions options_;
  std::optional<GradientBuckets> buckets_;  // none where one rank is alone and nothing must move

  Phase phase_ = Phase::kIdle;
  bool synchronise_ = true;        // outside any NoSync
  bool forward_decision_ = true;   // what the last forward announced
  bool backward_decision_ = true;  // of the backward that runs
  bool end_is_queued_ = false;     // of a backward that went through an output
  bool outputs_watched_ = false;   // of the last forward
  double weight_ = 1;
  Capture* capture_ = nullptr;  // that this step is part of; null: none
  AccumulationWindow window_;
  DroppedWindows dropped_;
  enum class Comparison { kNone, kAfterBackward, kDue } comparison_ = Comparison::kNone;
  GradientStreams streams_;

  std::mutex mutex_;     // hooks of several GPUs come from several threads
  GradientTally tally_;  // which gradients of this backward are there
  LaunchOrder order_;    // which bucket is next

  DdpStats stats_;
  NonfiniteGradients nonfinite_;
  BucketFlight flight_;

  std::optional<GradientHooks> hooks_;  // last: nothing is called before all else is ready
};

}  // namespace lockstep
