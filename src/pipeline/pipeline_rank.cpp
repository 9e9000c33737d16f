#include "pipeline/pipeline_rank.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <sstream>

#include "base/mutation.hpp"
#include "gradients/virtual_shards.hpp"
#include "lockstep/error.hpp"
#include "lockstep/sync_batch_norm.hpp"
#include "lockstep/tensor_parallel.hpp"
#include "lockstep/tensor_text.hpp"

namespace lockstep {
namespace {

// The action that ends a micro-batch's work in its stage.
bool completes(ActionKind kind) {
  return kind == ActionKind::kBackward || kind == ActionKind::kBackwardWeight;
}

// The whole schedule with the failed action marked, a note for each line.
std::vector<std::string> grid_notes(const PipelineFacts& pipeline, const Action& failed) {
  const std::vector<StageTimes> unit(static_cast<size_t>(pipeline.schedule.stages()));
  std::istringstream grid(format_grid(pipeline.schedule, simulate(pipeline.schedule, unit),
                                      {.rank_names = pipeline.rank_names, .marked = failed}));
  std::vector<std::string> notes;
  for (std::string line; std::getline(grid, line);) notes.push_back(line);
  return notes;
}

void spoil_gradient(const torch::nn::SequentialImpl& module) {
  for (const auto& parameter : module.parameters()) {
    const torch::Tensor gradient = parameter.grad();
    if (!gradient.defined() || gradient.numel() == 0) continue;
    gradient.view(-1).narrow(0, 0, 1).fill_(std::numeric_limits<double>::quiet_NaN());
    return;
  }
}

}  // namespace

LocalStage& PipelineRank::at(int stage) {
  return **std::find_if(stages_.begin(), stages_.end(),
                        [&](const auto& each) { return each->stage.index() == stage; });
}

void PipelineRank::run(const StepPlan& plan) {
  timed_.clear();
  loss_ = torch::Tensor();
  losses_.clear();
  input_gradients_.clear();
  const Schedule& schedule = pipeline_.schedule;
  backwards_left_.assign(static_cast<size_t>(schedule.stages()), schedule.micro_batches);
  std::optional<FixedThreads> threads;
  if (pipeline_.part_threads > 0) threads.emplace(pipeline_.part_threads);
  for (const auto& each : stages_) {
    set_gradient_weight(*each->stage.module(), plan.weight);
    if (each->sync) each->sync->begin_step(plan);
  }
  for (const Action& action : actions()) {
    run_action(action, plan);
    for (const auto& each : stages_) {
      if (each->sync) each->sync->advance();
    }
  }
  for (const auto& each : stages_) {
    if (each->sync) each->sync->finish();
  }
}

template <class Work>
torch::Tensor PipelineRank::attempt(const Action& action, const torch::Tensor& input,
                                    const Work& work) const {
  try {
    return work();
  } catch (const RankError&) {
    throw;  // another rank's failure, which a layer's own communication ran into
  } catch (const std::exception& error) {
    fail(action, input, error);
  }
}

void PipelineRank::run_action(const Action& action, const StepPlan& plan) {
  const torch::Tensor input = input_of(action, plan);
  const DeviceEvent begin = DeviceEvent::now(device_.torch_device());
  auto& sync = at(action.stage).sync;
  const torch::Tensor result = attempt(action, input, [&] {
    const torch::Tensor computed = compute(action, plan, input);
    if (sync) sync->end_action();
    return computed;
  });
  timed_.push_back({action, begin, DeviceEvent::now(device_.torch_device())});
  pass_on(action, plan, result);
  if (action.kind != ActionKind::kForward) end_backward(action, plan);
}

void PipelineRank::end_backward(const Action& action, const StepPlan& plan) {
  const auto& [stage, sync] = at(action.stage);
  auto& left = backwards_left_[static_cast<size_t>(action.stage)];
  const bool is_last = completes(action.kind) && --left == 0;
  if (is_last && action.stage == plan.faults.nan_stage) spoil_gradient(*stage.module());
  if (!sync) return;
  sync->end_backward(action.micro_batch, stage.awaits_weights(action.micro_batch));
  if (!is_last) return;
  if (action.stage == plan.faults.mismatch_stage) sync->call_mismatch();
  sync->launch(plan.synchronise, plan.weight);
}

torch::Tensor PipelineRank::input_of(const Action& action, const StepPlan& plan) {
  switch (action.kind) {
    case ActionKind::kForward:
      if (action.stage == 0) return rows_here(plan.x, plan, action.micro_batch);
      return channel_->receive({Payload::kActivation, action.stage - 1, action.micro_batch},
                               plan.shape_of(action.micro_batch));
    case ActionKind::kBackward:
    case ActionKind::kBackwardInput:
      if (is_last(action.stage)) return {};
      return channel_->receive({Payload::kGradient, action.stage + 1, action.micro_batch},
                               plan.shape_of(action.micro_batch));
    case ActionKind::kBackwardWeight:
      return {};
  }
  return {};
}

torch::Tensor PipelineRank::rows_here(const torch::Tensor& batch, const StepPlan& plan,
                                      int micro_batch) const {
  torch::Tensor rows = plan.rows_of(batch, static_cast<size_t>(micro_batch));
  if (plan.parts) rows = rows.clone();  // memory of their own, whatever rows come before them
  keep_for_current_stream(rows);
  return rows.to(device_.torch_device(), rows.scalar_type(), /*non_blocking=*/true);
}

MicroBatchFacts PipelineRank::facts_of(const Action& action, const StepPlan& plan) {
  MicroBatchFacts facts;
  facts.index = action.micro_batch;
  facts.part = (plan.parts ? plan.parts->first : 0) + action.micro_batch;
  facts.step_seed = plan.seed;
  facts.wants_input_gradient = action.stage > 0 || plan.x.requires_grad();
  if (!is_last(action.stage)) return facts;
  const bool forward = action.kind == ActionKind::kForward;
  facts.has_loss = plan.has_loss(action.micro_batch);
  if (forward || at(action.stage).stage.recomputes()) {
    facts.target = rows_here(plan.y, plan, action.micro_batch);
  }
  if (forward) {
    const int position = plan.compared < 0 ? -1 : action.micro_batch - plan.compared;
    facts.compares_loss = position == 0 || position == 1;
    return facts;
  }
  const double loss_factor = is_planted(Mutation::kLossNotDivided) ? 1 : plan.loss_factor;
  const double factor =
      plan.loss_shares[static_cast<size_t>(action.micro_batch)] * loss_factor * plan.data_factor;
  // float64 until the loss's own dtype is known: a third of a batch has no exact float32 value.
  const auto wide = torch::TensorOptions(torch::kFloat64).device(device_.torch_device());
  facts.loss_gradient = plan.loss_scale.defined() ? plan.loss_scale.to(torch::kFloat64) * factor
                                                  : torch::full({}, factor, wide);
  return facts;
}

torch::Tensor PipelineRank::compute(const Action& action, const StepPlan& plan,
                                    const torch::Tensor& input) {
  auto& [stage, sync] = at(action.stage);
  const bool computes_forward = action.kind == ActionKind::kForward ||
                                (stage.recomputes() && action.kind != ActionKind::kBackwardWeight);
  if (sync && computes_forward) sync->begin_forward();
  switch (action.kind) {
    case ActionKind::kForward: {
      const torch::Tensor output = stage.forward(facts_of(action, plan), input);
      if (sync) sync->end_forward(action.micro_batch);
      return output;
    }
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

void PipelineRank::pass_on(const Action& action, const StepPlan& plan,
                           const torch::Tensor& result) {
  const auto micro_batch = static_cast<size_t>(action.micro_batch);
  if (action.kind == ActionKind::kForward) {
    if (!is_last(action.stage)) {
      return channel_->send({Payload::kActivation, action.stage, action.micro_batch}, result,
                            plan.shape_of(action.micro_batch));
    }
    losses_.resize(plan.rows.size());
    losses_[micro_batch] = result;
    const torch::Tensor share = result * plan.loss_shares[micro_batch];
    loss_ = loss_.defined() ? loss_ + share : share;
  } else if (action.kind != ActionKind::kBackwardWeight && action.stage > 0) {
    channel_->send({Payload::kGradient, action.stage, action.micro_batch}, result,
                   plan.shape_of(action.micro_batch));
  } else if (action.kind != ActionKind::kBackwardWeight && result.defined()) {
    input_gradients_.resize(plan.rows.size());
    input_gradients_[micro_batch] = result;
  }
}

std::vector<torch::Tensor> PipelineRank::evaluate(const StepPlan& plan) {
  std::vector<torch::Tensor> outputs(static_cast<size_t>(pipeline_.schedule.micro_batches));
  for (const auto& each : stages_) {
    if (each->sync) each->sync->begin_evaluation();
  }
  for (const Action& action : actions()) {
    if (action.kind != ActionKind::kForward) continue;
    const torch::Tensor input = input_of(action, plan);
    LocalStage& local = at(action.stage);
    const torch::Tensor output = attempt(action, input, [&] {
      const torch::Tensor computed = local.stage.evaluate(input);
      if (local.sync) local.sync->end_action();
      return computed;
    });
    const auto micro_batch = static_cast<size_t>(action.micro_batch);
    if (is_last(action.stage)) {
      outputs[micro_batch] = output;
    } else {
      channel_->send({Payload::kActivation, action.stage, action.micro_batch}, output,
                     plan.shape_of(action.micro_batch));
    }
  }
  for (const auto& each : stages_) {
    if (each->sync) each->sync->end_evaluation();
  }
  return outputs;
}

void PipelineRank::fail(const Action& action, const torch::Tensor& input,
                        const std::exception& error) const {
  const std::string given =
      input.defined()
          ? fmt::format(", given {} {}", shape_text(input.sizes()), dtype_text(input.scalar_type()))
          : "";
  throw Error(Code::kStageFailed,
              fmt::format("{} of micro-batch {} in stage {} on {} of rank {}{}: {}",
                          action_name(action.kind), action.micro_batch, action.stage,
                          device_.name(), pipeline_.world_rank, given, describe(error)),
              "what follows the last colon is the module's own error; clear the gradients before "
              "the next step",
              grid_notes(pipeline_, action));
}

void PipelineRank::give_up(const std::string& reason) {
  channel_->abort(reason);
  for (const auto& each : stages_) {
    each->stage.drop_micro_batches();
    if (each->sync) each->sync->abort(reason);
    abort_tensor_axes(*each->stage.module(), reason);
  }
  input_gradients_.clear();
  timed_.clear();
}

void PipelineRank::add_spans(StepTrace& trace) const {
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
