#pragma once

#include <torch/types.h>

#include <functional>
#include <memory>
#include <vector>

#include "device/capture.hpp"
#include "device/own_stream.hpp"
#include "optim/gpu_update.hpp"

namespace lockstep {

using RatesSource = std::function<std::vector<GroupRates>()>;  // [group] as they are now

/// Rates of an optimizer's groups in a GPU's memory, for a step that is captured: before each
/// replay they are written anew where the host has changed them. Of builds with CUDA only.
class CapturedRates {
 public:
  /// Lives as long as the captured step.
  static std::shared_ptr<CapturedRates> make(Capture& capture, torch::Device gpu,
                                             RatesSource source);

  const GroupRates* on_gpu() const { return static_cast<const GroupRates*>(memory_.data_ptr()); }

 private:
  CapturedRates(torch::Device gpu, RatesSource source);
  void refresh();

  RatesSource source_;
  std::vector<GroupRates> captured_;  // as they were then: says which groups have momentum
  std::vector<GroupRates> written_;   // none before the first replay
  const OwnStream made_on_;           // not captured: the allocator gave the memory for it
  torch::Tensor memory_;
};

}  // namespace lockstep
