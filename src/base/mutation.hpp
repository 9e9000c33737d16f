#pragma once

#include <optional>
#include <span>
#include <string_view>

// Planted bugs: `lockstep verify --mutate` plants one of them in a run and must find it.

namespace lockstep {

/// A bug that can be planted in lockstep. Each changes what the library does at the one point that
/// asks is_planted() for it.
enum class Mutation {
  kNone,
  kMeanNotDivided,
  kMeanDividedTwice,
  kParameterNotAveraged,
  kRanksCountedAlike,
  kBucketTailDropped,
  kBucketLagsOneStep,
  kMicroBatchTwice,
  kNoSyncIgnored,
  kSyncBoundaryOff,
  kInitialBroadcastMissing,
  kBuffersNotShared,
  kTiedDividedTwice,
  kFrozenUpdated,
  kDropoutOneSeed,
  kShardShifted,
  kSamplesDuplicated,
  kLossNotDivided,
  kGradientsNotUnscaled,
  kOverflowNotSkipped,
  kSkipNotAgreed,
  kMasterNotWritten,
  kWeightDecayTwice,
  kRateAhead,
  kClippedByLocalNorm,
  kStateNotRestored,
  kShardsStale,
  kShardsSummed,
  kMicroBatchesCountedAlike,
  kPipelineRanksCountedAlike,
  kBiasOnEveryRank,
  kReplicaForgotten,
  kReplicaStale,
  kMastersKeepStart,
  kCastsKept,
  kKeptGradientOverwritten,
  kWrappersOverlap,
  kSyncNormUnweighted,
  kEvaluationStale,
  kGatheredChangeRepeated,
  kFrozenGetsZeros,
  kMeanOfMeans,
  kNormCountedPerRank,
  kTiedMastersKeepStart
};

/// A mutation for people: its name, and what is wrong once it is planted.
struct MutationInfo {
  Mutation mutation = Mutation::kNone;
  std::string_view name;
  std::string_view bug;
};

/// All but kNone, in the order of the enumeration.
std::span<const MutationInfo> all_mutations();

/// The mutation of that name.
std::optional<Mutation> mutation_named(std::string_view name);

/// The variable that plants one, in every rank of a run.
inline constexpr const char* kMutateVariable = "LOCKSTEP_MUTATE";

/// The folder in which `lockstep verify` has a run recorded.
inline constexpr const char* kVerifyFolderVariable = "LOCKSTEP_VERIFY_DIR";

/// The bug of this process: what LOCKSTEP_MUTATE named when it started. A name that does not exist
/// is an Error, and so is a bug in a run that is not recorded.
Mutation planted_mutation();

inline bool is_planted(Mutation mutation) {
  return planted_mutation() == mutation;
}

}  // namespace lockstep
