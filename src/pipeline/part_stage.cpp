#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "gradients/nonfinite_gradients.hpp"
#include "gradients/part_gradients.hpp"
#include "gradients/virtual_shards.hpp"
#include "pipeline/replicated_stage.hpp"
#include "pipeline/step_plan.hpp"
#include "precision/model_parallel.hpp"

namespace lockstep {
namespace {

/// Moves the gradients of each micro-batch away when its backward has ended, and puts back the mean
/// of all parts after the last one, in every step, whether it is synchronised or not.
class PartStage final : public ReplicatedStage {
 public:
  PartStage(int stage, torch::nn::Sequential module, const Communicator& comm,
            const PipelineOptions& options);

  void begin_step(const StepPlan& plan) override;
  bool has_accumulated() const override { return gradients_.has_accumulated(); }
  void begin_forward() override { buffers_->begin_forward(); }
  void end_forward(int micro_batch) override { buffers_->end_forward(micro_batch); }
  void end_backward(int micro_batch, bool weights_follow) override;
  void launch(bool synchronise, double weight) override;
  void finish() override;
  int64_t unaveraged_steps() const override { return 0; }
  std::optional<SyncSpan> span() override { return span_; }
  void abort(const std::string& reason) override;

 private:
  void hold_back(int micro_batch);
  void return_held(int micro_batch);

  const PartTree tree_;
  PartGradients gradients_;
  DdpStats stats_;
  NonfiniteGradients nonfinite_;

  // The parts of this step.
  StepParts parts_;
  std::optional<PartBuffers> buffers_;
  std::set<int> taken_;                             // micro-batches
  std::map<int, std::vector<torch::Tensor>> held_;  // [micro-batch][parameter]
  std::optional<SyncSpan> span_;
};

PartStage::PartStage(int stage, torch::nn::Sequential module, const Communicator& comm,
                     const PipelineOptions& options)
    : ReplicatedStage(stage, std::move(module), comm),
      tree_(options.virtual_shards, comm_.size()),
      gradients_(parameters_, tree_, comm_, options.bucket_cap_bytes),
      nonfinite_(parameters_, comm_, options.nonfinite, stats_, fmt::format("stage {}: ", stage)) {
  require_same_in_parts(*module_, options.broadcast_buffers, "Pipeline");
  // An optimizer may have those that are not trained: its norm is the others' too.
  for (const auto& parameter : module_->parameters()) note_same_bits(parameter);
}

void PartStage::begin_step(const StepPlan& plan) {
  span_.reset();
  require_unchanged();
  agree_on_frozen();
  if (plan.share_buffers) share_buffers();
  limited_embeddings_.shorten_rows();
  gradients_.begin_step();
  parts_ = *plan.parts;
  buffers_.emplace(*module_);
  taken_.clear();
  held_.clear();
}

// The second half of a split backward may come after that of other micro-batches. The first half
// gives weights gradients only where a layer runs a backward of its own, as a recomputed one does.
void PartStage::hold_back(int micro_batch) {
  auto& held = held_[micro_batch];
  for (const auto& [name, tensor] : parameters_) {
    held.push_back(std::exchange(tensor.mutable_grad(), torch::Tensor()));
  }
}

void PartStage::return_held(int micro_batch) {
  const auto held = held_.extract(micro_batch);
  for (size_t i = 0; !held.empty() && i < parameters_.size(); ++i) {
    const torch::Tensor& first = held.mapped()[i];
    torch::Tensor& grad = parameters_[i].tensor.mutable_grad();
    if (first.defined()) grad = grad.defined() ? first + grad : first;
  }
}

void PartStage::end_backward(int micro_batch, bool weights_follow) {
  if (weights_follow) return hold_back(micro_batch);
  const bool is_first = taken_.empty();
  if (!taken_.insert(micro_batch).second) return;  // the first half has done everything
  return_held(micro_batch);
  std::vector<torch::Tensor> gradients;
  for (const auto& [name, tensor] : parameters_) gradients.push_back(tensor.grad());
  nonfinite_.look(gradients, is_first);
  gradients_.take(parts_.first + micro_batch, parts_.weights[static_cast<size_t>(micro_batch)]);
}

void PartStage::launch(bool /*synchronise*/, double /*weight*/) {
  if (parameters_.empty()) return;
  std::vector<bool> trained;
  for (const uint8_t frozen : frozen_) trained.push_back(frozen == 0);
  gradients_.average(parts_.divisor, trained);
  const auto exchanges = gradients_.exchanges();
  if (exchanges.empty()) return;
  span_.emplace(SyncSpan{.stage = stage_,
                         .begin_ns = exchanges.front().begun_ns,
                         .end_ns = exchanges.back().ended_ns,
                         .all_reduces = static_cast<int64_t>(exchanges.size())});
  for (const auto& exchange : exchanges) span_->bytes += exchange.bytes;
}

void PartStage::finish() {
  buffers_->finish();
  buffers_.reset();
}

void PartStage::abort(const std::string& reason) {
  span_.reset();
  held_.clear();
  comm_.abort(reason);
}

}  // namespace

std::unique_ptr<StageSync> make_part_stage(int stage, const torch::nn::Sequential& module,
                                           const Communicator& comm,
                                           const PipelineOptions& options) {
  return std::make_unique<PartStage>(stage, module, comm, options);
}

}  // namespace lockstep
