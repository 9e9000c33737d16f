#include "gradients/part_sums.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <utility>

#include "lockstep/clock.hpp"

namespace lockstep {
namespace {

constexpr int64_t kSumAlignment = 16;  // elements

// Each rank reduces one block of a chunk.
int64_t filled_up(int64_t elements, int64_t ranks) {
  const int64_t unit = ranks * kSumAlignment;
  return std::max<int64_t>((elements + unit - 1) / unit, 1) * unit;
}

torch::TensorOptions options_of_sums(const torch::TensorOptions& gradients) {
  const bool is_double = gradients.dtype() == torch::kFloat64;
  return torch::TensorOptions(is_double ? torch::kFloat64 : torch::kFloat32)
      .device(gradients.device());
}

// A piece as it is added: flat, and multiplied by the part's weight.
torch::Tensor weighed(const torch::Tensor& gradient, double weight, const torch::Tensor& like) {
  torch::Tensor flat = gradient.detach().contiguous().view(-1).to(like.scalar_type());
  return weight == 1 ? flat : flat * weight;
}

}  // namespace

PartSums::PartSums(const PartTree& tree, const Communicator& comm, int64_t elements,
                   const torch::TensorOptions& options)
    : tree_(tree),
      comm_(comm),
      elements_(filled_up(elements, comm.size())),
      options_(options_of_sums(options)),
      fold_(tree_, [this](torch::Tensor left, const torch::Tensor& right) {
        return add_two(std::move(left), right);
      }) {}

void PartSums::begin_step() {
  for (auto& [node, sum] : fold_.values()) free_.push_back(std::move(sum));
  fold_.clear();
  exchanges_.clear();
}

torch::Tensor PartSums::take_memory() {
  if (free_.empty()) return torch::zeros({elements_}, options_);
  torch::Tensor memory = std::move(free_.back());
  free_.pop_back();
  return memory;
}

torch::Tensor PartSums::add_two(torch::Tensor left, const torch::Tensor& right) {
  left.add_(right);
  free_.push_back(right);
  return left;
}

// The part's gradients are added to the sum of its other half at once, if that is there.
void PartSums::add(int64_t part, std::span<const GradientPiece> pieces, double weight) {
  const torch::NoGradGuard no_grad;
  PartRange node{part, part + 1};
  const auto sibling = fold_.take_sibling(node);
  const torch::Tensor sum = sibling ? sibling->second : take_memory();
  const bool is_right = sibling && sibling->first < node;
  for (const auto& [offset, count, gradient] : pieces) {
    torch::Tensor here = sum.narrow(0, offset, count);
    if (!sibling && !gradient.defined()) {
      here.zero_();
      continue;
    }
    const torch::Tensor value =
        gradient.defined() ? weighed(gradient, weight, sum) : torch::zeros({}, options_);
    if (!sibling) {
      here.copy_(value);
    } else if (is_right) {
      here.add_(value);
    } else {
      torch::add_out(here, value, here);
    }
  }
  if (sibling) {
    node = {std::min(node.begin, sibling->first.begin), std::max(node.end, sibling->first.end)};
  }
  fold_.put(node, sum);
}

std::vector<torch::Tensor> PartSums::own_sums() {
  std::vector<torch::Tensor> sums;
  for (const auto& [node, sum] : fold_.values()) sums.push_back(sum);
  return sums;
}

// `sums` are the same elements of each of this rank's nodes, one block for each rank. Returns the
// sum of all parts of this rank's block.
torch::Tensor PartSums::exchange(const std::vector<torch::Tensor>& sums, const std::string& label) {
  const int64_t ranks = comm_.size();
  const int64_t count = sums.front().numel() / ranks;
  const int64_t slots = tree_.most_nodes();
  torch::Tensor given = sums.front();
  if (slots > 1) {
    given = torch::empty({ranks, slots, count}, options_);
    for (size_t i = 0; i < sums.size(); ++i) {
      given.select(1, static_cast<int64_t>(i)).copy_(sums[i].view({ranks, count}));
    }
    for (auto i = static_cast<int64_t>(sums.size()); i < slots; ++i) given.select(1, i).zero_();
  }
  const torch::Tensor taken = torch::empty({ranks, slots, count}, options_);
  comm_.all_to_all(taken, given, {.label = label});
  PartFold<torch::Tensor> fold(
      tree_, [](torch::Tensor left, const torch::Tensor& right) { return left.add_(right); });
  for (int rank = 0; rank < comm_.size(); ++rank) {
    int64_t slot = 0;
    for (const PartRange& node : tree_.nodes_of(rank)) fold.put(node, taken[rank][slot++]);
  }
  return fold.values().begin()->second;
}

torch::Tensor PartSums::all_reduce(double divisor, int64_t chunk_bytes) {
  const torch::NoGradGuard no_grad;
  const auto sums = own_sums();
  const torch::Tensor& result = sums.front();
  if (comm_.size() == 1) return result.div_(divisor);
  const auto element_bytes = static_cast<int64_t>(result.element_size());
  const int64_t chunk = filled_up(chunk_bytes / element_bytes, comm_.size());
  for (int64_t begin = 0; begin < elements_; begin += chunk) {
    const int64_t count = std::min(chunk, elements_ - begin);
    const int64_t begun_ns = monotonic_ns();
    const std::string label = fmt::format("sums of parts {}", exchanges_.size());
    std::vector<torch::Tensor> chunks;
    for (const auto& sum : sums) chunks.push_back(sum.narrow(0, begin, count));
    const int64_t own = count / comm_.size();
    const torch::Tensor block = chunks.front().narrow(0, comm_.rank() * own, own);
    block.copy_(exchange(chunks, label).div_(divisor));
    comm_.all_gather(chunks.front(), block, {.label = label});
    exchanges_.push_back({count * element_bytes, begun_ns, monotonic_ns()});
  }
  return result;
}

void PartSums::reduce_scatter(const torch::Tensor& block, double divisor,
                              const std::string& label) {
  const torch::NoGradGuard no_grad;
  auto sums = own_sums();
  if (comm_.size() == 1) {
    block.copy_(sums.front().narrow(0, 0, block.numel()).div_(divisor));
    return;
  }
  for (auto& sum : sums) sum = sum.narrow(0, 0, block.numel() * comm_.size());
  const int64_t begun_ns = monotonic_ns();
  block.copy_(exchange(sums, label).div_(divisor));
  exchanges_.push_back({static_cast<int64_t>(sums.front().nbytes()), begun_ns, monotonic_ns()});
}

void PartSums::release() {
  fold_.clear();
  free_.clear();
}

}  // namespace lockstep
