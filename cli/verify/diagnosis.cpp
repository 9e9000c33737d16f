#include "cli/verify/diagnosis.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "cli/verify/least_squares.hpp"

namespace lockstep::cli {
namespace {

// A wrong tensor as a multiple of what it should be.
struct Multiple {
  double ratio = 0;
  double rest = 0;  // relative to what it should be
};

Multiple multiple_of(const WrongTensor& difference) {
  const Fit fit = least_squares({difference.expected}, difference.got);
  double rest = 0;
  for (size_t i = 0; i < difference.got.size(); ++i) {
    const double left = difference.got[i] - fit.coefficients[0] * difference.expected[i];
    rest += left * left;
  }
  const double norm = norm_of(difference.expected);
  return {fit.coefficients[0], norm > 0 ? std::sqrt(rest) / norm : INFINITY};
}

std::vector<const WrongTensor*> of_kind(const DiagnosisInput& input, const char* kind) {
  std::vector<const WrongTensor*> found;
  for (const auto& each : input.wrong) {
    if (each.key.starts_with(kind)) found.push_back(&each);
  }
  return found;
}

size_t tensors_of_kind(const TracedStep& step, const char* kind) {
  size_t count = 0;
  for (const auto& [key, pieces] : step.pieces) count += key.starts_with(kind) ? 1 : 0;
  return count;
}

const WrongTensor& worst_of(const std::vector<const WrongTensor*>& wrong) {
  return **std::max_element(wrong.begin(), wrong.end(),
                            [](const auto* a, const auto* b) { return a->excess < b->excess; });
}

Divergence found_at(const DiagnosisInput& input, const WrongTensor& where, const char* cause,
                    std::string text) {
  return {input.step.step, parameter_of(where.key), {}, cause, std::move(text)};
}

bool is_finite(const std::vector<double>& values) {
  return std::all_of(values.begin(), values.end(), [](double each) { return std::isfinite(each); });
}

// What a ratio of all gradients may come from.
std::string ratio_text(const DiagnosisInput& input, double ratio) {
  const auto is = [ratio](double wanted) { return std::abs(ratio / wanted - 1) < 0.01; };
  const auto micro_steps = static_cast<double>(input.facts.micro_steps);
  if (micro_steps > 1 && is(micro_steps)) {
    return fmt::format("ratio {:.2f}: the loss was not divided by the {} micro-steps", ratio,
                       input.facts.micro_steps);
  }
  if (micro_steps > 1 && is(1 / micro_steps)) {
    return fmt::format("ratio {:.3f}: the loss was divided by the {} micro-steps twice", ratio,
                       input.facts.micro_steps);
  }
  if (input.facts.ranks > 1 && (is(input.facts.ranks) || is(1.0 / input.facts.ranks))) {
    return fmt::format("ratio {:.3f}: divided by the wrong count of {} ranks", ratio,
                       input.facts.ranks);
  }
  const double power = std::log2(std::abs(ratio));
  if (power >= 8 && std::abs(power - std::round(power)) < 0.01) {
    return fmt::format("ratio 2^{:.0f}: the gradients still carry the loss scale", power);
  }
  return fmt::format("ratio {:.4g}: clipped by another norm, or divided by the wrong count", ratio);
}

// All tensors are the same multiple of what they should be.
std::optional<double> common_ratio(const std::vector<const WrongTensor*>& wrong, double rest) {
  std::optional<double> ratio;
  for (const auto* each : wrong) {
    if (each->missing || norm_of(each->expected) == 0) continue;
    const Multiple multiple = multiple_of(*each);
    if (multiple.rest > rest * std::max(1.0, std::abs(multiple.ratio))) return std::nullopt;
    if (ratio && std::abs(multiple.ratio / *ratio - 1) > 0.02) return std::nullopt;
    ratio = multiple.ratio;
  }
  return ratio;
}

bool equals_earlier(const DiagnosisInput& input, const WrongTensor& difference) {
  if (input.reference_before == nullptr) return false;
  const auto earlier = input.reference_before->merged(difference.key);
  if (!earlier || earlier->size() != difference.got.size()) return false;
  return distance_of(*earlier, difference.got) <= 1e-3 * norm_of(difference.got);
}

Divergence diagnose_gradients(const DiagnosisInput& input,
                              const std::vector<const WrongTensor*>& wrong) {
  const WrongTensor& worst = worst_of(wrong);
  const size_t all = tensors_of_kind(input.reference, "gradient/");
  const std::string of_all = fmt::format(" ({} of {} gradients)", wrong.size(), all);
  if (std::any_of(wrong.begin(), wrong.end(), [](const auto* each) { return each->missing; })) {
    return found_at(input, **wrong.begin(), "gradient-missing",
                    "the update used no gradient of it" + of_all);
  }
  if (!is_finite(worst.got) || !std::all_of(wrong.begin(), wrong.end(), [](const auto* each) {
        return is_finite(each->got);
      })) {
    const auto spoiled = std::find_if(wrong.begin(), wrong.end(),
                                      [](const auto* each) { return !is_finite(each->got); });
    return found_at(
        input, **spoiled, "overflow-not-skipped",
        "an infinite or NaN gradient reached the update, which the reference skipped" + of_all);
  }
  if (equals_earlier(input, worst)) {
    return found_at(input, worst, "lags-one-step",
                    "the gradient is that of the step before" + of_all);
  }
  const double loose = std::max(1e-3, 8 * spacing_of(input.reference));
  const auto ratio = common_ratio(wrong, loose);
  if (ratio && std::abs(*ratio - 1) < 0.01) {
    return found_at(input, worst, "slightly-off",
                    fmt::format("it is within {:.1e} of the right one, and {:.1f} times as far as "
                                "rounding explains: another precision, or another order of sums{}",
                                distance_of(worst.expected, worst.got) / norm_of(worst.expected),
                                worst.excess, of_all));
  }
  if (ratio) {
    if (wrong.size() == all) {
      return found_at(input, worst, "scaled", ratio_text(input, *ratio) + of_all);
    }
    return found_at(input, worst, "parameter-scaled",
                    fmt::format("ratio {:.3f}, others are right: counted, divided or averaged once "
                                "too often{}",
                                *ratio, of_all));
  }
  const bool loss_is_known = input.loss && input.reference_loss;
  const double loss_error = loss_is_known ? std::abs(*input.loss - *input.reference_loss) /
                                                std::max(1e-12, std::abs(*input.reference_loss))
                                          : 0;
  const double loss_bound = std::max(1e-5, 4 * spacing_of(input.reference));
  if (input.before != nullptr) {
    return found_at(
        input, worst, "stale-weights",
        fmt::format("all weights were right after step {}, and this step's {} wrong: it "
                    "computed with older weights, or with other rows{}",
                    input.before->step,
                    loss_error > loss_bound ? "loss and gradients are" : "gradients are", of_all));
  }
  if (loss_is_known && loss_error > loss_bound) {
    return found_at(input, worst, "forward-wrong",
                    fmt::format("the loss is {:.6g} and should be {:.6g}: the forward is wrong, or "
                                "its parts are weighted wrongly{}",
                                *input.loss, *input.reference_loss, of_all));
  }
  return found_at(input, worst, "rows-weighted-wrongly",
                  "the weights are right and the gradient is not a multiple of the right one: "
                  "rows are left out, counted twice or weighted wrongly" +
                      of_all);
}

std::vector<double> minus(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> difference(a.size());
  for (size_t i = 0; i < a.size(); ++i) difference[i] = a[i] - b[i];
  return difference;
}

Divergence diagnose_update(const DiagnosisInput& input,
                           const std::vector<const WrongTensor*>& wrong) {
  const WrongTensor& worst = worst_of(wrong);
  const std::string name = parameter_of(worst.key);
  const std::string of_all =
      fmt::format(" ({} of {} weights)", wrong.size(), tensors_of_kind(input.reference, "weight/"));
  const bool has_gradient = input.reference.pieces.contains("gradient/" + name);
  if (!has_gradient && !input.step.is_skipped(0)) {
    return found_at(input, worst, "frozen-changed",
                    "it has no gradient and must not change, and it did" + of_all);
  }
  if (auto rate = differing_rates(input.step, input.reference)) {
    rate->where = name;
    rate->text += of_all;
    return *rate;
  }
  // What was added to the right update, as a multiple of the gradient's error or of the weight.
  const auto extra = minus(worst.got, worst.expected);
  const auto gradient = input.step.merged("gradient/" + name);
  const auto right = input.reference.merged("gradient/" + name);
  if (gradient && right && gradient->size() == extra.size() && right->size() == extra.size() &&
      least_squares({minus(*gradient, *right)}, extra).residual < 0.3) {
    const std::string text =
        "the update is what its gradient makes it, and that gradient is wrong by less than its own "
        "tolerance: ";
    return input.before == nullptr
               ? found_at(input, worst, "slightly-off", text + "another precision" + of_all)
               : found_at(input, worst, "stale-weights",
                          fmt::format("{}all weights were right after step {}, so it was computed "
                                      "with older ones, or with other rows{}",
                                      text, input.before->step, of_all));
  }
  const Fit decay = least_squares({worst.expected}, extra);
  if (decay.residual < 0.3) {  // the weight has moved since it was multiplied
    return found_at(input, worst, "weight-decay",
                    fmt::format("gradients are right; the weight is {:.3g} times itself too {}: "
                                "weight decay was applied once more or less{}",
                                std::abs(decay.coefficients[0]),
                                decay.coefficients[0] < 0 ? "small" : "large", of_all));
  }
  return found_at(input, worst, "update-differs",
                  "gradients and rates are right, and the update is not" + of_all);
}

}  // namespace

double norm_of(const std::vector<double>& values) {
  double sum = 0;
  for (const double each : values) sum += each * each;
  return std::sqrt(sum);
}

// Elements that are the same infinity or NaN in both are no difference.
double distance_of(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const bool same = a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i]));
    const double difference = same ? 0 : a[i] - b[i];
    sum += difference * difference;
  }
  return std::sqrt(sum);
}

