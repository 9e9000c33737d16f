#include "sharding/unit_gradients.hpp"

#include <torch/torch.h>

#include <utility>

#include "base/mutation.hpp"
#include "device/parameter_notes.hpp"
#include "gradients/gradient_buckets.hpp"
#include "sharding/whole_parameters.hpp"
#include "verify/step_recorder.hpp"

namespace lockstep {

UnitGradients::UnitGradients(UnitPlan& unit, const Communicator& comm, const ShardOptions& options)
    : unit_(unit),
      comm_(comm),
      resident_(options.stage == ShardStage::kOptimizer || comm.size() == 1),
      offloaded_(options.offload_optimizer && !unit.options.device().is_cpu()),
      present_(unit.parameters.size(), false),
      arrived_(unit.parameters.size(), false),
      origin_(unit.parameters.size(), Origin::kNone),
      given_(unit.parameters.size()),
      claimed_(unit.parameters.size()) {
  if (resident_) whole_ = comm.allocate(unit.elements, unit.options);
}

void UnitGradients::begin_backward() {
  arrived_.assign(arrived_.size(), false);
  arrived_count_ = 0;
}

torch::Tensor UnitGradients::view(size_t parameter) const {
  const UnitParameter& at = unit_.parameters[parameter];
  return whole_.narrow(0, at.offset, at.whole.numel()).view(at.whole.sizes()).detach();
}

torch::Tensor UnitGradients::own_part(size_t parameter) const {
  const UnitParameter& at = unit_.parameters[parameter];
  return part_with_own_storage(whole_, at.offset + at.first, at.count);
}

void UnitGradients::open() {
  if (state_ == State::kOpen) return;
  const torch::NoGradGuard no_grad;
  if (resident_) {
    keep_given();
  } else {
    whole_ = torch::empty({unit_.elements}, unit_.options);
    for (size_t i = 0; i < unit_.parameters.size(); ++i) {  // the gaps are averaged too
      const UnitParameter& at = unit_.parameters[i];
      const int64_t end = at.offset + at.whole.numel();
      const int64_t next =
          i + 1 < unit_.parameters.size() ? unit_.parameters[i + 1].offset : unit_.elements;
      if (next > end) whole_.narrow(0, end, next - end).zero_();
    }
  }
  present_.assign(present_.size(), false);
  state_ = State::kOpen;
}

// The memory of grads that were given out is about to be overwritten: see Note [Kept gradients].
void UnitGradients::keep_given() {
  keep(given_);
  keep(claimed_);
}

void UnitGradients::keep(std::vector<torch::Tensor>& tensors) {
  for (torch::Tensor& each : tensors) {
    if (each.defined() && each.storage().use_count() > 1) move_to_own_memory(each);
    each.reset();
  }
}

torch::Tensor UnitGradients::claim(size_t parameter) {
  open();
  if (present_[parameter] || claimed_[parameter].defined()) return {};
  const UnitParameter& at = unit_.parameters[parameter];
  claimed_[parameter] = part_with_own_storage(whole_, at.offset, at.whole.numel());
  return claimed_[parameter].view(at.whole.sizes()).detach();
}

torch::Tensor UnitGradients::write(size_t parameter, const torch::Tensor& gradient) {
  open();
  present_[parameter] = true;
  torch::Tensor memory = view(parameter);
  if (gradient.data_ptr() == memory.data_ptr() && gradient.strides() == memory.strides()) {
    return gradient;
  }
  if (claimed_[parameter].defined()) {  // and is not this gradient, so somebody may keep it
    if (claimed_[parameter].storage().use_count() > 1) move_to_own_memory(claimed_[parameter]);
    claimed_[parameter].reset();
  }
  memory.copy_(gradient);
  return memory;
}

void UnitGradients::accumulated(size_t parameter) {
  const torch::NoGradGuard no_grad;
  torch::Tensor& grad = unit_.parameters[parameter].whole.mutable_grad();
  open();
  torch::Tensor memory = view(parameter);
  if (grad.data_ptr() != memory.data_ptr()) {
    memory.copy_(grad);
    grad = memory;
  }
  present_[parameter] = true;
  if (arrived_[parameter]) return;
  arrived_[parameter] = true;
  ++arrived_count_;
}

// The whole gradients become this object's alone, with zeros where there are none.
void UnitGradients::let_go() {
  open();
  for (size_t i = 0; i < unit_.parameters.size(); ++i) {
    unit_.parameters[i].whole.mutable_grad().reset();
    if (!present_[i]) view(i).zero_();
    if (origin_[i] == Origin::kLocal) {
      unit_.parameters[i].shard.mutable_grad().reset();
      origin_[i] = Origin::kNone;
    }
  }
  keep_given();
}

torch::Tensor UnitGradients::memory_of_mean() const {
  return resident_ ? whole_.narrow(0, comm_.rank() * unit_.shard_elements, unit_.shard_elements)
                   : torch::empty({unit_.shard_elements}, unit_.options);
}

Work UnitGradients::begin_reduce(double weight) {
  const torch::NoGradGuard no_grad;
  let_go();
  state_ = State::kReducing;
  mean_ = memory_of_mean();
  if (comm_.size() == 1) return {};
  if (auto* recorder = StepRecorder::of_process()) {
    for (size_t i = 0; i < unit_.parameters.size(); ++i) {
      const UnitParameter& at = unit_.parameters[i];
      recorder->note_local(recorder->name_of(at.whole), view(i), slice_of(at.whole), weight);
    }
    recorder->note_sent(unit_.bytes());
  }
  const bool divides = !is_planted(Mutation::kShardsSummed);
  return comm_.begin_reduce_scatter(mean_, whole_, divides ? ReduceOp::kMean : ReduceOp::kSum,
                                    {.label = "gradients of " + unit_.name, .weight = weight});
}

torch::Tensor UnitGradients::take_part() {
  const torch::NoGradGuard no_grad;
  let_go();
  state_ = State::kClosed;
  return resident_ ? whole_ : std::exchange(whole_, torch::Tensor());
}

void UnitGradients::put_mean(const std::function<void(const torch::Tensor& mean)>& fill,
                             const std::vector<bool>& used) {
  state_ = State::kReducing;
  mean_ = memory_of_mean();
  fill(mean_);
  finish_reduce(used);
}

void UnitGradients::finish_reduce(const std::vector<bool>& used) {
  const torch::NoGradGuard no_grad;
  if (!resident_) whole_.reset();
  state_ = State::kClosed;
  for (size_t i = 0; i < unit_.parameters.size(); ++i) {
    UnitParameter& at = unit_.parameters[i];
    if (at.count == 0 || (!used.empty() && !used[i])) continue;
    torch::Tensor& grad = at.shard.mutable_grad();
    torch::Tensor part = resident_ ? own_part(i) : mean_.narrow(0, at.at, at.count).detach();
    if (offloaded_) part = part.to(torch::kCPU);
    if (grad.defined() && resident_ && !offloaded_) {
      part.add_(grad);
      grad = part;
    } else if (grad.defined()) {
      grad.add_(part);
      part = grad;
    } else {
      grad = part;
    }
    if (resident_ && !offloaded_) given_[i] = part.detach();
    origin_[i] = Origin::kMean;
  }
  mean_.reset();
}

void UnitGradients::show_local() {
  if (!is_open()) return;
  for (size_t i = 0; i < unit_.parameters.size(); ++i) {
    UnitParameter& at = unit_.parameters[i];
    torch::Tensor& grad = at.shard.mutable_grad();
    if (at.count == 0 || !present_[i] || grad.defined()) continue;
    grad = offloaded_ ? own_part(i).to(torch::kCPU) : own_part(i);
    if (!offloaded_) given_[i] = grad.detach();
    origin_[i] = Origin::kLocal;
  }
}

void UnitGradients::drop() {
  for (size_t i = 0; i < unit_.parameters.size(); ++i) {
    unit_.parameters[i].whole.mutable_grad().reset();
    if (origin_[i] != Origin::kLocal) continue;
    unit_.parameters[i].shard.mutable_grad().reset();
    origin_[i] = Origin::kNone;
  }
  if (!is_open()) return;
  keep_given();
  state_ = State::kClosed;
  if (!resident_) whole_.reset();
}

}  // namespace lockstep
