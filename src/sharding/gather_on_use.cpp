#include <torch/torch.h>

#include <algorithm>
#include <cstdlib>

#include "base/mutation.hpp"
#include "base/process.hpp"
#include "device/parameter_notes.hpp"
#include "sharding/sharded_state.hpp"

// The whole parameters of a sharded model: who uses a unit, and what is gathered and released then.

namespace lockstep {

void ShardedModel::State::before_use(std::span<const size_t> used, bool outermost) noexcept {
  const WithoutWatching own_work;
  if (failure) return poison(used);
  try {
    if (phase == Phase::kIdle && gathered_guards == 0) notice_changes();
    make_ready(used);
    for (const size_t index : used) follow_order(units[index]->plan.group);
    if (outermost && gathers_on_use() && gathered_guards == 0) release_others(used);
    prefetch_next();
  } catch (...) {
    failure = std::current_exception();
    if (phase == Phase::kIdle) {  // no call of the wrapper may follow that could throw it
      print_error("lockstep: a sharded parameter could not be gathered; it is NaN from here on\n");
    }
    poison(used);
  }
}

void ShardedModel::State::note_whole(bool whole) const {
  for (const auto& unit : units) {
    for (const auto& at : unit->plan.parameters) note_sharded(at.whole, !whole);
  }
}

// Nobody may compute with what is not there: after a failure that cannot be thrown here, the other
// ranks' parts are NaN until the wrapper throws it.
void ShardedModel::State::poison(std::span<const size_t> used) noexcept {
  try {
    const torch::NoGradGuard no_grad;
    for (const size_t index : used) {
      WholeParameters& weights = *units[index]->weights;
      if (weights.is_shared()) continue;  // it is there, if not up to date
      weights.materialize();
      const int64_t begin = comm->rank() * weights.shard().numel();
      const int64_t end = begin + weights.shard().numel();
      const torch::Tensor& whole = weights.whole();
      whole.narrow(0, 0, begin).fill_(std::numeric_limits<double>::quiet_NaN());
      whole.narrow(0, end, whole.numel() - end).fill_(std::numeric_limits<double>::quiet_NaN());
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
    ShardedUnit& unit = *units[index];
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
  }
}

// Note [Shared parameters on a host] Ranks write their parts after backward and read all parts in
// the next forward. A barrier before the first read lets all writes be seen. Nobody writes while
// another rank still reads, since the last average of a backward ends on all ranks after it.
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

void ShardedModel::State::begin_gather(ShardedUnit& unit) {
  ++stats.gathers;
  stats.gathered_bytes += unit.plan.bytes();
  unit.gathering = unit.weights->begin_gather({.label = "parameters of " + unit.plan.name});
}

void ShardedModel::State::finish_gather(ShardedUnit& unit) {
  unit.gathering->wait();
  unit.gathering.reset();
  unit.fresh = true;
}

// The first step records in which order groups are used; later ones follow it as long as it holds.
void ShardedModel::State::follow_order(size_t group) {
  const bool in_order = phase == Phase::kForwarded || phase == Phase::kBackward;
  if (!options.prefetch || !in_order || group == last_group) return;
  last_group = group;
  if (!order_known) {
    order.push_back(group);
  } else if (order_next < order.size()) {
    order_next = order[order_next] == group ? order_next + 1 : order.size();
  }
}

bool ShardedModel::State::is_next(const ShardedUnit& unit) const {
  return order_known && phase != Phase::kIdle && order_next < order.size() &&
         unit.plan.group == order[order_next];
}

void ShardedModel::State::prefetch_next() {
  for (const auto& unit : units) {
    const bool missing = !unit->is_ready() && !unit->gathering && !unit->weights->is_shared();
    if (missing && is_next(*unit)) begin_gather(*unit);
  }
}

void ShardedModel::State::release_others(std::span<const size_t> used) {
  for (const auto& unit : units) {
    const bool in_use = std::any_of(used.begin(), used.end(), [&](size_t index) {
      return units[index]->plan.group == unit->plan.group;
    });
    if (!in_use && !unit->gathering && !is_next(*unit)) unit->weights->release();
  }
}

void ShardedModel::State::release_unused() {
  if (gathered_guards > 0) return;
  for (const auto& unit : units) {
    if (unit->gathering) finish_gather(*unit);
    if (gathers_on_use()) unit->weights->release();
  }
}

void ShardedModel::State::mark_stale(bool frozen_too) {
  for (const auto& unit : units) {
    if (unit->gathering) finish_gather(*unit);
    if (is_planted(Mutation::kShardsStale)) continue;
    if (unit->plan.trained || frozen_too) unit->fresh = comm->size() == 1;
  }
}

// See Note [Fresh parameters]. Autograd must know too: a graph of the forward before cannot be used
// with other weights.
void ShardedModel::State::notice_changes() {
  if (!marks->weights_changed() || is_planted(Mutation::kEvaluationStale)) return;
  marks->add_micro_step();
  mark_stale();
  for (const auto& [name, tensor] : trained) tensor.unsafeGetTensorImpl()->bump_version();
}

// Before a forward: an optimizer may have changed shards, maybe in other elements than the first,
// after a forward without a backward has gathered them.
void ShardedModel::State::expect_update() {
  if (is_planted(Mutation::kEvaluationStale)) return;
  if (gathered_guards == 0 && update_follows) mark_stale();
}

}  // namespace lockstep
