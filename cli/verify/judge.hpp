#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cli/verify/divergence.hpp"
#include "cli/verify/traced_run.hpp"

namespace lockstep::cli {

enum class Verdict { kSameBits, kRounding, kReordered, kExplained, kWrong };

const char* verdict_text(Verdict verdict);

/// How far two runs of one rank get from each other if each weight begins one unit in the last
/// place apart: the tolerance of a tensor at a step is a multiple of that distance. Nothing is
/// guessed: a chaotic model has a large one, and the report shows it.
///
/// Note [A tensor's own tolerance] Each tensor has its own. A gradient that is zero but for
/// rounding, as that of a bias before a normalisation, moves by as much as it is long; it must not
/// lend that to others. Where a tensor hardly moves by chance, it is given what half of its kind
/// move.
class RoundingGrowth {
 public:
  /// Distances are compared in the 2-norm. The safety covers that a regrouped sum makes an error in
  /// each gradient of each step, and the perturbation one in each weight at the first.
  static constexpr double kSafety = 8;

  void add(const TracedRun& reference, const TracedRun& perturbed);

  /// The tolerance for a tensor of this norm.
  double tolerance(int64_t step, const std::string& key, double norm) const;

  /// The tolerance for a loss, in a precision of this spacing.
  double loss_tolerance(int64_t step, double loss, double spacing) const;

 private:
  using StepKey = std::pair<int64_t, std::string>;  // step, key or kind
  std::map<StepKey, double> distances_;
  std::map<StepKey, std::vector<double>> relative_;  // [step, kind] distances by norms
  std::map<StepKey, double> largest_norm_;           // [step, kind]
  std::map<int64_t, double> losses_;                 // [step] distances
};

/// What is known of a run in addition to what it recorded.
struct RunFacts {
  bool divides_rows = false;  ///< over ranks, devices, micro-steps or micro-batches
  bool same_bits = false;     ///< nothing may differ: both have virtual shards, or are one layout
  int64_t resumed_after = 0;  ///< the step of the checkpoint it was resumed from; 0: none
  int64_t micro_steps = 1;    ///< of an update
  int ranks = 1;
  int processes = 0;  ///< each of which must record every step; 0: not known
};

/// What comparing a run with its reference showed.
struct Judgement {
  Verdict verdict = Verdict::kSameBits;
  std::optional<Divergence> finding;  ///< with kWrong
  std::string explanation;            ///< with kExplained
  int64_t steps = 0;
  int64_t tensors = 0;             ///< compared with the reference
  int64_t loose = 0;               ///< of these, with a tolerance of more than half their norm
  bool inside = false;             ///< several ranks recorded it, so that they could be compared
  bool is_parallel = false;        ///< it divided something: else it is the reference once more
  bool is_other_training = false;  ///< its updates have more rows than the reference's
  std::vector<std::string> unrecorded = {};  ///< what several ranks did not record of their inside
  double largest = 0;                        ///< difference, relative to the tensor's norm
  double largest_tolerance = 0;              ///< that this tensor had, relative likewise
  std::string largest_at;                    ///< its key
};

Judgement judge(const TracedRun& reference, const RoundingGrowth& growth, const TracedRun& run,
                const RunFacts& facts);

/// The spacing of numbers in the precision that a run computed in.
double spacing_of(const TracedStep& step);

}  // namespace lockstep::cli
