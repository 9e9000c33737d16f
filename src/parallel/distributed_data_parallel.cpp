#include "lockstep/distributed_data_parallel.hpp"

#include <fmt/format.h>
#include <torch/nn/modules/embedding.h>
#include <torch/torch.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <optional>

#include "base/counted.hpp"
#include "base/mutation.hpp"
#include "base/process.hpp"
#include "device/capture.hpp"
#include "device/parameter_notes.hpp"
#include "gradients/model_sync.hpp"
#include "gradients/part_gradients.hpp"
#include "gradients/reducer.hpp"
#include "gradients/virtual_shards.hpp"
#include "lockstep/error.hpp"
#include "lockstep/sync_batch_norm.hpp"
#include "optim/optimizer_state.hpp"
#include "verify/step_recorder.hpp"

namespace lockstep {
namespace {

std::vector<TrainedParameter> trained_parameters(const torch::nn::Module& module) {
  auto parameters = trained_in(module);
  if (!parameters.empty()) return parameters;
  throw Error(Code::kUsage, "the module has no trained parameter",
              "use the module itself: DistributedDataParallel is for training");
}

// What every rank tells every other before a step of a join, in this order.
enum Notice : int64_t { kActive, kSynchronise, kTrains, kBuffers, kMicroSteps, kNotices };

// Moving a weight away and back costs a rounding or two in each step.
constexpr double kRoundings = 64 * std::numeric_limits<float>::epsilon();

thread_local int joins_of_thread = 0;  // loops of join() over several ranks

}  // namespace

struct GradientSync::State {
  State(std::shared_ptr<torch::nn::Module> trained, const Communicator& ranks,
        const DdpOptions& chosen);

  bool trains() const;
  bool averages() const;
  bool synchronises() const;
  bool shares_buffers() const;
  void share_buffers(int root);
  void compare_if_due();
  void check_if_due();
  void check_after_join();
  void share_in_each_replay(Capture& capture, bool shares_buffers);

  class Join;
  class Parts;

  std::shared_ptr<torch::nn::Module> module;
  const Communicator comm;
  const DdpOptions options;
  std::optional<Reducer> reducer;
  std::optional<LimitedEmbeddings> limited_embeddings;
  int no_sync_depth = 0;
  bool last_forward_synchronised = true;  // only then are buffers sent before the next forward
  bool awaits_training_backward = false;  // a forward that trains waits for its backward
  int64_t checked_at_step = 0;
  std::optional<int64_t> joined_at_step;        // the last join in which ranks made different steps
  int64_t compared_after_join = 0;              // how often the ranks were compared since then
  Join* join = nullptr;                         // inside join()
  std::unique_ptr<Parts> parts;                 // with virtual shards
  uint64_t forwards = 0;                        // for Mutation::kDropoutOneSeed
  std::optional<WatchedForward> forward_watch;  // for `lockstep verify`
};

/// Lets ranks have different numbers of steps: before each forward all ranks say whether they still
/// have data.
class GradientSync::State::Join {
 public:
  Join(State& state, const JoinOptions& options) : state_(state), options_(options) {}

  /// Before a forward of this rank; returns the rank whose buffers count. Collective.
  int begin_step(bool synchronise);

  /// Follows the other ranks after this rank's loop has ended, until theirs have too. Collective.
  void follow();

  /// Whether all ranks make the step that has begun.
  bool everybody() const { return everybody_; }

 private:
  struct Step {
    bool anybody = false;      // still has data
    bool everybody = true;     // still has data
    bool synchronise = false;  // of the step's backward
    bool trains = false;       // of the step's forward
    bool buffers = false;      // are sent before the forward
    int last_active = 0;       // the highest rank that still has data
  };

  Step exchange(bool active, bool synchronise);

