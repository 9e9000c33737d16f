#include "gradients/reducer.hpp"

#include <c10/core/StreamGuard.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/counted.hpp"
#include "base/fault.hpp"
#include "base/mutation.hpp"
#include "device/capture.hpp"
#include "device/parameter_map.hpp"
#include "gradients/model_sync.hpp"
#include "lockstep/clock.hpp"
#include "verify/step_recorder.hpp"

namespace lockstep {
namespace {

// A single rank has nothing to average, unless the user's hook does something else with gradients.
// PartGradients averages the gradients of virtual shards.
bool has_work(const Communicator& comm, const DdpOptions& options) {
  return (comm.size() > 1 || options.hook) && options.virtual_shards == 0;
}

// If the parameters in use change from step to step, so does the order in which they are ready.
bool learns_order(const Communicator& comm, const DdpOptions& options) {
  return has_work(comm, options) && (options.static_graph || !options.find_unused_parameters);
}

// How many Reducers average a parameter of this process: see Note [Shared parameters].
std::shared_ptr<std::atomic<int>> owners_of(const torch::Tensor& parameter) {
  static ParameterMap<std::shared_ptr<std::atomic<int>>> map;
  static std::mutex mutex;  // two Reducers must not both start the count
  const std::lock_guard lock(mutex);
  if (auto known = map.get(parameter)) return *known;
  auto count = std::make_shared<std::atomic<int>>(0);
  map.set(parameter, count);
  return count;
}

std::vector<TrainedParameter> joined(std::vector<TrainedParameter> dense,
                                     const std::vector<TrainedParameter>& sparse) {
  dense.insert(dense.end(), sparse.begin(), sparse.end());
  return dense;
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

Reducer::Reducer(ParametersByGradient parameters, const Communicator& comm,
                 const DdpOptions& options)
    : all_parameters_(joined(parameters.dense, parameters.sparse)),
      parameters_(std::span(all_parameters_).first(parameters.dense.size())),
      sparse_parameters_(std::span(all_parameters_).subspan(parameters.dense.size())),
      forms_(forms_of(parameters_)),
      sparse_forms_(forms_of(sparse_parameters_)),
      comm_(comm),
      options_(options),
      averages_(has_work(comm_, options_)),
      sparse_(sparse_parameters_, comm_),
      window_(all_parameters_),
      streams_(all_parameters_),
      ready_(parameters_.size(), options_.static_graph),
      order_(parameters_.size(), !parameters_.empty() && learns_order(comm_, options_)),
      nonfinite_(parameters_, comm_, options_.nonfinite, stats_),
      in_flight_(comm_, options_.hook, stats_) {
  for (const auto& [name, tensor] : all_parameters_) {
    owners_.push_back(owners_of(tensor));
    const bool is_shared = ++*owners_.back() > 1;
    // It may be a view of the other Reducer's bucket.
    if (is_shared && tensor.grad().defined()) tensor.mutable_grad() = tensor.grad().clone();
  }
  if (averages_ && !parameters_.empty()) {
    buckets_.emplace(comm_, parameters_, order_.expected(),
                     BucketLimits{options_.first_bucket_bytes, options_.bucket_cap_bytes});
    offer_gradient_memory();
  }
  hooks_.emplace(all_parameters_, *this);
}

bool Reducer::is_shared(size_t parameter) const {
  return *owners_[parameter] > 1 && !is_planted(Mutation::kWrappersOverlap);
}

bool Reducer::averages(const torch::Tensor& parameter) {
  return *owners_of(parameter) > 0;
}

Reducer::~Reducer() {
  for (const auto& owners : owners_) --*owners;
}

bool Reducer::shares_parameters() const {
  return std::any_of(owners_.begin(), owners_.end(), [](const auto& count) { return *count > 1; });
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
  auto reached = hooks_->reachable_from(outputs);
  // Outputs that depend on nothing, or are hidden in a user's own type, tell nothing.
  if (std::find(reached.begin(), reached.end(), true) == reached.end()) return;
  reached.resize(parameters_.size());  // sparse gradients may be missing on any rank
  ready_.add_reachable(reached);
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
  const TrainedParameter& target = all_parameters_[parameter];
  check_gradient(target, gradient, is_sparse(parameter));
  if (is_sparse(parameter)) return gradient;
  // A first gradient is written straight into its bucket, and autograd adopts the view; a further
  // one is added to it.
  if (target.tensor.grad().defined() || is_shared(parameter)) return gradient;
  if (buckets_->holds(parameter, gradient)) return gradient;  // see offer_gradient_memory()
  torch::Tensor in_bucket = buckets_->claim(parameter);
  in_bucket.copy_(gradient);
  return in_bucket;
}

// Note [Nested backward]: layers that are recomputed in backward (activation checkpointing) run a
// backward of their own inside it. The first gradient may come from there, but only the end of the
// outer backward is the end. The outer one goes through the outputs first, and so queues its end.
void Reducer::output_reached() {
  const std::lock_guard lock(mutex_);
  end_is_queued_ = true;
  at_end_of_backward([this] { end_backward(); });
}

void Reducer::gradient_accumulated(size_t parameter) {
  const std::lock_guard lock(mutex_);
  if (!concerns(parameter)) return;
  if (is_sparse(parameter)) return sparse_gradient_accumulated();
  const c10::MultiStreamGuard on_streams(streams_.all());  // see Note [Hooks of several GPUs]
  if (phase_ != Phase::kBackward) begin_backward();
  put_into_bucket(parameter);
  if (!backward_decision_) return ready_.mark_used(parameter);
  const auto arrival = ready_.arrive(parameter);
  if (arrival == ReadyTracker::Arrival::kLate) refuse_late(parameter);
  stats_.backward_finished_ns = monotonic_ns();
  if (passive() || arrival != ReadyTracker::Arrival::kLast) return;
  mark_ready(parameter);
  launch_ready_buckets();
  in_flight_.advance();
}

// It is averaged when backward ends; until then only the beginning counts.
void Reducer::sparse_gradient_accumulated() {
  const c10::MultiStreamGuard on_streams(streams_.all());
  if (phase_ != Phase::kBackward) begin_backward();
  if (backward_decision_) stats_.backward_finished_ns = monotonic_ns();
}

// Whether this backward belongs to this Reducer: see Note [Shared parameters].
bool Reducer::concerns(size_t parameter) const {
  if (phase_ == Phase::kBackward || !is_shared(parameter)) return true;
  return end_is_queued_ || (phase_ == Phase::kForwarded && !outputs_watched_);
}

// Lets layers compute a first gradient in its bucket, so that nothing is copied.
void Reducer::offer_gradient_memory() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    claims_.push_back(std::make_shared<const ClaimGradientMemory>([this, i] {
      const bool is_first = !parameters_[i].tensor.grad().defined() && !is_shared(i);
      return is_first ? buckets_->claim(i) : torch::Tensor();
    }));
    note_gradient_memory(parameters_[i].tensor, claims_.back());
  }
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

// Copies means to the grads that are not views of their bucket: see Note [Shared parameters].
void Reducer::copy_back_shared() {
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
  // See Note [Nested backward]. Outputs of a user's own type cannot be watched.
  if (!end_is_queued_) at_end_of_backward([this] { end_backward(); });
  if (!backward_decision_) return;
  FaultInjector::of_process().begin_backward();
  stats_.backward_started_ns = monotonic_ns();
  in_flight_.begin_step();
  if (buckets_) {
    in_flight_.begin_backward(buckets_->bucket(0).gradients.device());
    buckets_->set_micro_steps(window_.micro_steps() + 1);
    std::vector<size_t> gradients;  // [bucket]
    for (size_t i = 0; i < buckets_->size(); ++i) {
      gradients.push_back(buckets_->plan(i).gradients.size());
    }
    order_.begin_backward(std::move(gradients));
  }
  for (const size_t parameter : ready_.begin_backward()) mark_unused(parameter);
}

// This backward gives the parameter no gradient: its bucket gets zeros, or what was accumulated.
void Reducer::mark_unused(size_t parameter) {
  ready_.expect_none(parameter);
  if (passive()) return;
  if (parameters_[parameter].tensor.grad().defined()) {
    put_into_bucket(parameter);
  } else {
    buckets_->claim(parameter).zero_();
    ready_.mark_zero_filled(parameter);
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
  inject_faults(comm_, buckets_->bucket(bucket).gradients);
  if (planted_mutation() != Mutation::kNone) spoil_.launched(*buckets_, bucket);
  nonfinite_.look(*buckets_, bucket);
  if (StepRecorder::of_process() != nullptr) record_local(*buckets_, bucket, parameters_, weight);
  in_flight_.launch(buckets_->bucket(bucket), plan.bytes(),
                    static_cast<int64_t>(plan.gradients.size()), weight);
}

void Reducer::end_backward() {
  const std::lock_guard lock(mutex_);
  end_is_queued_ = false;
  if (phase_ != Phase::kBackward) return;  // it reached no parameter, or has already ended
  if (backward_decision_) {
    finish_backward();
  } else {
    count([this] { window_.add_micro_step(); });
    if (is_planted(Mutation::kMicroBatchTwice) && window_.micro_steps() == 1) {
      spoil_.count_twice(parameters_);
    }
  }
  ready_.end_backward();
  phase_ = Phase::kIdle;
}

void Reducer::finish_backward() {
  if (ready_.learns()) learn_static_graph();
  settle_missing();
  if (!passive()) {
    launch_ready_buckets();
    if (capture_ != nullptr) {
      record_wait();
    } else {
      in_flight_.wait();
      settle_unused();
      sparse_.average(weight_);
      if (planted_mutation() != Mutation::kNone)
        spoil_.averaged(*buckets_, parameters_, comm_.size());
    }
    copy_back_shared();
  }
  ready_.end_window();
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
  for (const size_t parameter : ready_.learn()) mark_ready(parameter);
  for (const size_t parameter : ready_.awaited()) mark_unused(parameter);
}

// Settles parameters that the outputs depend on, but the loss does not.
void Reducer::settle_missing() {
  const auto awaited = ready_.awaited();
  if (!awaited.empty() && !options_.find_unused_parameters) refuse_missing(awaited);
  for (const size_t parameter : awaited) mark_unused(parameter);
}

// A parameter that no rank used keeps its grad; one that another rank used gets the mean.
void Reducer::settle_unused() {
  if (!options_.find_unused_parameters && !options_.static_graph) return;
  torch::Tensor used = torch::empty({static_cast<int64_t>(parameters_.size())}, torch::kUInt8);
  auto* flags = used.data_ptr<uint8_t>();
  std::copy(ready_.used().begin(), ready_.used().end(), flags);
  comm_.all_reduce(used, ReduceOp::kMax, {.label = "parameters in use"});
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!ready_.zero_filled(i) || flags[i] == 0) continue;
    const torch::Tensor mean = buckets_->view(i);
    parameters_[i].tensor.mutable_grad() = is_shared(i) ? mean.clone() : mean;
  }
}

const DdpStats& Reducer::stats() {
  in_flight_.settle();
  nonfinite_.settle();
  return stats_;
}

void Reducer::shadow_backward(bool counts_in_mean) {
  stats_.backward_started_ns = monotonic_ns();
  stats_.backward_finished_ns = stats_.backward_started_ns;
  in_flight_.begin_step();
  if (buckets_) in_flight_.begin_backward(buckets_->bucket(0).gradients.device());
  ready_.end_window();
  if (buckets_) {
    buckets_->set_micro_steps(window_.micro_steps() + 1);
    buckets_->claim_all();
  }
  for (size_t bucket = 0; buckets_ && bucket < buckets_->size(); ++bucket) {
    buckets_->bucket(bucket).gradients.zero_();
    launch(bucket, counts_in_mean ? weight_ : 0);
    in_flight_.advance();
  }
  in_flight_.wait();
  settle_unused();
  for (const auto& parameter : sparse_parameters_) parameter.tensor.mutable_grad().reset();
  sparse_.average(counts_in_mean ? weight_ : 0);
  count_step();
}

std::vector<GradientBucket> Reducer::buckets() const {
  std::vector<GradientBucket> all;
  for (size_t i = 0; buckets_ && i < buckets_->size(); ++i) all.push_back(buckets_->bucket(i));
  return all;
}

void Reducer::join_capture(Capture& capture) {
  if (!passive() && (options_.find_unused_parameters || options_.static_graph)) {
    require_not_capturing(
        "DistributedDataParallel with find_unused_parameters or static_graph",
        "freeze parameters that are not used with requires_grad_(false), and leave the option out");
  }
  if (!sparse_.empty() && !passive()) {
    require_not_capturing("DistributedDataParallel with sparse gradients",
                          "construct the embedding without sparse gradients");
  }
  if (order_.changes()) {
    require_not_capturing("the first or second step of DistributedDataParallel",
                          "set CaptureOptions::warmup to 2 or more");
  }
  capture.before_replay([this] {
    capture_ = nullptr;
    stats_.backward_started_ns = monotonic_ns();
    stats_.backward_finished_ns = stats_.backward_started_ns;
    if (buckets_) in_flight_.begin_backward(buckets_->bucket(0).gradients.device());
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

// Makes the change now and in every replay but the first, which does what is recorded now.
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
      in_flight_.begin_step();
      buckets_->set_micro_steps(micro_steps);
    }
    stats_.backward_finished_ns = monotonic_ns();
    launch(bucket, weight_);
    in_flight_.advance();
  });
}

