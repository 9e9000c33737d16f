#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gradients/model_sync.hpp"
#include "gradients/trained_parameters.hpp"
#include "pipeline/stage_sync.hpp"

namespace lockstep {

/// A stage that every rank of the data axis has whole.
class ReplicatedStage : public StageSync {
 public:
  void call_mismatch() const override { lockstep::call_mismatch(comm_); }
  std::vector<torch::Tensor> parameters() const override;

 protected:
  /// Collective: rank 0's weights and buffers go to all.
  ReplicatedStage(int stage, torch::nn::Sequential module, const Communicator& comm);

  /// Refuses parameters whose gradients would not be averaged.
  void require_unchanged() const;

  /// Finds out what is frozen now. Collective if that has changed.
  void agree_on_frozen();

  void share_buffers() const;

  [[noreturn]] void refuse(const std::string& message, const std::string& help) const;

  const int stage_;
  const torch::nn::Sequential module_;
  const Communicator comm_;
  const std::vector<TrainedParameter> parameters_;  // trained when the pipeline was made
  const LimitedEmbeddings limited_embeddings_;
  std::vector<uint8_t> frozen_;  // [parameter] since then

 private:
  const std::vector<ParameterForm> forms_;  // [parameter]
};

}  // namespace lockstep
