#include "pipeline/pipeline_state.hpp"

#include <fmt/format.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <future>
#include <numeric>
#include <unordered_map>

#include "base/standard_streams.hpp"
#include "lockstep/autocast.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad_scaler.hpp"
#include "lockstep/split.hpp"
#include "parallel/model_tensors.hpp"
#include "pipeline/rank_wire.hpp"
#include "precision/model_parallel.hpp"

namespace lockstep {
namespace {

// Of who does what in which order: ranks of one pipeline must agree on it.
int64_t fingerprint(const Schedule& schedule) {
  std::vector<int> parts = {schedule.micro_batches};
  parts.insert(parts.end(), schedule.place_of_stage.begin(), schedule.place_of_stage.end());
  for (const auto& actions : schedule.actions) {
    for (const auto& [kind, stage, micro_batch] : actions) {
      parts.insert(parts.end(), {static_cast<int>(kind), stage, micro_batch});
    }
  }
  return static_cast<int64_t>(XXH3_64bits(parts.data(), parts.size() * sizeof(int)) >> 1);
}

torch::Device host() {
  return torch::Device(torch::kCPU);
}

void warn_of_mean(const std::string& what) {
  print_error(fmt::format(
      "warning[{}]: {}. A micro-batch's loss counts by its rows; where the loss leaves out "
      "targets, that is not the loss of the whole batch\n"
      "help: set PipelineOptions::loss_weight, for cross_entropy to "
      "count_targets(ignore_index)\n",
      code_name(Code::kStageMismatch), what));
}

}  // namespace

template <class Call>
auto Pipeline::State::or_abort(const Call& call) const {
  try {
    return call();
  } catch (const std::exception& error) {
    if (axis_) axis_->abort(describe(error));
    if (options_.data) options_.data->abort(describe(error));
    for (const auto& place : places_) place->give_up(describe(error));
    throw;
  }
}

Pipeline::State::State(std::vector<torch::nn::Sequential> modules, const Devices& devices,
                       Schedule given, PipelineOptions options)
    : schedule(std::move(given)),
      options_(std::move(options)),
      devices_(devices),
      seeds_(host(), 0) {
  require_options(modules.size());
  require_modules_apart(modules);
  if (options_.data) require_same_loss(*options_.data);
  if (static_cast<size_t>(schedule.places()) > devices.size()) {
    throw Error(Code::kPlacement,
                fmt::format("schedule {} has {} places, but there are {} devices", schedule.name,
                            schedule.places(), devices.size()),
                "give more devices, or put several stages on one with on_places()");
  }
  devices.require_not_on_worker("Pipeline");
  for (int index = 0; index < schedule.places(); ++index) {
    Device& device = devices[static_cast<size_t>(index)];
    auto& place =
        *places_.emplace_back(std::make_unique<Place>(index, schedule, device, world_rank()));
    wires_.push_back(std::make_unique<LocalWire>(exchange_, device));
    place.connect(*wires_.back());
    const StreamOrder caller = StreamOrder::now(device);
    device.run("place stages", [&] {
      caller.hold_back(device);  // a GPU may not have made the weights yet
      add_stages(place, modules);
      place.mark_end();
    });
    place.end().hold_back(device);
  }
  std::sort(local_stages.begin(), local_stages.end());
}

Pipeline::State::State(std::vector<torch::nn::Sequential> modules, const Communicator& axis,
                       Device& device, Schedule given, PipelineOptions options)
    : schedule(std::move(given)),
      options_(std::move(options)),
      axis_(axis),
      axis_of_stages_(std::make_shared<const Communicator>(axis)),
      seeds_(host(), 0) {
  require_options(modules.size());
  if (axis.size() != schedule.places()) {
    throw Error(Code::kStageMismatch,
                fmt::format("schedule {} has {} places, but the axis has {} ranks", schedule.name,
                            schedule.places(), axis.size()),
                "make the schedule for as many places as the pipeline's axis has ranks");
  }
  require_same_schedule();
  require_same_loss(axis);
  if (options_.data) require_same_loss(*options_.data);
  or_abort([&] { require_modules_apart(modules); });
  const StreamOrder caller = StreamOrder::now(device);
  {
    const UseDevice home(device);
    caller.hold_back(device);
    auto& place =
        *places_.emplace_back(std::make_unique<Place>(axis.rank(), schedule, device, world_rank()));
    wires_.push_back(std::make_unique<RankWire>(axis, schedule, device));
    place.connect(*wires_.back());
    or_abort([&] { add_stages(place, modules); });
    for (const auto& placed : place.stages()) {
      for (const auto& parameter : placed->stage.module()->parameters()) {
        note_pipeline_stage(parameter, axis_of_stages_);
      }
    }
    place.mark_end();
  }
  places_.front()->end().hold_back(device);
}

void Pipeline::State::require_options(size_t modules) const {
  validate(schedule);
  if (modules != static_cast<size_t>(schedule.stages())) {
    throw Error(Code::kStageMismatch,
                fmt::format("schedule {} has {} stages, but {} modules were given", schedule.name,
                            schedule.stages(), modules),
                "make the schedule for as many stages as the model is cut into");
  }
  if (!options_.loss) {
    throw Error(Code::kUsage, "a pipeline was made without a loss",
                "set PipelineOptions::loss: backward begins in the last stage");
  }
  if (options_.loss_weight && options_.reduction == LossReduction::kSum) {
    throw Error(Code::kUsage, "a pipeline was given a loss_weight for a loss that is a sum",
                "sums need no weights: take one of the two away");
  }
  for (const int stage : options_.recompute) {
    if (stage >= 0 && stage < schedule.stages()) continue;
    throw Error(Code::kUsage, fmt::format("recompute names stage {}", stage),
                fmt::format("stages are 0 to {}", schedule.stages() - 1));
  }
}

void Pipeline::State::require_same_schedule() const {
  const auto mine = torch::full({1}, fingerprint(schedule), torch::kInt64);
  const auto all = torch::zeros({axis_->size()}, torch::kInt64);
  axis_->all_gather(all, mine, {.label = "schedules of a pipeline"});
  for (int rank = 1; rank < axis_->size(); ++rank) {
    if (all[rank].item<int64_t>() == all[0].item<int64_t>()) continue;
    throw Error(
        Code::kStageMismatch,
        fmt::format("ranks {} and {} of a pipeline were given different schedules",
                    axis_->world_ranks().at(0), axis_->world_ranks().at(static_cast<size_t>(rank))),
        "give all ranks the same stages, micro-batches and schedule");
  }
}

// Ranks that weigh by different things would make a mean of nothing.
void Pipeline::State::require_same_loss(const Communicator& comm) const {
  const int64_t mine =
      (options_.reduction == LossReduction::kSum ? 1 : 0) + (options_.loss_weight ? 2 : 0);
  const auto largest = torch::tensor({mine, -mine}, torch::kInt64);
  comm.all_reduce(largest, ReduceOp::kMax, {.label = "how a pipeline's loss is weighed"});
  if (largest[0].item<int64_t>() == -largest[1].item<int64_t>()) return;
  throw Error(Code::kStageMismatch, "the ranks of a pipeline weigh their losses differently",
              "give all ranks the same reduction, and a loss_weight on all or on none");
}

// A weight in two stages would get half of its gradient in each.
void Pipeline::State::require_modules_apart(
    const std::vector<torch::nn::Sequential>& modules) const {
  std::unordered_map<const c10::TensorImpl*, size_t> owner;
  for (size_t stage = 0; stage < modules.size(); ++stage) {
    if (modules[stage].is_empty()) continue;
    for (const auto& item : modules[stage]->named_parameters()) {
      const auto [place, is_new] = owner.emplace(item.value().unsafeGetTensorImpl(), stage);
      if (is_new || place->second == stage) continue;
      throw Error(
          Code::kPlacement,
          fmt::format("parameter {} belongs to stages {} and {}", item.key(), place->second, stage),
          "cut the model so that layers with common weights are in one stage, or give each "
          "its own");
    }
  }
}

// On a thread that works for the place's device.
void Pipeline::State::add_stages(Place& place, std::vector<torch::nn::Sequential>& modules) {
  std::optional<Communicator> data;
  if (options_.data) {
    data = options_.data->split(0, options_.data->rank(), fmt::format("data {}", place.index()));
  }
  for (int stage = 0; stage < schedule.stages(); ++stage) {
    if (schedule.place_of_stage[static_cast<size_t>(stage)] != place.index()) continue;
    auto& module = modules[static_cast<size_t>(stage)];
    if (module.is_empty()) {
      throw Error(Code::kStageMismatch, fmt::format("stage {} has no module here", stage),
                  "give every rank the modules of its own stages");
    }
    const auto& again = options_.recompute;
    const bool recompute = std::find(again.begin(), again.end(), stage) != again.end();
    const bool last = stage + 1 == schedule.stages();
    auto placed = std::make_unique<PlacedStage>(PlacedStage{
        Stage(stage, module, place.device(), recompute, last ? options_.loss : nullptr), {}});
    if (data) placed->sync.emplace(stage, module, *data, options_);
    place.add(std::move(placed));
    local_stages.push_back(stage);
  }
}

int Pipeline::State::world_rank() const {
  const auto& comm = axis_ ? axis_ : options_.data;
  return comm ? comm->world_ranks().at(static_cast<size_t>(comm->rank())) : 0;
}

PlacedStage& Pipeline::State::local(int stage) const {
  for (const auto& place : places_) {
    for (const auto& each : place->stages()) {
      if (each->stage.index() == stage) return *each;
    }
  }
  throw Error(Code::kUsage, fmt::format("stage {} is not in this process", stage),
              fmt::format("local_stages() names those that are; stages are 0 to {}",
                          schedule.stages() - 1));
}

// The rank with stage 0 knows the batch; the others must not come with another idea of the call.
void Pipeline::State::agree_on_rows(int64_t& rows, bool trains) const {
  if (!axis_) return;
  const auto told = torch::tensor({rows, static_cast<int64_t>(trains)}, torch::kInt64);
  axis_->broadcast(told, schedule.place_of_stage.front(), {.label = "rows of a pipeline's step"});
  if (told[1].item<int64_t>() != static_cast<int64_t>(trains)) {
    throw Error(Code::kStageMismatch, "one rank of the pipeline trains, another evaluates",
                "call step() or evaluate() on all ranks of the axis");
  }
  const int64_t first = told[0].item<int64_t>();
  if (rows >= 0 && rows != first) {
    throw Error(
        Code::kStageMismatch,
        fmt::format("this rank was given {} rows, the one with stage 0 has {}", rows, first),
        "give all ranks of one pipeline the same batch");
  }
  rows = first;
}

StepPlan Pipeline::State::plan_rows(const torch::Tensor& x, const torch::Tensor& y, bool trains) {
  const bool has_first = local_stages.front() == 0;
  if (has_first && !x.defined()) {
    throw Error(Code::kUsage, "the process with stage 0 was given no input", "pass the batch as x");
  }
  if (trains && has_last() && !y.defined()) {
    throw Error(Code::kUsage, "the process with the last stage was given no target",
                "pass the targets as y");
  }
  if (x.defined() && y.defined() && x.size(0) != y.size(0)) {
    throw Error(Code::kStageMismatch, fmt::format("x has {} rows and y {}", x.size(0), y.size(0)),
                "give every row its target");
  }
  int64_t rows = x.defined() ? x.size(0) : y.defined() ? y.size(0) : -1;
  agree_on_rows(rows, trains);
  if (rows < schedule.micro_batches) {
    throw Error(Code::kStageMismatch,
                fmt::format("{} rows cannot make {} micro-batches", rows, schedule.micro_batches),
                "give a larger batch, or a schedule with fewer micro-batches");
  }
  StepPlan plan;
  plan.x = x;
  plan.y = y;
  plan.rows = tensor_split_rows(rows, schedule.micro_batches);
  return plan;
}

std::vector<double> Pipeline::State::read_loss_weights(const StepPlan& plan) const {
  std::vector<double> weights;
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    weights.push_back(options_.loss_weight(plan.rows_of(plan.y, i)));
    if (std::isfinite(weights.back()) && weights.back() >= 0) continue;
    throw Error(Code::kUsage, fmt::format("loss_weight gave {} for micro-batch {}", weights[i], i),
                "let it give how many terms the loss is the mean of, from 0");
  }
  return weights;
}