void Reducer::record_wait() {
  capture_->between_graphs([this] { in_flight_.wait(); });
}

void Reducer::fail(Code code, const std::string& message, const std::string& help) {
  comm_.abort(message);
  throw Error(code, message, help);
}

// A parameter may get other data of the same form, as from torch::load; its hooks follow it.
void Reducer::require_unchanged(const ParametersByGradient& trained) {
  auto change = find_change(parameters_, forms_, trained.dense);
  if (!change) change = find_change(sparse_parameters_, sparse_forms_, trained.sparse);
  if (change) {
    fail(Code::kSyncMisuse,
         fmt::format("parameter {} {} after it was wrapped: its gradients would not be averaged",
                     change->name, change->what),
         "change the module first and construct DistributedDataParallel afterwards");
  }
  hooks_->follow(all_parameters_);
}

void Reducer::set_weight(double weight) {
  if (!std::isfinite(weight) || weight < 0) {
    throw Error(Code::kUsage, fmt::format("a rank cannot have the weight {} in a mean", weight),
                "give its number of rows, or any other number that is not negative");
  }
  weight_ = is_planted(Mutation::kRanksCountedAlike) ? 1 : weight;
}

void Reducer::check_ended() {
  if (phase_ == Phase::kBackward && backward_decision_) {
    fail(Code::kSyncMisuse, "forward was called although the last backward did not end",
         "an exception left it half done; end the program, or construct DDP and its communicator "
         "again");
  }
}

