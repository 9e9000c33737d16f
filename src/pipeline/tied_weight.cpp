#include "lockstep/tied_weight.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include "lockstep/error.hpp"
#include "precision/model_parallel.hpp"

namespace lockstep {

TiedWeight::TiedWeight(const Communicator& axis, int first, int second, const torch::Tensor& copy)
    : copy_(copy) {
  const auto is_rank = [&](int rank) { return rank >= 0 && rank < axis.size(); };
  if (!is_rank(first) || !is_rank(second) || first == second) {
    throw Error(Code::kUsage,
                fmt::format("a TiedWeight of ranks {} and {} on an axis of {} ranks", first, second,
                            axis.size()),
                "name two ranks of the axis; stages of one rank can use one tensor");
  }
  const bool takes_part = axis.rank() == first || axis.rank() == second;
  if (takes_part != copy.defined()) {
    throw Error(Code::kUsage,
                fmt::format("rank {} of the axis {} copy of the TiedWeight of ranks {} and {}",
                            axis.rank(), takes_part ? "has no" : "was given a", first, second),
                "pass the copy on these two ranks, and an undefined tensor on the others");
  }
  // The first rank is rank 0 of the pair.
  const Communicator pair = axis.split(takes_part ? 0 : 1 + axis.rank(),
                                       axis.rank() == second ? 1 : 0, "copies of a tied weight");
  if (!takes_part) return;
  pair_ = std::make_shared<const Communicator>(pair);
  pair_->broadcast(copy_.detach(), 0, {.label = "tied weight"});
  if (pair_->rank() == 1) note_copy(copy_);
}

void TiedWeight::sum_gradients() const {
  if (pair_ == nullptr) return;
  const torch::NoGradGuard no_grad;
  if (!copy_.grad().defined()) copy_.mutable_grad() = torch::zeros_like(copy_);
  const auto gradient = copy_.grad().detach();
  const auto dense = gradient.contiguous();
  pair_->all_reduce(dense, ReduceOp::kSum, {.label = "gradients of a tied weight"});
  if (!dense.is_same(gradient)) gradient.copy_(dense);
}

}  // namespace lockstep
