#include <torch/torch.h>

#include <algorithm>
#include <utility>

#include "sharding/sharded_state.hpp"

// Steps of virtual shards of a sharded model: from each part's gradients to the shards' grads.

namespace lockstep {

ShardedModel::State::Parts::Parts(State& state)
    : state_(state),
      shards_(state.options.virtual_shards, state.options.part_threads, *state.comm,
              "FullyShardedDataParallel") {
  require_same_in_parts(*state.module, state.options.broadcast_buffers, "FullyShardedDataParallel");
}

// The shards' grads say whether gradients were accumulated; a rank may have no shard at all.
bool ShardedModel::State::Parts::has_accumulated() const {
  const auto& shards = state_.trained_shards;
  const bool mine = std::any_of(shards.begin(), shards.end(), [](const TrainedParameter& each) {
    const torch::Tensor& grad = each.tensor.grad();
    return grad.defined() && grad.ne(0).any().item<bool>();
  });
  if (state_.comm->size() == 1) return mine;
  const auto any = torch::full({1}, mine ? 1 : 0, torch::kUInt8);
  state_.comm->all_reduce(any, ReduceOp::kMax, {.label = "accumulated gradients"});
  return any.item<uint8_t>() != 0;
}

void ShardedModel::State::Parts::begin_sums() {
  used_.assign(state_.trained.size(), false);
  if (sums_.empty()) {
    for (const auto& unit : state_.units) {
      sums_.push_back(unit->gradients
                          ? std::make_unique<PartSums>(shards_.tree(), *state_.comm,
                                                       unit->plan.elements, unit->plan.options)
                          : nullptr);
    }
  }
  for (const auto& sums : sums_) {
    if (sums) sums->begin_step();
  }
  // Between steps nothing is whole, unless a part of the last one ended with an error.
  for (const auto& unit : state_.units) {
    if (unit->gradients) unit->gradients->drop();
  }
  state_.phase = Phase::kIdle;
  state_.end_is_queued = false;
}

torch::Tensor ShardedModel::State::Parts::step(const PartLoss& loss_of, const PartStep& how) {
  shards_.require_outside("backward_parts()", "call it once for a batch");
  state_.rethrow_failure();
  bool continues = std::exchange(accumulates_, state_.no_sync_depth > 0);
  {
    const WithoutWatching own_work;
    continues = has_accumulated() || continues;
    if (state_.options.broadcast_buffers && state_.module->is_training()) state_.share_buffers();
    begin_sums();
  }
  return shards_.step(*state_.module, *this, loss_of, how, continues);
}

// A backward that reaches no parameter must not be taken for the one before it.
void ShardedModel::State::Parts::begin_part(bool /*last*/) {
  for (const auto& unit : state_.units) {
    if (unit->gradients) unit->gradients->begin_backward();
  }
}

void ShardedModel::State::Parts::take_gradients(const BatchPart& part, double weight) {
  const WithoutWatching own_work;
  state_.rethrow_failure();
  std::vector<std::string> missing;
  for (size_t i = 0; i < state_.trained.size(); ++i) {
    const auto [unit, parameter] = state_.location[i];
    const bool arrived = state_.units[unit]->gradients->arrived()[parameter];
    used_[i] = used_[i] || arrived;
    if (!arrived) missing.push_back(state_.trained[i].name);
  }
  if (!missing.empty() && !state_.options.find_unused_parameters) {
    state_.refuse_missing(std::move(missing));
  }
  for (size_t i = 0; i < sums_.size(); ++i) {
    if (!sums_[i]) continue;
    const torch::Tensor flat = state_.units[i]->gradients->take_part();
    const GradientPiece piece{0, flat.numel(), flat};
    sums_[i]->add(part.index, std::span(&piece, 1), weight);
  }
}

void ShardedModel::State::Parts::average(double sum_of_weights) {
  const WithoutWatching own_work;
  std::vector<bool> used(used_.size(), true);
  if (state_.options.find_unused_parameters) used = state_.used_anywhere(used_);
  for (size_t i = 0; i < sums_.size(); ++i) {
    if (!sums_[i]) continue;
    const ShardedUnit& unit = *state_.units[i];
    PartSums& sums = *sums_[i];
    state_.units[i]->gradients->put_mean(
        [&](const torch::Tensor& mean) {
          sums.reduce_scatter(mean, sum_of_weights, "gradients of " + unit.plan.name);
        },
        state_.used_of_unit(unit, used));
    if (state_.options.stage != ShardStage::kOptimizer) sums.release();
    ++state_.stats.reduce_scatters;
    state_.stats.reduced_bytes += unit.plan.bytes();
  }
  state_.end_average();
}

}  // namespace lockstep
