#include "pipeline/pipeline_state.hpp"

#include <fmt/format.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <future>
#include <numeric>
#include <unordered_map>

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

}  // namespace

template <class Call>
auto Pipeline::State::or_abort(const Call& call) const {
  try {
    return call();
  } catch (const std::exception& error) {
    if (axis_) axis_->abort(describe(error));
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
    if (data) placed->sync.emplace(stage, module, *data, options_.bucket_cap_bytes);
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
  const bool has_last = local_stages.back() + 1 == schedule.stages();
  if (has_first && !x.defined()) {
    throw Error(Code::kUsage, "the process with stage 0 was given no input", "pass the batch as x");
  }
  if (trains && has_last && !y.defined()) {
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
  const bool mean = options_.reduction == LossReduction::kMean;
  for (const int64_t count : plan.rows) {
    plan.loss_shares.push_back(mean ? static_cast<double>(count) / static_cast<double>(rows) : 1.0);
  }
  plan.weight = mean ? static_cast<double>(rows) : 1.0;
  return plan;
}

const Device& Pipeline::State::last_device() const {
  return places_.size() == 1
             ? places_.front()->device()
             : places_[static_cast<size_t>(schedule.place_of_stage.back())]->device();
}

torch::Tensor Pipeline::State::step(const torch::Tensor& x, const torch::Tensor& y,
                                    const PipelineStep& how) {
  StepPlan plan = or_abort([&] { return plan_rows(x, y, /*trains=*/true); });
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
    if (place->loss().defined()) loss = place->loss();
  }
  return share_loss(loss);
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
