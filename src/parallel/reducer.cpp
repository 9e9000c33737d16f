#include "parallel/reducer.hpp"

#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <utility>

#include "device/capture.hpp"
#include "device/parameter_map.hpp"
#include "lockstep/clock.hpp"

namespace lockstep {
namespace {

// A rank alone has nothing to average, unless the user does something else with gradients.
bool averages(const Communicator& comm, const DdpOptions& options) {
  return comm.size() > 1 || options.hook;
}

// Which parameters are ready first may differ from step to step where their use does.
bool learns_order(const Communicator& comm, const DdpOptions& options) {
  return averages(comm, options) && (options.static_graph || !options.find_unused_parameters);
}

// How many Reducers average a parameter of this process: see Note [Shared parameters].
std::shared_ptr<std::atomic<int>> owners_of(const torch::Tensor& parameter) {
  static ParameterMap<std::shared_ptr<std::atomic<int>>> map;
  static std::mutex mutex;  // two Reducers must not both begin the count
  const std::lock_guard lock(mutex);
  if (auto known = map.get(parameter)) return *known;
  auto count = std::make_shared<std::atomic<int>>(0);
  map.set(parameter, count);
  return count;
}

}  // namespace

Reducer::Reducer(std::vector<TrainedParameter> parameters, const Communicator& comm,
                 const DdpOptions& options)
    : parameters_(std::move(parameters)),
      forms_(forms_of(parameters_)),
      comm_(comm),
      options_(options),
      window_(parameters_),
      streams_(parameters_),
      tally_(parameters_.size(), options_.static_graph),
      order_(parameters_.size(), learns_order(comm_, options_)),
      nonfinite_(parameters_, comm_, options_.nonfinite, stats_),
      flight_(comm_, options_.hook, stats_) {
  for (const auto& [name, tensor] : parameters_) {
    owners_.push_back(owners_of(tensor));
    const bool is_shared = ++*owners_.back() > 1;
    // It may lie in a bucket of the other Reducer.
    if (is_shared && tensor.grad().defined()) tensor.mutable_grad() = tensor.grad().clone();
  }
  if (averages(comm_, options_)) {
    buckets_.emplace(comm_, parameters_, order_.expected(),
                     BucketLimits{options_.first_bucket_bytes, options_.bucket_cap_bytes});
  }
  hooks_.emplace(parameters_, *this);
}

Reducer::~Reducer() {
  for (const auto& owners : owners_) --*owners;
}

void Reducer::before_forward(bool synchronise) {
  check_ended();
  check_window(synchronise);
  streams_.follow_current();
  Capture* capture = Capture::current();
  if (capture != nullptr && capture != capture_) join_capture(*capture);
  capture_ = capture;
  forward_decision_ = synchronise;
  phase_ = Phase::kForwarded;
  end_is_queued_ = false;
}

void Reducer::after_forward(const std::vector<torch::Tensor>& outputs) {
  window_.forward_ended();
  outputs_watched_ = hooks_->watch(outputs);
  if (!options_.find_unused_parameters || options_.static_graph) return;
  const auto reached = hooks_->reachable_from(outputs);
  // Outputs that depend on nothing, or that are hidden in a type of the user's, tell nothing.
  if (std::find(reached.begin(), reached.end(), true) == reached.end()) return;
  tally_.add_reachable(reached);
}

void Reducer::rebuild_if_due() {
  const auto proposed = order_.take_proposal();
  if (!proposed) return;
  torch::Tensor agreed = torch::empty({static_cast<int64_t>(proposed->size())}, torch::kInt64);
  auto* numbers = agreed.data_ptr<int64_t>();
  std::copy(proposed->begin(), proposed->end(), numbers);
  comm_.broadcast(agreed, 0, {.label = "order of buckets"});
  const std::vector<size_t> order(numbers, numbers + agreed.numel());
  if (order_.agree(order)) buckets_->arrange(order_.expected());
}

torch::Tensor Reducer::gradient_computed(size_t parameter, const torch::Tensor& gradient) {
  if (passive()) return gradient;
  const TrainedParameter& target = parameters_[parameter];
  check_gradient(target, gradient);
  // A first gradient goes straight to its place, and autograd adopts the view; a further one is
  // added to what is there.
  if (target.tensor.grad().defined() || is_shared(parameter)) return gradient;
  torch::Tensor place = buckets_->claim(parameter);
  place.copy_(gradient);
  return place;
}

// Note [Nested backward]: layers that are computed again in backward (activation checkpointing) run
// a backward of their own inside it. The first gradient may come from there, but only the end of
// the outer one is the end. It goes through the outputs, and before that.
void Reducer::output_reached() {
  const std::lock_guard lock(mutex_);
  end_is_queued_ = true;
  at_end_of_backward([this] { end_backward(); });
}

void Reducer::gradient_accumulated(size_t parameter) {
  const std::lock_guard lock(mutex_);
  if (!concerns(parameter)) return;
  const c10::MultiStreamGuard on_streams(streams_.all());  // see Note [Hooks of several GPUs]
  if (phase_ != Phase::kBackward) begin_backward();
  put_into_bucket(parameter);
  if (!backward_decision_) return tally_.mark_used(parameter);
  const auto arrival = tally_.arrive(parameter);
  if (arrival == GradientTally::Arrival::kLate) refuse_late(parameter);
  stats_.backward_finished_ns = monotonic_ns();
  if (passive() || arrival != GradientTally::Arrival::kLast) return;
  mark_ready(parameter);
  launch_ready_buckets();
  flight_.advance();
}

// Whether this backward is one of this Reducer's own: see Note [Shared parameters].
bool Reducer::concerns(size_t parameter) const {
  if (phase_ == Phase::kBackward || !is_shared(parameter)) return true;
  return end_is_queued_ || (phase_ == Phase::kForwarded && !outputs_watched_);
}

void Reducer::put_into_bucket(size_t parameter) {
  if (passive()) return;
  if (is_shared(parameter)) {
    const torch::NoGradGuard no_grad;
    buckets_->claim(parameter).copy_(parameters_[parameter].tensor.grad());
  } else if (!buckets_->holds_grad(parameter)) {
    buckets_->adopt_grad(parameter);
  }
}

// What was averaged in a bucket becomes the grad, which lies elsewhere.
void Reducer::take_shared_means() {
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    torch::Tensor& grad = parameters_[i].tensor.mutable_grad();
    if (is_shared(i) && grad.defined()) grad.copy_(buckets_->view(i));
  }
}

