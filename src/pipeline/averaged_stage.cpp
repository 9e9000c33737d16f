#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "base/counted.hpp"
#include "gradients/gradient_buckets.hpp"
#include "gradients/in_flight_buckets.hpp"
#include "gradients/model_sync.hpp"
#include "gradients/nonfinite_gradients.hpp"
#include "gradients/recorded_gradients.hpp"
#include "gradients/trained_parameters.hpp"
#include "lockstep/error.hpp"
#include "pipeline/stage_sync.hpp"
#include "verify/step_recorder.hpp"

namespace lockstep {
namespace {

class AveragedStage final : public StageSync {
 public:
  AveragedStage(int stage, torch::nn::Sequential module, const Communicator& comm,
                const PipelineOptions& options);

  // Makes every trained parameter's gradient a view of its bucket.
  void begin_step(bool share_buffers) override;
  void launch(bool synchronise, double weight) override;
  void advance() override { in_flight_.advance(); }
  void finish() override;
  void call_mismatch() const override { lockstep::call_mismatch(comm_); }
  int64_t unaveraged_steps() const override {
    return checks_updates_ && window_.weights_changed() ? window_.micro_steps() : 0;
  }
  std::optional<SyncSpan> span() override;
  void abort(const std::string& reason) override;
  std::vector<torch::Tensor> parameters() const override;

 private:
  void require_averaged() const;
  void require_unchanged() const;
  void agree_on_frozen();
  void prepare_gradient(size_t parameter);
  [[noreturn]] void refuse(const std::string& message, const std::string& help) const;

  int stage_;
  torch::nn::Sequential module_;
  const Communicator comm_;
  const bool checks_updates_;
  std::vector<TrainedParameter> parameters_;  // trained when the pipeline was made
  const LimitedEmbeddings limited_embeddings_;
  std::vector<ParameterForm> forms_;        // [parameter]
  std::vector<uint8_t> frozen_;             // [parameter] since then
  std::optional<GradientBuckets> buckets_;  // none if nothing is trained or comm has one rank
  DdpStats stats_;
  NonfiniteGradients nonfinite_;
  InFlightBuckets in_flight_;
  AccumulationWindow window_;
  std::optional<SyncSpan> span_;  // of this step; its times come from stats_
};

AveragedStage::AveragedStage(int stage, torch::nn::Sequential module, const Communicator& comm,
                             const PipelineOptions& options)
    : stage_(stage),
      module_(std::move(module)),
      comm_(comm),
      checks_updates_(options.check_unaveraged_updates),
      parameters_(trained_in(*module_)),
      limited_embeddings_(*module_),
      forms_(forms_of(parameters_)),
      frozen_(parameters_.size(), 0),
      nonfinite_(parameters_, comm_, options.nonfinite, stats_, fmt::format("stage {}: ", stage)),
      in_flight_(comm_, {}, stats_),
      window_(parameters_) {
  if (comm_.size() == 1) return;
  require_same_model(comm_, model_tensors(*module_));
  broadcast_model(comm_, *module_, 0, "initial stage");
  if (parameters_.empty()) return;
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

void AveragedStage::require_unchanged() const {
  const auto change = find_change(parameters_, forms_, trained_in(*module_));
  if (!change) return;
  refuse(fmt::format("parameter {} of stage {} {} after the pipeline was made: its gradients would "
                     "not be averaged",
                     change->name, stage_, change->what),
         "change the stages before making the Pipeline, or make a new one");
}

void AveragedStage::refuse(const std::string& message, const std::string& help) const {
  comm_.abort(message);
  throw Error(Code::kSyncMisuse, message, help);
}

// A rank that trains what another has frozen would diverge from it. All ranks freeze between the
// same steps, so that the other steps exchange nothing.
void AveragedStage::agree_on_frozen() {
  std::vector<uint8_t> now;
  for (const auto& [name, tensor] : parameters_) now.push_back(tensor.requires_grad() ? 0 : 1);
  if (now == frozen_) return;
  frozen_ = std::move(now);
  const auto count = static_cast<int64_t>(frozen_.size());
  const torch::Tensor anywhere = torch::empty({2, count}, torch::kUInt8);  // frozen, trained
  anywhere[0].copy_(torch::tensor(frozen_, torch::kUInt8));
  anywhere[1].copy_(anywhere[0].logical_not());
  comm_.all_reduce(anywhere, ReduceOp::kMax, {.label = "frozen parameters"});
  for (size_t i = 0; i < frozen_.size(); ++i) {
    if (anywhere.select(1, static_cast<int64_t>(i)).min().item<uint8_t>() == 0) continue;
    throw Error(Code::kReplicasDiffer,
                fmt::format("parameter {} of stage {} is frozen on some data ranks and trained on "
                            "others",
                            parameters_[i].name, stage_),
                "freeze the same parameters between the same steps on every rank");
  }
}

// A frozen parameter keeps the gradient it has, or none, and an optimizer skips it then. Only what
// it has accumulated since the last average is still averaged.
void AveragedStage::prepare_gradient(size_t parameter) {
  torch::Tensor tensor = parameters_[parameter].tensor;
  const torch::Tensor grad = tensor.grad();
  if (frozen_[parameter] == 0) {
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

void AveragedStage::begin_step(bool share_buffers) {
  span_.reset();
  if (comm_.size() == 1) return;
  require_unchanged();
  require_averaged();
  if (window_.gradients_dropped()) window_.close();
  agree_on_frozen();
  if (share_buffers) {
    const auto buffers = buffers_of(*module_);
    if (!buffers.empty()) broadcast_tensors(comm_, buffers, 0, "buffers of a stage");
  }
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

std::vector<torch::Tensor> AveragedStage::parameters() const {
  std::vector<torch::Tensor> all;
  for (const auto& each : trained_in(*module_)) all.push_back(each.tensor);
  return all;
}

}  // namespace

std::unique_ptr<StageSync> make_averaged_stage(int stage, const torch::nn::Sequential& module,
                                               const Communicator& comm,
                                               const PipelineOptions& options) {
  return std::make_unique<AveragedStage>(stage, module, comm, options);
}

}  // namespace lockstep
