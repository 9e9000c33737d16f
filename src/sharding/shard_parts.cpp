#include <torch/torch.h>

#include <algorithm>
#include <utility>

#include "gradients/model_sync.hpp"
#include "sharding/sharded_state.hpp"

// Steps of virtual shards of a sharded model: from each part's gradients to the shards' grads.

namespace lockstep {

ShardedModel::State::Parts::Parts(State& state)
    : state_(state),
      shards_(state.options.virtual_shards, state.options.part_threads, *state.comm,
              "FullyShardedDataParallel"),
      used_(state.trained.size()) {
  require_same_in_parts(*state.module, state.options.broadcast_buffers, "FullyShardedDataParallel");
  for (const auto& unit : state.units) {
    sums_.push_back(unit->gradients
                        ? std::make_unique<PartSums>(shards_.tree(), *state.comm,
                                                     unit->plan.elements, unit->plan.options)
                        : nullptr);
  }
}

// The shards' grads say whether gradients were accumulated; a rank may have no shard at all.
bool ShardedModel::State::Parts::has_accumulated() const {
  const bool mine = !std::all_of(state_.trained_shards.begin(), state_.trained_shards.end(),
                                 [](const TrainedParameter& each) {
                                   const torch::Tensor& grad = each.tensor.grad();
                                   return !grad.defined() || !grad.ne(0).any().item<bool>();
                                 });
  if (state_.comm->size() == 1) return mine;
  const auto any = torch::full({1}, mine ? 1 : 0, torch::kUInt8);
  state_.comm->all_reduce(any, ReduceOp::kMax, {.label = "accumulated gradients"});
  return any.item<uint8_t>() != 0;
}

torch::Tensor ShardedModel::State::Parts::step(const PartLoss& loss_of, const PartStep& how) {
  shards_.require_outside("backward_parts()", "call it once for a batch");
  bool continues = std::exchange(accumulates_, state_.no_sync_depth > 0);
  {
    const WithoutWatching own_work;
    continues = has_accumulated() || continues;
    if (state_.options.broadcast_buffers && state_.module->is_training()) {
      broadcast_tensors(*state_.comm, buffers_of(*state_.module), 0, "buffers");
    }
  }
  used_.assign(used_.size(), false);
  for (const auto& sums : sums_) {
    if (sums) sums->begin_step();
  }
  return shards_.step(*state_.module, *this, loss_of, how, continues);
}

void ShardedModel::State::Parts::begin_part(bool) {}

void ShardedModel::State::Parts::take_gradients(const BatchPart& part, double weight) {
  const WithoutWatching own_work;
  std::vector<std::string> missing;
  for (size_t i = 0; i < state_.trained.size(); ++i) {
    const auto [unit, parameter] = state_.location[i];
    const bool arrived = state_.units[unit]->gradients->arrived()[parameter];
    if (arrived) used_[i] = true;
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
  if (state_.options.find_unused_parameters) {
    const auto flags = torch::empty({static_cast<int64_t>(used_.size())}, torch::kUInt8);
    auto* flag = flags.data_ptr<uint8_t>();
    std::copy(used_.begin(), used_.end(), flag);
    state_.comm->all_reduce(flags, ReduceOp::kMax, {.label = "parameters in use"});
    used_.assign(flag, flag + used_.size());
  }
  for (size_t i = 0; i < sums_.size(); ++i) {
    if (!sums_[i]) continue;
    const UnitPlan& plan = state_.units[i]->plan;
    std::vector<bool> used(plan.parameters.size(), true);
    for (size_t t = 0; t < used_.size(); ++t) {
      if (state_.location[t].first == i) used[state_.location[t].second] = used_[t];
    }
    state_.units[i]->gradients->put_mean(
        [&](const torch::Tensor& mean) {
          sums_[i]->reduce_scatter(mean, sum_of_weights, "gradients of " + plan.name);
        },
        used);
    ++state_.stats.reduce_scatters;
    state_.stats.reduced_bytes += plan.bytes();
  }
  state_.finish_average();
}

}  // namespace lockstep
