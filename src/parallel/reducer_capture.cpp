// See Note [Captured backward].

#include <utility>

#include "device/capture.hpp"
#include "lockstep/clock.hpp"
#include "parallel/reducer.hpp"

namespace lockstep {

void Reducer::join_capture(Capture& capture) {
  if (!passive() && (options_.find_unused_parameters || options_.static_graph)) {
    require_not_capturing(
        "DistributedDataParallel with find_unused_parameters or static_graph",
        "freeze parameters that are not used with requires_grad_(false), and leave the option out");
  }
  if (order_.changes()) {
    require_not_capturing("the first or second step of DistributedDataParallel",
                          "set CaptureOptions::warmup to 2 or more");
  }
  capture.before_replay([this] {
    capture_ = nullptr;
    stats_.backward_started_ns = monotonic_ns();
    stats_.backward_finished_ns = stats_.backward_started_ns;
    if (!passive()) flight_.begin_backward(buckets_->bucket(0).gradients.device());
  });
  std::vector<bool> had_grad;
  for (const auto& parameter : parameters_) had_grad.push_back(parameter.tensor.grad().defined());
  capture.if_dropped([this, had_grad] {
    capture_ = nullptr;
    phase_ = Phase::kIdle;
    end_is_queued_ = false;
    window_.close();
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (!had_grad[i]) parameters_[i].tensor.mutable_grad().reset();
    }
  });
}

// Now, and again in every replay after the first, which does what is recorded now.
void Reducer::count(std::function<void()> change) {
  change();
  if (capture_ == nullptr) return;
  capture_->after_replay([change = std::move(change), first = true]() mutable {
    if (!std::exchange(first, false)) change();
  });
}

void Reducer::record_launch(size_t bucket) {
  const int64_t micro_steps = window_.micro_steps() + 1;
  capture_->between_graphs([this, bucket, micro_steps] {
    if (bucket == 0) {
      flight_.begin_step();
      buckets_->set_micro_steps(micro_steps);
    }
    stats_.backward_finished_ns = monotonic_ns();
    launch(bucket, weight_);
    flight_.advance();
  });
}

void Reducer::record_wait() {
  capture_->between_graphs([this] { flight_.wait(); });
}

}  // namespace lockstep
