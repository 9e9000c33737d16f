#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>

#include "base/counted.hpp"
#include "base/process.hpp"
#include "device/capture.hpp"
#include "device/parameter_notes.hpp"
#include "gradients/model_sync.hpp"
#include "gradients/reducer.hpp"
#include "lockstep/sync_batch_norm.hpp"
#include "precision/model_parallel.hpp"
#include "sharding/sharded_state.hpp"
#include "verify/step_recorder.hpp"

namespace lockstep {
namespace {

// Where the elements [first, first + count) of a rank's tensor lie in the whole one.
Slice slice_of_range(const Slice& tensor, int64_t first, int64_t count) {
  Slice slice{tensor.whole, {count}, {}};
  const auto runs = runs_of(tensor);
  for (const Run& run : *runs) {
    const int64_t begin = std::max(run.local, first);
    const int64_t end = std::min(run.local + run.count, first + count);
    if (begin >= end) continue;
    slice.blocks.push_back({{begin - first}, {run.whole + begin - run.local}, {end - begin}});
  }
  if (slice.blocks.empty()) slice.blocks.push_back({{0}, {0}, {0}});
  return slice;
}

}  // namespace

Error sharding_misuse(const std::string& message, const std::string& help) {
  return {Code::kSyncMisuse, "FullyShardedDataParallel: " + message, help};
}

ShardedModel::State::State(std::shared_ptr<torch::nn::Module> given, const Communicator& ranks,
                           const ShardOptions& chosen)
    : module(std::move(given)), comm(std::make_shared<const Communicator>(ranks)), options(chosen) {
  require_not_capturing("the construction of FullyShardedDataParallel", "construct it before");
  check_module();
  if (options.virtual_shards != 0) parts = std::make_unique<Parts>(*this);
  require_same_model(*comm, model_tensors(*module));
  broadcast_model(*comm, *module, 0, "initial model");
  auto* recorder = StepRecorder::of_process();
  if (recorder != nullptr) recorder->learn(*module, parts ? "virtual_shards" : "sharded");
  const WithoutWatching own_work;
  for (auto& plan : plan_units(*module, options, comm->rank(), comm->size())) {
    units.push_back(std::make_unique<ShardedUnit>(std::move(plan), *comm, options));
    divide(*units.back());
  }
  // Each rank has written all initial values to what they share. Before that, no rank's mark of its
  // shards holds.
  if (shares_memory()) see_updates();
  std::map<const c10::TensorImpl*, std::pair<size_t, size_t>> found;  // unit, parameter
  for (size_t i = 0; i < units.size(); ++i) {
    ShardedUnit& unit = *units[i];
    for (size_t p = 0; p < unit.plan.parameters.size(); ++p) {
      const UnitParameter& at = unit.plan.parameters[p];
      shard_of[at.whole.unsafeGetTensorImpl()] = at.shard;
      if (recorder != nullptr) recorder->name(at.shard, recorder->name_of(at.whole));
      found[at.whole.unsafeGetTensorImpl()] = {i, p};
    }
    if (comm->size() > 1) {
      watched.push_back(
          std::make_unique<WatchedStorage>(unit.weights->whole().storage(), *this, i));
    }
  }
  for (auto& each : trained_in(*module)) {
    const auto [unit, parameter] = found.at(each.tensor.unsafeGetTensorImpl());
    location.emplace_back(unit, parameter);
    const UnitParameter& at = units[unit]->plan.parameters[parameter];
    if (at.count > 0) trained_shards.push_back({each.name, at.shard});
    trained.push_back(std::move(each));
  }
  forms = forms_of(trained);
  window.emplace(trained_shards);
  marks.emplace(trained_shards);
  marks->add_micro_step();
  streams.emplace(trained);
  hooks.emplace(trained, *this);
  offer_gradient_memory();
  if (comm->size() > 1) watch_this_thread();
}

// A module that outlives its wrapper has no valid parameters: empty ones are refused by every
// layer, while freed or stale memory would not be.
ShardedModel::State::~State() {
  const WithoutWatching own_work;
  for (const auto& unit : units) {
    try {  // a gather that nobody waits for would abort the other ranks
      if (unit->gathering && std::uncaught_exceptions() == 0) finish_gather(*unit);
    } catch (...) {  // another rank has failed, and says so itself
    }
  }
  if (window && window->micro_steps() > 0 && window->weights_changed() &&
      std::uncaught_exceptions() == 0) {
    print_error(
        fmt::format("warning[{}]: the last update used {} inside NoSync whose gradients were not "
                    "averaged\n",
                    code_name(Code::kSyncMisuse), counted(window->micro_steps(), "micro-step")));
  }
  watched.clear();
  unwatch_this_thread();
  const bool changed = marks && marks->weights_changed();
  for (const auto& unit : units) {
    const bool valid =
        comm->size() == 1 || (unit->fresh && !changed && unit->weights->has_memory());
    for (UnitParameter& at : unit->plan.parameters) {
      note_sharded(at.whole, false);
      at.whole.mutable_grad().reset();
      if (!valid) at.whole.set_data(torch::empty({0}, unit->plan.options));
    }
  }
}

void ShardedModel::State::check_module() const {
  require_not_sharded(*module, "FullyShardedDataParallel", "wrap a module once");
  // Its forward writes to the weight. What a rank writes to the parts of others would be lost, and
  // where ranks share the memory, each of them would shorten a row once more.
  if (const LimitedEmbeddings limited(*module); !limited.empty() && comm->size() > 1) {
    throw Error(Code::kUsage,
                fmt::format("FullyShardedDataParallel was given the embedding {} with a max_norm, "
                            "which changes its weight in forward",
                            limited.first()),
                "remove max_norm, or train with DistributedDataParallel");
  }
  std::optional<torch::Device> device;
  bool any_trained = false;
  for (const auto& item : module->named_parameters()) {
    const torch::Tensor& parameter = item.value();
    if (!parameter.defined()) continue;
    any_trained = any_trained || parameter.requires_grad();
    if (Reducer::averages(parameter)) {
      throw Error(Code::kUsage,
                  fmt::format("FullyShardedDataParallel was given a module whose parameter {} is "
                              "averaged by DistributedDataParallel or a Pipeline",
                              item.key()),
                  "wrap a module once");
    }
    if (!device) device = parameter.device();
    if (*device == parameter.device()) continue;
    throw Error(Code::kPlacement,
                fmt::format("parameter {} is on {} and others are on {}", item.key(),
                            parameter.device().str(), device->str()),
                "move the module to one device before it is wrapped");
  }
  if (any_trained) return;
  throw Error(Code::kUsage, "the module has no trained parameter",
              "use the module itself: FullyShardedDataParallel is for training");
}

// Moves the parameters into the unit's memory and makes this rank's shards of them.
void ShardedModel::State::divide(ShardedUnit& unit) {
  const torch::NoGradGuard no_grad;
  UnitPlan& plan = unit.plan;
  WholeParameters& weights = *unit.weights;
  weights.materialize();
  weights.whole().zero_();
  for (UnitParameter& at : plan.parameters) {
    weights.whole().narrow(0, at.offset, at.whole.numel()).view(at.whole.sizes()).copy_(at.whole);
  }
  weights.scatter();
  torch::Tensor masters_memory;
  for (UnitParameter& at : plan.parameters) {
    const auto masters = MasterWeights::holding(at.whole);
    const torch::Tensor master = masters ? masters->of(at.whole) : torch::Tensor();
    at.shard =
        part_with_own_storage(weights.shard(), at.at, at.count).set_requires_grad(plan.trained);
    at.whole.mutable_grad().reset();
    at.home = weights.whole().narrow(0, at.offset, at.whole.numel()).view(at.whole.sizes());
    at.whole.set_data(at.home);
    if (masters) hold_master(at, *masters, master, masters_memory, plan);
    note_slice(at.shard, slice_of_range(slice_of(at.whole), at.first, at.count));
    note_data_shard(at.shard, at.whole, comm);
    if (parts) note_same_bits(at.shard);
    note_sharded(at.whole, true);
  }
  weights.release();
}

void ShardedModel::State::hold_master(const UnitParameter& parameter, const MasterWeights& masters,
                                      const torch::Tensor& master, torch::Tensor& flat,
                                      const UnitPlan& plan) const {
  if (!flat.defined()) {
    flat = torch::zeros({plan.shard_elements},
                        parameter.shard.options().dtype(torch::kFloat32).requires_grad(false));
  }
  const torch::Tensor own = part_with_own_storage(flat, parameter.at, parameter.count);
  own.copy_(master.contiguous().view(-1).narrow(0, parameter.first, parameter.count));
  masters.replace(parameter.whole, parameter.shard, own);
}

ShardedModel::ShardedModel(std::shared_ptr<torch::nn::Module> module, const Communicator& comm,
                           const ShardOptions& options)
    : state_(std::make_unique<State>(std::move(module), comm, options)) {}

ShardedModel::~ShardedModel() = default;

void ShardedModel::State::require_unchanged() {
  if (const auto change = find_change(trained, forms, trained_in(*module))) {
    fail(sharding_misuse(
        fmt::format("parameter {} {} after it was wrapped", change->name, change->what),
        "change the module first and construct FullyShardedDataParallel afterwards"));
  }
  require_own_memory();
}

// torch::load and set_data() leave a parameter outside its unit, where no update reaches it.
void ShardedModel::State::require_own_memory() {
  if (gathered_guards > 0) return;  // see take_over_changes()
  for (const auto& unit : units) {
    for (const UnitParameter& at : unit->plan.parameters) {
      if (at.whole.is_alias_of(at.home)) continue;
      fail(sharding_misuse(fmt::format("parameter {} got other memory (torch::load, set_data) "
                                       "after it was wrapped",
                                       at.name),
                           "load inside GatheredParameters, or before the module is wrapped"));
    }
  }
}

void ShardedModel::State::require_not_gathered(const char* what) {
  if (gathered_guards == 0) return;
  fail(sharding_misuse(fmt::format("{} inside GatheredParameters", what),
                       "end the guard first: when it ends, shards take over the whole parameters"));
}

// When GatheredParameters end: each rank's shards are its part of the whole parameters again.
void ShardedModel::State::take_over_changes() {
  const torch::NoGradGuard no_grad;
  const bool overwrites = std::any_of(units.begin(), units.end(), [](const auto& unit) {
    return unit->plan.trained && unit->weights->overwrites_shard();
  });
  const bool update_is_lost = overwrites && marks->weights_changed();
  const UnitParameter* converted = nullptr;
  for (const auto& unit : units) {
    for (UnitParameter& at : unit->plan.parameters) {
      if (!at.whole.is_alias_of(at.home)) {  // torch::load gives a parameter other memory
        const torch::Tensor loaded = at.whole.variable_data();
        at.whole.set_data(at.home);
        if (loaded.sizes() == at.home.sizes() && loaded.dtype() == at.home.dtype() &&
            loaded.device() == at.home.device()) {
          at.whole.copy_(loaded);
        } else {
          converted = &at;
        }
      }
      // Master weights take over what was changed in the whole parameters.
      at.shard.unsafeGetTensorImpl()->bump_version();
    }
    unit->weights->scatter();
  }
  if (converted != nullptr) {
    fail(sharding_misuse(
        fmt::format("parameter {} was moved, converted or resized inside GatheredParameters",
                    converted->name),
        "load weights of the same shape, dtype and device"));
  }
  if (update_is_lost) {
    fail(sharding_misuse("an optimizer changed shards inside GatheredParameters",
                         "end the guard before step()"));
  }
}

// What a backward that ended with an error has left is in whole gradients, which no optimizer sees,
// and some units may be averaged already. One that had not reached a parameter has left nothing.
// A layer that is computed again inside backward may be the whole wrapper.
void ShardedModel::State::require_ended() {
  if (inside_backward()) return;
  end_is_queued = false;
  if (phase != Phase::kBackward) return;
  fail(sharding_misuse("forward was called although the last backward did not end",
                       "an exception left it half done; end the program, or construct "
                       "FullyShardedDataParallel and its communicator again"));
}

void ShardedModel::State::share_buffers() const {
  broadcast_tensors(*comm, buffers_of(*module), 0, "buffers");
}

// See Note [Evaluation before an update].
void ShardedModel::State::end_evaluation() {
  const bool may_be_updated = update_follows && gathered_guards == 0;
  if (may_be_updated && shares_memory()) comm->barrier({.label = "end of an evaluation"});
}

void ShardedModel::before_forward() {
  State& state = *state_;
  require_not_capturing("FullyShardedDataParallel", "capture steps of DistributedDataParallel");
  state.rethrow_failure();
  const WithoutWatching own_work;
  state.require_unchanged();
  state.hooks->follow(state.trained);
  state.streams->follow_current();
  if (state.comm->size() > 1) watch_this_thread();
  const bool first = state.phase == State::Phase::kIdle;
  state.notice_changes();
  if (first && !state.order_known) state.order.clear();
  if (first) state.order_next = 0;
  if (first) state.last_group = State::kNoGroup;
  if (first) state.awaits_training_backward = false;
  if (!inside_backward()) state.expect_update();
  // A forward before may have been an evaluation with gradients enabled.
  const bool begins =
      first || (state.phase == State::Phase::kForwarded && !state.awaits_training_backward);
  if (!torch::GradMode::is_enabled()) {
    if (first) state.order_next = state.order.size();
    return;
  }
  if (state.parts) state.parts->shards().require_inside("a forward");
  state.require_ended();
  const bool trains = state.module->is_training();
  // A forward before may have had no backward, and gradients may have been dropped since then.
  if (first || !inside_backward()) state.check_window();
  if (trains) {
    const bool shares = state.options.broadcast_buffers && state.last_forward_averaged;
    if (shares && begins && !state.parts) state.share_buffers();
    state.last_forward_averaged = state.no_sync_depth == 0;
    state.awaits_training_backward = true;
    auto* recorder = StepRecorder::of_process();
    if (recorder != nullptr && state.last_forward_averaged) recorder->note_synchronised_forward();
    if (recorder != nullptr) state.forward_watch.emplace(*state.module);
  }
  state.phase = State::Phase::kForwarded;
}

void ShardedModel::after_forward(const std::vector<torch::Tensor>& outputs) {
  State& state = *state_;
  state.forward_watch.reset();
  state.rethrow_failure();
  const WithoutWatching own_work;
  state.window->forward_ended();
  if (!torch::GradMode::is_enabled()) {
    if (state.phase == State::Phase::kIdle) state.release_unused();
  } else {
    state.hooks->watch(outputs);
  }
  const bool trains = torch::GradMode::is_enabled() && state.module->is_training();
  if (!trains) state.end_evaluation();
}

torch::Tensor ShardedModel::backward_parts(const PartLoss& loss_of, const PartStep& how) {
  if (!state_->parts) {
    throw Error(Code::kUsage,
                "backward_parts() of a FullyShardedDataParallel without virtual shards",
                "set ShardOptions::virtual_shards");
  }
  return state_->parts->step(loss_of, how);
}

void ShardedModel::begin_step(bool share_buffers) {
  State& state = *state_;
  state.rethrow_failure();
  const WithoutWatching own_work;
  state.require_not_gathered("a step");
  state.require_unchanged();
  for (const auto& [name, tensor] : state.trained) {
    if (tensor.requires_grad()) continue;
    state.fail(sharding_misuse(fmt::format("parameter {} was frozen after it was wrapped", name),
                               "freeze it before, or give it a learning rate of 0"));
  }
  state.hooks->follow(state.trained);
  state.streams->follow_current();
  if (state.comm->size() > 1) watch_this_thread();
  state.notice_changes();
  state.expect_update();
  state.update_follows = false;
  if (state.phase == State::Phase::kStepping) state.drop_gradients();  // that step failed
  state.check_window();
  if (share_buffers) state.share_buffers();
  for (const auto& unit : state.units) {
    if (unit->gradients) unit->gradients->begin_backward();
  }
  state.phase = State::Phase::kStepping;
}

void ShardedModel::end_action() {
  state_->rethrow_failure();
  const WithoutWatching own_work;
  state_->release_unused();
}

void ShardedModel::end_step() {
  const WithoutWatching own_work;
  state_->rethrow_failure();
  state_->keep_local_gradients();
  state_->end_step();
}

void ShardedModel::begin_average() {
  const WithoutWatching own_work;
  state_->rethrow_failure();
  state_->begin_average();
}

void ShardedModel::end_average() {
  const WithoutWatching own_work;
  state_->end_average();
  state_->end_step();
}

void ShardedModel::begin_evaluation() {
  state_->rethrow_failure();
  const WithoutWatching own_work;
  state_->require_own_memory();
  if (state_->comm->size() > 1) watch_this_thread();
  state_->notice_changes();
  if (state_->update_follows) state_->mark_stale();
}

void ShardedModel::end_evaluation() {
  state_->rethrow_failure();
  const WithoutWatching own_work;
  state_->release_unused();
  state_->end_evaluation();
}

torch::Tensor ShardedModel::shard_of(const torch::Tensor& parameter) const {
  const auto found = state_->shard_of.find(parameter.unsafeGetTensorImpl());
  return found == state_->shard_of.end() ? parameter : found->second;
}

std::vector<std::pair<std::string, torch::Tensor>> ShardedModel::named_shards() const {
  std::vector<std::pair<std::string, torch::Tensor>> shards;
  std::map<const c10::TensorImpl*, bool> seen;
  for (const auto& item : state_->module->named_parameters()) {
    const auto* key = item.value().unsafeGetTensorImpl();
    if (!item.value().defined() || !seen.emplace(key, true).second) continue;
    shards.emplace_back(item.key(), shard_of(item.value()));
  }
  return shards;
}

void ShardedModel::set_weight(double weight) {
  if (!std::isfinite(weight) || weight < 0) {
    throw Error(Code::kUsage, fmt::format("a rank cannot have the weight {} in a mean", weight),
                "give its number of rows, or any other number that is not negative");
  }
  state_->weight = weight;
  set_gradient_weight(*state_->module, weight);
  if (state_->parts) state_->parts->shards().set_weight(weight);
}

void ShardedModel::zero_grad(bool set_to_none) {
  state_->drop_gradients();
  for (const auto& [name, shard] : named_shards()) {
    torch::Tensor& gradient = shard.mutable_grad();
    if (!gradient.defined()) continue;
    if (set_to_none) {
      gradient.reset();
    } else {
      gradient.zero_();
    }
  }
}

void ShardedModel::gather_all() {
  State& state = *state_;
  state.rethrow_failure();
  const WithoutWatching own_work;
  if (state.gathered_guards == 0) {
    state.require_own_memory();
    state.notice_changes();
    if (state.update_follows) state.mark_stale();
    std::vector<size_t> all(state.units.size());
    for (size_t i = 0; i < all.size(); ++i) all[i] = i;
    if (state.shares_memory()) state.see_updates();  // whoever reads or writes next
    state.make_ready(all);
    for (const auto& unit : state.units) unit->weights->copy_for_changes();
    if (state.shares_memory()) state.comm->barrier({.label = "copies of shared parameters"});
  }
  if (state.gathered_guards++ == 0) state.note_whole(true);
}

// Called by a destructor, so what fails here is thrown by the next call.
void ShardedModel::release_all() {
  State& state = *state_;
  if (--state.gathered_guards > 0) return;
  const WithoutWatching own_work;
  state.note_whole(false);
  try {
    state.take_over_changes();
    note_changed_shards();
    state.release_unused();
  } catch (const std::exception& error) {
    if (!state.failure) state.failure = std::current_exception();
    print_error(fmt::format("{}\n", error.what()));
  }
}

void ShardedModel::begin_change() const {
  const WithoutWatching own_work;
  state_->require_not_gathered("a change of the shards");
  if (state_->shares_memory()) state_->comm->barrier({.label = "before shards are changed"});
}

void ShardedModel::note_changed_shards() {
  const WithoutWatching own_work;
  state_->mark_stale(/*frozen_too=*/true);
  state_->marks->add_micro_step();
  state_->window->forward_ended();  // a change on all ranks is no update with gradients of one
}

ShardStats ShardedModel::stats() const {
  return state_->stats;
}

std::vector<ShardUnit> ShardedModel::units() const {
  std::vector<ShardUnit> units;
  for (const auto& unit : state_->units) {
    ShardUnit& made = units.emplace_back();
    made.name = unit->plan.name;
    made.elements = unit->plan.elements;
    made.dtype = c10::typeMetaToScalarType(unit->plan.options.dtype());
    made.shared = unit->weights->is_shared();
    for (const auto& each : unit->plan.parameters) made.parameters.push_back(each.name);
  }
  return units;
}

const Communicator& ShardedModel::comm() const {
  return *state_->comm;
}

const std::shared_ptr<torch::nn::Module>& ShardedModel::module() const {
  return state_->module;
}

// With virtual shards NoSync only says that the next step goes on with this one's gradients.
void ShardedModel::enter_no_sync() {
  if (state_->parts) state_->parts->shards().require_outside("NoSync", kNoSyncInParts);
  ++state_->no_sync_depth;
}

void ShardedModel::leave_no_sync() {
  --state_->no_sync_depth;
}

}  // namespace lockstep