// Note [Weights of accumulated gradients]
// On a data axis a rank counts by its share of all ranks' terms in this call. One synchronised call
// alone is averaged by that weight. Gradients of several calls lie in one sum, which cannot be
// averaged by the weights of each: so there the ranks exchange their terms in every call, each
// brings its gradients to its share beforehand, and all count alike in the mean. The same where
// loss_weight may be 0 on all ranks, of which no mean can be taken.
void Pipeline::State::weigh_micro_batches(StepPlan& plan, bool synchronise) {
  plan.loss_shares.assign(plan.rows.size(), 1.0);
  if (options_.reduction == LossReduction::kSum) return;
  std::vector<double> weights(plan.rows.begin(), plan.rows.end());
  if (options_.loss_weight && has_last()) weights = read_loss_weights(plan);
  double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  if (options_.loss_weight && axis_) {
    const auto told = torch::full({1}, total, torch::kFloat64);
    axis_->broadcast(told, schedule.place_of_stage.back(),
                     {.label = "loss weight of a pipeline's step"});
    total = told.item<double>();
  }
  for (size_t i = 0; i < weights.size(); ++i) {
    plan.loss_shares[i] = total > 0 ? weights[i] / total : 0.0;
  }
  plan.weight = total;
  const bool accumulates = !synchronise || !last_step_synchronised_;
  if (!options_.data || options_.data->size() == 1) return;
  if (!options_.loss_weight && !accumulates) return;
  const auto all = torch::full({1}, total, torch::kFloat64);
  options_.data->all_reduce(all, ReduceOp::kSum, {.label = "loss weights of a pipeline's step"});
  const double of_all = all.item<double>();
  plan.data_factor = of_all > 0 ? total * options_.data->size() / of_all : 0.0;
  plan.weight = 1;
}

