#include "lockstep/pipeline.hpp"

#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <exception>
#include <future>
#include <unordered_map>

#include "base/counted.hpp"
#include "base/fault.hpp"
#include "base/process.hpp"
#include "device/parameter_notes.hpp"
#include "gradients/model_sync.hpp"
#include "gradients/trained_parameters.hpp"
#include "gradients/virtual_shards.hpp"
#include "lockstep/autocast.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad_scaler.hpp"
#include "pipeline/pipeline_rank.hpp"
#include "precision/model_parallel.hpp"
#include "verify/step_recorder.hpp"

namespace lockstep {
namespace {

// Fingerprint of the schedule (which rank does what, in which order), on which all ranks must
// agree.
int64_t fingerprint(const Schedule& schedule) {
  std::vector<int> parts = {schedule.micro_batches};
  parts.insert(parts.end(), schedule.rank_of_stage.begin(), schedule.rank_of_stage.end());
  for (const auto& actions : schedule.actions) {
    for (const auto& [kind, stage, micro_batch] : actions) {
      parts.insert(parts.end(), {static_cast<int>(kind), stage, micro_batch});
    }
  }
  return static_cast<int64_t>(XXH3_64bits(parts.data(), parts.size() * sizeof(int)) >> 1);
}

void require_same_schedule(const Communicator& axis, const Schedule& schedule) {
  const auto mine = torch::full({1}, fingerprint(schedule), torch::kInt64);
  const auto all = torch::zeros({axis.size()}, torch::kInt64);
  axis.all_gather(all, mine, {.label = "schedules of a pipeline"});
  for (int rank = 1; rank < axis.size(); ++rank) {
    if (all[rank].item<int64_t>() == all[0].item<int64_t>()) continue;
    throw Error(
        Code::kStageMismatch,
        fmt::format("ranks {} and {} of a pipeline were given different schedules",
                    axis.world_ranks().at(0), axis.world_ranks().at(static_cast<size_t>(rank))),
        "give all ranks the same stages, micro-batches and schedule");
  }
}

// A weight in two stages would get half of its gradient in each.
void require_modules_apart(const std::vector<torch::nn::Sequential>& modules) {
  for (const auto& module : modules) {
    if (module.is_empty()) continue;  // another rank's
    require_not_sharded(*module, "Pipeline",
                        "let the pipeline divide its stages over its data axis: "
                        "PipelineOptions::shard");
  }
  std::unordered_map<const c10::TensorImpl*, size_t> owner;
  for (size_t stage = 0; stage < modules.size(); ++stage) {
    if (modules[stage].is_empty()) continue;
    for (const auto& item : modules[stage]->named_parameters()) {
      const auto [found, is_new] = owner.emplace(item.value().unsafeGetTensorImpl(), stage);
      if (is_new || found->second == stage) continue;
      throw Error(
          Code::kPlacement,
          fmt::format("parameter {} belongs to stages {} and {}", item.key(), found->second, stage),
          "cut the model so that layers with common weights are in one stage, or give each "
          "its own");
    }
  }
}

// Every micro-batch of every data rank is one virtual shard.
void require_parts(const Schedule& schedule, const PipelineOptions& options) {
  if (options.shard && options.shard->virtual_shards != 0) {
    throw Error(Code::kUsage, "the ShardOptions of a pipeline have virtual_shards",
                "they are an option of the pipeline: PipelineOptions::virtual_shards");
  }
  if (options.virtual_shards == 0) return;
  require_part_threads(options.part_threads);
  const int64_t parts = (options.data ? options.data->size() : 1) * int64_t{schedule.micro_batches};
  if (options.virtual_shards != parts) {
    throw Error(Code::kUsage,
                fmt::format("a pipeline was made with {}, but {} of {} make {}",
                            counted(options.virtual_shards, "virtual shard"),
                            counted(parts / schedule.micro_batches, "data rank"),
                            counted(schedule.micro_batches, "micro-batch"), parts),
                "every micro-batch is a part: make the schedule for virtual_shards divided by the "
                "number of data ranks");
  }
  if (options.shard) {
    throw Error(Code::kUsage, "a pipeline was told to shard its stages and to have virtual_shards",
                "leave out one of the two; without stages FullyShardedDataParallel has both");
  }
}

void require_options(const Schedule& schedule, const PipelineOptions& options, size_t modules) {
  validate(schedule);
  if (modules != static_cast<size_t>(schedule.stages())) {
    throw Error(Code::kStageMismatch,
                fmt::format("schedule {} has {}, but {} were given", schedule.name,
                            counted(schedule.stages(), "stage"), counted(modules, "module")),
                "make the schedule for as many stages as the model is cut into");
  }
  if (!options.loss) {
    throw Error(Code::kUsage, "a pipeline was made without a loss",
                "set PipelineOptions::loss: backward begins in the last stage");
  }
  if (options.loss_weight && options.reduction == LossReduction::kSum) {
    throw Error(Code::kUsage, "a pipeline was given a loss_weight for a loss that is a sum",
                "sums need no weights: remove one of the two");
  }
  require_parts(schedule, options);
  if (options.shard && !options.data) {
    throw Error(Code::kUsage, "a pipeline was told to shard its stages, but has no data axis",
                "set PipelineOptions::data: the ranks that the stages are divided over");
  }
  if (options.shard &&
      (options.nonfinite != Nonfinite::kWarn || !options.check_unaveraged_updates)) {
    throw Error(
        Code::kUsage,
        fmt::format("a pipeline cannot shard its stages with {}",
                    options.nonfinite != Nonfinite::kWarn ? "PipelineOptions::nonfinite"
                                                          : "check_unaveraged_updates = false"),
        "leave that option as it is, or do not shard");
  }
  for (const int stage : options.recompute) {
    if (stage >= 0 && stage < schedule.stages()) continue;
    throw Error(Code::kUsage, fmt::format("recompute names stage {}", stage),
                fmt::format("stages are 0 to {}", schedule.stages() - 1));
  }
}

}  // namespace

/// Everything behind a Pipeline. Its ranks are those of this process: all of them, each on a
/// device's worker; or one, on the calling thread, where the others are ranks of an axis.
class Pipeline::State {
 public:
  State(std::vector<torch::nn::Sequential> modules, const Devices& devices, Schedule given,
        PipelineOptions options);
  State(std::vector<torch::nn::Sequential> modules, const Communicator& axis, Device& device,
        Schedule given, PipelineOptions options);
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  torch::Tensor step(const torch::Tensor& x, const torch::Tensor& y, const PipelineStep& how);
  torch::Tensor evaluate(const torch::Tensor& x);
  const StepTrace& trace() const;
  LinkStats links() const;

