#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/verify/judge.hpp"

namespace lockstep::cli {

double norm_of(const std::vector<double>& values);
double distance_of(const std::vector<double>& a, const std::vector<double>& b);

/// A tensor that differs from the reference by more than its tolerance.
struct WrongTensor {
  std::string key;
  std::vector<double> expected;
  std::vector<double> got;
  double excess = 0;     ///< times the tolerance
  bool missing = false;  ///< the run did not record it
};

/// The first step of a run in which a tensor is wrong although every invariant holds.
struct DiagnosisInput {
  const TracedStep& step;
  const TracedStep& reference;
  const TracedStep* before = nullptr;            ///< null: it is the first
  const TracedStep* reference_before = nullptr;  ///< likewise
  const std::vector<WrongTensor>& wrong;
  const RunFacts& facts;
  std::optional<double> loss = {};
  std::optional<double> reference_loss = {};
};

/// The learning rates of a step, where they are not the reference's.
std::optional<Divergence> differing_rates(const TracedStep& step, const TracedStep& reference);

/// A loss that is not the reference's although all tensors of the step are.
Divergence diagnose_loss(int64_t step, double loss, double expected, double tolerance);

/// Names the first wrong tensor and a likely cause, by what the difference looks like.
Divergence diagnose(const DiagnosisInput& input);

}  // namespace lockstep::cli