// The loss function is the caller's own; but cross_entropy leaves these targets out unless told
// otherwise. A GPU would have to be waited for.
void Pipeline::State::warn_of_ignored_targets(const StepPlan& plan) {
  constexpr int64_t kIgnored = -100;
  const bool looks = !warned_of_loss_ && !options_.loss_weight && has_last() &&
                     options_.reduction == LossReduction::kMean;
  if (!looks || !plan.y.is_cpu() || plan.y.scalar_type() != torch::kLong) return;
  const torch::Tensor ignored = plan.y.eq(kIgnored);
  if (!ignored.any().item<bool>()) return;
  std::vector<double> shares;  // [micro-batch] of its targets
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    shares.push_back(plan.rows_of(ignored, i).to(torch::kFloat64).mean().item<double>());
  }
  const auto [least, most] = std::minmax_element(shares.begin(), shares.end());
  const bool alone = !options_.data || options_.data->size() == 1;
  if (alone && *least == *most) return;
  warned_of_loss_ = true;
  warn_of_mean(
      fmt::format("{:.0f} % to {:.0f} % of a micro-batch's targets are {}, which "
                  "cross_entropy ignores",
                  100 * *least, 100 * *most, kIgnored));
}

// One micro-batch without a number among others that have one: its loss may be a mean of nothing.
void Pipeline::State::warn_of_losses(const std::vector<torch::Tensor>& losses) {
  if (warned_of_loss_ || options_.loss_weight || options_.reduction != LossReduction::kMean) return;
  std::vector<size_t> undefined;
  for (size_t i = 0; i < losses.size(); ++i) {
    if (!losses[i].is_cpu()) return;  // a GPU would have to be waited for
    if (std::isnan(losses[i].item<double>())) undefined.push_back(i);
  }
  if (undefined.empty() || undefined.size() == losses.size()) return;
  warned_of_loss_ = true;
  warn_of_mean(
      fmt::format("the loss of micro-batch {} is NaN, that of {} of {} micro-batches is not",
                  undefined.front(), losses.size() - undefined.size(), losses.size()));
}