  /// Steps whose gradients were applied without having been averaged.
  int64_t unaveraged_steps() const;

  LocalStage& local(int stage) const;
  std::vector<torch::Tensor> parameters() const;
  DeviceRng& seeds() { return seeds_; }

  // Runs `work` for every local rank, on its device, after the caller's work there and before what
  // the caller does next; all of it has ended when this returns or throws.
  void run_ranks(const char* name, const std::function<void(PipelineRank&)>& work);

  const Schedule schedule;
  std::vector<int> local_stages;  // ascending

 private:
  void add_rank(int index, Device& device, std::unique_ptr<StageChannel> channel,
                std::vector<torch::nn::Sequential>& modules);
  int world_rank() const;
  void continue_backward(const torch::Tensor& x, const torch::Tensor& y, const StepPlan& plan);
  uint64_t next_seed();
  torch::Tensor loss_of_parts(const StepPlan& plan, const torch::Tensor& mine) const;
  torch::Tensor share_loss(const torch::Tensor& mine) const;
  const Device& last_device() const;
  StepFaults inject_faults() const;
  void run_on_workers(const char* name, const std::function<void(PipelineRank&)>& work);
  void run_here(const std::function<void(PipelineRank&)>& work);

  // Other ranks must not wait for one that left a call with an error.
  template <class Call>
  auto or_abort(const Call& call) const {
    try {
      return call();
    } catch (const std::exception& error) {
      if (axis_) axis_->abort(describe(error));
      if (options_.data) options_.data->abort(describe(error));
      for (const auto& rank : ranks_) rank->give_up(describe(error));
      throw;
    }
  }