void Reducer::begin_backward() {
  check_decision();
  backward_decision_ = synchronise_ && phase_ == Phase::kForwarded;
  phase_ = Phase::kBackward;
  // See Note [Nested backward]. Outputs of a type of the user's cannot be watched.
  if (!end_is_queued_) at_end_of_backward([this] { end_backward(); });
  if (!backward_decision_) return;
  stats_.backward_started_ns = monotonic_ns();
  flight_.begin_step();
  if (!passive()) {
    flight_.begin_backward(buckets_->bucket(0).gradients.device());
    buckets_->set_micro_steps(window_.micro_steps() + 1);
    std::vector<size_t> gradients;  // [bucket]
    for (size_t i = 0; i < buckets_->size(); ++i) {
      gradients.push_back(buckets_->plan(i).gradients.size());
    }
    order_.begin_backward(std::move(gradients));
  }
  for (const size_t parameter : tally_.begin_backward()) mark_unused(parameter);
}

// This backward gives the parameter nothing: its place holds zeros, or what it has accumulated.
void Reducer::mark_unused(size_t parameter) {
  tally_.expect_none(parameter);
  if (passive()) return;
  if (parameters_[parameter].tensor.grad().defined()) {
    put_into_bucket(parameter);
  } else {
    buckets_->claim(parameter).zero_();
    tally_.mark_zero_filled(parameter);
  }
  mark_ready(parameter);
}

