#pragma once

#include <c10/core/Stream.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "gradients/trained_parameters.hpp"

namespace torch::autograd {
struct Node;
}

namespace lockstep {

/// Is called for gradients during backward. Autograd's threads call it, one at a time for the
/// parameters of one device.
class GradientListener {
 public:
  virtual ~GradientListener() = default;

  /// Backward has computed a gradient; the returned tensor is accumulated instead of it.
  virtual torch::Tensor gradient_computed(size_t parameter, const torch::Tensor& gradient) = 0;

  /// A backward pass goes through a watched output; it may not reach any parameter.
  virtual void output_reached() = 0;

  /// The parameter's grad is complete for this backward.
  virtual void gradient_accumulated(size_t parameter) = 0;
};

/// Guard: listens to the gradients of these parameters as long as it lives.
class GradientHooks {
 public:
  GradientHooks(std::span<const TrainedParameter> parameters, GradientListener& listener);
  ~GradientHooks();
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

  /// Hooks accumulators that are new: libtorch may replace a parameter's accumulator together with
  /// its data, as torch::load does.
  void follow(std::span<const TrainedParameter> parameters);

  /// Reports backward passes through these outputs from now on. Returns false if none can be
  /// watched: leaves cannot, since a hook on a parameter would stay there forever.
  bool watch(const std::vector<torch::Tensor>& outputs) const;

  /// For each parameter, whether these outputs depend on it.
  std::vector<bool> reachable_from(const std::vector<torch::Tensor>& outputs) const;

 private:
  void listen(size_t parameter, const torch::Tensor& tensor);

  struct Target;
  class BeforeAccumulation;
  class AfterAccumulation;

  std::shared_ptr<Target> target_;  // shared with hooks in graphs, which may outlive this guard
  std::vector<std::shared_ptr<torch::autograd::Node>> accumulators_;  // [parameter]
};

/// Whether this thread is in a backward pass.
bool inside_backward();

/// Runs `callback` when the current backward pass has ended.
void at_end_of_backward(std::function<void()> callback);

/// The streams that gradients are written on, one for each GPU that holds parameters.
///
/// Note [Hooks of several GPUs]: autograd has one thread for each GPU. The thread that brings the
/// last gradient of a bucket launches it and the buckets that waited behind it, including those of
/// other GPUs, on which its current stream is not the one their gradients are written on. So hooks
/// make these streams current; at the end of backward, autograd makes the caller's streams wait for
/// them.
class GradientStreams {
 public:
  explicit GradientStreams(std::span<const TrainedParameter> parameters);

  /// From now on gradients are written on the calling thread's current streams.
  void follow_current();

  /// Empty before the first follow_current(), and where there is no GPU.
  const std::vector<c10::Stream>& all() const { return streams_; }

 private:
  std::span<const TrainedParameter> parameters_;
  std::vector<torch::Device> gpus_;
  std::vector<c10::Stream> streams_;  // [gpu]
};

namespace cuda {

/// Autograd accumulates a gradient on the stream that was current when the parameter's accumulator
/// was made, and hooks keep accumulators forever. From now on these accumulate on the calling
/// thread's current stream, on which forward runs and which a capture records. Builds with CUDA.
void accumulate_on_current_stream(std::span<const TrainedParameter> parameters);

}  // namespace cuda
}  // namespace lockstep
