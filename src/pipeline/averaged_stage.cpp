#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "base/counted.hpp"
#include "base/mutation.hpp"
#include "gradients/gradient_buckets.hpp"
#include "gradients/in_flight_buckets.hpp"
#include "gradients/nonfinite_gradients.hpp"
#include "gradients/recorded_gradients.hpp"
#include "pipeline/replicated_stage.hpp"
#include "pipeline/step_plan.hpp"
#include "verify/step_recorder.hpp"

namespace lockstep {
namespace {

class AveragedStage final : public ReplicatedStage {
 public:
  AveragedStage(int stage, torch::nn::Sequential module, const Communicator& comm,
                const PipelineOptions& options);

  // Makes every trained parameter's gradient a view of its bucket.
  void begin_step(const StepPlan& plan) override;
  void launch(bool synchronise, double weight) override;
  void advance() override { in_flight_.advance(); }
  void finish() override;
  int64_t unaveraged_steps() const override {
    return checks_updates_ && window_.weights_changed() ? window_.micro_steps() : 0;
  }
  std::optional<SyncSpan> span() override;
  void abort(const std::string& reason) override;

 private:
  void require_averaged() const;
  void prepare_gradient(size_t parameter);

  const bool checks_updates_;
  std::optional<GradientBuckets> buckets_;  // none if nothing is trained or comm has one rank
  DdpStats stats_;
  NonfiniteGradients nonfinite_;
  InFlightBuckets in_flight_;
  AccumulationWindow window_;
  std::optional<SyncSpan> span_;  // of this step; its times come from stats_
};

AveragedStage::AveragedStage(int stage, torch::nn::Sequential module, const Communicator& comm,
                             const PipelineOptions& options)
    : ReplicatedStage(stage, std::move(module), comm),
      checks_updates_(options.check_unaveraged_updates),
      nonfinite_(parameters_, comm_, options.nonfinite, stats_, fmt::format("stage {}: ", stage)),
      in_flight_(comm_, {}, stats_),
      window_(parameters_) {
  if (comm_.size() == 1 || parameters_.empty()) return;
  std::vector<size_t> order(parameters_.size());
  std::iota(order.rbegin(), order.rend(), 0);  // the last layer's gradients come first
  buckets_.emplace(comm_, parameters_, order,
                   BucketLimits{options.bucket_cap_bytes, options.bucket_cap_bytes});
}

// An update between two unaveraged steps would use gradients that the other ranks do not have.
void AveragedStage::require_averaged() const {
  if (unaveraged_steps() == 0) return;
  refuse(fmt::format("the weights of stage {} changed after {} without synchronisation", stage_,
                     counted(unaveraged_steps(), "step")),
         "set synchronise = true in the last step before an update; if weights change on "
         "purpose and are changed back, set PipelineOptions::check_unaveraged_updates to false");
}

// A frozen parameter keeps the gradient it has, or none, and an optimizer skips it then. Only what
// it has accumulated since the last average is still averaged.
void AveragedStage::prepare_gradient(size_t parameter) {
  torch::Tensor tensor = parameters_[parameter].tensor;
  const torch::Tensor grad = tensor.grad();
  if (frozen_[parameter] == 0 || is_planted(Mutation::kFrozenGetsZeros)) {
    if (!grad.defined()) {
      tensor.mutable_grad() = buckets_->claim(parameter).zero_();
    } else if (!buckets_->holds_grad(parameter)) {
      buckets_->adopt_grad(parameter);
    }
    return;
  }
  const bool holds = grad.defined() && buckets_->holds_grad(parameter);
  if (holds && window_.micro_steps() > 0) return;
  if (holds) tensor.mutable_grad() = grad.clone();
  buckets_->claim(parameter).zero_();
}

void AveragedStage::begin_step(const StepPlan& plan) {
  span_.reset();
  if (comm_.size() == 1) return;
  require_unchanged();
  require_averaged();
  if (window_.gradients_dropped()) window_.close();
  agree_on_frozen();
  if (plan.share_buffers) share_buffers();
  limited_embeddings_.shorten_rows();
  for (size_t i = 0; i < parameters_.size(); ++i) prepare_gradient(i);
}

void AveragedStage::launch(bool synchronise, double weight) {
  if (!buckets_) return;
  if (!synchronise) return window_.add_micro_step();
  buckets_->set_micro_steps(window_.micro_steps() + 1);
  window_.close();
  in_flight_.begin_step();
  span_.emplace(SyncSpan{.stage = stage_});
  for (size_t i = 0; i < buckets_->size(); ++i) {
    const PlannedBucket& plan = buckets_->plan(i);
    nonfinite_.look(*buckets_, i);
    if (StepRecorder::of_process() != nullptr) record_local(*buckets_, i, parameters_, weight);
    in_flight_.launch(buckets_->bucket(i), plan.bytes(),
                      static_cast<int64_t>(plan.gradients.size()), weight);
    span_->bytes += plan.bytes();
    span_->all_reduces += 1;
  }
}

void AveragedStage::finish() {
  if (span_) in_flight_.wait();
}

std::optional<SyncSpan> AveragedStage::span() {
  if (!span_) return std::nullopt;
  in_flight_.settle();
  SyncSpan span = *span_;
  span.begin_ns = stats_.last_step.front().launched_ns;
  for (const auto& bucket : stats_.last_step) {
    span.end_ns = std::max(span.end_ns, bucket.finished_ns);
  }
  return span;
}

void AveragedStage::abort(const std::string& reason) {
  span_.reset();
  comm_.abort(reason);
}

}  // namespace

std::unique_ptr<StageSync> make_averaged_stage(int stage, const torch::nn::Sequential& module,
                                               const Communicator& comm,
                                               const PipelineOptions& options) {
  return std::make_unique<AveragedStage>(stage, module, comm, options);
}

}  // namespace lockstep
