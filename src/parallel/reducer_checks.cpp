// What a Reducer refuses, and what it says.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "lockstep/error.hpp"
#include "parallel/reducer.hpp"

namespace lockstep {
namespace {

std::string list_names(const std::vector<std::string>& names) {
  constexpr size_t kShown = 8;
  const std::vector<std::string> shown(
      names.begin(), names.begin() + static_cast<std::ptrdiff_t>(std::min(names.size(), kShown)));
  std::string text = fmt::format("{}", fmt::join(shown, ", "));
  if (names.size() > kShown) text += fmt::format(" and {} more", names.size() - kShown);
  return text;
}

}  // namespace

void Reducer::fail(Code code, const std::string& message, const std::string& help) {
  comm_.abort(message);
  throw Error(code, message, help);
}

// A parameter may get other data of its own kind, as from torch::load. Its hooks follow it.
void Reducer::require_unchanged(const std::vector<TrainedParameter>& trained) {
  if (const auto change = find_change(parameters_, forms_, trained)) {
    fail(Code::kSyncMisuse,
         fmt::format("parameter {} {} after it was wrapped: its gradients would not be averaged",
                     change->name, change->what),
         "change the module first, and then make DistributedDataParallel, anew where it was made "
         "already");
  }
  hooks_->follow(parameters_);
}

void Reducer::set_weight(double weight) {
  if (!std::isfinite(weight) || weight < 0) {
    throw Error(Code::kUsage, fmt::format("{} cannot weigh a rank in a mean", weight),
                "give a number of rows, or any number from 0");
  }
  weight_ = weight;
}

void Reducer::check_ended() {
  if (phase_ == Phase::kBackward && backward_decision_) {
    fail(Code::kSyncMisuse, "forward was called although the last backward did not end",
         "an exception has left it half done; end the program, or make DDP and its communicator "
         "anew");
  }
}

// A window that ends inside NoSync, such as a last partial one, was never averaged.
//
// Note [Perturbed weights]: sharpness-aware minimisation takes a first gradient inside NoSync,
// drops it after it has moved the weights along it, takes a second one that is averaged, and moves
// the weights back before the update. When the second forward begins, that looks like an update
// from gradients that were not averaged. What tells the two apart is whether the ranks' weights
// agree in the step after. They are compared then, for the dropped windows 1, 2, 4, 8 and so on.
// Whether a window was dropped follows from the program alone, so all ranks come to the comparison.
void Reducer::check_window(bool synchronise) {
  if (window_.micro_steps() == 0) return;
  const bool dropped = window_.gradients_dropped();
  if (spoiled_micro_steps() > 0 && !(dropped && synchronise)) {
    fail(Code::kSyncMisuse,
         fmt::format("the weights changed after {} micro-steps whose gradients were not averaged: "
                     "from here on ranks would differ",
                     spoiled_micro_steps()),
         "let the last micro-step before each update run outside NoSync, also that of a last, "
         "shorter window, and divide its loss by the micro-steps it has. Gradients that another "
         "model's loss has left here are dropped by zero_grad() before this model's next step. "
         "Where weights change on purpose and are changed back, drop the gradients first, or set "
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
       "let the guard live around forward and backward");
}

void Reducer::check_gradient(const TrainedParameter& target, const torch::Tensor& gradient) {
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
}

void Reducer::refuse_late(size_t parameter) {
  fail(Code::kSyncMisuse,
       fmt::format("parameter {} got a gradient after it was ready for its bucket",
                   parameters_[parameter].name),
       "use it in one forward per backward, return all tensors from forward that the loss is made "
       "of, or set static_graph where every step does the same");
}

void Reducer::refuse_missing(const std::vector<size_t>& awaited) {
  std::vector<std::string> names;
  for (const size_t parameter : awaited) names.push_back(parameters_[parameter].name);
  fail(
      Code::kUnusedParameter,
      fmt::format("backward gave no gradient to {} of {} parameters: {}", names.size(),
                  parameters_.size(), list_names(names)),
      "use them in forward, freeze them with requires_grad_(false) before they are wrapped, or set "
      "find_unused_parameters");
}

}  // namespace lockstep
