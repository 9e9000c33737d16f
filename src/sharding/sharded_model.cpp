#include <c10/core/StreamGuard.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>
#include <map>
#include <optional>
#include <utility>

#include "base/process.hpp"
#include "device/capture.hpp"
#include "device/gradient_memory.hpp"
#include "device/slice_map.hpp"
#include "device/storage_watch.hpp"
#include "gradients/gradient_hooks.hpp"
#include "gradients/model_sync.hpp"
#include "gradients/reducer.hpp"
#include "gradients/trained_parameters.hpp"
#include "lockstep/error.hpp"
#include "lockstep/fully_sharded_data_parallel.hpp"
#include "lockstep/master_weights.hpp"
#include "precision/model_parallel.hpp"
#include "sharding/unit_gradients.hpp"
#include "sharding/unit_plan.hpp"
#include "sharding/whole_parameters.hpp"

namespace lockstep {
namespace {

Error misuse(const std::string& message, const std::string& help) {
  return {Code::kSyncMisuse, "FullyShardedDataParallel: " + message, help};
}

// A unit with its memory.
struct Unit {
  Unit(UnitPlan planned, const Communicator& comm, const ShardOptions& options)
      : plan(std::move(planned)), weights(make_whole_parameters(plan, comm, options)) {
    if (plan.trained) gradients.emplace(plan, comm, options);
  }
  Unit(const Unit&) = delete;  // the gradients refer to the plan
  Unit& operator=(const Unit&) = delete;

  bool is_ready() const { return fresh && !gathering && weights->has_memory(); }

  UnitPlan plan;
  std::unique_ptr<WholeParameters> weights;
  std::optional<UnitGradients> gradients;
  std::optional<Work> gathering;  // begun before it was needed
  std::optional<Work> reducing;
  bool fresh = true;  // the whole parameters are those of all ranks' shards
};

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

/// What makes a sharded model work:
///
///   operation uses a unit  -> gathered, and the one before it released      before_use()
///   gradient computed      -> copied into its unit's flat gradient          gradient_computed()
///   unit's gradients there -> reduce-scatter                                gradient_accumulated()
///   backward ended         -> rest averaged, shards' grads set              end_backward()
///
/// Note [Fresh parameters] The whole parameters are those of the shards until an optimizer changes
/// these, which no hook reports. So they count as stale after each averaged backward, and whenever
/// a shard's version or first element has changed when a forward begins. All ranks run one program,
/// so all come to the same decision; if they do not, their collectives differ, which is an Error.
///
/// Note [Which unit is released] When an operation uses a unit, all units of other groups are
/// released. Only an outermost operation does so: one that is part of another may run while that
/// one has addresses of a unit's parameters.
struct ShardedModel::State final : GradientListener, StorageWatcher {
  State(std::shared_ptr<torch::nn::Module> trained, const Communicator& ranks,
        const ShardOptions& chosen);
  ~State() override;

  // Construction.
  void check_module() const;
  void divide(Unit& unit);
  void hold_master(const UnitParameter& parameter, const MasterWeights& masters,
                   const torch::Tensor& master, torch::Tensor& flat, const UnitPlan& plan) const;

  // Whole parameters.
  void before_use(std::span<const size_t> used, bool outermost) noexcept override;
  void make_ready(std::span<const size_t> used);
  void see_updates();
  bool shares_memory() const;
  void begin_gather(Unit& unit);
  void finish_gather(Unit& unit);
  void prefetch_after(size_t unit);
  void release_others(std::span<const size_t> used);
  void release_unused();
  void mark_stale();
  void notice_changes();
  void note_whole(bool whole) const;
  void poison(std::span<const size_t> used) noexcept;
  void rethrow_failure();

  // Gradients.
  void offer_gradient_memory();
  torch::Tensor gradient_computed(size_t parameter, const torch::Tensor& gradient) override;
  void output_reached() override;
  void gradient_accumulated(size_t parameter) override;
  void begin_backward();
  void end_backward();
  void settle_missing();
  void begin_reduce(Unit& unit);
  void advance_reduces();
  void finish_reduce(Unit& unit);
  void finish_reduces();
  void check_gradient(size_t parameter, const torch::Tensor& gradient);
  void check_window();
  bool window_was_dropped();

  [[noreturn]] void fail(const Error& error);
  bool gathers_on_use() const { return options.stage == ShardStage::kParameters; }

