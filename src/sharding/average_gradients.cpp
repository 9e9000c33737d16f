#include <c10/core/StreamGuard.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <utility>

#include "base/counted.hpp"
#include "sharding/sharded_state.hpp"

// The gradients of a sharded model: from autograd's hooks to the shards' grads.

namespace lockstep {

// Lets layers compute a first gradient where it is averaged, so that nothing is copied.
void ShardedModel::State::offer_gradient_memory() {
  for (size_t i = 0; i < trained.size(); ++i) {
    claims.push_back(std::make_shared<const ClaimGradientMemory>([this, i] {
      if (trained[i].tensor.grad().defined()) return torch::Tensor();
      const auto [unit, index] = location[i];
      if (units[unit]->reducing) finish_reduce(*units[unit]);
      return units[unit]->gradients->claim(index);
    }));
    note_gradient_memory(trained[i].tensor, claims.back());
  }
}

torch::Tensor ShardedModel::State::gradient_computed(size_t parameter,
                                                     const torch::Tensor& gradient) {
  rethrow_failure();
  check_gradient(parameter, gradient);
  if (trained[parameter].tensor.grad().defined()) return gradient;  // autograd adds it there
  const auto [unit, index] = location[parameter];
  if (units[unit]->reducing) finish_reduce(*units[unit]);
  return units[unit]->gradients->write(index, gradient);
}

// See Note [Nested backward] of the Reducer.
void ShardedModel::State::output_reached() {
  if (comm->size() > 1 && !is_watching()) {
    fail(
        sharding_misuse("backward runs on another thread than forward did",
                        "call both on one thread, where the parameters that they use are noticed"));
  }
  if (std::exchange(end_is_queued, true)) return;
  at_end_of_backward([this] { end_backward(); });
}

void ShardedModel::State::gradient_accumulated(size_t parameter) {
  rethrow_failure();
  const c10::MultiStreamGuard on_streams(streams->all());
  const auto [unit, index] = location[parameter];
  UnitGradients& gradients = *units[unit]->gradients;
  if (phase == Phase::kStepping) return gradients.accumulated(index);
  if (phase != Phase::kBackward) begin_backward();
  gradients.accumulated(index);
  if (!backward_averages || options.find_unused_parameters) return;
  if (complete != nullptr) begin_reduce(*std::exchange(complete, nullptr));
  if (gradients.is_complete()) complete = units[unit].get();
  advance_reduces();
}

// Frees the whole gradients of units whose average is there.
void ShardedModel::State::advance_reduces() {
  for (const auto& unit : units) {
    if (unit->reducing && unit->reducing->advance()) finish_reduce(*unit);
  }
}

void ShardedModel::State::finish_reduce(ShardedUnit& unit) {
  unit.reducing->wait();
  unit.reducing.reset();
  unit.gradients->finish_reduce({});
}

void ShardedModel::State::begin_backward() {
  require_not_gathered("backward");
  phase = Phase::kBackward;
  update_follows = false;
  backward_averages = no_sync_depth == 0 && !parts;
  complete = nullptr;
  if (!end_is_queued) at_end_of_backward([this] { end_backward(); });
  for (const auto& unit : units) {
    if (unit->gradients) unit->gradients->begin_backward();
  }
}

void ShardedModel::State::begin_reduce(ShardedUnit& unit) {
  // While a peer is late, more averages would only keep more whole gradients in memory. In stage 1
  // these are there all the time.
  constexpr std::ptrdiff_t kMostInFlight = 2;
  const auto in_flight = std::count_if(units.begin(), units.end(),
                                       [](const auto& each) { return each->reducing.has_value(); });
  if (options.stage != ShardStage::kOptimizer && in_flight >= kMostInFlight) finish_reduces();
  ++stats.reduce_scatters;
  stats.reduced_bytes += unit.plan.bytes();
  unit.reducing = unit.gradients->begin_reduce(weight);
}

void ShardedModel::State::finish_reduces() {
  for (const auto& unit : units) {
    if (unit->reducing) finish_reduce(*unit);
  }
}

void ShardedModel::State::end_backward() {
  end_is_queued = false;
  if (phase != Phase::kBackward) return;  // it reached no parameter, or has already ended
  const WithoutWatching own_work;
  rethrow_failure();
  if (!order.empty() && (backward_averages || parts)) order_known = true;
  if (parts) return end_step();  // the gradients stay in their units until they are taken
  if (backward_averages) {
    settle_missing();
    end_average();
  } else {
    keep_local_gradients();
  }
  end_step();
}

// Averages what is not averaged yet; parameters without a gradient count as zeros.
void ShardedModel::State::begin_average() {
  for (const auto& unit : units) {
    if (unit->gradients) begin_reduce(*unit);
  }
}

// The last averages were begun when backward had ended. So they end when it has ended on all ranks,
// and nobody reads shared parameters any more: see Note [Shared parameters on a host].
void ShardedModel::State::end_average() {
  finish_reduces();
  window->close();
  ++stats.synchronised_backwards;
  mark_stale();
  update_follows = true;
}

void ShardedModel::State::keep_local_gradients() {
  for (const auto& unit : units) {
    if (unit->gradients) unit->gradients->show_local();
  }
  window->add_micro_step();
  shown = !window->gradients_dropped();
  shown_nonzero = !window->gradients_cleared();
}

// Drops gradients that were accumulated and not averaged.
void ShardedModel::State::drop_gradients() {
  for (const auto& unit : units) {
    if (unit->gradients) unit->gradients->drop();
  }
  window->close();
}

void ShardedModel::State::end_step() {
  release_unused();
  marks->add_micro_step();
  phase = Phase::kIdle;
}

// Averages the units that are not complete: with gradients that came after their unit was averaged,
// with accumulated gradients, or with parameters that this backward did not reach.
void ShardedModel::State::settle_missing() {
  std::vector<std::string> missing;
  std::vector<ShardedUnit*> rest;
  for (const auto& unit : units) {
    if (!unit->gradients) continue;
    const UnitGradients& gradients = *unit->gradients;
    for (size_t i = 0; i < unit->plan.parameters.size(); ++i) {
      const bool accumulated = gradients.is_open() && gradients.had_gradient()[i];
      if (!gradients.arrived()[i] && !accumulated) missing.push_back(unit->plan.parameters[i].name);
    }
    if (gradients.is_open() || options.find_unused_parameters) rest.push_back(unit.get());
  }
  if (!missing.empty() && !options.find_unused_parameters) refuse_missing(std::move(missing));
  std::vector<bool> used(trained.size(), true);
  if (options.find_unused_parameters) {
    for (size_t i = 0; i < trained.size(); ++i) {
      const auto& gradients = *units[location[i].first]->gradients;
      used[i] = gradients.is_open() && gradients.had_gradient()[location[i].second];
    }
    used = used_anywhere(used);
  }
  for (ShardedUnit* unit : rest) {
    begin_reduce(*unit);
    if (!options.find_unused_parameters) continue;
    unit->reducing->wait();
    unit->reducing.reset();
    unit->gradients->finish_reduce(used_of_unit(*unit, used));
  }
}

void ShardedModel::State::refuse_missing(std::vector<std::string> missing) {
  constexpr size_t kShown = 8;
  const size_t count = missing.size();
  missing.resize(std::min(count, kShown));
  fail({Code::kUnusedParameter,
        fmt::format("backward gave no gradient to {} of {}: {}{}", count,
                    counted(trained.size(), "parameter"), fmt::join(missing, ", "),
                    count > kShown ? fmt::format(" and {} more", count - kShown) : ""),
        "use them in forward, freeze them with requires_grad_(false) before they are wrapped, or "
        "set find_unused_parameters"});
}

// [trained] whether any rank has used it.
std::vector<bool> ShardedModel::State::used_anywhere(const std::vector<bool>& used) const {
  const torch::Tensor flags = torch::empty({static_cast<int64_t>(used.size())}, torch::kUInt8);
  auto* flag = flags.data_ptr<uint8_t>();
  std::copy(used.begin(), used.end(), flag);
  if (comm->size() > 1) comm->all_reduce(flags, ReduceOp::kMax, {.label = "parameters in use"});
  return std::vector<bool>(flag, flag + used.size());
}

// [parameter of the unit], of `used`: [trained].
std::vector<bool> ShardedModel::State::used_of_unit(const ShardedUnit& unit,
                                                    const std::vector<bool>& used) const {
  std::vector<bool> of_unit(unit.plan.parameters.size());
  for (size_t i = 0; i < trained.size(); ++i) {
    const auto [index, parameter] = location[i];
    if (units[index].get() == &unit) of_unit[parameter] = used[i];
  }
  return of_unit;
}

void ShardedModel::State::check_gradient(size_t parameter, const torch::Tensor& gradient) {
  if (gradient.layout() != torch::kStrided) {
    fail({Code::kTensorMismatch,
          fmt::format("the gradient of {} is sparse", trained[parameter].name),
          "shards are dense: construct the layer without sparse gradients"});
  }
  if (torch::GradMode::is_enabled()) {
    fail(sharding_misuse(
        fmt::format("backward with create_graph reached {}: averaged gradients have no "
                    "derivative",
                    trained[parameter].name),
        "take first derivatives that need a graph with torch::autograd::grad, and call "
        "backward without create_graph"));
  }
}

void ShardedModel::State::fail(const Error& error) {
  comm->abort(error.message());
  throw Error(error);
}

// Gradients that were accumulated inside NoSync must be averaged before they are used, or dropped.
void ShardedModel::State::check_window() {
  if (window->micro_steps() == 0) return;
  if (window->weights_changed()) {
    fail(sharding_misuse(
        fmt::format("the weights changed after {} whose gradients were not "
                    "averaged",
                    counted(window->micro_steps(), "micro-step")),
        "run the last micro-step before each update outside NoSync, also in a last, shorter "
        "window"));
  }
  if (window_was_dropped()) drop_gradients();
}

// An optimizer's zero_grad() reaches the shards' grads only, which say so for the whole gradients
// behind them. A rank that has shown none cannot know, so the ranks ask each other.
bool ShardedModel::State::window_was_dropped() {
  enum Vote : int64_t { kUnknown, kKept, kDropped };
  int64_t vote = kUnknown;
  if (shown) {
    vote = window->gradients_dropped()   ? kDropped
           : !shown_nonzero              ? kUnknown
           : window->gradients_cleared() ? kDropped
                                         : kKept;
  }
  if (comm->size() == 1) return vote == kDropped;
  const torch::Tensor mine = torch::full({1}, vote, torch::kInt64);
  const torch::Tensor all = torch::empty({comm->size()}, torch::kInt64);
  comm->all_gather(all, mine, {.label = "accumulated gradients"});
  const bool dropped = all.eq(static_cast<int64_t>(kDropped)).any().item<bool>();
  if (dropped && all.eq(static_cast<int64_t>(kKept)).any().item<bool>()) {
    fail(sharding_misuse(
        "some ranks dropped the gradients that they had accumulated and others did not",
        "call zero_grad() after the same micro-steps on every rank"));
  }
  return dropped;
}

}  // namespace lockstep