// A window that ends inside NoSync, such as a last partial one, was never averaged.
//
// Note [Perturbed weights]: sharpness-aware minimisation takes a first gradient inside NoSync,
// moves the weights along it, drops it, takes a second gradient that is averaged, and moves the
// weights back before the update. When the second forward begins, that looks like an update with
// gradients that were not averaged. The two differ in whether the ranks' weights agree one step
// later. They are compared then, for the dropped windows 1, 2, 4, 8 and so on. Whether a window was
// dropped depends only on the program, so all ranks take part in the comparison.
void Reducer::check_window(bool synchronise) {
  if (window_.micro_steps() == 0) return;
  const bool spoiled = spoiled_micro_steps() > 0;
  const bool dropped =
      window_.gradients_dropped() || (spoiled && synchronise && window_.gradients_cleared());
  if (spoiled && !(dropped && synchronise)) {
    fail(Code::kSyncMisuse,
         fmt::format("the weights changed after {} whose gradients were not averaged: "
                     "from here on ranks would differ",
                     counted(spoiled_micro_steps(), "micro-step")),
         "run the last micro-step before each update outside NoSync, also in a last, shorter "
         "window, whose loss is divided by the micro-steps it has. Drop gradients that another "
         "model's loss left here with zero_grad() before this model's next step. If weights change "
         "on purpose and are changed back, drop the gradients first, or set "
         "DdpOptions::check_unaveraged_updates to false");
  }
  if (!dropped) return;
  dropped_.micro_steps = window_.micro_steps();
  window_.close();
  if (!synchronise || passive() || !options_.check_unaveraged_updates) return;
  dropped_.count += 1;
  const bool power_of_two = (dropped_.count & (dropped_.count - 1)) == 0;
  if (power_of_two) comparison_ = Comparison::kAfterBackward;
}

