#include "lockstep/distributed_data_parallel.hpp"

#include <fmt/format.h>

#include <exception>
#include <limits>

#include "base/standard_streams.hpp"
#include "device/capture.hpp"
#include "lockstep/error.hpp"
#include "parallel/gradient_sync_state.hpp"
#include "parallel/model_tensors.hpp"

namespace lockstep {
namespace {

std::vector<TrainedParameter> trained_parameters(const torch::nn::Module& module) {
  auto parameters = trained_in(module);
  if (!parameters.empty()) return parameters;
  throw Error(Code::kUsage, "the module has no parameter that is trained",
              "DistributedDataParallel is for training: a module without gradients needs none");
}

}  // namespace

GradientSync::State::State(std::shared_ptr<torch::nn::Module> trained, const Communicator& ranks,
                           const DdpOptions& chosen)
    : module(std::move(trained)), comm(ranks), options(chosen) {
  require_same_model(comm, model_tensors(*module));
  broadcast_model(comm, *module, 0, "initial model");
  reducer.emplace(trained_parameters(*module), comm, options);
}

// Evaluation is not collective: a rank may evaluate alone, with its own buffers.
bool GradientSync::State::trains() const {
  return torch::GradMode::is_enabled() && module->is_training();
}

// Buffers travel before the first forward of a step. Where a second one follows before backward,
// autograd may have saved them in the first, as BatchNorm does, and they must stay.
bool GradientSync::State::shares_buffers() const {
  return options.broadcast_buffers && last_forward_synchronised && !reducer->awaits_backward();
}

void GradientSync::State::share_buffers(int root) {
  broadcast_tensors(comm, buffers_of(*module), root, "buffers");
}

// See Note [Perturbed weights].
void GradientSync::State::compare_if_due() {
  const auto dropped = reducer->take_due_comparison();
  if (!dropped) return;
  const Deviation found = largest_deviation(comm, trained_in_full_precision(*module));
  // Moving a weight away and back is off by a rounding or two, in each of the windows so far.
  constexpr double kRoundings = 64 * std::numeric_limits<float>::epsilon();
  if (found.largest <= static_cast<double>(dropped->count) * kRoundings * found.magnitude) return;
  throw Error(Code::kSyncMisuse,
              fmt::format("the weights changed after {} micro-steps whose gradients were dropped "
                          "instead of averaged, and were not changed back: {} on rank {} is off by "
                          "{:.2g}",
                          dropped->micro_steps, found.name, found.rank, found.largest),
              "let the last micro-step before each update run outside NoSync; or, where ranks may "
              "differ, set DdpOptions::check_unaveraged_updates to false");
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

// What a forward tells the other ranks, where it is captured.
void GradientSync::State::share_in_each_replay(Capture& capture, bool shares_buffers) {
  const bool sends_buffers = shares_buffers && comm.size() > 1 && !buffers_of(*module).empty();
  if (!sends_buffers && options.check_replicas_every == 0) return;
  capture.between_graphs([this, sends_buffers] {
    check_if_due();
    if (sends_buffers) broadcast_tensors(comm, buffers_of(*module), 0, "buffers");
  });
}

GradientSync::GradientSync(std::shared_ptr<torch::nn::Module> module, const Communicator& comm,
                           const DdpOptions& options)
    : state_(std::make_unique<State>(std::move(module), comm, options)) {}

// Nobody forwards again who could be told: the last window was applied on each rank alone.
GradientSync::~GradientSync() {
  if (std::uncaught_exceptions() > 0 || state_->reducer->spoiled_micro_steps() == 0) return;
  print_error(fmt::format(
      "warning[{}]: the last update used {} micro-steps inside NoSync whose gradients were not "
      "averaged: the ranks' weights differ\n",
      code_name(Code::kSyncMisuse), state_->reducer->spoiled_micro_steps()));
}

void GradientSync::before_forward() {
  State& state = *state_;
  if (!torch::GradMode::is_enabled()) return;
  state.reducer->require_unchanged(trained_in(*state.module));
  const bool synchronise = state.no_sync_depth == 0;
  if (state.joining) require_not_capturing("join", "run the steps of a join without capture");
  const int root = state.joining ? state.joining->begin_step(state, synchronise) : 0;
  const bool shares_buffers = state.shares_buffers();
  state.reducer->before_forward(synchronise);
  if (!state.trains()) return;
  state.reducer->rebuild_if_due();
  if (Capture* capture = Capture::current()) {
    state.share_in_each_replay(*capture, shares_buffers);
  } else {
    if (!state.joining) {
      state.check_if_due();
      state.compare_if_due();
    }
    if (shares_buffers) state.share_buffers(root);
  }
  state.last_forward_synchronised = synchronise;
}

void GradientSync::after_forward(const std::vector<torch::Tensor>& outputs) {
  if (torch::GradMode::is_enabled()) state_->reducer->after_forward(outputs);
}

void GradientSync::set_weight(double weight) {
  state_->reducer->set_weight(weight);
}

// Buffers may differ between ranks within a step: their own batches make them.
void GradientSync::check_replicas() {
  require_same_values(state_->comm, trained_in_full_precision(*state_->module));
}

DdpStats GradientSync::stats() const {
  return state_->reducer->stats();
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

NoSync::NoSync(GradientSync& sync) : sync_(sync) {
  sync_.state_->no_sync_depth += 1;
  sync_.state_->reducer->set_synchronise(false);
}

NoSync::~NoSync() {
  sync_.state_->no_sync_depth -= 1;
  sync_.state_->reducer->set_synchronise(sync_.state_->no_sync_depth == 0);
}

}  // namespace lockstep
