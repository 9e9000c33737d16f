#include "pipeline/stage_sync.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "lockstep/error.hpp"
#include "parallel/model_tensors.hpp"

namespace lockstep {

StageSync::StageSync(int stage, torch::nn::Sequential module, const Communicator& comm,
                     int64_t bucket_cap_bytes)
    : stage_(stage),
      module_(std::move(module)),
      comm_(comm),
      parameters_(trained_in(*module_)),
      flight_(comm_, {}, stats_),
      window_(parameters_) {
  if (comm_.size() == 1) return;
  require_same_model(comm_, model_tensors(*module_));
  broadcast_model(comm_, *module_, 0, "initial stage");
  if (parameters_.empty()) return;
  std::vector<size_t> order(parameters_.size());
  std::iota(order.rbegin(), order.rend(), 0);  // the last layer's gradients come first
  buckets_.emplace(comm_, parameters_, order, BucketLimits{bucket_cap_bytes, bucket_cap_bytes});
}

// An update between two unaveraged steps would use gradients that no other rank has seen.
void StageSync::require_averaged() const {
  if (!window_.weights_changed()) return;
  const std::string message =
      fmt::format("the weights of stage {} changed after {} steps that were not synchronised",
                  stage_, window_.micro_steps());
  comm_.abort(message);
  throw Error(Code::kSyncMisuse, message,
              "let the last step before an update have synchronise = true");
}

void StageSync::begin_step(bool share_buffers) {
  span_.reset();
  if (comm_.size() == 1) return;
  if (window_.gradients_dropped()) window_.close();
  require_averaged();
  if (share_buffers) {
    const auto buffers = buffers_of(*module_);
    if (!buffers.empty()) broadcast_tensors(comm_, buffers, 0, "buffers of a stage");
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    torch::Tensor parameter = parameters_[i].tensor;
    if (!parameter.grad().defined()) {
      parameter.mutable_grad() = buckets_->claim(i).zero_();
    } else if (!buckets_->holds_grad(i)) {
      buckets_->adopt_grad(i);
    }
  }
}

void StageSync::launch(bool synchronise, double weight) {
  if (!buckets_) return;
  if (!synchronise) return window_.add_micro_step();
  buckets_->set_micro_steps(window_.micro_steps() + 1);
  window_.close();
  flight_.begin_step();
  span_.emplace(SyncSpan{.stage = stage_});
  for (size_t i = 0; i < buckets_->size(); ++i) {
    const PlannedBucket& plan = buckets_->plan(i);
    flight_.launch(buckets_->bucket(i), plan.bytes(), static_cast<int64_t>(plan.gradients.size()),
                   weight);
    span_->bytes += plan.bytes();
    span_->all_reduces += 1;
  }
}

void StageSync::finish() {
  if (span_) flight_.wait();
}

std::optional<SyncSpan> StageSync::span() {
  if (!span_) return std::nullopt;
  flight_.settle();
  SyncSpan span = *span_;
  span.begin_ns = stats_.last_step.front().launched_ns;
  for (const auto& bucket : stats_.last_step) {
    span.end_ns = std::max(span.end_ns, bucket.finished_ns);
  }
  return span;
}

void StageSync::abort(const std::string& reason) {
  span_.reset();
  comm_.abort(reason);
}

}  // namespace lockstep
