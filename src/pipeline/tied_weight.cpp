#include "lockstep/tied_weight.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <bit>

#include "base/mutation.hpp"
#include "device/parameter_notes.hpp"
#include "gradients/model_sync.hpp"
#include "lockstep/error.hpp"
#include "lockstep/master_weights.hpp"
#include "lockstep/tensor_text.hpp"
#include "precision/model_parallel.hpp"
#include "verify/step_recorder.hpp"

namespace lockstep {
namespace {

// Shards of the two copies must be the same elements of the weight, and both have a master or none.
void require_same_part(const Communicator& pair, const torch::Tensor& copy) {
  const Slice slice = slice_of(copy);
  std::string mine = fmt::format("{} of {}", shape_text(slice.local), shape_text(slice.whole));
  for (const Block& block : slice.blocks) mine += ", from " + shape_text(block.whole);
  if (MasterWeights::holding(copy)) mine += ", with a float32 master weight";
  const auto both = pair.all_gather_text(mine, {.label = "parts of a tied weight"});
  if (both[0] == both[1]) return;
  throw Error(
      Code::kTensorMismatch,
      fmt::format("the copies of a TiedWeight are other parts of it: {}; {}", both[0], both[1]),
      "if its stages are sharded, make the weight's module a unit of its own in both: "
      "ShardOptions::units. Hold both in MasterWeights, or none");
}

}  // namespace

TiedWeight::TiedWeight(const Communicator& axis, int first, int second, const torch::Tensor& copy)
    : calls_(std::make_shared<uint64_t>(0)), copy_(copy) {
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
  const auto masters =
      is_planted(Mutation::kTiedMastersKeepStart) ? std::nullopt : MasterWeights::holding(copy_);
  const torch::Tensor values = masters ? masters->of(copy_) : copy_.detach();
  pair_->broadcast(values, 0, {.label = "tied weight"});
  if (masters) masters->round(copy_);
  if (pair_->rank() == 1) note_copy(copy_);
  if (auto* recorder = StepRecorder::of_process()) {  // the whole model has one weight
    recorder->name(copy_, pair_->broadcast_text(recorder->name_of(copy_), 0, {.label = "name"}));
  }
}

// Optimizers with other settings for the copies, or an Embedding(max_norm) that shortens rows of
// one of them, would let them drift apart.
void TiedWeight::compare_if_due() const {
  if (!std::has_single_bit(++*calls_) || is_planted(Mutation::kTiedMastersKeepStart)) return;
  const auto masters = MasterWeights::holding(copy_);
  require_same_values(*pair_,
                      {{"a copy of a tied weight", masters ? masters->of(copy_) : copy_, true}});
}

void TiedWeight::sum_gradients() const {
  if (pair_ == nullptr) return;
  const torch::NoGradGuard no_grad;
  compare_if_due();
  // Where neither copy has a gradient, as one that is frozen, an optimizer skips the weight.
  const auto any = torch::full({1}, copy_.grad().defined() ? 1 : 0, torch::kUInt8);
  pair_->all_reduce(any, ReduceOp::kMax, {.label = "gradients of a tied weight?"});
  if (any.item<uint8_t>() == 0) return;
  if (!copy_.grad().defined()) copy_.mutable_grad() = torch::zeros_like(copy_);
  const auto gradient = copy_.grad().detach();
  const auto dense = gradient.contiguous();
  pair_->all_reduce(dense, ReduceOp::kSum, {.label = "gradients of a tied weight"});
  if (!dense.is_same(gradient)) gradient.copy_(dense);
  if (auto* recorder = StepRecorder::of_process()) recorder->note_tied(copy_);
}

}  // namespace lockstep
