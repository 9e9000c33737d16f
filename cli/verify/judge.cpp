#include "cli/verify/judge.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "cli/verify/diagnosis.hpp"

namespace lockstep::cli {
namespace {

using Values = std::vector<double>;

// "gradient", "weight", "buffer", or a state's name.
std::string kind_of(const std::string& key) {
  return key.starts_with("state/") ? key.substr(key.rfind('/')) : key.substr(0, key.find('/'));
}

bool is_compared(const std::string& key) {
  return !key.starts_with("local/") && !key.starts_with("rounded/");
}

bool has_wrapper(const TracedStep& step, const char* name) {
  return step.words("wrappers").contains(name);
}

int64_t forwards_of(const TracedStep& step) {
  int64_t count = 0;
  for (const auto& [rank, facts] : step.facts) count += facts.at("forwards").get<int64_t>();
  return count;
}

bool scales_gradients(const TracedStep& step) {
  return std::any_of(step.updates.begin(), step.updates.end(), [](const auto& each) {
    return std::any_of(each.second.begin(), each.second.end(),
                       [](const auto& update) { return factor_of(update) != 1; });
  });
}

bool draws_in_forward(const TracedStep& step) {
  const auto kinds = step.words("kinds");
  return kinds.contains("dropout") || kinds.contains("random");
}

// Virtual shards promise every bit where both runs cut a batch into the same parts: each has a
// forward. Stages draw other random numbers in another cut, and a norm of parts is another sum.
bool has_same_parts(const TracedStep& step, const TracedStep& reference) {
  if (!has_wrapper(step, "virtual_shards") || !has_wrapper(reference, "virtual_shards")) {
    return false;
  }
  if (forwards_of(step) != forwards_of(reference)) return false;
  if (has_wrapper(step, "pipeline") && draws_in_forward(step)) return false;
  return step.holds_parts() == reference.holds_parts() || !scales_gradients(step);
}

// Whether random numbers and statistics are those of a part of the rows. Ranks that hold parts of a
// layer draw the numbers of the whole layer.
bool has_rows_apart(const TracedStep& step, const RunFacts& facts) {
  return ranks_with_rows(step) != 1 || facts.micro_steps > 1 || has_wrapper(step, "pipeline") ||
         has_wrapper(step, "data_parallel");
}

// Why a correct run may differ from the reference by more than rounding.
struct Excuse {
  std::string text;                // "": it may not
  bool is_other_training = false;  // with steps and rates of its own
};

Excuse excuse_of(const TracedStep& step, const TracedStep& reference, const RunFacts& facts) {
  if (!facts.divides_rows || facts.same_bits) return {};
  const size_t rows = rows_of(step);
  const size_t wanted = rows_of(reference);
  if (wanted > 0 && rows > wanted) {
    return {fmt::format("an update has {} rows, and one of the reference {}: another training",
                        rows, wanted),
            true};
  }
  if (!has_rows_apart(step, facts)) return {};
  const auto kinds = step.words("kinds");
  if (draws_in_forward(step)) {
    return {"dropout, or other random numbers of the model: each rank draws its own"};
  }
  if (kinds.contains("batch_norm")) return {"BatchNorm: each rank normalises by its own rows"};
  if (kinds.contains("sync_batch_norm") && facts.micro_steps > 1) {
    return {"SyncBatchNorm: each micro-step normalises by its own rows"};
  }
  return {};
}

// A check that looks at too few ranks, or at parameters under other names, would pass for nothing.
std::optional<Divergence> unusable(const TracedStep& step, const TracedStep& reference,
                                   const RunFacts& facts) {
  const auto recorded = static_cast<int>(step.facts.size());
  if (facts.processes > 0 && recorded != facts.processes) {
    return Divergence{step.step,
                      "",
                      {},
                      "rank-missing",
                      fmt::format("{} of {} processes recorded it: each must be a rank of the job, "
                                  "and make every update",
                                  recorded, facts.processes)};
  }
  for (const auto& [key, pieces] : step.pieces) {
    if (!key.starts_with("weight/") || reference.pieces.contains(key)) continue;
    return Divergence{step.step,
                      parameter_of(key),
                      {pieces.front().rank},
                      "name-unknown",
                      "the reference has no parameter of this name: give it its name in the whole "
                      "model by lockstep::verify_name"};
  }
  return std::nullopt;
}

// A run that was to resume, and has begun anew or was never killed.
std::optional<Divergence> not_resumed(const TracedStep& step, const RunFacts& facts) {
  if (facts.resumed_after == 0 || step.step <= facts.resumed_after + 1) return std::nullopt;
  for (const auto& [rank, own] : step.facts) {
    if (own.value("resumed_after", int64_t{0}) > 0) continue;
    return Divergence{
        step.step,
        "",
        {rank},
        "not-resumed",
        fmt::format("the process that made this step had loaded no checkpoint, and one "
                    "of step {} should exist: the program ignores it, or the rank "
                    "was not killed in step {}",
                    facts.resumed_after, facts.resumed_after + 2)};
  }
  return std::nullopt;
}

// What the checks inside a run had nothing of.
std::vector<std::string> unrecorded_of(const TracedStep& step) {
  std::vector<std::string> missing;
  const size_t ranks = ranks_with_rows(step);
  if (ranks == 0) missing.emplace_back("rows");
  const bool averages = std::any_of(step.facts.begin(), step.facts.end(), [](const auto& each) {
    return !each.second.at("averages").empty();
  });
  // Ranks that hold one model average nothing. With virtual shards every bit is compared instead.
  if (!averages && ranks != 1 && !has_wrapper(step, "virtual_shards")) {
    missing.emplace_back("averages");
  }
  return missing;
}

// Every bit was promised, so the first tensor that differs is the finding.
Divergence differing_bits(int64_t step, const std::vector<WrongTensor>& wrong,
                          const RunFacts& facts) {
  const WrongTensor& first = wrong.front();
  size_t count = 0;
  for (size_t i = 0; i < first.got.size(); ++i) count += first.got[i] != first.expected[i] ? 1 : 0;
  return {step,
          parameter_of(first.key),
          {},
          "bits-differ",
          first.missing
              ? fmt::format("{} was not recorded", first.key)
              : fmt::format("{} of {} elements of {} differ from {} may", count, first.got.size(),
                            first.key,
                            facts.resumed_after > 0 ? "the run that was not killed: none"
                                                    : "one rank's: with virtual shards none")};
}

}  // namespace

double spacing_of(const TracedStep& step) {
  if (step.facts.empty()) return 0x1p-23;
  const auto dtype = step.facts.begin()->second.at("dtype").get<std::string>();
  if (dtype == "bfloat16") return 0x1p-7;
  return dtype == "float16" ? 0x1p-10 : 0x1p-23;
}

const char* verdict_text(Verdict verdict) {
  switch (verdict) {
    case Verdict::kSameBits:
      return "same bits";
    case Verdict::kRounding:
      return "rounding";
    case Verdict::kReordered:
      return "reordered sums";
    case Verdict::kExplained:
      return "explained";
    case Verdict::kWrong:
      return "WRONG";
  }
  return "";
}

double RoundingGrowth::loss_tolerance(int64_t step, double loss, double spacing) const {
  const auto own = losses_.find(step);
  const double far = own == losses_.end() ? 0 : own->second;
  return kSafety * std::max(far, spacing * std::abs(loss)) + 1e-30;
}

void RoundingGrowth::add(const TracedRun& reference, const TracedRun& perturbed) {
  const auto losses = reference.losses();
  const auto moved_losses = perturbed.losses();
  for (const int64_t number : reference.steps()) {
    if (std::find(perturbed.steps().begin(), perturbed.steps().end(), number) ==
        perturbed.steps().end()) {
      continue;
    }
    if (losses.contains(number) && moved_losses.contains(number)) {
      double& known = losses_[number];
      const double far = std::abs(losses.at(number) - moved_losses.at(number));
      if (std::isfinite(far)) known = std::max(known, far);
    }
    const TracedStep step = reference.read(number);
    const TracedStep moved = perturbed.read(number);
    for (const auto& [key, pieces] : step.pieces) {
      if (!is_compared(key)) continue;
      const auto before = step.merged(key);
      const auto after = moved.merged(key);
      if (!before || !after || before->size() != after->size()) continue;
      const double far = distance_of(*before, *after);
      const double norm = norm_of(*before);
      if (!std::isfinite(far)) continue;
      double& known = distances_[{number, key}];
      known = std::max(known, far);
      const StepKey kind(number, kind_of(key));
      if (norm > 0) relative_[kind].push_back(far / norm);
      largest_norm_[kind] = std::max(largest_norm_[kind], norm);
    }
  }
}

double RoundingGrowth::tolerance(int64_t step, const std::string& key, double norm) const {
  const StepKey kind(step, kind_of(key));
  const auto own = distances_.find({step, key});
  const double far = own == distances_.end() ? 0 : own->second;
  double of_kind = 0;
  if (const auto found = relative_.find(kind); found != relative_.end()) {
    auto all = found->second;
    const auto middle = all.begin() + static_cast<std::ptrdiff_t>(all.size() / 2);
    std::nth_element(all.begin(), middle, all.end());
    of_kind = *middle * norm;
  }
  // A gradient that cancels out is rounded in the size of its terms, not in its own.
  double size = norm;
  if (key.starts_with("gradient/") && largest_norm_.contains(kind)) size = largest_norm_.at(kind);
  return kSafety * std::max({far, of_kind, 0x1p-23 * size}) + 1e-30;
}

Judgement judge(const TracedRun& reference, const RoundingGrowth& growth, const TracedRun& run,
                const RunFacts& given) {
  Judgement result;
  bool same_bits = true;
  std::optional<TracedStep> before;
  std::optional<TracedStep> reference_before;
  const auto reference_losses = reference.losses();
  const auto losses = run.losses();
  for (const int64_t number : run.steps()) {
    const auto& known = reference.steps();
    if (std::find(known.begin(), known.end(), number) == known.end()) continue;
    TracedStep step = run.read(number);
    TracedStep wanted = reference.read(number);
    find_batch_dimension(step, wanted);
    RunFacts facts = given;
    facts.same_bits = facts.same_bits || has_same_parts(step, wanted);
    ++result.steps;
    if (trains_alone(step, wanted)) return result;
    const auto [excuse, is_other] = excuse_of(step, wanted, facts);
    if (!excuse.empty()) result.explanation = excuse;
    result.is_other_training = result.is_other_training || is_other;
    result.inside = result.inside || step.facts.size() > 1;
    result.is_parallel = result.is_parallel || result.inside || facts.micro_steps > 1 ||
                         has_wrapper(step, "data_parallel") || has_wrapper(step, "pipeline");
    if (step.facts.size() > 1) result.unrecorded = unrecorded_of(step);
    auto found = unusable(step, wanted, facts);
    if (!found) found = not_resumed(step, facts);
    if (!found) found = broken_invariant(step, before ? &*before : nullptr, &wanted);
    if (!found && !excuse.empty() && !is_other) found = differing_rates(step, wanted);
    if (found) {
      result.verdict = Verdict::kWrong;
      result.finding = std::move(found);
      return result;
    }
    std::vector<WrongTensor> wrong;
    for (const auto& [key, pieces] : wanted.pieces) {
      if (!is_compared(key)) continue;
      const auto expected = wanted.merged(key);
      const auto got = step.merged(key);
      if (!expected) continue;
      if (!got || got->size() != expected->size()) {
        wrong.push_back({key, expected.value(), {}, 0, true});
        continue;
      }
      if (!excuse.empty()) continue;
      ++result.tensors;
      const double far = distance_of(*expected, *got);
      if (far == 0) continue;
      same_bits = false;
      const double norm = norm_of(*expected);
      const double tolerance = facts.same_bits ? 0 : growth.tolerance(number, key, norm);
      if (tolerance > norm / 2) ++result.loose;
      const double relative = norm > 0 ? far / norm : INFINITY;
      if (norm > 0 && relative > result.largest) {
        result.largest = relative;
        result.largest_tolerance = tolerance / norm;
        result.largest_at = key;
      }
      if (!(far <= tolerance)) wrong.push_back({key, *expected, *got, far / tolerance, false});
    }
    if (!wrong.empty() && excuse.empty()) {
      DiagnosisInput input{.step = step,
                           .reference = wanted,
                           .before = before ? &*before : nullptr,
                           .reference_before = reference_before ? &*reference_before : nullptr,
                           .wrong = wrong,
                           .facts = facts};
      if (reference_losses.contains(number) && losses.contains(number)) {
        input.loss = losses.at(number);
        input.reference_loss = reference_losses.at(number);
      }
      result.verdict = Verdict::kWrong;
      result.finding = facts.same_bits ? differing_bits(number, wrong, facts) : diagnose(input);
      return result;
    }
    // Of several micro-steps a program may tell the last one's loss.
    if (excuse.empty() && facts.micro_steps == 1 && reference_losses.contains(number) &&
        losses.contains(number)) {
      const double expected = reference_losses.at(number);
      const double tolerance =
          growth.loss_tolerance(number, expected, std::max(spacing_of(step), spacing_of(wanted)));
      if (std::abs(losses.at(number) - expected) > tolerance) {
        result.verdict = Verdict::kWrong;
        result.finding = diagnose_loss(number, losses.at(number), expected, tolerance);
        return result;
      }
    }
    before = std::move(step);
    reference_before = std::move(wanted);
  }
  if (result.steps == 0) {
    result.verdict = Verdict::kWrong;
    result.finding = Divergence{
        0,
        "",
        {},
        "nothing-recorded",
        run.steps().empty() ? "it recorded no update" : "no step of it is in the reference"};
  } else if (!result.is_other_training && run.steps() != reference.steps()) {
    const auto [ours, theirs] = std::mismatch(run.steps().begin(), run.steps().end(),
                                              reference.steps().begin(), reference.steps().end());
    result.verdict = Verdict::kWrong;
    result.finding =
        Divergence{theirs == reference.steps().end() ? *ours : *theirs,
                   "",
                   {},
                   "steps-missing",
                   fmt::format("it made {} updates, up to {}, and the reference {}, up to {}",
                               run.steps().size(), run.steps().back(), reference.steps().size(),
                               reference.steps().back())};
  } else if (!result.explanation.empty()) {
    result.verdict = Verdict::kExplained;
  } else if (!same_bits) {
    result.verdict = given.divides_rows ? Verdict::kReordered : Verdict::kRounding;
  }
  return result;
}

}  // namespace lockstep::cli