// The gradients of this rank's own loss, as a backward on one device would give them: what weighs
// the rank among others is taken out again. Both at once, since one graph may have made x and y.
void Pipeline::State::go_on_backward(const torch::Tensor& x, const torch::Tensor& y,
                                     const StepPlan& plan) {
  std::vector<torch::Tensor> roots, gradients;
  const auto add = [&](const torch::Tensor& root, const torch::Tensor& gradient) {
    keep_for_current_stream(gradient);
    const bool weighed = plan.data_factor > 0 && plan.data_factor != 1;
    roots.push_back(root);
    gradients.push_back((weighed ? gradient / plan.data_factor : gradient).to(root.device()));
  };
  for (const auto& place : places_) {
    const auto parts = place->take_input_gradients();
    if (parts.empty()) continue;
    for (const auto& part : parts) keep_for_current_stream(part);
    add(x, torch::cat(parts));
  }
  if (!plan.y.is_same(y) && plan.y.grad().defined()) add(y, plan.y.grad());
  if (roots.empty()) return;
  const Autocast as_forward_did(roots.front().device(), torch::kBFloat16, /*enabled=*/false);
  torch::autograd::backward(roots, gradients);
}

const Device& Pipeline::State::last_device() const {
  return places_.size() == 1
             ? places_.front()->device()
             : places_[static_cast<size_t>(schedule.place_of_stage.back())]->device();
}