std::optional<Reducer::DroppedWindows> Reducer::take_due_comparison() {
  if (comparison_ != Comparison::kDue) return std::nullopt;
  comparison_ = Comparison::kNone;
  return dropped_;
}

void Reducer::check_decision() {
  if (phase_ == Phase::kIdle) {
    if (!synchronise_ || !end_is_queued_) return;  // see Note [Backward without a forward]
    fail(Code::kSyncMisuse,
         "a second backward went through the outputs of one forward of a "
         "DistributedDataParallel: these gradients would not be averaged",
         "call forward through the wrapper before each backward, or wrap both in NoSync");
  }
  if (forward_decision_ == synchronise_) return;
  fail(Code::kSyncMisuse,
       synchronise_
           ? "half of a step is inside NoSync: forward was inside, its backward is outside"
           : "half of a step is inside NoSync: forward was outside, its backward is inside",
       "keep the guard alive around both forward and backward");
}

void Reducer::check_gradient(const TrainedParameter& target, const torch::Tensor& gradient,
                             bool sparse) {
  if (!sparse && gradient.layout() != torch::kStrided) {
    fail(Code::kTensorMismatch, fmt::format("the gradient of {} is sparse", target.name),
         "only the weight of an Embedding or EmbeddingBag with sparse(true) may have one: use such "
         "a layer, or gradients that are dense");
  }
  if (sparse && !gradient.is_sparse()) {
    fail(
        Code::kTensorMismatch,
        fmt::format("the gradient of {} is dense, and its embedding has sparse(true)", target.name),
        "do not use the weight of a sparse embedding elsewhere, or construct it with "
        "sparse(false)");
  }
  if (torch::GradMode::is_enabled()) {
    fail(Code::kSyncMisuse,
         fmt::format("backward with create_graph reached {}: averaged gradients have no derivative",
                     target.name),
         "take first derivatives that need a graph with torch::autograd::grad, and call backward "
         "without create_graph");
  }
}

void Reducer::refuse_late(size_t parameter) {
  fail(Code::kSyncMisuse,
       fmt::format("parameter {} got a gradient after it was ready for its bucket",
                   parameters_[parameter].name),
       "use it in one forward per backward, return from forward all tensors that the loss is made "
       "of, or set static_graph if every step does the same");
}

void Reducer::refuse_missing(const std::vector<size_t>& awaited) {
  std::vector<std::string> names;
  for (const size_t parameter : awaited) names.push_back(parameters_[parameter].name);
  fail(
      Code::kUnusedParameter,
      fmt::format("backward gave no gradient to {} of {}: {}", names.size(),
                  counted(parameters_.size(), "parameter"), list_names(names)),
      "use them in forward, freeze them with requires_grad_(false) before they are wrapped, or set "
      "find_unused_parameters");
}

}  // namespace lockstep
