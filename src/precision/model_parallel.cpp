#include "precision/model_parallel.hpp"

#include <algorithm>
#include <utility>

#include "base/mutation.hpp"
#include "device/parameter_map.hpp"
#include "precision/exact_squares.hpp"

namespace lockstep {
namespace {

using Axes = ParameterMap<std::weak_ptr<const Communicator>>;

Axes& tensor_shards() {
  static Axes map;
  return map;
}

// A part of a parameter that is divided over data-parallel ranks.
struct DataShard {
  c10::weak_intrusive_ptr<c10::TensorImpl> parameter;
  std::weak_ptr<const Communicator> axis;
};

ParameterMap<DataShard>& data_shards() {
  static ParameterMap<DataShard> map;
  return map;
}

Axes& pipeline_stages() {
  static Axes map;
  return map;
}

ParameterMap<bool>& noted_copies() {
  static ParameterMap<bool> map;
  return map;
}

ParameterMap<bool>& noted_same_bits() {
  static ParameterMap<bool> map;
  return map;
}

std::shared_ptr<const Communicator> usable(const std::weak_ptr<const Communicator>& noted) {
  auto axis = noted.lock();
  return axis != nullptr && axis->size() > 1 ? axis : nullptr;
}

std::shared_ptr<const Communicator> axis_in(const Axes& map, const torch::Tensor& parameter) {
  const auto found = map.get(parameter);
  return found ? usable(*found) : nullptr;
}

void add_up(const Communicator& comm, const torch::Tensor& sum) {
  comm.all_reduce(sum.view({-1}), ReduceOp::kSum, {.label = "norm of a divided model"});
}

}  // namespace

void note_tensor_shard(const torch::Tensor& parameter,
                       const std::shared_ptr<const Communicator>& axis) {
  tensor_shards().set(parameter, axis);
}

void note_data_shard(const torch::Tensor& shard, const torch::Tensor& parameter,
                     const std::shared_ptr<const Communicator>& axis) {
  data_shards().set(
      shard,
      DataShard{c10::weak_intrusive_ptr<c10::TensorImpl>(parameter.getIntrusivePtr()), axis});
}

void note_pipeline_stage(const torch::Tensor& parameter,
                         const std::shared_ptr<const Communicator>& axis) {
  pipeline_stages().set(parameter, axis);
}

void note_copy(const torch::Tensor& parameter) {
  noted_copies().set(parameter, true);
}

void note_same_bits(const torch::Tensor& parameter) {
  noted_same_bits().set(parameter, true);
}

ModelParallelGroup::ModelParallelGroup(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                                       const std::optional<Communicator>& others) {
  if (others && others->size() > 1) others_ = others;
  if (tensor_shards().empty() && data_shards().empty() && pipeline_stages().empty() &&
      noted_same_bits().empty()) {
    return;
  }
  for (const auto& group : groups) {
    for (const torch::Tensor& parameter : group.params()) {
      same_bits_ = same_bits_ || noted_same_bits().get(parameter).has_value();
      std::vector<size_t> axes;
      torch::Tensor whole = parameter;
      if (const auto shard = data_shards().get(parameter)) {
        if (const auto axis = usable(shard->axis)) axes.push_back(find_axis(*axis));
        if (auto divided = shard->parameter.lock()) whole = torch::Tensor(std::move(divided));
      }
      if (const auto axis = axis_in(tensor_shards(), whole)) axes.push_back(find_axis(*axis));
      if (!axes.empty()) part_[parameter.unsafeGetTensorImpl()] = find_part(axes);
      if (noted_copies().get(whole) || noted_copies().get(parameter)) {
        part_[parameter.unsafeGetTensorImpl()] = kCopies;
        has_copies_ = true;
      }
      if (pipeline_) continue;
      if (const auto axis = axis_in(pipeline_stages(), whole)) pipeline_ = *axis;
    }
  }
}

// Stages of one process each have a communicator for the same ranks.
size_t ModelParallelGroup::find_axis(const Communicator& axis) {
  const std::vector<int> ranks = axis.world_ranks();
  size_t index = 0;
  while (index < axes_.size() && axes_[index].ranks != ranks) ++index;
  if (index == axes_.size()) axes_.push_back({ranks, axis});
  return index;
}

size_t ModelParallelGroup::find_part(const std::vector<size_t>& axes) {
  const auto found = std::find(parts_.begin(), parts_.end(), axes);
  if (found != parts_.end()) return static_cast<size_t>(found - parts_.begin());
  parts_.push_back(axes);
  return parts_.size() - 1;
}

size_t ModelParallelGroup::part_of(const torch::Tensor& parameter) const {
  const auto found = part_.find(parameter.unsafeGetTensorImpl());
  if (found == part_.end()) return 0;
  return found->second == kCopies ? parts() - 1 : found->second;
}

torch::Tensor ModelParallelGroup::sum(std::vector<torch::Tensor> parts) const {
  if (is_planted(Mutation::kClippedByLocalNorm)) return torch::stack(parts).sum();
  torch::Tensor total = parts[0];
  for (size_t i = 1; i < parts_.size(); ++i) {
    for (const size_t axis : parts_[i]) add_up(axes_[axis].comm, parts[i]);
    total = total + parts[i];
  }
  if (pipeline_) {
    total = total.clone();
    add_up(*pipeline_, total);
  }
  if (others_) {
    total = torch::where(is_counted_here(total.device()), total, torch::zeros_like(total));
    add_up(*others_, total);
  }
  return same_bits_ ? value_of_squares(total) : total;
}

// The ranks of the axes that were summed over now have the same total, which must count once: at
// the first of them. They recognise each other by the smallest rank among them. Some stages of a
// pipeline may be divided over a tensor axis and others not; a second round reaches the ranks that
// the first did not. All of it stays on the device, so that an optimizer's own clipping can be
// captured.
torch::Tensor ModelParallelGroup::is_counted_here(torch::Device device) const {
  if (is_planted(Mutation::kNormCountedPerRank)) return torch::ones({}, device).eq(1);
  const int own = others_->world_ranks()[static_cast<size_t>(others_->rank())];
  const auto smallest = torch::full({1}, own, torch::TensorOptions(torch::kFloat64).device(device));
  for (int round = 0; round < 2; ++round) {
    for (const Communicator* axis : divided_over()) axis->all_reduce(smallest, ReduceOp::kMin);
  }
  const auto all = torch::empty({others_->size()}, smallest.options());
  others_->all_gather(all, smallest, {.label = "ranks that share a norm"});
  return all.eq(smallest).to(torch::kInt64).argmax().eq(others_->rank());
}

std::vector<const Communicator*> ModelParallelGroup::divided_over() const {
  std::vector<const Communicator*> axes;
  for (const auto& axis : axes_) axes.push_back(&axis.comm);
  if (pipeline_) axes.push_back(&*pipeline_);
  return axes;
}

std::vector<const Communicator*> ModelParallelGroup::communicators() const {
  auto all = divided_over();
  if (others_) all.push_back(&*others_);
  return all;
}

// One axis after the other, each receives what the axes before it found. So all ranks of all axes
// learn of it.
int ModelParallelGroup::first_other(bool mine) const {
  int found = -1;
  for (const Communicator* comm : communicators()) {
    const auto ranks = comm->world_ranks();
    const int64_t known = mine ? ranks[static_cast<size_t>(comm->rank())] : found;
    const auto own = torch::full({1}, known, torch::kInt64);
    const auto all = torch::empty({comm->size()}, torch::kInt64);
    comm->all_gather(all, own, {.label = "GradScaler's finding"});
    for (int rank = 0; rank < comm->size() && found < 0; ++rank) {
      const auto said = static_cast<int>(all[rank].item<int64_t>());
      if (said >= 0 && rank != comm->rank()) found = said;
    }
  }
  return found;
}

}  // namespace lockstep