  State& state_;
  const JoinOptions options_;
  int last_active_ = 0;  // of the last step that anybody trained in
  bool everybody_ = true;
  bool uneven_ = false;  // some ranks have made more steps than others
};

/// Steps of virtual shards: see docs/same_bits.md. The Reducer watches each part's backward and
/// averages nothing; the gradients are taken away after each part.
class GradientSync::State::Parts final : public PartOwner {
 public:
  explicit Parts(State& state);

  torch::Tensor step(const PartLoss& loss_of, const PartStep& how);
  VirtualShards& shards() { return shards_; }
  bool is_last() const { return is_last_; }
  DdpStats stats();

  void begin_part(bool last) override;
  void take_gradients(const BatchPart& part, double weight) override;
  void average(double sum_of_weights) override;

 private:
  std::vector<bool> used_anywhere() const;

  State& state_;
  const std::vector<TrainedParameter> parameters_;
  VirtualShards shards_;
  PartGradients gradients_;
  DdpStats stats_;
  NonfiniteGradients nonfinite_;
  bool is_last_ = true;
  bool accumulates_ = false;  // the last step was inside NoSync
};

GradientSync::State::State(std::shared_ptr<torch::nn::Module> trained, const Communicator& ranks,
                           const DdpOptions& chosen)
    : module(std::move(trained)), comm(ranks), options(chosen) {
  require_not_sharded(*module, "DistributedDataParallel",
                      "wrap a module once: FullyShardedDataParallel averages gradients itself");
  require_same_model(comm, model_tensors(*module));
  if (!is_planted(Mutation::kInitialBroadcastMissing)) {
    broadcast_model(comm, *module, 0, "initial model");
  }
  if (auto* recorder = StepRecorder::of_process()) {
    recorder->learn(*module, options.virtual_shards > 0 ? "virtual_shards" : "ddp");
  }
  reducer.emplace(by_gradient(*module, trained_parameters(*module)), comm, options);
  if (options.virtual_shards != 0) parts = std::make_unique<Parts>(*this);
  if (comm.size() > 1 || parts) limited_embeddings.emplace(*module);
}

GradientSync::State::Parts::Parts(State& state)
    : state_(state),
      parameters_(trained_parameters(*state.module)),
      shards_(state.options.virtual_shards, state.options.part_threads, state.comm,
              "DistributedDataParallel"),
      gradients_(parameters_, shards_.tree(), state.comm, state.options.bucket_cap_bytes),
      nonfinite_(parameters_, state.comm, state.options.nonfinite, stats_) {
  require_same_in_parts(*state.module, state.options.broadcast_buffers, "DistributedDataParallel");
  const auto refuse = [](const char* what, const char* help) {
    throw Error(Code::kUsage, fmt::format("DdpOptions has virtual_shards and {}", what), help);
  };
  if (state.options.hook) {
    refuse("a hook, which would add gradients in an order of its own", "leave out one of the two");
  }
  if (state.options.static_graph) {
    refuse("static_graph", "leave it out: parts are summed when their backward has ended");
  }
}

torch::Tensor GradientSync::State::Parts::step(const PartLoss& loss_of, const PartStep& how) {
  if (state_.reducer->shares_parameters()) {
    throw Error(
        Code::kUsage,
        "a parameter of this DistributedDataParallel, which has virtual_shards, is averaged "
        "by another one too",
        "wrap models with common layers without virtual shards");
  }
  shards_.require_outside("backward_parts()", "call it once for a batch");
  const bool continues = accumulates_ || gradients_.has_accumulated();
  accumulates_ = state_.no_sync_depth > 0;
  if (state_.options.broadcast_buffers && state_.module->is_training()) state_.share_buffers(0);
  gradients_.begin_step();
  try {
    const torch::Tensor loss = shards_.step(*state_.module, *this, loss_of, how, continues);
    state_.reducer->set_synchronise(state_.no_sync_depth == 0);
    return loss;
  } catch (...) {
    gradients_.give_back();
    state_.reducer->drop_window();  // of parts that had ended
    throw;
  }
}

void GradientSync::State::Parts::begin_part(bool last) {
  is_last_ = last;
  state_.reducer->set_synchronise(last);
}

void GradientSync::State::Parts::take_gradients(const BatchPart& part, double weight) {
  std::vector<torch::Tensor> gradients;
  for (const auto& [name, tensor] : parameters_) gradients.push_back(tensor.grad());
  const auto any = std::find_if(gradients.begin(), gradients.end(), [](const auto& gradient) {
    return gradient.defined() && gradient.dim() > 0 && gradient.numel() > 0;
  });
  if (is_last_ && any != gradients.end()) inject_faults(state_.comm, *any);
  nonfinite_.look(gradients, part.local_index == 0);
  gradients_.take(part.index, weight);
  const auto missing = gradients_.missing();
  if (!missing.empty() && !state_.options.find_unused_parameters) {
    state_.reducer->refuse_missing(missing);
  }
}

// [parameter] whether any part of any rank gave it a gradient.
std::vector<bool> GradientSync::State::Parts::used_anywhere() const {
  const auto& used = gradients_.used();
  if (!state_.options.find_unused_parameters) return std::vector<bool>(used.size(), true);
  const auto flags = torch::empty({static_cast<int64_t>(used.size())}, torch::kUInt8);
  auto* flag = flags.data_ptr<uint8_t>();
  std::copy(used.begin(), used.end(), flag);
  state_.comm.all_reduce(flags, ReduceOp::kMax, {.label = "parameters in use"});
  return std::vector<bool>(flag, flag + used.size());
}

void GradientSync::State::Parts::average(double sum_of_weights) {
  gradients_.average(sum_of_weights, used_anywhere());
  stats_.last_step.clear();
  for (const auto& [bytes, begun_ns, ended_ns] : gradients_.exchanges()) {
    stats_.last_step.push_back({.index = static_cast<int64_t>(stats_.last_step.size()),
                                .bytes = bytes,
                                .launched_ns = begun_ns,
                                .finished_ns = ended_ns});
    stats_.all_reduces += 1;
    stats_.bytes += bytes;
    stats_.communication_ns += ended_ns - begun_ns;
    stats_.exposed_ns += ended_ns - begun_ns;
  }
}

DdpStats GradientSync::State::Parts::stats() {
  nonfinite_.settle();
  DdpStats all = stats_;
  const DdpStats& of_reducer = state_.reducer->stats();
  all.synchronised_backwards = of_reducer.synchronised_backwards;
  all.backward_started_ns = of_reducer.backward_started_ns;
  all.backward_finished_ns = of_reducer.backward_finished_ns;
  return all;
}

// Evaluation is not collective: a rank may evaluate alone, with its own buffers.
bool GradientSync::State::trains() const {
  return torch::GradMode::is_enabled() && module->is_training();
}

// Outside any NoSync.
bool GradientSync::State::averages() const {
  if (is_planted(Mutation::kNoSyncIgnored)) return true;
  if (is_planted(Mutation::kSyncBoundaryOff)) return no_sync_depth > 0;
  return no_sync_depth == 0;
}

bool GradientSync::State::synchronises() const {
  return parts ? parts->is_last() : averages();
}

// Gradients of virtual shards are sent when their step begins.
//
// Buffers are sent before the first forward of a step. If a second forward follows before backward,
// autograd may have saved them in the first, as BatchNorm does, and they must not change.
// An evaluation with gradients enabled, maybe of one rank alone, does not count.
bool GradientSync::State::shares_buffers() const {
  return !parts && options.broadcast_buffers && last_forward_synchronised &&
         !(reducer->awaits_backward() && awaits_training_backward);
}

void GradientSync::State::share_buffers(int root) {
  if (is_planted(Mutation::kBuffersNotShared)) return;
  broadcast_tensors(comm, buffers_of(*module), root, "buffers");
}

// See Note [Perturbed weights].
void GradientSync::State::compare_if_due() {
  const auto dropped = reducer->take_due_comparison();
  if (!dropped) return;
  const Deviation found = largest_deviation(comm, trained_in_full_precision(*module));
  if (found.largest <= static_cast<double>(dropped->count) * kRoundings * found.magnitude) return;
  throw Error(Code::kSyncMisuse,
              fmt::format("the weights changed after {} whose gradients were dropped "
                          "instead of averaged, and were not changed back: {} on rank {} is off by "
                          "{:.2g}",
                          counted(dropped->micro_steps, "micro-step"), found.name, found.rank,
                          found.largest),
              "run the last micro-step before each update outside NoSync; or, if ranks may differ, "
              "set DdpOptions::check_unaveraged_updates to false");
}

void GradientSync::State::check_if_due() {
  const int64_t steps = reducer->synchronised_backwards();
  if (options.check_replicas_every == 0 || steps == checked_at_step ||
      steps % options.check_replicas_every != 0) {
    return;
  }
  checked_at_step = steps;
  require_same_values(comm, trained_in_full_precision(*module));
}

// Only the weights are sent when a join ends. An optimizer with momentum, a scaler or a schedule is
// behind on a rank that has made fewer steps, and its next updates are others. The scaler's effect
// may come much later than the optimizer's: ranks are compared after 1, 2, 4, 8 steps and so on.
void GradientSync::State::check_after_join() {
  if (!joined_at_step || !options.check_unaveraged_updates) return;
  const int64_t steps = reducer->synchronised_backwards() - *joined_at_step;
  if (steps < int64_t{1} << compared_after_join) return;
  ++compared_after_join;
  const Deviation found = largest_deviation(comm, trained_in_full_precision(*module));
  if (found.largest <= static_cast<double>(steps) * kRoundings * found.magnitude) return;
  throw Error(Code::kReplicasDiffer,
              fmt::format("{} after a join in which ranks made different numbers of steps, {} on "
                          "rank {} is off by {:.2g}",
                          counted(steps, "step"), found.name, found.rank, found.largest),
              "the optimizer, the scaler and the schedule of ranks that made fewer steps are "
              "behind: join only the last epoch, or make them anew after the join");
}

// What a captured forward tells the other ranks.
void GradientSync::State::share_in_each_replay(Capture& capture, bool shares_buffers) {
  const bool sends_buffers = shares_buffers && comm.size() > 1 && !buffers_of(*module).empty();
  if (!sends_buffers && options.check_replicas_every == 0) return;
  capture.between_graphs([this, sends_buffers] {
    check_if_due();
    if (sends_buffers) share_buffers(0);
  });
}

GradientSync::State::Join::Step GradientSync::State::Join::exchange(bool active, bool synchronise) {
  const torch::Tensor mine = torch::zeros({kNotices}, torch::kInt64);
  auto* notice = mine.data_ptr<int64_t>();
  notice[kActive] = active ? 1 : 0;
  notice[kSynchronise] = active && synchronise ? 1 : 0;
  notice[kTrains] = active && state_.trains() ? 1 : 0;
  notice[kBuffers] = active && state_.shares_buffers() ? 1 : 0;
  notice[kMicroSteps] = active ? state_.reducer->open_micro_steps() : 0;
  const torch::Tensor all = torch::empty({state_.comm.size(), kNotices}, torch::kInt64);
  state_.comm.all_gather(all, mine, {.label = "join"});
  Step step;
  int64_t micro_steps = 0;  // of the others' window
  for (int rank = 0; rank < state_.comm.size(); ++rank) {
    const int64_t* said = all.data_ptr<int64_t>() + rank * kNotices;
    if (said[kActive] == 0) {
      step.everybody = false;
      continue;
    }
    if (step.anybody && step.synchronise != (said[kSynchronise] != 0)) {
      const auto [inside, outside] =
          step.synchronise ? std::pair(rank, step.last_active) : std::pair(step.last_active, rank);
      throw Error(Code::kSyncMisuse,
                  fmt::format("rank {} is inside NoSync and rank {} is not", inside, outside),
                  "accumulate over the same micro-steps on every rank");
    }
    if (step.anybody && step.trains != (said[kTrains] != 0)) {
      const auto [evaluating, training] =
          step.trains ? std::pair(rank, step.last_active) : std::pair(step.last_active, rank);
      throw Error(Code::kSyncMisuse,
                  fmt::format("inside join, rank {} called forward in eval mode and rank {} in "
                              "training mode",
                              evaluating, training),
                  "evaluate under torch::NoGradGuard: a forward with gradients is a step of all "
                  "ranks");
    }
    step.anybody = true;
    step.last_active = rank;
    step.synchronise = said[kSynchronise] != 0;
    step.trains = said[kTrains] != 0;
    step.buffers = said[kBuffers] != 0;
    micro_steps = said[kMicroSteps];
  }
  if (!active) state_.reducer->shadow_window(micro_steps);
  if (step.anybody) last_active_ = step.last_active;
  uneven_ = uneven_ || (step.anybody && !step.everybody);
  if (options_.throw_on_early_termination && step.anybody && !step.everybody) {
    throw Error(Code::kSyncMisuse, "a rank ran out of data while others still have some",
                "give every rank the same number of steps, or join without "
                "throw_on_early_termination");
  }
  return step;
}

int GradientSync::State::Join::begin_step(bool synchronise) {
  const Step step = exchange(/*active=*/true, synchronise);
  everybody_ = step.everybody;
  return step.everybody ? 0 : step.last_active;
}

void GradientSync::State::Join::follow() {
  for (Step step = exchange(false, false); step.anybody; step = exchange(false, false)) {
    if (step.trains) {
      state_.reducer->rebuild_if_due();
      if (step.buffers) state_.share_buffers(step.last_active);
      state_.last_forward_synchronised = step.synchronise;
    }
    if (step.synchronise) state_.reducer->shadow_backward(options_.divide_by_initial_world_size);
  }
  broadcast_model(state_.comm, *state_.module, last_active_, "joined model");
  state_.reducer->drop_window();
  if (!uneven_) return;
  state_.joined_at_step = state_.reducer->synchronised_backwards();
  state_.compared_after_join = 0;
}

GradientSync::GradientSync(std::shared_ptr<torch::nn::Module> module, const Communicator& comm,
                           const DdpOptions& options)
    : state_(std::make_unique<State>(std::move(module), comm, options)) {}

// If the last window was applied on each rank alone, no later forward can report it.
GradientSync::~GradientSync() {
  // No forward will show that an optimizer of torch::optim made its last update.
  auto* recorder = StepRecorder::of_process();
  if (recorder != nullptr && std::uncaught_exceptions() == 0) recorder->note_rows({});
  const auto spoiled = state_->reducer->spoiled_micro_steps();
  if (std::uncaught_exceptions() > 0 || spoiled == 0) return;
  print_error(
      fmt::format("warning[{}]: the last update used {} inside NoSync whose gradients were not "
                  "averaged: the ranks' weights differ\n",
                  code_name(Code::kSyncMisuse), counted(spoiled, "micro-step")));
}

void GradientSync::before_forward() {
  State& state = *state_;
  if (!torch::GradMode::is_enabled()) return;
  if (state.parts) state.parts->shards().require_inside("a forward");
  state.reducer->require_unchanged(by_gradient(*state.module, trained_in(*state.module)));
  const bool synchronise = state.synchronises();
  if (state.join) require_not_capturing("join", "run the steps of a join without capture");
  const int root = state.join ? state.join->begin_step(synchronise) : 0;
  const bool shares_buffers = state.shares_buffers();
  if (!state.reducer->awaits_backward()) state.awaits_training_backward = false;
  state.reducer->before_forward(synchronise);
  if (state.limited_embeddings) state.limited_embeddings->shorten_rows();
  auto* recorder = StepRecorder::of_process();
  if (recorder != nullptr && state.no_sync_depth == 0) recorder->note_synchronised_forward();
  if (!state.trains()) return;
  state.awaits_training_backward = true;
  state.reducer->rebuild_if_due();
  if (Capture* capture = Capture::current()) {
    state.share_in_each_replay(*capture, shares_buffers);
  } else {
    if (!state.join) {
      state.check_if_due();
      state.compare_if_due();
    }
    if (!state.join || state.join->everybody()) state.check_after_join();
    if (shares_buffers) state.share_buffers(root);
    if (recorder != nullptr && shares_buffers) recorder->note_buffers(*state.module);
    if (is_planted(Mutation::kDropoutOneSeed)) torch::manual_seed(state.forwards++);
  }
  if (recorder != nullptr) state.forward_watch.emplace(*state.module);
  state.last_forward_synchronised = synchronise;
}

void GradientSync::after_forward(const std::vector<torch::Tensor>& outputs) {
  state_->forward_watch.reset();
  if (torch::GradMode::is_enabled()) state_->reducer->after_forward(outputs);
}

torch::Tensor GradientSync::backward_parts(const PartLoss& loss_of, const PartStep& how) {
  if (!state_->parts) {
    throw Error(Code::kUsage,
                "backward_parts() of a DistributedDataParallel without virtual shards",
                "set DdpOptions::virtual_shards");
  }
  return state_->parts->step(loss_of, how);
}

void GradientSync::run_joined(const std::function<void()>& loop, const JoinOptions& options) {
  if (state_->parts) {
    throw Error(Code::kSyncMisuse,
                "join() of a DistributedDataParallel with virtual_shards: each part needs a batch",
                "give every part the same number of batches, as DistributedSampler does");
  }
  if (state_->join) {
    throw Error(Code::kSyncMisuse, "join inside join", "join once, around the whole loop");
  }
  State::Join join(*state_, options);
  struct Leave {
    State& state;
    int depth;
    ~Leave() {
      state.join = nullptr;
      joins_of_thread -= depth;
    }
  } leave{*state_, state_->comm.size() > 1 ? 1 : 0};
  state_->join = &join;
  joins_of_thread += leave.depth;
  loop();
  join.follow();
}

bool detail::inside_join() {
  return joins_of_thread > 0;
}

void GradientSync::set_weight(double weight) {
  state_->reducer->set_weight(weight);
  set_gradient_weight(*state_->module, weight);
  if (state_->parts) state_->parts->shards().set_weight(weight);
}

// Compares no buffers: within a step each rank's own batches change them.
void GradientSync::check_replicas() {
  require_same_values(state_->comm, trained_in_full_precision(*state_->module));
}

DdpStats GradientSync::stats() const {
  return state_->parts ? state_->parts->stats() : state_->reducer->stats();
}

std::vector<GradientBucket> GradientSync::buckets() const {
  return state_->reducer->buckets();
}

void GradientSync::record_to(Trace* trace, int rank, int row) {
  state_->reducer->record_to(trace, rank, row);
}

const Communicator& GradientSync::comm() const {
  return state_->comm;
}

std::vector<torch::Tensor> GradientSync::parameters() const {
  return without_repeats(state_->module->parameters());
}

// With virtual shards NoSync only says that the next step goes on with this one's gradients.
void GradientSync::enter_no_sync() {
  if (state_->parts) state_->parts->shards().require_outside("NoSync", kNoSyncInParts);
  state_->no_sync_depth += 1;
  state_->reducer->set_synchronise(state_->averages());
}

void GradientSync::leave_no_sync() {
  state_->no_sync_depth -= 1;
  state_->reducer->set_synchronise(state_->averages());
}

}  // namespace lockstep
