#include "pipeline/step_plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <numeric>

#include "base/counted.hpp"
#include "base/mutation.hpp"
#include "base/process.hpp"
#include "buckets/part_tree.hpp"
#include "lockstep/error.hpp"
#include "lockstep/split.hpp"

namespace lockstep {

torch::Tensor StepPlan::rows_of(const torch::Tensor& batch, size_t micro_batch) const {
  const auto end = rows.begin() + static_cast<std::ptrdiff_t>(micro_batch);
  return batch.narrow(0, std::accumulate(rows.begin(), end, int64_t{0}), rows[micro_batch]);
}

bool StepPlanner::has_stage(int stage) const {
  return !axis_ || schedule_.rank_of_stage[static_cast<size_t>(stage)] == axis_->rank();
}

void StepPlanner::require_same_weighing() const {
  const int64_t mine =
      (options_.reduction == LossReduction::kSum ? 1 : 0) + (options_.loss_weight ? 2 : 0);
  for (const auto* comm : {&axis_, &options_.data}) {
    if (!*comm) continue;
    const auto largest = torch::tensor({mine, -mine}, torch::kInt64);
    (*comm)->all_reduce(largest, ReduceOp::kMax, {.label = "how a pipeline's loss is weighed"});
    if (largest[0].item<int64_t>() == -largest[1].item<int64_t>()) continue;
    throw Error(Code::kStageMismatch, "the ranks of a pipeline weigh their losses differently",
                "give all ranks the same reduction, and a loss_weight on all or on none");
  }
}

StepPlan StepPlanner::plan_step(const torch::Tensor& x, const torch::Tensor& y, bool accumulates) {
  StepPlan plan = plan_rows(x, y, /*trains=*/true);
  if (options_.virtual_shards > 0) {
    weigh_parts(plan);
  } else {
    weigh_micro_batches(plan, accumulates);
  }
  warn_of_ignored_targets(plan);
  plan.compared = micro_batch_to_compare();
  // The graph behind the targets is traversed once, at the end, not by every micro-batch.
  if (y.defined() && y.requires_grad()) plan.y = y.detach().requires_grad_();
  return plan;
}

StepPlan StepPlanner::plan_evaluation(const torch::Tensor& x) const {
  return plan_rows(x, {}, /*trains=*/false);
}

StepPlan StepPlanner::plan_rows(const torch::Tensor& x, const torch::Tensor& y, bool trains) const {
  if (has_stage(0) && !x.defined()) {
    throw Error(Code::kUsage, "the process with stage 0 was given no input", "pass the batch as x");
  }
  if (trains && has_last() && !y.defined()) {
    throw Error(Code::kUsage, "the process with the last stage was given no target",
                "pass the targets as y");
  }
  if (x.defined() && y.defined() && x.size(0) != y.size(0)) {
    throw Error(Code::kStageMismatch,
                fmt::format("x has {} and y {}", counted(x.size(0), "row"), y.size(0)),
                "give every row its target");
  }
  StepPlan plan;
  plan.x = x;
  plan.y = y;
  const int64_t rows = agree_on_batch(plan,
                                      x.defined()   ? x.size(0)
                                      : y.defined() ? y.size(0)
                                                    : -1,
                                      trains);
  if (rows < schedule_.micro_batches) {
    throw Error(Code::kStageMismatch,
                fmt::format("{} cannot make {}", counted(rows, "row"),
                            counted(schedule_.micro_batches, "micro-batch")),
                "give a larger batch, or a schedule with fewer micro-batches");
  }
  plan.rows = tensor_split_rows(rows, schedule_.micro_batches);
  return plan;
}

// The rank with stage 0 knows the batch; the other ranks must expect the same one. `rows` -1: not
// known. What a row is may change from step to step, as the length of sequences does.
int64_t StepPlanner::agree_on_batch(StepPlan& plan, int64_t rows, bool trains) const {
  if (!axis_) return rows;
  constexpr size_t kHeader = 4;  // rows, trains, dtype, dimensions of a row
  std::vector<int64_t> sent(kHeader + kMaxDimensions, 0);
  sent[0] = rows;
  sent[1] = static_cast<int64_t>(trains);
  if (has_stage(0)) {
    const auto sizes = plan.x.sizes().slice(1);
    if (sizes.size() >= kMaxDimensions) {
      throw Error(Code::kStageMismatch, fmt::format("x has {} dimensions", plan.x.dim()),
                  fmt::format("between ranks a tensor may have at most {}", kMaxDimensions));
    }
    sent[2] = static_cast<int64_t>(plan.x.scalar_type());
    sent[3] = static_cast<int64_t>(sizes.size());
    std::copy(sizes.begin(), sizes.end(), sent.begin() + kHeader);
  }
  const auto header = torch::tensor(sent, torch::kInt64);
  axis_->broadcast(header, schedule_.rank_of_stage.front(), {.label = "rows of a pipeline's step"});
  const int64_t* said = header.data_ptr<int64_t>();
  if (said[1] != static_cast<int64_t>(trains)) {
    throw Error(Code::kStageMismatch, "one rank of the pipeline trains, another evaluates",
                "call step() or evaluate() on all ranks of the axis");
  }
  if (rows >= 0 && rows != said[0]) {
    throw Error(Code::kStageMismatch,
                fmt::format("this rank was given {}, the one with stage 0 has {}",
                            counted(rows, "row"), said[0]),
                "give all ranks of one pipeline the same batch");
  }
  plan.dtype = static_cast<torch::ScalarType>(said[2]);
  plan.row.assign(said + kHeader, said + kHeader + said[3]);
  return said[0];
}

// Note [Weights of accumulated gradients]
// On a data axis a rank counts by its share of all ranks' loss terms in this call. A synchronised
// call alone is averaged with that weight. The gradients of several calls are in one sum, which
// cannot be averaged with the weights of each. So the ranks exchange their terms in every such
// call, each scales its gradients to its share beforehand, and all count alike in the mean. The
// same is done where loss_weight may be 0 on all ranks, since that has no weighted mean.
void StepPlanner::weigh_micro_batches(StepPlan& plan, bool accumulates) const {
  plan.loss_shares.assign(plan.rows.size(), 1.0);
  if (options_.reduction == LossReduction::kSum) return;
  std::vector<double> weights(plan.rows.begin(), plan.rows.end());
  const bool weighs = options_.loss_weight && !is_planted(Mutation::kMeanOfMeans);
  if (weighs && has_last()) weights = read_loss_weights(plan);
  double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  if (weighs && axis_) {
    const auto sent = torch::full({1}, total, torch::kFloat64);
    axis_->broadcast(sent, schedule_.rank_of_stage.back(),
                     {.label = "loss weight of a pipeline's step"});
    total = sent.item<double>();
  }
  for (size_t i = 0; i < weights.size(); ++i) {
    plan.loss_shares[i] = total > 0 ? weights[i] / total : 0.0;
    if (is_planted(Mutation::kMicroBatchesCountedAlike)) {
      plan.loss_shares[i] = 1.0 / static_cast<double>(weights.size());
    }
  }
  plan.weight = is_planted(Mutation::kPipelineRanksCountedAlike) ? 1 : total;
  if (!options_.data || options_.data->size() == 1) return;
  if (!weighs && !accumulates) return;
  const auto all = torch::full({1}, total, torch::kFloat64);
  options_.data->all_reduce(all, ReduceOp::kSum, {.label = "loss weights of a pipeline's step"});
  const double of_all = all.item<double>();
  plan.data_factor = of_all > 0 ? total * options_.data->size() / of_all : 0.0;
  plan.weight = 1;
}

// Every part's gradients are multiplied by its own weight, and the sum of all parts is divided by
// the sum of all weights: by numbers that do not depend on the ranks.
void StepPlanner::weigh_parts(StepPlan& plan) const {
  if (std::adjacent_find(plan.rows.begin(), plan.rows.end(), std::not_equal_to<>()) !=
      plan.rows.end()) {
    throw Error(
        Code::kSplit,
        fmt::format("{} of this rank cannot be divided evenly into its {} of {}",
                    counted(std::accumulate(plan.rows.begin(), plan.rows.end(), int64_t{0}), "row"),
                    counted(plan.rows.size(), "part"), options_.virtual_shards),
        fmt::format("make the global batch a multiple of {}",
                    counted(options_.virtual_shards, "row")));
  }
  for (const auto& given : {plan.x, plan.y}) {
    if (!given.defined() || !given.requires_grad()) continue;
    throw Error(Code::kUsage,
                "a Pipeline with virtual_shards was given rows that require a gradient",
                "detach them: their gradients would be weighted by the rank that has them");
  }
  StepParts parts;
  const int rank = options_.data ? options_.data->rank() : 0;
  const int ranks = options_.data ? options_.data->size() : 1;
  const auto own = static_cast<int64_t>(plan.rows.size());
  parts.first = rank * own;
  parts.weights.assign(plan.rows.size(), 1.0);
  const bool is_sum = options_.reduction == LossReduction::kSum;
  parts.divisor = is_sum ? 1 : static_cast<double>(options_.virtual_shards);
  if (options_.loss_weight) {
    const auto all = loss_weights_of_parts(plan);
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(parts.first);
    parts.weights.assign(begin, begin + static_cast<std::ptrdiff_t>(own));
    const double sum = sum_in_tree(PartTree(options_.virtual_shards, ranks), all);
    parts.divisor = sum > 0 ? sum : 1;  // without any term all gradients are zeros
  }
  plan.loss_shares.clear();
  for (const double weight : parts.weights) plan.loss_shares.push_back(weight > 0 ? 1 : 0);
  plan.parts = std::move(parts);
}

// [part] of all data ranks. The rank with the last stage tells the others of its pipeline.
std::vector<double> StepPlanner::loss_weights_of_parts(const StepPlan& plan) const {
  const torch::Tensor mine =
      torch::zeros({static_cast<int64_t>(plan.rows.size())}, torch::kFloat64);
  if (has_last()) mine.copy_(torch::tensor(read_loss_weights(plan), torch::kFloat64));
  if (axis_) {
    axis_->broadcast(mine, schedule_.rank_of_stage.back(),
                     {.label = "loss weights of a pipeline's step"});
  }
  torch::Tensor all = mine;
  if (options_.data) {
    all = torch::empty({options_.virtual_shards}, torch::kFloat64);
    options_.data->all_gather(all, mine, {.label = "loss weights of a pipeline's step"});
  }
  return {all.data_ptr<double>(), all.data_ptr<double>() + all.numel()};
}

std::vector<double> StepPlanner::read_loss_weights(const StepPlan& plan) const {
  std::vector<double> weights;
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    weights.push_back(options_.loss_weight(plan.rows_of(plan.y, i)));
    if (std::isfinite(weights.back()) && weights.back() >= 0) continue;
    throw Error(Code::kUsage, fmt::format("loss_weight gave {} for micro-batch {}", weights[i], i),
                "it must return how many terms the loss is the mean of, 0 or more");
  }
  return weights;
}