void Reducer::mark_ready(size_t parameter) {
  if (!passive()) order_.mark_ready(parameter, buckets_->bucket_of(parameter));
}

void Reducer::launch_ready_buckets() {
  while (const auto bucket = order_.take_ready()) {
    if (capture_ != nullptr) {
      record_launch(*bucket);
    } else {
      launch(*bucket, weight_);
    }
  }
}

void Reducer::launch(size_t bucket, double weight) {
  const PlannedBucket& plan = buckets_->plan(bucket);
  nonfinite_.look(*buckets_, bucket);
  flight_.launch(buckets_->bucket(bucket), plan.bytes(),
                 static_cast<int64_t>(plan.gradients.size()), weight);
}

void Reducer::end_backward() {
  const std::lock_guard lock(mutex_);
  end_is_queued_ = false;
  if (phase_ != Phase::kBackward) return;  // it reached no parameter, or ended already
  if (backward_decision_) {
    finish_backward();
  } else {
    count([this] { window_.add_micro_step(); });
  }
  tally_.end_backward();
  phase_ = Phase::kIdle;
}

void Reducer::finish_backward() {
  if (tally_.learns()) learn_static_graph();
  settle_missing();
  if (!passive()) {
    launch_ready_buckets();
    if (capture_ != nullptr) {
      record_wait();
    } else {
      flight_.wait();
      settle_unused();
    }
    take_shared_means();
  }
  tally_.end_window();
  count_step();
}

void Reducer::count_step() {
  count([this] {
    stats_.synchronised_backwards += 1;
    window_.close();
  });
  if (comparison_ == Comparison::kAfterBackward) comparison_ = Comparison::kDue;
  order_.end_backward();
}

void Reducer::learn_static_graph() {
  for (const size_t parameter : tally_.learn()) mark_ready(parameter);
  for (const size_t parameter : tally_.awaited()) mark_unused(parameter);
}

// Parameters from which a gradient was expected: the outputs depend on them, but the loss does not.
void Reducer::settle_missing() {
  const auto awaited = tally_.awaited();
  if (!awaited.empty() && !options_.find_unused_parameters) refuse_missing(awaited);
  for (const size_t parameter : awaited) mark_unused(parameter);
}

// A parameter that no rank used keeps the grad it had; one that another rank used gets the mean.
void Reducer::settle_unused() {
  if (!options_.find_unused_parameters && !options_.static_graph) return;
  torch::Tensor used = torch::empty({static_cast<int64_t>(parameters_.size())}, torch::kUInt8);
  auto* flags = used.data_ptr<uint8_t>();
  std::copy(tally_.used().begin(), tally_.used().end(), flags);
  comm_.all_reduce(used, ReduceOp::kMax, {.label = "parameters in use"});
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!tally_.zero_filled(i) || flags[i] == 0) continue;
    const torch::Tensor mean = buckets_->view(i);
    parameters_[i].tensor.mutable_grad() = is_shared(i) ? mean.clone() : mean;
  }
}

const DdpStats& Reducer::stats() {
  flight_.settle();
  nonfinite_.settle();
  return stats_;
}

void Reducer::shadow_backward(bool counts_in_mean) {
  stats_.backward_started_ns = monotonic_ns();
  stats_.backward_finished_ns = stats_.backward_started_ns;
  flight_.begin_step();
  flight_.begin_backward(buckets_->bucket(0).gradients.device());
  tally_.end_window();
  buckets_->set_micro_steps(window_.micro_steps() + 1);
  buckets_->claim_all();
  for (size_t bucket = 0; bucket < buckets_->size(); ++bucket) {
    buckets_->bucket(bucket).gradients.zero_();
    launch(bucket, counts_in_mean ? weight_ : 0);
    flight_.advance();
  }
  flight_.wait();
  settle_unused();
  count_step();
}

std::vector<GradientBucket> Reducer::buckets() const {
  std::vector<GradientBucket> all;
  for (size_t i = 0; !passive() && i < buckets_->size(); ++i) all.push_back(buckets_->bucket(i));
  return all;
}

}  // namespace lockstep