  const PipelineOptions options_;
  std::optional<Devices> devices_;                      // where all stages are in this process
  std::optional<Communicator> axis_;                    // where they are ranks
  std::shared_ptr<const Communicator> axis_of_stages_;  // the same, noted on their parameters
  torch::Tensor none_trained_;                          // see parameters(); undefined without axis_
  std::vector<std::string> rank_names_;                 // [pipeline rank]
  StepPlanner planner_{schedule, options_, axis_};
  DeviceRng seeds_{torch::Device(torch::kCPU), 0};  // of steps
  PartSeeds part_seeds_;                            // of steps with virtual shards
  Mailbox mailbox_;
  std::vector<std::unique_ptr<PipelineRank>> ranks_;  // local ones
  mutable std::optional<StepTrace> last_step_;        // read from the devices when first asked for
  bool last_step_synchronised_ = true;
};

Pipeline::State::State(std::vector<torch::nn::Sequential> modules, const Devices& devices,
                       Schedule given, PipelineOptions options)
    : schedule(std::move(given)), options_(std::move(options)), devices_(devices) {
  require_options(schedule, options_, modules.size());
  require_modules_apart(modules);
  planner_.require_same_weighing();
  if (static_cast<size_t>(schedule.ranks()) > devices.size()) {
    throw Error(Code::kPlacement,
                fmt::format("schedule {} has {}, but this process has {}", schedule.name,
                            counted(schedule.ranks(), "rank"), counted(devices.size(), "device")),
                "give more devices, or put several stages on one with on_ranks()");
  }
  devices.require_not_on_worker("Pipeline");
  for (int index = 0; index < schedule.ranks(); ++index) {
    rank_names_.push_back(devices[static_cast<size_t>(index)].name());
  }
  for (int index = 0; index < schedule.ranks(); ++index) {
    Device& device = devices[static_cast<size_t>(index)];
    const StreamOrder caller = StreamOrder::now(device);
    device.run("place stages", [&] {
      caller.hold_back(device);  // a GPU may not have made the weights yet
      add_rank(index, device, make_local_channel(mailbox_, device), modules);
    });
    ranks_.back()->end().hold_back(device);
  }
  std::sort(local_stages.begin(), local_stages.end());
}

Pipeline::State::State(std::vector<torch::nn::Sequential> modules, const Communicator& axis,
                       Device& device, Schedule given, PipelineOptions options)
    : schedule(std::move(given)),
      options_(std::move(options)),
      axis_(axis),
      axis_of_stages_(std::make_shared<const Communicator>(axis)) {
  require_options(schedule, options_, modules.size());
  if (axis.size() != schedule.ranks()) {
    throw Error(Code::kStageMismatch,
                fmt::format("schedule {} has {}, but the axis has {}", schedule.name,
                            counted(schedule.ranks(), "rank"), axis.size()),
                "make the schedule for as many ranks as the pipeline's axis has");
  }
  require_same_schedule(axis, schedule);
  planner_.require_same_weighing();
  or_abort([&] { require_modules_apart(modules); });
  for (const int rank : axis.world_ranks()) rank_names_.push_back(fmt::format("rank {}", rank));
  const StreamOrder caller = StreamOrder::now(device);
  {
    const UseDevice home(device);
    caller.hold_back(device);
    auto channel = make_rank_channel(axis, schedule, device);
    or_abort([&] { add_rank(axis.rank(), device, std::move(channel), modules); });
    for (const auto& each : ranks_.front()->stages()) {
      for (const auto& parameter : each->stage.module()->parameters()) {
        note_pipeline_stage(parameter, axis_of_stages_);
      }
    }
    none_trained_ = torch::empty({0}, torch::TensorOptions().device(device.torch_device()));
  }
  note_pipeline_stage(none_trained_, axis_of_stages_);
  note_slice(none_trained_, {.whole = {1}, .local = {0}, .blocks = {}});  // in no checkpoint
  if (options_.virtual_shards > 0) note_same_bits(none_trained_);
  ranks_.front()->end().hold_back(device);
}

// Called on a thread that works for the device.
void Pipeline::State::add_rank(int index, Device& device, std::unique_ptr<StageChannel> channel,
                               std::vector<torch::nn::Sequential>& modules) {
  auto& rank = *ranks_.emplace_back(std::make_unique<PipelineRank>(
      index,
      PipelineFacts{schedule, rank_names_, world_rank(),
                    options_.virtual_shards > 0 ? options_.part_threads : 0},
      device, std::move(channel)));
  std::optional<Communicator> data;
  if (options_.data) {
    data = options_.data->split(0, options_.data->rank(), fmt::format("data {}", index));
  } else if (options_.virtual_shards > 0) {
    data = Communicator::self();
  }
  for (int stage = 0; stage < schedule.stages(); ++stage) {
    if (schedule.rank_of_stage[static_cast<size_t>(stage)] != index) continue;
    auto& module = modules[static_cast<size_t>(stage)];
    if (module.is_empty()) {
      throw Error(Code::kStageMismatch, fmt::format("stage {} has no module here", stage),
                  "give every rank the modules of its own stages");
    }
    const auto& again = options_.recompute;
    const bool recompute = std::find(again.begin(), again.end(), stage) != again.end();
    const bool last = stage + 1 == schedule.stages();
    auto local = std::make_unique<LocalStage>(
        LocalStage{Stage(stage, module, device, recompute, last ? options_.loss : nullptr), {}});
    if (data) {
      const bool shards = options_.shard && !trained_in(*module).empty();
      const auto make = options_.virtual_shards > 0 ? make_part_stage
                        : shards                    ? make_sharded_stage
                                                    : make_averaged_stage;
      local->sync = make(stage, module, *data, options_);
    }
    if (auto* recorder = StepRecorder::of_process()) {
      recorder->learn(*module, "pipeline");
      if (options_.virtual_shards > 0) recorder->learn(*module, "virtual_shards");
    }
    rank.add(std::move(local));
    local_stages.push_back(stage);
  }
  rank.mark_end();
}

int Pipeline::State::world_rank() const {
  const auto& comm = axis_ ? axis_ : options_.data;
  return comm ? comm->world_ranks().at(static_cast<size_t>(comm->rank())) : 0;
}

LocalStage& Pipeline::State::local(int stage) const {
  for (const auto& rank : ranks_) {
    for (const auto& each : rank->stages()) {
      if (each->stage.index() == stage) return *each;
    }
  }
  throw Error(Code::kUsage, fmt::format("stage {} is not in this process", stage),
              fmt::format("local_stages() names those that are; stages are 0 to {}",
                          schedule.stages() - 1));
}

// The optimizer of a rank that trains nothing has one empty tensor, which says whose norm and whose
// skipped steps are its own too.
std::vector<torch::Tensor> Pipeline::State::parameters() const {
  std::vector<torch::Tensor> all;
  for (const int stage : local_stages) {
    const auto& [computed, sync] = local(stage);
    if (sync) {
      for (auto& each : sync->parameters()) all.push_back(std::move(each));
      continue;
    }
    for (auto& each : trained_in(*computed.module())) all.push_back(std::move(each.tensor));
  }
  if (all.empty() && none_trained_.defined()) all.push_back(none_trained_);
  return all;
}

const Device& Pipeline::State::last_device() const {
  const auto last = static_cast<size_t>(schedule.rank_of_stage.back());
  return ranks_[ranks_.size() == 1 ? 0 : last]->device();
}

// Provokes what `lockstep run --inject` asks for as a step begins; returns what comes later in it.
StepFaults Pipeline::State::inject_faults() const {
  FaultInjector& injector = FaultInjector::of_process();
  injector.begin_backward();
  const auto trained = std::find_if(local_stages.begin(), local_stages.end(), [this](int stage) {
    return !local(stage).stage.module()->parameters().empty();
  });
  StepFaults faults;
  if (trained == local_stages.end()) return faults;
  if (injector.take(FaultKind::kNan)) faults.nan_stage = *trained;
  if (injector.take(FaultKind::kMismatch)) {
    if (axis_ && axis_->size() > 1) {
      call_mismatch(*axis_);
    } else {
      faults.mismatch_stage = *trained;
    }
  }
  return faults;
}

torch::Tensor Pipeline::State::step(const torch::Tensor& x, const torch::Tensor& y,
                                    const PipelineStep& how) {
  const bool accumulates = !how.synchronise || !last_step_synchronised_;
  StepPlan plan = or_abort([&] {
    const StepFaults faults = how.synchronise ? inject_faults() : StepFaults();
    StepPlan made = planner_.plan_step(x, y, accumulates);
    made.faults = faults;
    return made;
  });
  plan.seed = or_abort([&] { return next_seed(); });
  auto* recorder = StepRecorder::of_process();
  const bool has_input =
      std::find(local_stages.begin(), local_stages.end(), 0) != local_stages.end();
  if (recorder != nullptr) {
    if (has_input) {
      recorder->note_rows({x}, plan.parts ? static_cast<int64_t>(plan.rows.size()) : 1);
    }
    if (plan.data_factor != 1) recorder->note_weighed();
    const bool by_rows = options_.reduction == LossReduction::kMean && !options_.loss_weight;
    if (by_rows && !plan.parts) recorder->note_micro_batches(plan.rows, plan.loss_shares);
  }
  plan.loss_factor = how.loss_factor;
  plan.synchronise = how.synchronise;
  plan.share_buffers = options_.broadcast_buffers && (last_step_synchronised_ || plan.parts);
  if (how.scaler != nullptr) {
    plan.loss_scale = how.scaler->scale(
        torch::ones({}, torch::TensorOptions().device(last_device().torch_device())));
  }
  last_step_.reset();
  run_ranks("pipeline", [&](PipelineRank& rank) { rank.run(plan); });
  last_step_synchronised_ = how.synchronise;
  torch::Tensor loss;
  for (const auto& rank : ranks_) {
    if (!rank->loss().defined()) continue;
    loss = rank->loss();
    planner_.check_losses(rank->losses(), rank->take_comparison());
  }
  if (plan.parts) loss = or_abort([&] { return loss_of_parts(plan, loss); });
  loss = share_loss(loss);
  or_abort([&] { continue_backward(x, y, plan); });
  return loss;
}

// With virtual shards it is the same on all data ranks, and for every number of them.
uint64_t Pipeline::State::next_seed() {
  if (options_.virtual_shards == 0) return seeds_.next_seed();
  bool accumulates = !last_step_synchronised_;
  for (const int stage : local_stages) {
    accumulates = accumulates || local(stage).sync->has_accumulated();
  }
  if (axis_) {  // a stage may have no weights that could tell
    const auto any = torch::full({1}, accumulates ? 1 : 0, torch::kUInt8);
    axis_->all_reduce(any, ReduceOp::kMax, {.label = "accumulated gradients"});
    accumulates = any.item<uint8_t>() != 0;
  }
  part_seeds_.begin_step(accumulates);
  return part_seeds_.seed_of(0);
}

// The loss over the parts of all data ranks. Only where the last stage is are the parts' losses
// known, and `mine` defined.
torch::Tensor Pipeline::State::loss_of_parts(const StepPlan& plan,
                                             const torch::Tensor& mine) const {
  std::vector<double> losses(plan.rows.size(), 0.0);
  for (const auto& rank : ranks_) {
    for (size_t i = 0; mine.defined() && i < rank->losses().size(); ++i) {
      losses[i] = rank->losses()[i].item<double>();
    }
  }
  const Communicator data = options_.data ? *options_.data : Communicator::self();
  const auto sums =
      VirtualShards::exchange(PartTree(options_.virtual_shards, data.size()), data, plan.seed,
                              plan.rows.front(), plan.parts->weights, losses);
  if (!mine.defined()) return mine;
  return torch::full({}, sums.loss / plan.parts->divisor, mine.options());
}

// Goes backward from x and y with the gradients of this rank's own loss, as a backward on one
// device would give them: the rank's weight among others is divided out. One call for both, since
// one graph may have made x and y.
void Pipeline::State::continue_backward(const torch::Tensor& x, const torch::Tensor& y,
                                        const StepPlan& plan) {
  std::vector<torch::Tensor> roots, gradients;
  const auto add = [&](const torch::Tensor& root, const torch::Tensor& gradient) {
    keep_for_current_stream(gradient);
    const bool weighed = plan.data_factor > 0 && plan.data_factor != 1;
    roots.push_back(root);
    gradients.push_back((weighed ? gradient / plan.data_factor : gradient).to(root.device()));
  };
  for (const auto& rank : ranks_) {
    const auto parts = rank->take_input_gradients();
    if (parts.empty()) continue;
    for (const auto& part : parts) keep_for_current_stream(part);
    add(x, torch::cat(parts));
  }
  if (!plan.y.is_same(y) && plan.y.grad().defined()) add(y, plan.y.grad());
  if (roots.empty()) return;
  const Autocast off(roots.front().device(), torch::kBFloat16, /*enabled=*/false);
  torch::autograd::backward(roots, gradients);
}

torch::Tensor Pipeline::State::share_loss(const torch::Tensor& mine) const {
  if (!axis_ || axis_->size() == 1) return mine;
  const torch::Tensor shared =
      mine.defined()
          ? mine.to(torch::kFloat64).reshape({1}).contiguous()
          : torch::zeros(
                {1}, torch::TensorOptions(torch::kFloat64).device(last_device().torch_device()));
  axis_->broadcast(shared, schedule.rank_of_stage.back(), {.label = "loss of a pipeline's step"});
  return mine.defined() ? mine : shared[0].to(torch::kFloat32);
}

torch::Tensor Pipeline::State::evaluate(const torch::Tensor& x) {
  const StepPlan plan = or_abort([&] { return planner_.plan_evaluation(x); });
  std::vector<torch::Tensor> outputs;
  run_ranks("pipeline", [&](PipelineRank& rank) {
    auto mine = rank.evaluate(plan);
    if (mine.front().defined()) outputs = std::move(mine);
  });
  if (outputs.empty()) return {};
  for (const auto& output : outputs) keep_for_current_stream(output);
  return torch::cat(outputs);
}

const StepTrace& Pipeline::State::trace() const {
  if (last_step_) return *last_step_;
  StepTrace trace;
  for (const auto& rank : ranks_) rank->add_spans(trace);
  const auto by_begin = [](const auto& a, const auto& b) { return a.begin_ns < b.begin_ns; };
  std::stable_sort(trace.actions.begin(), trace.actions.end(), by_begin);
  std::stable_sort(trace.syncs.begin(), trace.syncs.end(), by_begin);
  return last_step_.emplace(std::move(trace));
}

int64_t Pipeline::State::unaveraged_steps() const {
  int64_t steps = 0;
  for (const auto& rank : ranks_) {
    for (const auto& each : rank->stages()) {
      if (each->sync) steps = std::max(steps, each->sync->unaveraged_steps());
    }
  }
  return steps;
}

LinkStats Pipeline::State::links() const {
  LinkStats total;
  for (const auto& rank : ranks_) {
    const LinkStats each = rank->channel().stats();
    total.messages += each.messages;
    total.bytes += each.bytes;
  }
  return total;
}

void Pipeline::State::run_ranks(const char* name, const std::function<void(PipelineRank&)>& work) {
  if (axis_) {
    run_here(work);
  } else {
    run_on_workers(name, work);
  }
  for (const auto& rank : ranks_) rank->end().hold_back(rank->device());
}

void Pipeline::State::run_here(const std::function<void(PipelineRank&)>& work) {
  PipelineRank& rank = *ranks_.front();
  const StreamOrder caller = StreamOrder::now(rank.device());
  const UseDevice home(rank.device());
  caller.hold_back(rank.device());
  or_abort([&] { work(rank); });
  rank.mark_end();
}

void Pipeline::State::run_on_workers(const char* name,
                                     const std::function<void(PipelineRank&)>& work) {
  devices_->require_not_on_worker("a pipeline's step");
  mailbox_.clear();
  std::vector<std::future<void>> running;
  for (const auto& rank : ranks_) {
    auto caller = StreamOrder::now(rank->device());
    running.push_back(
        rank->device().submit(name, [this, &work, &rank = *rank, caller = std::move(caller)] {
          caller.hold_back(rank.device());
          try {
            work(rank);
          } catch (...) {
            mailbox_.fail(std::current_exception());  // keeps the error that stopped this rank
          }
          rank.mark_end();
        }));
  }
  for (const auto& each : running) each.wait();
  const std::exception_ptr error = mailbox_.error();
  if (!error) return;
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& caught) {
    for (const auto& rank : ranks_) {
      rank->give_up(describe(caught));
      rank->end().hold_back(rank->device());  // the caller may clear gradients now
    }
    mailbox_.clear();
    throw;
  }
}

