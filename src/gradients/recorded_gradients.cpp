#include "gradients/recorded_gradients.hpp"

#include <torch/torch.h>

#include "base/mutation.hpp"
#include "device/parameter_notes.hpp"
#include "verify/step_recorder.hpp"

namespace lockstep {

void record_local(const GradientBuckets& buckets, size_t bucket,
                  std::span<const TrainedParameter> parameters, double weight) {
  auto* recorder = StepRecorder::of_process();
  for (const auto& gradient : buckets.plan(bucket).gradients) {
    const torch::Tensor& parameter = parameters[gradient.parameter].tensor;
    recorder->note_local(recorder->name_of(parameter), buckets.view(gradient.parameter),
                         slice_of(parameter), weight);
  }
  recorder->note_sent(buckets.plan(bucket).bytes());
}

void SpoiledGradients::launched(const GradientBuckets& buckets, size_t bucket) {
  if (is_planted(Mutation::kParameterNotAveraged) && buckets.bucket_of(0) == bucket) {
    own_ = buckets.view(0).clone();
  }
}

void SpoiledGradients::averaged(const GradientBuckets& buckets,
                                std::span<const TrainedParameter> parameters, int ranks) {
  const torch::NoGradGuard no_grad;
  if (is_planted(Mutation::kParameterNotAveraged) && own_.defined()) buckets.view(0).copy_(own_);
  for (size_t i = 0; i < buckets.size(); ++i) {
    const torch::Tensor& mean = buckets.bucket(i).gradients;
    if (is_planted(Mutation::kMeanDividedTwice)) mean.div_(ranks);
    if (is_planted(Mutation::kBucketLagsOneStep) && i == 0) {
      const torch::Tensor now = mean.clone();
      if (earlier_.contains(i)) mean.copy_(earlier_[i]);
      earlier_[i] = now;
    }
  }
  if (!is_planted(Mutation::kTiedDividedTwice)) return;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (is_tied(parameters[i].tensor)) buckets.view(i).div_(ranks);
  }
}

void SpoiledGradients::count_twice(std::span<const TrainedParameter> parameters) const {
  const torch::NoGradGuard no_grad;
  for (const auto& [name, tensor] : parameters) {
    if (tensor.grad().defined()) tensor.grad().mul_(2);
  }
}

}  // namespace lockstep
