#include "gradients/part_gradients.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <utility>

#include "lockstep/error.hpp"

namespace lockstep {
namespace {

constexpr int64_t kPieceAlignment = 16;  // elements

bool is_zero(const torch::Tensor& tensor) {
  return !tensor.defined() || !tensor.ne(0).any().item<bool>();
}

}  // namespace

PartGradients::PartGradients(std::span<const TrainedParameter> parameters, const PartTree& tree,
                             const Communicator& comm, int64_t chunk_bytes)
    : parameters_(parameters),
      chunk_bytes_(chunk_bytes),
      used_(parameters.size()),
      accumulated_(parameters.size()),
      taken_(parameters.size()) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const torch::Tensor& tensor = parameters_[i].tensor;
    auto group = std::find_if(groups_.begin(), groups_.end(), [&](const Group& each) {
      return each.options.dtype() == tensor.dtype() && each.options.device() == tensor.device();
    });
    if (group == groups_.end()) {
      const auto options = torch::TensorOptions(tensor.dtype()).device(tensor.device());
      group = groups_.insert(group, Group{options, 0, {}});
    }
    group->parameters.push_back(i);
    group->pieces.push_back({group->elements, tensor.numel(), {}});
    group->elements += (tensor.numel() + kPieceAlignment - 1) / kPieceAlignment * kPieceAlignment;
  }
  for (auto& group : groups_) {
    group.sums = std::make_unique<PartSums>(tree, comm, group.elements, group.options);
  }
}

void PartGradients::begin_step() {
  used_.assign(used_.size(), false);
  for (auto& group : groups_) group.sums->begin_step();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    torch::Tensor& grad = parameters_[i].tensor.mutable_grad();
    accumulated_[i] = grad;
    grad = torch::Tensor();
  }
}

void PartGradients::give_back() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].tensor.mutable_grad() = std::exchange(accumulated_[i], torch::Tensor());
    taken_[i] = torch::Tensor();
  }
}

bool PartGradients::has_accumulated() const {
  return !std::all_of(parameters_.begin(), parameters_.end(),
                      [](const TrainedParameter& each) { return is_zero(each.tensor.grad()); });
}

void PartGradients::take(int64_t part, double weight) {
  for (auto& group : groups_) {
    for (size_t i = 0; i < group.parameters.size(); ++i) {
      const size_t index = group.parameters[i];
      const auto& [name, tensor] = parameters_[index];
      const torch::Tensor gradient = tensor.grad();
      if (gradient.defined() && gradient.layout() != torch::kStrided) {
        throw Error(
            Code::kTensorMismatch,
            fmt::format("the gradient of {} is sparse, and virtual shards add dense ones", name),
            "construct the embedding without sparse gradients");
      }
      group.pieces[i].gradient = gradient;
      if (gradient.defined()) used_[index] = true;
      taken_[index] = gradient;
      tensor.mutable_grad() = torch::Tensor();
    }
    group.sums->add(part, group.pieces, weight);
    for (auto& piece : group.pieces) piece.gradient = torch::Tensor();
  }
}

std::vector<size_t> PartGradients::missing() const {
  std::vector<size_t> missing;
  for (size_t i = 0; i < taken_.size(); ++i) {
    if (!taken_[i].defined()) missing.push_back(i);
  }
  return missing;
}

void PartGradients::average(double divisor, const std::vector<bool>& given) {
  const torch::NoGradGuard no_grad;
  for (auto& group : groups_) {
    const torch::Tensor sums = group.sums->all_reduce(divisor, chunk_bytes_);
    for (size_t i = 0; i < group.parameters.size(); ++i) {
      const size_t index = group.parameters[i];
      torch::Tensor& grad = parameters_[index].tensor.mutable_grad();
      if (given[index]) {
        put(index, sums.narrow(0, group.pieces[i].offset, group.pieces[i].count));
      } else {
        grad = accumulated_[index];
      }
      accumulated_[index] = taken_[index] = torch::Tensor();
    }
  }
}

void PartGradients::put(size_t parameter, const torch::Tensor& mean) {
  const torch::Tensor& tensor = parameters_[parameter].tensor;
  torch::Tensor& grad = tensor.mutable_grad();
  grad = taken_[parameter].defined() ? taken_[parameter] : torch::empty_like(tensor.detach());
  grad.copy_(mean.view(tensor.sizes()));
  if (!accumulated_[parameter].defined()) return;
  grad = accumulated_[parameter].add_(grad);
}

std::vector<SumExchange> PartGradients::exchanges() const {
  std::vector<SumExchange> all;
  for (const auto& group : groups_) {
    const auto& mine = group.sums->exchanges();
    all.insert(all.end(), mine.begin(), mine.end());
  }
  return all;
}

}  // namespace lockstep
