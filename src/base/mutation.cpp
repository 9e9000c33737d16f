#include "base/mutation.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdlib>

#include "lockstep/error.hpp"

namespace lockstep {
namespace {

using enum Mutation;

constexpr std::array kMutations = {
    MutationInfo{kMeanNotDivided, "mean-not-divided",
                 "gradients are summed over the ranks and never divided"},
    MutationInfo{kMeanDividedTwice, "mean-divided-twice",
                 "the mean is divided by the number of ranks once more"},
    MutationInfo{kParameterNotAveraged, "parameter-not-averaged",
                 "one parameter keeps the gradient of its own rank"},
    MutationInfo{kRanksCountedAlike, "ranks-counted-alike",
                 "ranks count alike in the mean, although one has more rows"},
    MutationInfo{kBucketTailDropped, "bucket-tail-dropped",
                 "the last eighth of a bucket is not sent"},
    MutationInfo{kBucketLagsOneStep, "bucket-lags-one-step",
                 "a bucket holds the mean of the step before"},
    MutationInfo{kMicroBatchTwice, "micro-batch-twice",
                 "the first micro-batch of a window is counted twice"},
    MutationInfo{kNoSyncIgnored, "no-sync-ignored", "every micro-step averages its gradients"},
    MutationInfo{kSyncBoundaryOff, "sync-boundary-off",
                 "all micro-steps but the last average their gradients"},
    MutationInfo{kInitialBroadcastMissing, "initial-broadcast-missing",
                 "rank 0's weights are not sent to the others"},
    MutationInfo{kBuffersNotShared, "buffers-not-shared",
                 "rank 0's buffers are not sent before a forward"},
    MutationInfo{kTiedDividedTwice, "tied-weight-twice",
                 "the gradient of a shared weight is averaged for each of its owners"},
    MutationInfo{kFrozenUpdated, "frozen-updated", "weight decay changes a frozen parameter"},
    MutationInfo{kDropoutOneSeed, "dropout-one-seed", "all ranks draw the same random numbers"},
    MutationInfo{kShardShifted, "shard-shifted", "a rank's samples begin one too far"},
    MutationInfo{kSamplesDuplicated, "samples-duplicated", "every rank takes rank 0's samples"},
    MutationInfo{kLossNotDivided, "loss-not-divided",
                 "the loss of a micro-step is not divided by their number"},
    MutationInfo{kGradientsNotUnscaled, "gradients-not-unscaled",
                 "the update uses gradients that still carry the loss scale"},
    MutationInfo{kOverflowNotSkipped, "overflow-not-skipped",
                 "a step with an infinite gradient is not skipped"},
    MutationInfo{kSkipNotAgreed, "skip-not-agreed",
                 "a rank of a divided model does not learn of another's overflow"},
    MutationInfo{kMasterNotWritten, "master-not-written",
                 "the model goes on with weights that were not rounded from their masters"},
    MutationInfo{kWeightDecayTwice, "weight-decay-twice", "weight decay is applied twice"},
    MutationInfo{kRateAhead, "rate-ahead", "the learning-rate schedule is one update ahead"},
    MutationInfo{kClippedByLocalNorm, "clipped-by-local-norm",
                 "each rank clips by the norm of its own shards"},
    MutationInfo{kStateNotRestored, "state-not-restored",
                 "a resumed run begins with a new optimizer state"},
    MutationInfo{kShardsStale, "shards-stale",
                 "a sharded model computes with the weights of the step before"},
    MutationInfo{kShardsSummed, "shards-summed",
                 "gradients of shards are summed over the ranks and never divided"},
    MutationInfo{kMicroBatchesCountedAlike, "micro-batches-counted-alike",
                 "micro-batches of a pipeline count alike, although one has more rows"},
    MutationInfo{kPipelineRanksCountedAlike, "pipeline-ranks-counted-alike",
                 "data-parallel pipelines count alike, although one has more rows"},
    MutationInfo{kBiasOnEveryRank, "bias-on-every-rank",
                 "every rank of a tensor axis adds the bias"},
    MutationInfo{kReplicaForgotten, "replica-forgotten",
                 "DataParallel leaves out the gradient of its last replica"},
    MutationInfo{kReplicaStale, "replica-stale",
                 "DataParallel's replicas keep the weights of the first step"},
    MutationInfo{kMastersKeepStart, "masters-keep-start",
                 "float32 masters keep the weights that their own rank began with"},
    MutationInfo{kCastsKept, "casts-kept",
                 "autocast computes with the first step's casts of the weights"},
    MutationInfo{kKeptGradientOverwritten, "kept-gradient-overwritten",
                 "a gradient that the program kept is overwritten by the next backward"},
    MutationInfo{kWrappersOverlap, "wrappers-overlap",
                 "two wrappers of one parameter both take its gradient for theirs alone"},
    MutationInfo{kSyncNormUnweighted, "sync-norm-unweighted",
                 "SyncBatchNorm's backward counts ranks alike, although one has more rows"},
    MutationInfo{kEvaluationStale, "evaluation-stale",
                 "a sharded model keeps the weights that an evaluation gathered before the update"},
    MutationInfo{kGatheredChangeRepeated, "gathered-change-repeated",
                 "a change inside GatheredParameters is made once by each rank of a host"},
    MutationInfo{kFrozenGetsZeros, "frozen-gets-zeros",
                 "a parameter that was frozen later gets zeros, and weight decay moves it"},
    MutationInfo{kMeanOfMeans, "mean-of-means",
                 "micro-batches count by rows, although some rows have no target"},
    MutationInfo{kNormCountedPerRank, "norm-counted-per-rank",
                 "the norm of a divided model is counted once by each of its ranks"},
    MutationInfo{kTiedMastersKeepStart, "tied-masters-keep-start",
                 "the copies of a tied weight have masters of their own from the start"}};

Mutation mutation_of_environment() {
  const char* name = std::getenv(kMutateVariable);
  if (name == nullptr || *name == '\0') return kNone;
  // A planted bug must never reach a run whose results are used.
  const char* recording = std::getenv(kVerifyFolderVariable);
  if (recording == nullptr || *recording == '\0') {
    throw Error(
        Code::kUsage,
        fmt::format("{} is set, which plants the bug \"{}\", but this run is not verified",
                    kMutateVariable, name),
        fmt::format("unset {}: `lockstep verify --mutate` sets it by itself", kMutateVariable));
  }
  if (const auto found = mutation_named(name)) return *found;
  throw Error(Code::kUsage,
              fmt::format("{} names \"{}\", which is no mutation", kMutateVariable, name),
              "`lockstep verify --mutate all` lists them");
}

}  // namespace

std::span<const MutationInfo> all_mutations() {
  return kMutations;
}

std::optional<Mutation> mutation_named(std::string_view name) {
  const auto* const found =
      std::find_if(kMutations.begin(), kMutations.end(),
                   [name](const MutationInfo& each) { return each.name == name; });
  return found == kMutations.end() ? std::nullopt : std::optional(found->mutation);
}

Mutation planted_mutation() {
  static const Mutation planted = mutation_of_environment();
  return planted;
}

}  // namespace lockstep