std::function<double(const torch::Tensor&)> count_targets(int64_t ignore_index) {
  return [ignore_index](const torch::Tensor& target) {
    return static_cast<double>(target.ne(ignore_index).sum().item<int64_t>());
  };
}

Pipeline::Pipeline(std::vector<torch::nn::Sequential> stages, const Devices& devices,
                   Schedule schedule, PipelineOptions options)
    : state_(std::make_unique<State>(std::move(stages), devices, std::move(schedule),
                                     std::move(options))) {}

Pipeline::Pipeline(std::vector<torch::nn::Sequential> stages, const Communicator& axis,
                   Device& device, Schedule schedule, PipelineOptions options)
    : state_(std::make_unique<State>(std::move(stages), axis, device, std::move(schedule),
                                     std::move(options))) {}

// No step follows that could refuse an update that each rank made alone.
Pipeline::~Pipeline() {
  const int64_t steps = state_->unaveraged_steps();
  if (std::uncaught_exceptions() > 0 || steps == 0) return;
  print_error(
      fmt::format("warning[{}]: the last update used the gradients of {} with synchronise = false "
                  "that were not averaged: the data ranks' weights differ\n",
                  code_name(Code::kSyncMisuse), counted(steps, "step")));
}

torch::Tensor Pipeline::step(const torch::Tensor& x, const torch::Tensor& y,
                             const PipelineStep& how) {
  return state_->step(x, y, how);
}

