#include "parallel/reducer.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "device/capture.hpp"
#include "lockstep/clock.hpp"
#include "lockstep/error.hpp"
#include "lockstep/tensor_text.hpp"
#if LOCKSTEP_CUDA
#include "parallel/cuda_accumulators.hpp"
#endif

namespace lockstep {
namespace {

// Backward reaches the parameters of the last layer first.
std::vector<size_t> reversed_order(size_t count) {
  std::vector<size_t> order(count);
  std::iota(order.rbegin(), order.rend(), size_t{0});
  return order;
}

std::string list_names(const std::vector<std::string>& names) {
  constexpr size_t kShown = 8;
  const std::vector<std::string> shown(
      names.begin(), names.begin() + static_cast<std::ptrdiff_t>(std::min(names.size(), kShown)));
  std::string text = fmt::format("{}", fmt::join(shown, ", "));
  if (names.size() > kShown) text += fmt::format(" and {} more", names.size() - kShown);
  return text;
}

}  // namespace

Reducer::Reducer(std::vector<TrainedParameter> parameters, const Communicator& comm,
                 const DdpOptions& options)
    : parameters_(std::move(parameters)),
      comm_(comm),
      options_(options),
      window_(parameters_),
      firings_left_(parameters_.size(), 1),
      firings_(parameters_.size(), 0),
      used_(parameters_.size(), false),
      zero_filled_(parameters_.size(), false),
      order_(reversed_order(parameters_.size())),
      flight_(comm_, options_.hook, stats_) {
  for (const auto& parameter : parameters_) shapes_.push_back(parameter.tensor.sizes().vec());
  if (comm_.size() > 1 || options_.hook) {
    buckets_.emplace(comm_, parameters_, order_,
                     BucketLimits{options_.first_bucket_bytes, options_.bucket_cap_bytes});
  }
  // Which parameters are ready first may differ from step to step where their use does.
  if (passive() || (options_.find_unused_parameters && !options_.static_graph)) {
    rebuild_ = Rebuild::kDone;
  }
  hooks_.emplace(parameters_, *this);
}

void Reducer::fail(Code code, const std::string& message, const std::string& help) {
  comm_.abort(message);
  throw Error(code, message, help);
}

void Reducer::set_weight(double weight) {
  if (!std::isfinite(weight) || weight < 0) {
    throw Error(Code::kUsage, fmt::format("{} cannot weigh a rank in a mean", weight),
                "give a number of rows, or any number from 0");
  }
  weight_ = weight;
}

void Reducer::require_unchanged(const std::vector<TrainedParameter>& trained) {
  const auto refuse = [&](const std::string& name, const std::string& what) {
    fail(Code::kSyncMisuse,
         fmt::format("parameter {} {} after it was wrapped: its gradients would not be averaged",
                     name, what),
         "change the module first, and then make DistributedDataParallel, anew where it was made "
         "already");
  };
  size_t known = 0;
  for (const auto& [name, tensor] : trained) {
    while (known < parameters_.size() && !parameters_[known].tensor.is_same(tensor)) ++known;
    if (known == parameters_.size()) refuse(name, "was added or made trainable");
    if (!hooks_->listens_to(known, tensor)) refuse(name, "was moved or converted");
    if (tensor.sizes() != torch::IntArrayRef(shapes_[known])) {
      refuse(name, fmt::format("was resized from {} to {}", shape_text(shapes_[known]),
                               shape_text(tensor.sizes())));
    }
    ++known;
  }
}

void Reducer::before_forward(bool synchronise) {
  if (phase_ == Phase::kBackward && backward_decision_) {
    fail(Code::kSyncMisuse, "forward was called although the last backward did not end",
         "an exception has left it half done; end the program, or make DDP and its communicator "
         "anew");
  }
  check_window();
#if LOCKSTEP_CUDA
  cuda::accumulate_on_current_stream(parameters_);
#endif
  Capture* capture = Capture::current();
  if (capture != nullptr && capture != capture_) join_capture(*capture);
  capture_ = capture;
  forward_decision_ = synchronise;
  phase_ = Phase::kForwarded;
  end_is_queued_ = false;
}

void Reducer::join_capture(Capture& capture) {
  if (!passive() && (options_.find_unused_parameters || options_.static_graph)) {
    require_not_capturing(
        "DistributedDataParallel with find_unused_parameters or static_graph",
        "freeze parameters that are not used with requires_grad_(false), and leave the option out");
  }
  if (rebuild_ != Rebuild::kDone) {
    require_not_capturing("the first or second step of DistributedDataParallel",
                          "set CaptureOptions::warmup to 2 or more");
  }
  capture.before_replay([this] {
    capture_ = nullptr;
    stats_.backward_started_ns = monotonic_ns();
    stats_.backward_finished_ns = stats_.backward_started_ns;
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

// A window that ends inside NoSync, such as a last partial one, was never averaged.
void Reducer::check_window() {
  if (spoiled_micro_steps() > 0) {
    fail(Code::kSyncMisuse,
         fmt::format("the weights changed after {} micro-steps whose gradients were not averaged: "
                     "from here on ranks would differ",
                     spoiled_micro_steps()),
         "let the last micro-step before each update run outside NoSync, also that of a last, "
         "shorter window, and divide its loss by the micro-steps it has");
  }
  if (window_.micro_steps() > 0 && window_.gradients_dropped()) window_.close();
}

void Reducer::after_forward(const std::vector<torch::Tensor>& outputs) {
  hooks_->watch(outputs);
  if (!options_.find_unused_parameters || options_.static_graph) return;
  const auto reached = hooks_->reachable_from(outputs);
  // Outputs that depend on nothing, or that are hidden in a type of the user's, tell nothing.
  if (std::find(reached.begin(), reached.end(), true) == reached.end()) return;
  if (reachable_.empty()) reachable_.assign(reached.size(), false);
  for (size_t i = 0; i < reached.size(); ++i) reachable_[i] = reachable_[i] || reached[i];
}

void Reducer::rebuild_if_due() {
  if (rebuild_ != Rebuild::kDue) return;
  rebuild_ = Rebuild::kDone;
  // A rank that had no step of its own yet has seen no order.
  const auto& seen = ready_order_.size() == order_.size() ? ready_order_ : order_;
  torch::Tensor agreed = torch::empty({static_cast<int64_t>(seen.size())}, torch::kInt64);
  auto* numbers = agreed.data_ptr<int64_t>();
  for (size_t i = 0; i < seen.size(); ++i) numbers[i] = static_cast<int64_t>(seen[i]);
  comm_.broadcast(agreed, 0, {.label = "order of buckets"});
  const std::vector<size_t> order(numbers, numbers + agreed.numel());
  if (order == order_) return;
  order_ = order;
  buckets_->arrange(order_);
}

torch::Tensor Reducer::gradient_computed(size_t parameter, const torch::Tensor& gradient) {
  if (passive()) return gradient;
  const TrainedParameter& target = parameters_[parameter];
  if (gradient.layout() != torch::kStrided) {
    fail(Code::kTensorMismatch, fmt::format("the gradient of {} is sparse", target.name),
         "buckets are dense: build the layer without sparse gradients");
  }
  if (torch::GradMode::is_enabled()) {
    fail(Code::kSyncMisuse,
         fmt::format("backward with create_graph reached {}: averaged gradients have no derivative",
                     target.name),
         "take first derivatives that need a graph with torch::autograd::grad, and call backward "
         "without create_graph");
  }
  // A first gradient goes straight to its place, and autograd adopts the view; a further one is
  // added to what is there.
  if (target.tensor.grad().defined()) return gradient;
  torch::Tensor place = buckets_->view(parameter);
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
  if (phase_ != Phase::kBackward) begin_backward();
  if (!passive() && !buckets_->holds_grad(parameter)) buckets_->adopt_grad(parameter);
  used_[parameter] = true;
  firings_[parameter] += 1;
  if (!backward_decision_) return;
  if (firings_left_[parameter] == 0) {
    fail(
        Code::kSyncMisuse,
        fmt::format("parameter {} got a gradient after it was ready for its bucket",
                    parameters_[parameter].name),
        "use it in one forward per backward, return all tensors from forward that the loss is made "
        "of, or set static_graph where every step does the same");
  }
  stats_.backward_finished_ns = monotonic_ns();
  const bool watching_graph = options_.static_graph && static_firings_.empty();
  if (watching_graph) {
    std::erase(ready_order_, parameter);
    ready_order_.push_back(parameter);
    return;
  }
  if (--firings_left_[parameter] > 0) return;
  mark_ready(parameter);
  if (passive()) return;
  launch_ready_buckets();
  flight_.advance();
}

void Reducer::check_decision() {
  if (phase_ == Phase::kIdle) {
    if (!synchronise_) return;
    fail(Code::kSyncMisuse,
         "backward reached parameters of a DistributedDataParallel that had no forward since its "
         "last backward: these gradients would not be averaged",
         "call forward through the wrapper before each backward, or wrap both in NoSync");
  }
  if (forward_decision_ == synchronise_) return;
  fail(Code::kSyncMisuse,
       synchronise_
           ? "half of a step is inside NoSync: forward was inside, its backward is outside"
           : "half of a step is inside NoSync: forward was outside, its backward is inside",
       "let the guard live around forward and backward");
}

void Reducer::begin_backward() {
  check_decision();
  backward_decision_ = synchronise_;
  phase_ = Phase::kBackward;
  // See Note [Nested backward]. Outputs of a type of the user's cannot be watched.
  if (!end_is_queued_) at_end_of_backward([this] { end_backward(); });
  std::fill(firings_.begin(), firings_.end(), 0);
  if (!backward_decision_) return;

  if (static_firings_.empty()) {
    std::fill(firings_left_.begin(), firings_left_.end(), 1);
  } else {
    firings_left_ = static_firings_;
  }
  std::fill(zero_filled_.begin(), zero_filled_.end(), false);
  stats_.backward_started_ns = monotonic_ns();
  stats_.last_step.clear();
  if (!passive()) buckets_->set_micro_steps(window_.micro_steps() + 1);
  next_bucket_ = 0;
  missing_in_bucket_.clear();
  for (size_t i = 0; !passive() && i < buckets_->size(); ++i) {
    missing_in_bucket_.push_back(buckets_->plan(i).gradients.size());
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (reachable_.empty() ? firings_left_[i] == 0 : !reachable_[i]) mark_unused(i);
  }
}

// This backward gives the parameter nothing: its place holds zeros, or what it has accumulated.
void Reducer::mark_unused(size_t parameter) {
  firings_left_[parameter] = 0;
  if (passive()) return;
  if (!parameters_[parameter].tensor.grad().defined()) {
    buckets_->view(parameter).zero_();
    zero_filled_[parameter] = true;
  } else if (!buckets_->holds_grad(parameter)) {
    buckets_->adopt_grad(parameter);
  }
  mark_ready(parameter);
}

void Reducer::mark_ready(size_t parameter) {
  if (rebuild_ == Rebuild::kWatching) ready_order_.push_back(parameter);
  if (!passive()) --missing_in_bucket_[buckets_->bucket_of(parameter)];
}

// Strictly in order: ranks may be ready in different orders, but must make the same calls.
void Reducer::launch_ready_buckets() {
  while (next_bucket_ < buckets_->size() && missing_in_bucket_[next_bucket_] == 0) {
    const size_t bucket = next_bucket_++;
    if (capture_ != nullptr) {
      record_launch(bucket);
    } else {
      launch(bucket, weight_);
    }
  }
}

// See Note [Captured backward].
void Reducer::record_launch(size_t bucket) {
  const int64_t micro_steps = window_.micro_steps() + 1;
  capture_->between_graphs([this, bucket, micro_steps] {
    if (bucket == 0) {
      stats_.last_step.clear();
      buckets_->set_micro_steps(micro_steps);
    }
    launch(bucket, weight_);
    flight_.advance();
  });
}

void Reducer::wait_for_buckets() {
  if (capture_ == nullptr) {
    flight_.wait();
    settle_unused();
    return;
  }
  capture_->between_graphs([this] {
    stats_.backward_finished_ns = monotonic_ns();
    flight_.wait();
  });
}

void Reducer::launch(size_t bucket, double weight) {
  const PlannedBucket& plan = buckets_->plan(bucket);
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
  reachable_.clear();
  phase_ = Phase::kIdle;
}

void Reducer::finish_backward() {
  if (options_.static_graph && static_firings_.empty()) learn_static_graph();
  settle_missing();
  if (!passive()) {
    launch_ready_buckets();
    wait_for_buckets();
  }
  std::fill(used_.begin(), used_.end(), false);
  count_step();
}

void Reducer::count_step() {
  count([this] {
    stats_.synchronised_backwards += 1;
    window_.close();
  });
  if (rebuild_ == Rebuild::kWatching) rebuild_ = Rebuild::kDue;
}

void Reducer::learn_static_graph() {
  static_firings_ = firings_;
  for (const size_t parameter : std::exchange(ready_order_, {})) {
    firings_left_[parameter] = 0;
    mark_ready(parameter);
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (firings_[i] == 0) mark_unused(i);
  }
}

// Parameters from which a gradient was expected: the outputs depend on them, but the loss does not.
void Reducer::settle_missing() {
  std::vector<std::string> names;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (firings_left_[i] == 0) continue;
    if (options_.find_unused_parameters) {
      mark_unused(i);
    } else {
      names.push_back(parameters_[i].name);
    }
  }
  if (names.empty()) return;
  fail(
      Code::kUnusedParameter,
      fmt::format("backward gave no gradient to {} of {} parameters: {}", names.size(),
                  parameters_.size(), list_names(names)),
      "use them in forward, freeze them with requires_grad_(false) before they are wrapped, or set "
      "find_unused_parameters");
}

// A parameter that no rank used keeps the grad it had; one that another rank used gets the mean.
void Reducer::settle_unused() {
  if (!options_.find_unused_parameters && !options_.static_graph) return;
  torch::Tensor used = torch::empty({static_cast<int64_t>(used_.size())}, torch::kUInt8);
  auto* flags = used.data_ptr<uint8_t>();
  for (size_t i = 0; i < used_.size(); ++i) flags[i] = used_[i] ? 1 : 0;
  comm_.all_reduce(used, ReduceOp::kMax, {.label = "parameters in use"});
  for (size_t i = 0; i < used_.size(); ++i) {
    if (zero_filled_[i] && flags[i] != 0) parameters_[i].tensor.mutable_grad() = buckets_->view(i);
  }
}

void Reducer::shadow_backward(bool counts_in_mean) {
  stats_.last_step.clear();
  std::fill(zero_filled_.begin(), zero_filled_.end(), false);
  buckets_->set_micro_steps(window_.micro_steps() + 1);
  for (size_t bucket = 0; bucket < buckets_->size(); ++bucket) {
    buckets_->bucket(bucket).gradients.zero_();
    launch(bucket, counts_in_mean ? weight_ : 0);
    flight_.advance();
  }
  flight_.wait();
  std::fill(used_.begin(), used_.end(), false);
  settle_unused();
  count_step();
}

std::vector<GradientBucket> Reducer::buckets() const {
  std::vector<GradientBucket> all;
  for (size_t i = 0; !passive() && i < buckets_->size(); ++i) all.push_back(buckets_->bucket(i));
  return all;
}

}  // namespace lockstep