std::optional<Divergence> differing_rates(const TracedStep& step, const TracedStep& reference) {
  const auto theirs = reference.rates();
  for (const auto& [name, rate] : step.rates()) {
    const auto known = theirs.find(name);
    if (known == theirs.end() || known->second == rate) continue;
    return Divergence{
        step.step,
        name,
        {},
        "rate-differs",
        fmt::format("the learning rate is {:.6g} and should be {:.6g}", rate, known->second)};
  }
  return std::nullopt;
}

Divergence diagnose_loss(int64_t step, double loss, double expected, double tolerance) {
  return {
      step,
      "",
      {},
      "loss-differs",
      fmt::format("gradients and weights are right; the mean of the ranks' losses is {:.6g} and "
                  "should be {:.6g}, ratio {:.4g}: {:.2g} times what rounding explains",
                  loss, expected, loss / expected, std::abs(loss - expected) / tolerance)};
}

Divergence diagnose(const DiagnosisInput& input) {
  const auto gradients = of_kind(input, "gradient/");
  const bool skipped = input.step.is_skipped(0);
  if (skipped != input.reference.is_skipped(0)) {
    return {input.step.step,
            "",
            {},
            skipped ? "skipped" : "overflow-not-skipped",
            skipped ? "the step was skipped, and the reference made it"
                    : "the step was made, and the reference skipped it"};
  }
  const bool resumed = input.facts.resumed_after > 0 && input.step.step > input.facts.resumed_after;
  const auto states = of_kind(input, "state/");
  if (!gradients.empty()) return diagnose_gradients(input, gradients);
  if (resumed && !states.empty()) {
    return found_at(input, worst_of(states), "state-not-restored",
                    fmt::format("right before the resume after step {}: the optimizer's state is "
                                "not the saved one ({} tensors)",
                                input.facts.resumed_after, states.size()));
  }
  const auto weights = of_kind(input, "weight/");
  if (!weights.empty()) return diagnose_update(input, weights);
  if (!states.empty()) {
    return found_at(input, worst_of(states), "state-differs",
                    fmt::format("gradients and weights are right, and the optimizer's state is not "
                                "({} tensors)",
                                states.size()));
  }
  const WrongTensor& first = input.wrong.front();
  return found_at(input, first, "buffer-differs", "the buffer is not the reference's");
}

}  // namespace lockstep::cli