torch::Tensor Pipeline::evaluate(const torch::Tensor& x) {
  return state_->evaluate(x);
}

const Schedule& Pipeline::schedule() const {
  return state_->schedule;
}

const std::vector<int>& Pipeline::local_stages() const {
  return state_->local_stages;
}

const torch::nn::Sequential& Pipeline::stage(int stage) const {
  return state_->local(stage).stage.module();
}

Device& Pipeline::device_of(int stage) const {
  return state_->local(stage).stage.device();
}

std::vector<torch::Tensor> Pipeline::parameters() const {
  return state_->parameters();
}

ShardedModel* Pipeline::sharded(int stage) const {
  const auto& sync = state_->local(stage).sync;
  return sync ? sync->sharded() : nullptr;
}

void Pipeline::for_each_stage(const char* name, const std::function<void(int)>& work) {
  state_->run_ranks(name, [&](PipelineRank& rank) {
    for (const auto& each : rank.stages()) work(each->stage.index());
  });
}

int64_t Pipeline::random_position() const {
  return state_->seeds().position();
}

void Pipeline::set_random_position(int64_t position) {
  state_->seeds().set_position(position);
}

const StepTrace& Pipeline::last_step() const {
  return state_->trace();
}

LinkStats Pipeline::links() const {
  return state_->links();
}

}  // namespace lockstep
