#include "lockstep/tied_weight.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include "device/slice_map.hpp"
#include "lockstep/error.hpp"
#include "lockstep/tensor_text.hpp"
#include "precision/model_parallel.hpp"

namespace lockstep {
namespace {

// Shards of the two copies must be the same elements of the weight.
void require_same_part(const Communicator& pair, const torch::Tensor& copy) {
  const Slice slice = slice_of(copy);
  std::string mine = fmt::format("{} of {}", shape_text(slice.local), shape_text(slice.whole));
  for (const Block& block : slice.blocks) mine += ", from " + shape_text(block.whole);
  const auto both = pair.all_gather_text(mine, {.label = "parts of a tied weight"});
  if (both[0] == both[1]) return;
  throw Error(
      Code::kTensorMismatch,
      fmt::format("the copies of a TiedWeight are other parts of it: {}; {}", both[0], both[1]),
      "if its stages are sharded, make the weight's module a unit of its own in both: "
      "ShardOptions::units");
}

}  // namespace

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
  require_same_part(*pair_, copy_);
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