bool StepPlanner::warns_of_loss() const {
  return !warned_of_loss_ && !options_.loss_weight && options_.reduction == LossReduction::kMean;
}

void StepPlanner::warn_of_loss(const std::string& what) {
  warned_of_loss_ = true;
  print_error(fmt::format(
      "warning[{}]: {}. A micro-batch's loss counts by its rows; where the loss leaves out "
      "targets, that is not the loss of the whole batch\n"
      "help: set PipelineOptions::loss_weight, for cross_entropy to "
      "count_targets(ignore_index)\n",
      code_name(Code::kStageMismatch), what));
}

// The loss function is unknown, but cross_entropy leaves out these targets by default. Targets on a
// GPU are not looked at: that would wait for it.
void StepPlanner::warn_of_ignored_targets(const StepPlan& plan) {
  constexpr int64_t kIgnored = -100;
  if (!warns_of_loss() || !has_last()) return;
  if (!plan.y.is_cpu() || plan.y.scalar_type() != torch::kLong) return;
  const torch::Tensor ignored = plan.y.eq(kIgnored);
  if (!ignored.any().item<bool>()) return;
  std::vector<double> shares;  // [micro-batch] of its targets
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    shares.push_back(plan.rows_of(ignored, i).to(torch::kFloat64).mean().item<double>());
  }
  const auto [least, most] = std::minmax_element(shares.begin(), shares.end());
  const bool alone = !options_.data || options_.data->size() == 1;
  if (alone && *least == *most) return;
  warn_of_loss(
      fmt::format("{:.0f} % to {:.0f} % of a micro-batch's targets are {}, which "
                  "cross_entropy ignores",
                  100 * *least, 100 * *most, kIgnored));
}