  std::shared_ptr<torch::nn::Module> module;
  std::shared_ptr<const Communicator> comm;
  const ShardOptions options;
  std::vector<std::unique_ptr<Unit>> units;
  std::vector<TrainedParameter> trained;            // the module's, that are sharded
  std::vector<std::pair<size_t, size_t>> location;  // [trained] unit, parameter
  std::vector<ParameterForm> forms;                 // [trained]
  std::vector<TrainedParameter> trained_shards;     // of this rank, those that have elements
  std::map<const c10::TensorImpl*, torch::Tensor> shard_of;  // [parameter of the module]
  std::vector<std::unique_ptr<WatchedStorage>> watched;

  enum class Phase { kIdle, kForwarded, kBackward } phase = Phase::kIdle;
  int no_sync_depth = 0;
  bool backward_averages = true;
  bool last_forward_averaged = true;  // only then are buffers sent before the next forward
  bool end_is_queued = false;

  // The unit whose last gradient was the last to arrive. It is averaged when the next one arrives:
  // until then autograd itself holds that gradient, as a user would who wants to keep it.
  Unit* complete = nullptr;
  int gathered_guards = 0;
  double weight = 1;
  bool shown_nonzero = false;  // gradients of the open window, on this rank
  std::exception_ptr failure;  // of an operation that could not say so

  std::vector<size_t> order;  // units in the order in which the first step gathered them
  bool order_known = false;
  size_t order_next = 0;

