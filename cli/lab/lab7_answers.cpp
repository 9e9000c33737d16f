#include "cli/lab/lab7_answers.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "cli/lab/lab_measures.hpp"
#include "cli/lab/lab_text.hpp"
#include "lockstep/units.hpp"

namespace lockstep::cli {
namespace {

// What most answers look at: the runs with the fewest micro-steps, and those in lower precision.
struct Scene {
  const Lab7Results& results;
  const AccumulationRuns& many;
  const std::string& precision;  // bf16 or fp16
  int64_t rows;                  // of a step with accumulation
  int64_t micro_rows;            // of a step without
  Comparison faster_with_amp;    // than fp32
  Comparison faster_with_many;   // per row, than fp32 alone

  explicit Scene(const Lab7Results& of)
      : results(of),
        many(of.first()),
        precision(of.precision()),
        rows(rows_of(many.no_sync)),
        micro_rows(rows_of(of.fp32)),
        faster_with_amp(compare(of.fp32, of.amp)),
        faster_with_many(compare_per_row(of.fp32, many.no_sync)) {}

  bool one_rank() const { return results.ranks() < 2; }
  bool bf16() const { return precision == "bf16"; }
  std::string noise(const Comparison& of) const {
    return noise_remark(results.others_busy_cores, of);
  }
  std::string shared() const {
    return sharing(results.fp32) > 1 ? " " + shared_remark(results.fp32) : "";
  }
  double saved_by_many() const {
    return -relative_change(peak_of(many.one_batch), peak_of(many.no_sync));
  }
  double saved_by_amp() const {
    return -relative_change(peak_of(results.fp32), peak_of(results.amp));
  }
};

std::string one_rank_remark() {
  return "This run had one rank, so there was nothing to synchronise and it cannot show it; try "
         "--devices cpu:2.";
}

std::string share_text(double fraction) {
  const std::string text = format_share(fraction);
  return text.starts_with("<") ? "less than" + text.substr(1) : text;
}

// How the run that did not divide its loss went on, after a space.
std::string undivided_end(const RunRecord& divided, const RunRecord& undivided) {
  if (divided.losses.empty() || undivided.losses.empty()) return "";
  if (undivided.nonfinite > 0) return " Its loss did not stay finite.";
  return fmt::format(" Its loss after {} steps was {:.3g} instead of {:.3g}.",
                     undivided.losses.size(), undivided.losses.back(), divided.losses.back());
}

// Whether accumulation gave what one batch of all rows gives, after a space.
std::string one_batch_text(const Scene& scene) {
  const auto norms = norm_ratio(scene.many.one_batch, scene.many.no_sync);
  const auto losses =
      loss_deviation(scene.many.one_batch.runs.front(), scene.many.no_sync.runs.front());
  if (!norms || !losses) return "";
  const double apart = std::max(std::abs(*norms - 1), *losses);
  return fmt::format(" One batch of {} rows gave {:.4g}: {}.", scene.rows,
                     gradients_of(scene.many.one_batch)->norm,
                     apart <= kSameNorm ? "accumulation is equivalent to it, but for rounding"
                                        : "norm and losses are up to " + share_text(apart) +
                                              " apart from accumulation's");
}

std::string answer_divided(const Scene& scene) {
  std::string text = fmt::format(
      "backward() adds to the gradients, so {0} micro-steps give the sum of {0} means; each loss "
      "divided by {0} makes it the mean over all {1} rows.",
      scene.many.micro_steps, scene.rows);
  const auto undivided = norm_ratio(scene.many.no_sync, scene.many.undivided);
  if (!undivided) return text + " This run did not record its gradients, so it cannot show it.";
  text += fmt::format(
      " Undivided, the first gradient had the norm {:.4g} instead of {:.4g}, {:.2f} times as much, "
      "and moved the weights as a learning rate of {:.2f} times the size would.",
      gradients_of(scene.many.undivided)->norm, gradients_of(scene.many.no_sync)->norm, *undivided,
      *undivided);
  text += undivided_end(scene.many.no_sync.runs.front(), scene.many.undivided.runs.front());
  return text + one_batch_text(scene);
}

std::string answer_skipped(const Scene& scene) {
  const std::string reason =
      "The optimizer needs only the sum over all micro-steps, and averaging that sum once over the "
      "ranks gives what averaging each part would.";
  if (scene.one_rank()) return reason + " " + one_rank_remark();
  const AllReduces& once = scene.many.no_sync.runs.front().all_reduces;
  const AllReduces& each = scene.many.synced.runs.front().all_reduces;
  std::string text = fmt::format(
      "{} With no_sync an optimizer step made {:g} all-reduces of together {}; synchronising each "
      "of its {} micro-steps made {:g} of together {}.",
      reason, once.count, format_bytes(once.bytes), scene.many.micro_steps, each.count,
      format_bytes(each.bytes));
  if (const auto ratio = norm_ratio(scene.many.no_sync, scene.many.synced)) {
    const double apart = std::abs(*ratio - 1);
    text += apart <= kSameNorm
                ? " The gradient was the same."
                : fmt::format(" The norms of the gradients were {} apart.", format_share(apart));
  }
  return text;
}

std::string answer_without_no_sync(const Scene& scene) {
  if (scene.one_rank()) return one_rank_remark();
  const Comparison slower = compare(scene.many.no_sync, scene.many.synced);
  const AllReduces& once = scene.many.no_sync.runs.front().all_reduces;
  const AllReduces& each = scene.many.synced.runs.front().all_reduces;
  return fmt::format(
             "The weights come out the same, but each of the {} micro-steps sends all gradients: "
             "{} per optimizer step instead of {}. Communication that nothing hid took {} instead "
             "of {}, and a step {} instead of {}: {}.",
             scene.many.micro_steps, format_bytes(each.bytes), format_bytes(once.bytes),
             format_ms(communication_of(scene.many.synced).exposed_ms),
             format_ms(communication_of(scene.many.no_sync).exposed_ms),
             format_ms(pooled_step_ms(scene.many.synced).mean),
             format_ms(pooled_step_ms(scene.many.no_sync).mean),
             format_against(slower, "with no_sync")) +
         scene.shared() + scene.noise(slower);
}

std::string answer_why_mixed(const Scene& scene) {
  std::string text = fmt::format(
      "Values of 16 bits are half the bytes to move, and matrix products have faster instructions "
      "for them. A step took {} in {} and {} in fp32: {}.",
      format_ms(pooled_step_ms(scene.results.amp).mean), scene.precision,
      format_ms(pooled_step_ms(scene.results.fp32).mean),
      format_against(scene.faster_with_amp, "fp32"));
  const auto fp32 = memory_of(scene.results.fp32);
  const auto amp = memory_of(scene.results.amp);
  if (fp32 && amp) {
    text += fmt::format(" Activations and temporaries took {} against {}",
                        format_bytes(amp->activations), format_bytes(fp32->activations));
    text += amp->low_precision > 0 ? fmt::format(", and {} of low-precision weights came on top.",
                                                 format_bytes(amp->low_precision))
                                   : ".";
  }
  return text +
         loss_parity(scene.results.fp32.runs.front(), scene.results.amp.runs.front(), "fp32's") +
         scene.noise(scene.faster_with_amp);
}

std::string answer_why_scaler(const Scene& scene) {
  std::string text =
      "fp16 knows no number between 0 and 6e-8, so small gradients vanish; multiplied by a scale "
      "they survive, and the update divides by it again.";
  if (const auto check = gradients_of(scene.results.fp32)) {
    text += fmt::format(
        " Of the {} gradient values of the first fp32 step fp16 would lose {}, and {} after "
        "multiplication by 65536",
        check->count, share_text(check->fp16_lost), share_text(check->fp16_lost_scaled));
    text += check->fp16_overflow_scaled > 0
                ? fmt::format("; {} would then be too large for it, which is why the scale adapts.",
                              share_text(check->fp16_overflow_scaled))
                : "; none would then be too large for it.";
  } else {
    text += " This run did not record its gradients, so it cannot show how many.";
  }
  if (scene.bf16()) {
    text += " The run itself computed in bf16, which has fp32's range and loses none of them.";
  }
  return text;
}

// What the planted overflow did to both runs, after a space.
std::string overflow_text(const Scene& scene) {
  const RunRecord& with = scene.results.overflow.runs.front();
  const RunRecord& without = scene.results.overflow_no_scaler.runs.front();
  const int64_t at = scene.results.overflow_at;
  const auto skipped =
      std::find_if(with.skipped_steps.begin(), with.skipped_steps.end(),
                   [at](const SkippedStepRecord& step) { return step.step == at; });
  std::string text;
  if (skipped == with.skipped_steps.end()) {
    text =
        fmt::format(" The infinite gradient planted in step {} was not skipped in this run.", at);
  } else {
    text = fmt::format(
        " An infinite gradient was planted in step {}: the scaler skipped that step (it named {}, "
        "and the scale went from {:g} to {:g}), and {} of {} losses were finite.",
        at, skipped->parameter, skipped->scale_before, skipped->scale_after,
        static_cast<int64_t>(with.losses.size()) - with.nonfinite, with.losses.size());
  }
  if (without.nonfinite == 0) return text + " Without the scaler no loss became infinite either.";
  return text + fmt::format(
                    " Without the scaler it reached the weights, and {} of {} losses were "
                    "not finite.",
                    without.nonfinite, without.losses.size());
}

std::string answer_without_scaler(const Scene& scene) {
  std::string text;
  const auto with = gradients_of(scene.results.amp);
  const auto without = gradients_of(scene.results.no_scaler);
  if (scene.bf16()) {
    text = "Small gradients would vanish in fp16; in bf16, which this run used, none do.";
  } else if (with && without) {
    text = fmt::format(
        "Small gradients vanish: {} of the first gradient's values were 0 without a "
        "scaler and {} with it.",
        format_share(without->zero_share), format_share(with->zero_share));
  } else {
    text = "Small gradients vanish; this run did not record how many.";
  }
  return text +
         loss_parity(scene.results.amp.runs.front(), scene.results.no_scaler.runs.front(),
                     "those with a scaler") +
         overflow_text(scene);
}

std::string answer_table(const Scene& scene) {
  const AllReduces& many = scene.many.no_sync.runs.front().all_reduces;
  const AllReduces& amp = scene.results.amp.runs.front().all_reduces;
  std::string text = fmt::format(
      "Accumulation makes a batch of {} rows in the memory of {}: a peak of {} where one batch "
      "needs {}, {:.2f} times the rows per second of plain fp32. {} computes the same batch with "
      "less work: a peak of {} instead of {}, {:.2f} times the rows per second.",
      scene.rows, scene.micro_rows, format_bytes(peak_of(scene.many.no_sync)),
      format_bytes(peak_of(scene.many.one_batch)), scene.faster_with_many.speedup.mean,
      scene.precision, format_bytes(peak_of(scene.results.amp)),
      format_bytes(peak_of(scene.results.fp32)), scene.faster_with_amp.speedup.mean);
  if (scene.one_rank()) {
    return text + " With one rank neither communicates.";
  }
  return text + fmt::format(" Accumulation sends {} for {} rows, {} sends {} for {}.",
                            format_bytes(many.bytes), scene.rows, scene.precision,
                            format_bytes(amp.bytes), scene.micro_rows);
}

std::string answer_memory(const Scene& scene) {
  const double many = scene.saved_by_many();
  const double amp = scene.saved_by_amp();
  const std::string verdict = std::max(many, amp) <= 0 ? "Neither saved any in this run."
                              : many > amp             ? "Accumulation, in this run."
                                                       : "Mixed precision, in this run.";
  return fmt::format(
      "{} With accumulation {} sufficed for {} rows where one batch took {} ({}); {} took {} where "
      "fp32 took {} ({}). Accumulation keeps the activations of one micro-step only; autocast "
      "makes them smaller, but adds copies of the weights, and gradients and weights stay fp32 "
      "with both.",
      verdict, format_bytes(peak_of(scene.many.no_sync)), scene.rows,
      format_bytes(peak_of(scene.many.one_batch)), format_change(-many), scene.precision,
      format_bytes(peak_of(scene.results.amp)), format_bytes(peak_of(scene.results.fp32)),
      format_change(-amp));
}

std::string answer_speed(const Scene& scene) {
  const Comparison& many = scene.faster_with_many;
  const Comparison& amp = scene.faster_with_amp;
  const double margin = std::max(many.margin(), amp.margin());
  const double apart = amp.speedup.mean - many.speedup.mean;
  const std::string verdict = std::abs(apart) <= margin ? "Neither clearly, in this run."
                              : apart > 0               ? "Mixed precision, in this run."
                                                        : "Accumulation, in this run.";
  std::string text = fmt::format(
      "{} Against plain fp32 the rows per second were {} times with {} and {} times with {} "
      "micro-steps. Precision speeds up the products themselves; accumulation only saves {}.",
      verdict, format_speedup(amp), scene.precision, format_speedup(many), scene.many.micro_steps,
      scene.one_rank() ? "updates, and with several ranks communication"
                       : "communication and updates, which are made once per step");
  return text + scene.shared() + scene.noise(amp.unsafe ? amp : many);
}

std::string answer_combined(const Scene& scene) {
  const RunSet& both = scene.results.combined;
  const Comparison faster = compare_per_row(scene.results.fp32, both);
  return fmt::format(
             "Yes: they act on different things. {} micro-steps in {} trained {} times the rows "
             "per "
             "second of plain fp32 ({:.2f} with accumulation alone, {:.2f} with {} alone), at a "
             "peak of "
             "{} for {} rows. The accumulation logic stays as it is: the divided loss is scaled, "
             "and the "
             "scaler steps once, after the last micro-step.",
             scene.many.micro_steps, scene.precision, format_speedup(faster),
             scene.faster_with_many.speedup.mean, scene.faster_with_amp.speedup.mean,
             scene.precision, format_bytes(peak_of(both)), rows_of(both)) +
         loss_parity(scene.many.no_sync.runs.front(), both.runs.front(),
                     "those of accumulation in fp32") +
         scene.noise(faster);
}

}  // namespace

std::vector<Answer> answer_lab7(const Lab7Results& results) {
  const Scene scene(results);
  return {
      {"accumulation", "Why is the loss divided?", answer_divided(scene)},
      {"accumulation", "Why is synchronisation skipped?", answer_skipped(scene)},
      {"accumulation", "What happens without no_sync?", answer_without_no_sync(scene)},
      {"precision", "Why mixed precision?", answer_why_mixed(scene)},
      {"precision", "Why is a GradScaler needed?", answer_why_scaler(scene)},
      {"precision", "What happens without it?", answer_without_scaler(scene)},
      {"comparison", "How do goal, memory, speed and communication compare?", answer_table(scene)},
      {"comparison", "Which saves more memory?", answer_memory(scene)},
      {"comparison", "Which gains more speed?", answer_speed(scene)},
      {"comparison", "Can they be combined?", answer_combined(scene)},
  };
}

}  // namespace lockstep::cli
