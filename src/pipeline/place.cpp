#include "pipeline/place.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <sstream>

#include "lockstep/error.hpp"
#include "lockstep/tensor_text.hpp"
#include "parallel/tensor_parallel_shards.hpp"

namespace lockstep {
namespace {

// The action after which a micro-batch leaves nothing to do in its stage.
bool completes(ActionKind kind) {
  return kind == ActionKind::kBackward || kind == ActionKind::kBackwardWeight;
}

// The whole schedule with the action pointed out, a note for each line.
std::vector<std::string> grid_notes(const Schedule& schedule, const Action& failed) {
  const std::vector<StageTimes> unit(static_cast<size_t>(schedule.stages()));
  std::istringstream grid(format_grid(schedule, simulate(schedule, unit), {.marked = failed}));
  std::vector<std::string> notes;
  for (std::string line; std::getline(grid, line);) notes.push_back(line);
  return notes;
}

}  // namespace

torch::Tensor StepPlan::rows_of(const torch::Tensor& batch, size_t micro_batch) const {
  const auto end = rows.begin() + static_cast<std::ptrdiff_t>(micro_batch);
  return batch.narrow(0, std::accumulate(rows.begin(), end, int64_t{0}), rows[micro_batch]);
}

Place::Place(int index, const Schedule& schedule, Device& device, int rank)
    : index_(index), schedule_(schedule), device_(device), rank_(rank) {}

PlacedStage& Place::at(int stage) {
  return **std::find_if(stages_.begin(), stages_.end(),
                        [&](const auto& each) { return each->stage.index() == stage; });
}

void Place::run(const StepPlan& plan) {
  timed_.clear();
  loss_ = torch::Tensor();
  losses_.clear();
  input_gradients_.clear();
  backwards_left_.assign(static_cast<size_t>(schedule_.stages()), schedule_.micro_batches);
  for (const auto& each : stages_) {
    if (each->sync) each->sync->begin_step(plan.share_buffers);
  }
  for (const Action& action : schedule_.actions[static_cast<size_t>(index_)]) {
    do_action(action, plan);
    advance_syncs();
  }
  for (const auto& each : stages_) {
    if (each->sync) each->sync->finish();
  }
}

template <class Work>
torch::Tensor Place::attempt(const Action& action, const torch::Tensor& input,
                             const Work& work) const {
  try {
    return work();
  } catch (const RankError&) {
    throw;  // another rank's fault, which a layer's own communication met
  } catch (const std::exception& error) {
    fail(action, input, error);
  }
}

void Place::do_action(const Action& action, const StepPlan& plan) {
  const torch::Tensor input = input_of(action, plan);
  const Moment begin = Moment::now(device_.torch_device());
  const torch::Tensor result = attempt(action, input, [&] { return compute(action, plan, input); });
  timed_.push_back({action, begin, Moment::now(device_.torch_device())});
  pass_on(action, plan, result);
  auto& left = backwards_left_[static_cast<size_t>(action.stage)];
  if (completes(action.kind) && --left == 0) {
    auto& sync = at(action.stage).sync;
    if (sync) sync->launch(plan.synchronise, plan.weight);
  }
}

torch::Tensor Place::input_of(const Action& action, const StepPlan& plan) {
  const int64_t rows = plan.rows[static_cast<size_t>(action.micro_batch)];
  switch (action.kind) {
    case ActionKind::kForward:
      if (action.stage == 0) return rows_here(plan.x, plan, action.micro_batch);
      return wire_->receive({Cargo::kActivation, action.stage - 1, action.micro_batch}, rows);
    case ActionKind::kBackward:
    case ActionKind::kBackwardInput:
      if (is_last(action.stage)) return {};
      return wire_->receive({Cargo::kGradient, action.stage + 1, action.micro_batch}, rows);
    case ActionKind::kBackwardWeight:
      return {};
  }
  return {};
}

torch::Tensor Place::rows_here(const torch::Tensor& batch, const StepPlan& plan,
                               int micro_batch) const {
  const torch::Tensor rows = plan.rows_of(batch, static_cast<size_t>(micro_batch));
  keep_for_current_stream(rows);
  return rows.to(device_.torch_device(), rows.scalar_type(), /*non_blocking=*/true);
}

MicroBatchFacts Place::facts_of(const Action& action, const StepPlan& plan) {
  MicroBatchFacts facts;
  facts.index = action.micro_batch;
  facts.step_seed = plan.seed;
  facts.wants_input_gradient = action.stage > 0 || plan.x.requires_grad();
  if (!is_last(action.stage)) return facts;
  const bool forward = action.kind == ActionKind::kForward;
  facts.has_loss = plan.has_loss(action.micro_batch);
  if (forward || at(action.stage).stage.recomputes()) {
    facts.target = rows_here(plan.y, plan, action.micro_batch);
  }
  if (forward) return facts;
  const double factor = plan.loss_shares[static_cast<size_t>(action.micro_batch)] *
                        plan.loss_factor * plan.data_factor;
  // In float64 until the loss's own dtype is known: a third of a batch is not a float32 number.
  const auto wide = torch::TensorOptions(torch::kFloat64).device(device_.torch_device());
  facts.loss_gradient = plan.loss_scale.defined() ? plan.loss_scale.to(torch::kFloat64) * factor
                                                  : torch::full({}, factor, wide);
  return facts;
}

torch::Tensor Place::compute(const Action& action, const StepPlan& plan,
                             const torch::Tensor& input) {
  Stage& stage = at(action.stage).stage;
  switch (action.kind) {
    case ActionKind::kForward:
      return stage.forward(facts_of(action, plan), input);
    case ActionKind::kBackward:
      return stage.backward(facts_of(action, plan), input);
    case ActionKind::kBackwardInput:
      return stage.backward_input(facts_of(action, plan), input);
    case ActionKind::kBackwardWeight:
      stage.backward_weight(action.micro_batch);
      return {};
  }
  return {};
}

void Place::pass_on(const Action& action, const StepPlan& plan, const torch::Tensor& result) {
  const auto micro_batch = static_cast<size_t>(action.micro_batch);
  if (action.kind == ActionKind::kForward) {
    if (!is_last(action.stage)) {
      return wire_->send({Cargo::kActivation, action.stage, action.micro_batch}, result,
                         plan.rows[micro_batch]);
    }
    losses_.resize(plan.rows.size());
    losses_[micro_batch] = result;
    const torch::Tensor share = result * plan.loss_shares[micro_batch];
    loss_ = loss_.defined() ? loss_ + share : share;
  } else if (action.kind != ActionKind::kBackwardWeight && action.stage > 0) {
    wire_->send({Cargo::kGradient, action.stage, action.micro_batch}, result,
                plan.rows[micro_batch]);
  } else if (action.kind != ActionKind::kBackwardWeight && result.defined()) {
    input_gradients_.resize(plan.rows.size());
    input_gradients_[micro_batch] = result;
  }
}

// Buckets on their way while this place still computes.
void Place::advance_syncs() {
  for (const auto& each : stages_) {
    if (each->sync) each->sync->advance();
  }
}

std::vector<torch::Tensor> Place::evaluate(const StepPlan& plan) {
  std::vector<torch::Tensor> outputs(static_cast<size_t>(schedule_.micro_batches));
  for (const Action& action : schedule_.actions[static_cast<size_t>(index_)]) {
    if (action.kind != ActionKind::kForward) continue;
    const torch::Tensor input = input_of(action, plan);
    const torch::Tensor output =
        attempt(action, input, [&] { return at(action.stage).stage.evaluate(input); });
    const auto micro_batch = static_cast<size_t>(action.micro_batch);
    if (is_last(action.stage)) {
      outputs[micro_batch] = output;
    } else {
      wire_->send({Cargo::kActivation, action.stage, action.micro_batch}, output,
                  plan.rows[micro_batch]);
    }
  }
  return outputs;
}

void Place::fail(const Action& action, const torch::Tensor& input,
                 const std::exception& error) const {
  const std::string given =
      input.defined()
          ? fmt::format(", given {} {}", shape_text(input.sizes()), dtype_text(input.scalar_type()))
          : "";
  throw Error(Code::kStageFailed,
              fmt::format("{} of micro-batch {} in stage {} on {} of rank {}{}: {}",
                          action_name(action.kind), action.micro_batch, action.stage,
                          device_.name(), rank_, given, describe(error)),
              "what follows the last colon is the module's own error; clear the gradients before "
              "the next step",
              grid_notes(schedule_, action));
}

void Place::give_up(const std::string& reason) {
  wire_->abort(reason);
  for (const auto& each : stages_) {
    each->stage.drop_micro_batches();
    if (each->sync) each->sync->abort(reason);
    abort_tensor_axes(*each->stage.module(), reason);
  }
  input_gradients_.clear();
  timed_.clear();
}

void Place::add_spans(StepTrace& trace) const {
  for (const auto& [action, begin, end] : timed_) {
    const int64_t begin_ns = begin.ns();
    trace.actions.push_back({action, index_, begin_ns, begin_ns + end.since(begin)});
  }
  for (const auto& each : stages_) {
    const auto span = each->sync ? each->sync->span() : std::nullopt;
    if (span) trace.syncs.push_back(*span);
  }
}

}  // namespace lockstep