  ShardStats stats;
  std::vector<std::shared_ptr<const ClaimGradientMemory>> claims;  // [trained]
  std::optional<AccumulationWindow> window;
  std::optional<AccumulationWindow> marks;  // for Note [Fresh parameters]
  std::optional<GradientStreams> streams;
  std::optional<GradientHooks> hooks;  // last, so that no hook runs before all else is ready
};

ShardedModel::State::State(std::shared_ptr<torch::nn::Module> given, const Communicator& ranks,
                           const ShardOptions& chosen)
    : module(std::move(given)), comm(std::make_shared<const Communicator>(ranks)), options(chosen) {
  require_not_capturing("the construction of FullyShardedDataParallel", "construct it before");
  check_module();
  require_same_model(*comm, model_tensors(*module));
  broadcast_model(*comm, *module, 0, "initial model");
  const WithoutWatching own_work;
  for (auto& plan : plan_units(*module, options, comm->rank(), comm->size())) {
    units.push_back(std::make_unique<Unit>(std::move(plan), *comm, options));
    divide(*units.back());
  }
  for (size_t i = 0; i < units.size(); ++i) {
    const UnitPlan& plan = units[i]->plan;
    for (size_t p = 0; p < plan.parameters.size(); ++p) {
      const UnitParameter& at = plan.parameters[p];
      shard_of[at.whole.unsafeGetTensorImpl()] = at.shard;
      if (!plan.trained) continue;
      trained.push_back({at.name, at.whole});
      location.emplace_back(i, p);
      if (at.count > 0) trained_shards.push_back({at.name, at.shard});
    }
    if (comm->size() > 1) {
      watched.push_back(
          std::make_unique<WatchedStorage>(units[i]->weights->whole().storage(), *this, i));
    }
  }
  forms = forms_of(trained);
  window.emplace(trained_shards);
  marks.emplace(trained_shards);
  marks->add_micro_step();
  streams.emplace(trained);
  hooks.emplace(trained, *this);
  offer_gradient_memory();
  if (comm->size() > 1) watch_this_thread();
  if (shares_memory()) see_updates();  // all ranks have written the initial values
}

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

// A module that outlives its wrapper has no valid parameters: empty ones are refused by every
// layer, while freed or stale memory would not be.
ShardedModel::State::~State() {
  const WithoutWatching own_work;
  if (window && window->micro_steps() > 0 && window->weights_changed() &&
      std::uncaught_exceptions() == 0) {
    print_error(fmt::format(
        "warning[{}]: the last update used {} micro-steps inside NoSync whose gradients were not "
        "averaged\n",
        code_name(Code::kSyncMisuse), window->micro_steps()));
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
void ShardedModel::State::divide(Unit& unit) {
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
    at.whole.set_data(
        weights.whole().narrow(0, at.offset, at.whole.numel()).view(at.whole.sizes()));
    if (masters) hold_master(at, *masters, master, masters_memory, plan);
    note_slice(at.shard, slice_of_range(slice_of(at.whole), at.first, at.count));
    note_data_shard(at.shard, at.whole, comm);
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

void ShardedModel::State::before_use(std::span<const size_t> used, bool outermost) noexcept {
  const WithoutWatching own_work;
  if (failure) return poison(used);
  try {
    if (phase == Phase::kIdle && gathered_guards == 0) notice_changes();
    make_ready(used);
    if (outermost && gathers_on_use() && gathered_guards == 0) release_others(used);
  } catch (...) {
    failure = std::current_exception();
    poison(used);
  }
}

void ShardedModel::State::note_whole(bool whole) const {
  for (const auto& unit : units) {
    for (const auto& at : unit->plan.parameters) note_sharded(at.whole, !whole);
  }
}

// Nobody may compute with what is not there: after a failure that cannot be thrown here, parameters
// are NaN until the wrapper throws it.
void ShardedModel::State::poison(std::span<const size_t> used) noexcept {
  try {
    const torch::NoGradGuard no_grad;
    for (const size_t index : used) {
      WholeParameters& weights = *units[index]->weights;
      weights.materialize();
      if (!weights.is_shared()) weights.whole().fill_(std::numeric_limits<double>::quiet_NaN());
    }
  } catch (...) {
    print_error("lockstep: a sharded parameter has no memory\n");
    std::abort();
  }
}

void ShardedModel::State::rethrow_failure() {
  if (!failure) return;
  phase = Phase::kIdle;
  std::rethrow_exception(failure);
}

void ShardedModel::State::make_ready(std::span<const size_t> used) {
  for (const size_t index : used) {
    Unit& unit = *units[index];
    if (unit.is_ready()) continue;
    if (unit.weights->is_shared()) {
      see_updates();
      continue;
    }
    if (unit.gathering) {
      ++stats.prefetched;
    } else {
      begin_gather(unit);
    }
    finish_gather(unit);
    if (phase != Phase::kIdle) prefetch_after(index);
  }
}

// Note [Shared parameters on a host] Ranks write their parts after backward and read all parts in
// the next forward. A barrier before the first read lets all writes be seen, and one at the end of
// backward lets nobody write while another rank still reads.
void ShardedModel::State::see_updates() {
  comm->barrier({.label = "updates of shared parameters"});
  for (const auto& unit : units) {
    if (unit->weights->is_shared()) unit->fresh = true;
  }
}

bool ShardedModel::State::shares_memory() const {
  return std::any_of(units.begin(), units.end(),
                     [](const auto& unit) { return unit->weights->is_shared(); });
}

void ShardedModel::State::begin_gather(Unit& unit) {
  ++stats.gathers;
  stats.gathered_bytes += unit.plan.bytes();
  unit.gathering = unit.weights->begin_gather({.label = "parameters of " + unit.plan.name});
}

void ShardedModel::State::finish_gather(Unit& unit) {
  unit.gathering->wait();
  unit.gathering.reset();
  unit.fresh = true;
}

// The first step records the order of gathers; later ones follow it as long as it holds.
void ShardedModel::State::prefetch_after(size_t unit) {
  if (!options.prefetch) return;
  if (!order_known) {
    order.push_back(unit);
    return;
  }
  if (order_next >= order.size()) return;
  if (order[order_next] != unit) {
    order_next = order.size();
    return;
  }
  ++order_next;
  if (order_next == order.size()) return;
  Unit& next = *units[order[order_next]];
  if (!next.is_ready() && !next.gathering) begin_gather(next);
}

void ShardedModel::State::release_others(std::span<const size_t> used) {
  for (const auto& unit : units) {
    const bool in_use = std::any_of(used.begin(), used.end(), [&](size_t index) {
      return units[index]->plan.group == unit->plan.group;
    });
    if (!in_use && !unit->gathering) unit->weights->release();
  }
}

void ShardedModel::State::release_unused() {
  if (gathered_guards > 0) return;
  for (const auto& unit : units) {
    if (unit->gathering) finish_gather(*unit);
    if (gathers_on_use()) unit->weights->release();
  }
}

void ShardedModel::State::mark_stale() {
  for (const auto& unit : units) {
    if (unit->gathering) finish_gather(*unit);
    if (unit->plan.trained) unit->fresh = comm->size() == 1;
  }
}

// See Note [Fresh parameters]. Autograd must know too: a graph of the forward before cannot be used
// with other weights.
void ShardedModel::State::notice_changes() {
  if (!marks->weights_changed()) return;
  marks->add_micro_step();
  mark_stale();
  for (const auto& [name, tensor] : trained) tensor.unsafeGetTensorImpl()->bump_version();
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
    fail(misuse("backward runs on another thread than forward did",
                "call both on one thread, where the parameters that they use are noticed"));
  }
  if (std::exchange(end_is_queued, true)) return;
  at_end_of_backward([this] { end_backward(); });
}

void ShardedModel::State::gradient_accumulated(size_t parameter) {
  rethrow_failure();
  const c10::MultiStreamGuard on_streams(streams->all());
  const auto [unit, index] = location[parameter];
  if (phase != Phase::kBackward) begin_backward();
  UnitGradients& gradients = *units[unit]->gradients;
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

void ShardedModel::State::finish_reduce(Unit& unit) {
  unit.reducing->wait();
  unit.reducing.reset();
  unit.gradients->finish_reduce({});
}

void ShardedModel::State::begin_backward() {
  phase = Phase::kBackward;
  backward_averages = no_sync_depth == 0;
  complete = nullptr;
  if (!end_is_queued) at_end_of_backward([this] { end_backward(); });
  for (const auto& unit : units) {
    if (unit->gradients) unit->gradients->begin_backward();
  }
}

void ShardedModel::State::begin_reduce(Unit& unit) {
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
  if (backward_averages) {
    settle_missing();
    finish_reduces();
    if (shares_memory()) comm->barrier({.label = "end of backward"});
    window->close();
    ++stats.synchronised_backwards;
    if (!order.empty()) order_known = true;
    mark_stale();
  } else {
    for (const auto& unit : units) {
      if (unit->gradients) unit->gradients->show_local();
    }
    window->add_micro_step();
    shown_nonzero = !window->gradients_cleared();
  }
  release_unused();
  marks->add_micro_step();
  phase = Phase::kIdle;
}

// Averages the units that are not complete: with gradients that came after their unit was averaged,
// with accumulated gradients, or with parameters that this backward did not reach.
void ShardedModel::State::settle_missing() {
  std::vector<std::string> missing;
  std::vector<Unit*> rest;
  for (const auto& unit : units) {
    if (!unit->gradients) continue;
    const UnitGradients& gradients = *unit->gradients;
    for (size_t i = 0; i < unit->plan.parameters.size(); ++i) {
      const bool accumulated = gradients.is_open() && gradients.had_gradient()[i];
      if (!gradients.arrived()[i] && !accumulated) missing.push_back(unit->plan.parameters[i].name);
    }
    if (gradients.is_open() || options.find_unused_parameters) rest.push_back(unit.get());
  }
  if (!missing.empty() && !options.find_unused_parameters) {
    constexpr size_t kShown = 8;
    const size_t count = missing.size();
    missing.resize(std::min(count, kShown));
    fail({Code::kUnusedParameter,
          fmt::format("backward gave no gradient to {} of {} parameters: {}{}", count,
                      trained.size(), fmt::join(missing, ", "),
                      count > kShown ? fmt::format(" and {} more", count - kShown) : ""),
          "use them in forward, freeze them with requires_grad_(false) before they are wrapped, or "
          "set find_unused_parameters"});
  }
  std::vector<bool> used(trained.size(), true);
  if (options.find_unused_parameters) {
    torch::Tensor flags = torch::empty({static_cast<int64_t>(trained.size())}, torch::kUInt8);
    for (size_t i = 0; i < trained.size(); ++i) {
      const auto& gradients = *units[location[i].first]->gradients;
      flags.data_ptr<uint8_t>()[i] =
          gradients.is_open() && gradients.had_gradient()[location[i].second] ? 1 : 0;
    }
    if (comm->size() > 1) comm->all_reduce(flags, ReduceOp::kMax, {.label = "parameters in use"});
    for (size_t i = 0; i < trained.size(); ++i) used[i] = flags.data_ptr<uint8_t>()[i] != 0;
  }
  for (Unit* unit : rest) {
    begin_reduce(*unit);
    if (!options.find_unused_parameters) continue;
    unit->reducing->wait();
    unit->reducing.reset();
    std::vector<bool> of_unit;
    for (size_t i = 0; i < trained.size(); ++i) {
      if (units[location[i].first].get() == unit) of_unit.push_back(used[i]);
    }
    unit->gradients->finish_reduce(of_unit);
  }
}

void ShardedModel::State::check_gradient(size_t parameter, const torch::Tensor& gradient) {
  if (gradient.layout() != torch::kStrided) {
    fail({Code::kTensorMismatch,
          fmt::format("the gradient of {} is sparse", trained[parameter].name),
          "shards are dense: construct the layer without sparse gradients"});
  }
  if (torch::GradMode::is_enabled()) {
    fail(misuse(fmt::format("backward with create_graph reached {}: averaged gradients have no "
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
    fail(
        misuse(fmt::format("the weights changed after {} micro-step{} whose gradients were not "
                           "averaged",
                           window->micro_steps(), window->micro_steps() == 1 ? "" : "s"),
               "run the last micro-step before each update outside NoSync, also in a last, shorter "
               "window"));
  }
  if (!window_was_dropped()) return;
  for (const auto& unit : units) {
    if (unit->gradients) unit->gradients->drop();
  }
  window->close();
}

// An optimizer's zero_grad() reaches the shards' grads only, which say so for the whole gradients
// behind them. A rank without any shard cannot know, so the ranks ask each other.
bool ShardedModel::State::window_was_dropped() {
  enum Vote : int64_t { kUnknown, kKept, kDropped };
  int64_t vote = kUnknown;
  if (!trained_shards.empty()) {
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
    fail(misuse("some ranks dropped the gradients that they had accumulated and others did not",
                "call zero_grad() after the same micro-steps on every rank"));
  }
  return dropped;
}

ShardedModel::ShardedModel(std::shared_ptr<torch::nn::Module> module, const Communicator& comm,
                           const ShardOptions& options)
    : state_(std::make_unique<State>(std::move(module), comm, options)) {}

ShardedModel::~ShardedModel() = default;

void ShardedModel::before_forward() {
  State& state = *state_;
  require_not_capturing("FullyShardedDataParallel", "capture steps of DistributedDataParallel");
  state.rethrow_failure();
  const WithoutWatching own_work;
  if (const auto change = find_change(state.trained, state.forms, trained_in(*state.module))) {
    state.fail(
        misuse(fmt::format("parameter {} {} after it was wrapped", change->name, change->what),
               "change the module first and construct FullyShardedDataParallel afterwards"));
  }
  state.hooks->follow(state.trained);
  state.streams->follow_current();
  if (state.comm->size() > 1) watch_this_thread();
  const bool first = state.phase == State::Phase::kIdle;
  state.notice_changes();
  if (first && !state.order_known) state.order.clear();
  if (first) state.order_next = 0;
  if (!torch::GradMode::is_enabled()) {
    if (first) state.order_next = state.order.size();
    return;
  }
  if (first) state.check_window();
  const bool averages = state.no_sync_depth == 0;
  if (state.options.broadcast_buffers && state.last_forward_averaged && first &&
      state.module->is_training()) {
    broadcast_tensors(*state.comm, buffers_of(*state.module), 0, "buffers");
  }
  state.last_forward_averaged = averages;
  state.phase = State::Phase::kForwarded;
}

void ShardedModel::after_forward(const std::vector<torch::Tensor>& outputs) {
  State& state = *state_;
  state.rethrow_failure();
  const WithoutWatching own_work;
  state.window->forward_ended();
  if (!torch::GradMode::is_enabled()) {
    if (state.phase == State::Phase::kIdle) state.release_unused();
    return;
  }
  state.hooks->watch(outputs);
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
}

void ShardedModel::zero_grad(bool set_to_none) {
  for (const auto& unit : state_->units) {
    if (unit->gradients) unit->gradients->drop();
  }
  state_->window->close();
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
    state.notice_changes();
    std::vector<size_t> all(state.units.size());
    for (size_t i = 0; i < all.size(); ++i) all[i] = i;
    if (state.shares_memory()) state.see_updates();  // whoever reads or writes next
    state.make_ready(all);
  }
  if (state.gathered_guards++ == 0) state.note_whole(true);
}

void ShardedModel::release_all() {
  State& state = *state_;
  if (--state.gathered_guards > 0) return;
  const WithoutWatching own_work;
  state.note_whole(false);
  for (const auto& unit : state.units) unit->weights->scatter();
  note_changed_shards();
  state.release_unused();
}

void ShardedModel::note_changed_shards() {
  const WithoutWatching own_work;
  state_->mark_stale();
  state_->marks->add_micro_step();
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

void ShardedModel::enter_no_sync() {
  ++state_->no_sync_depth;
}

void ShardedModel::leave_no_sync() {
  --state_->no_sync_depth;
}

}  // namespace lockstep
