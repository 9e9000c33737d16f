#include "pipeline/replicated_stage.hpp"

#include <fmt/format.h>

#include <utility>

#include "lockstep/error.hpp"

namespace lockstep {

ReplicatedStage::ReplicatedStage(int stage, torch::nn::Sequential module, const Communicator& comm)
    : stage_(stage),
      module_(std::move(module)),
      comm_(comm),
      parameters_(trained_in(*module_)),
      limited_embeddings_(*module_),
      frozen_(parameters_.size(), 0),
      forms_(forms_of(parameters_)) {
  if (comm_.size() == 1) return;
  require_same_model(comm_, model_tensors(*module_));
  broadcast_model(comm_, *module_, 0, "initial stage");
}

void ReplicatedStage::require_unchanged() const {
  const auto change = find_change(parameters_, forms_, trained_in(*module_));
  if (!change) return;
  refuse(fmt::format("parameter {} of stage {} {} after the pipeline was made: its gradients would "
                     "not be averaged",
                     change->name, stage_, change->what),
         "change the stages before making the Pipeline, or make a new one");
}

void ReplicatedStage::refuse(const std::string& message, const std::string& help) const {
  comm_.abort(message);
  throw Error(Code::kSyncMisuse, message, help);
}

// A rank that trains what another has frozen would diverge from it. All ranks freeze between the
// same steps, so that the other steps exchange nothing.
void ReplicatedStage::agree_on_frozen() {
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

void ReplicatedStage::share_buffers() const {
  const auto buffers = buffers_of(*module_);
  if (!buffers.empty()) broadcast_tensors(comm_, buffers, 0, "buffers of a stage");
}

std::vector<torch::Tensor> ReplicatedStage::parameters() const {
  std::vector<torch::Tensor> all;
  for (const auto& each : trained_in(*module_)) all.push_back(each.tensor);
  return all;
}

}  // namespace lockstep