torch::Tensor Pipeline::State::step(const torch::Tensor& x, const torch::Tensor& y,
                                    const PipelineStep& how) {
  StepPlan plan = or_abort([&] {
    StepPlan made = plan_rows(x, y, /*trains=*/true);
    weigh_micro_batches(made, how.synchronise);
    warn_of_ignored_targets(made);
    // A graph behind the targets is gone through once, at the end, not by every micro-batch.
    if (y.defined() && y.requires_grad()) made.y = y.detach().requires_grad_();
    return made;
  });
  plan.seed = seeds_.next_seed();
  plan.loss_factor = how.loss_factor;
  plan.synchronise = how.synchronise;
  plan.share_buffers = options_.broadcast_buffers && last_step_synchronised_;
  if (how.scaler != nullptr) {
    plan.loss_scale = how.scaler->scale(
        torch::ones({}, torch::TensorOptions().device(last_device().torch_device())));
  }
  last_step.reset();
  run_places("pipeline", [&](Place& place) { place.run(plan); });
  last_step_synchronised_ = how.synchronise;
  torch::Tensor loss;
  for (const auto& place : places_) {
    if (!place->loss().defined()) continue;
    loss = place->loss();
    warn_of_losses(place->losses());
  }
  loss = share_loss(loss);
  or_abort([&] { go_on_backward(x, y, plan); });
  return loss;
}

torch::Tensor Pipeline::State::share_loss(const torch::Tensor& mine) const {
  if (!axis_ || axis_->size() == 1) return mine;
  const torch::Tensor shared =
      mine.defined()
          ? mine.to(torch::kFloat64).reshape({1}).contiguous()
          : torch::zeros(
                {1}, torch::TensorOptions(torch::kFloat64).device(last_device().torch_device()));
  axis_->broadcast(shared, schedule.place_of_stage.back(), {.label = "loss of a pipeline's step"});
  return mine.defined() ? mine : shared[0].to(torch::kFloat32);
}

torch::Tensor Pipeline::State::evaluate(const torch::Tensor& x) {
  const StepPlan plan = or_abort([&] { return plan_rows(x, {}, /*trains=*/false); });
  std::vector<torch::Tensor> outputs;
  run_places("pipeline", [&](Place& place) {
    auto mine = place.evaluate(plan);
    if (mine.front().defined()) outputs = std::move(mine);
  });
  if (outputs.empty()) return {};
  for (const auto& output : outputs) keep_for_current_stream(output);
  return torch::cat(outputs);
}

void Pipeline::State::for_each_stage(const char* name, const std::function<void(int)>& work) {
  run_places(name, [&](Place& place) {
    for (const auto& each : place.stages()) work(each->stage.index());
  });
}

StepTrace Pipeline::State::trace() const {
  StepTrace trace;
  for (const auto& place : places_) place->add_spans(trace);
  const auto by_begin = [](const auto& a, const auto& b) { return a.begin_ns < b.begin_ns; };
  std::stable_sort(trace.actions.begin(), trace.actions.end(), by_begin);
  std::stable_sort(trace.syncs.begin(), trace.syncs.end(), by_begin);
  return trace;
}

int64_t Pipeline::State::spoiled_steps() const {
  int64_t steps = 0;
  for (const auto& place : places_) {
    for (const auto& each : place->stages()) {
      if (each->sync) steps = std::max(steps, each->sync->spoiled_steps());
    }
  }
  return steps;
}

LinkStats Pipeline::State::links() const {
  LinkStats total;
  for (const auto& wire : wires_) {
    const LinkStats each = wire->stats();
    total.messages += each.messages;
    total.bytes += each.bytes;
  }
  return total;
}

void Pipeline::State::run_places(const char* name, const std::function<void(Place&)>& work) {
  if (axis_) {
    run_here(work);
  } else {
    run_on_workers(name, work);
  }
  for (const auto& place : places_) place->end().hold_back(place->device());
}

void Pipeline::State::run_here(const std::function<void(Place&)>& work) {
  Place& place = *places_.front();
  const StreamOrder caller = StreamOrder::now(place.device());
  const UseDevice home(place.device());
  caller.hold_back(place.device());
  or_abort([&] { work(place); });
  place.mark_end();
}

void Pipeline::State::run_on_workers(const char* name, const std::function<void(Place&)>& work) {
  devices_->require_not_on_worker("a pipeline's step");
  exchange_.clear();
  std::vector<std::future<void>> running;
  for (const auto& place : places_) {
    auto caller = StreamOrder::now(place->device());
    running.push_back(
        place->device().submit(name, [this, &work, &place = *place, caller = std::move(caller)] {
          caller.hold_back(place.device());
          try {
            work(place);
          } catch (...) {
            exchange_.fail(std::current_exception());  // unless that is what stopped this one
          }
          place.mark_end();
        }));
  }
  for (const auto& each : running) each.wait();
  const std::exception_ptr error = exchange_.error();
  if (!error) return;
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& caught) {
    for (const auto& place : places_) {
      place->give_up(describe(caught));
      place->end().hold_back(place->device());  // gradients may be cleared now
    }
    exchange_.clear();
    throw;
  }
}

}  // namespace lockstep