// The loss function is called three more times, for a few rows of two neighbouring micro-batches
// and for both together, in steps 1, 2, 4, 8 and so on: each time for another pair, and rarely
// enough to cost nothing.
int StepPlanner::micro_batch_to_compare() {
  steps_ += 1;
  const auto steps = static_cast<uint64_t>(steps_);
  const bool looks = warns_of_loss() && has_last() && schedule_.micro_batches > 1;
  if (!looks || !std::has_single_bit(steps)) return -1;
  return (std::bit_width(steps) - 1) % (schedule_.micro_batches - 1);
}

// A NaN among numbers may be the mean of no targets.
void StepPlanner::check_losses(const std::vector<torch::Tensor>& losses,
                               const std::optional<LossComparison>& comparison) {
  if (!warns_of_loss()) return;
  if (comparison && comparison->differs()) {
    return warn_of_loss(fmt::format(
        "the loss of two micro-batches together is {:.6g}, and the mean of their own losses is "
        "{:.6g}",
        comparison->together, comparison->apart));
  }
  std::vector<size_t> undefined;
  for (size_t i = 0; i < losses.size(); ++i) {
    if (!losses[i].is_cpu()) return;  // looking at it would wait for the GPU
    if (std::isnan(losses[i].item<double>())) undefined.push_back(i);
  }
  if (undefined.empty() || undefined.size() == losses.size()) return;
  warn_of_loss(
      fmt::format("the loss of micro-batch {} is NaN, that of {} of {} micro-batches is not",
                  undefined.front(), losses.size() - undefined.size(), losses.size()));
}

}  // namespace lockstep
