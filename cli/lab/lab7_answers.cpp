// The questions of practical 7, answered from its records.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "cli/lab/lab7.hpp"
#include "lockstep/units.hpp"

namespace lockstep::cli::practical7 {
namespace {

const std::string kOneRank =
    "This run had one rank, so there was nothing to synchronise and it cannot show it; try "
    "--devices cpu:2.";

// "none of them", "less than 0.001 % of them", "12 % of them".
std::string share_of_them(double fraction) {
  if (fraction == 0) return "none of them";
  const std::string text = format_share(fraction);
  return (text.starts_with("<") ? "less than" + text.substr(1) : text) + " of them";
}

// Two times with their deviations: "469 ± 57 ms instead of 521 ± 29 ms".
std::string step_instead(const RunSet& now, const RunSet& before) {
  return fmt::format("{} instead of {}", step_with_deviation(now), step_with_deviation(before));
}

// Whether accumulation gave what one batch of all rows gives, after a space.
std::string one_batch_text(const AnswerContext& context) {
  const auto norms = norm_ratio(context.one_batch, context.accumulated);
  const auto losses = loss_deviation(context.one_batch.first(), context.accumulated.first());
  if (!norms || !losses) return "";
  const double apart = std::max(std::abs(*norms - 1), *losses);
  const std::string both = fmt::format(
      " The first gradient's norm was {:.4g}, and {:.4g} with one batch of {} rows",
      gradients_of(context.accumulated)->norm, gradients_of(context.one_batch)->norm, context.rows);
  if (apart <= kSameNorm) {
    return both + ": accumulation is equivalent to it, except for rounding.";
  }
  return both + fmt::format("; norm and losses were {} apart.", at_most(apart));
}

std::string answer_divided(const AnswerContext& context) {
  return fmt::format(
             "backward() adds to the gradients, so {0} micro-steps give the sum of {0} means; "
             "dividing each loss by {0} makes it the mean over all {1} rows, as in one large "
             "batch.{2} Undivided, gradients and with them the steps of the optimizer are {0} "
             "times as large: the learning rate is in effect {0} times what was chosen. ",
             context.micro_steps, context.rows, one_batch_text(context)) +
         context.divisor_text();
}

std::string answer_skipped(const AnswerContext& context) {
  const std::string reason =
      "The optimizer needs only the sum over all micro-steps, and averaging that sum once over the "
      "ranks gives what averaging each part would.";
  if (context.one_rank()) return reason + " " + kOneRank;
  std::string text = fmt::format(
      "{} With no_sync an optimizer step made {} ({}); synchronising in each of its {} micro-steps "
      "made {} ({}).",
      reason, count_all_reduces(context.accumulated),
      format_bytes(context.accumulated.first().all_reduces.bytes), context.micro_steps,
      count_all_reduces(context.synced), format_bytes(context.synced.first().all_reduces.bytes));
  if (const auto ratio = norm_ratio(context.accumulated, context.synced)) {
    const double apart = std::abs(*ratio - 1);
    text += apart <= kSameNorm ? " The norm of the first gradient was the same."
                               : fmt::format(" The norms of the first gradients were {} apart.",
                                             format_share(apart));
  }
  return text;
}

std::string answer_without_no_sync(const AnswerContext& context) {
  if (context.one_rank()) return kOneRank;
  std::string text = fmt::format(
      "Each of the {} micro-steps sends all gradients: {} per optimizer step instead of {}.",
      context.micro_steps, format_bytes(context.synced.first().all_reduces.bytes),
      format_bytes(context.accumulated.first().all_reduces.bytes));
  text += loss_parity(context.accumulated.first(), context.synced.first(), "those with no_sync");
  text += fmt::format(" Communication that no computation hid took {} instead of {}, and a step {}",
                      format_ms(communication_of(context.synced).exposed_ms),
                      format_ms(communication_of(context.accumulated).exposed_ms),
                      step_instead(context.synced, context.accumulated));
  if (context.times_count()) {
    text += fmt::format(
        ": it was {}",
        format_against(compare_rows(context.accumulated, context.synced), "with no_sync"));
  }
  return text + "." + sharing_sentence(context.fp32);
}

std::string answer_why_mixed(const AnswerContext& context) {
  std::string text = fmt::format(
      "Values of 16 bits are half the bytes to move, and matrix products have faster instructions "
      "for them. A step took {} in {} and {} in fp32",
      step_with_deviation(context.amp), context.precision, step_with_deviation(context.fp32));
  text += context.times_count()
              ? fmt::format(": it was {}.", format_against(context.faster_with_amp, "in fp32"))
              : ".";
  const auto fp32 = memory_of(context.fp32);
  const auto amp = memory_of(context.amp);
  if (fp32 && amp) {
    text += fmt::format(" Activations and temporaries took {} instead of {}",
                        format_bytes(amp->activations), format_bytes(fp32->activations));
    text += amp->low_precision > 0
                ? fmt::format(", but autocast also keeps {} of {} copies of the weights.",
                              format_bytes(amp->low_precision), context.precision)
                : ".";
  }
  return text + loss_parity(context.fp32.first(), context.amp.first(), "fp32's");
}

std::string answer_why_scaler(const AnswerContext& context) {
  std::string text =
      "fp16 has no number between 0 and 6e-8, so small gradients become 0; multiplied by a scale "
      "they survive, and the update divides by it again.";
  if (const auto check = gradients_of(context.fp32)) {
    text += fmt::format(
        " The first fp32 step had {} gradient values: fp16 would lose {}, and after "
        "multiplication by 65536 {}",
        format_count(check->count), share_of_them(check->fp16_lost),
        share_of_them(check->fp16_lost_scaled));
    text += check->fp16_overflow_scaled > 0
                ? fmt::format("; {} would then be too large for it, which is why the scale adapts.",
                              share_of_them(check->fp16_overflow_scaled))
                : "; none would then be too large for it.";
  } else {
    text += " This run did not record its gradients, so it cannot show how many.";
  }
  if (context.bf16()) {
    text += " The run itself computed in bf16, which has fp32's range and loses none of them.";
  }
  return text;
}

// What the planted overflow did to both runs, after a space.
std::string overflow_text(const AnswerContext& context) {
  const RunRecord& with = context.runs.of("overflow").first();
  const RunRecord& without = context.runs.of("overflow_no_scaler").first();
  const int64_t at = context.overflow_at();
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
        "and the scale went from {:g} to {:g}), and {}.",
        at, skipped->parameter, skipped->scale_before, skipped->scale_after,
        with.nonfinite == 0
            ? std::string("every loss stayed finite")
            : fmt::format("{} of {} losses were not finite", with.nonfinite, with.losses.size()));
  }
  if (without.nonfinite == 0) return text + " Without the scaler no loss became infinite either.";
  return text + fmt::format(
                    " Without the scaler it reached the weights, and {} of {} losses were "
                    "not finite.",
                    without.nonfinite, without.losses.size());
}

std::string answer_without_scaler(const AnswerContext& context) {
  std::string text;
  const auto with = gradients_of(context.amp);
  const auto without = gradients_of(context.runs.of("no_scaler"));
  if (context.bf16()) {
    text = "Small gradients would become 0 in fp16; in bf16, which this run used, none do.";
  } else if (with && without) {
    text = fmt::format(
        "Small gradients become 0: {} of the first gradient's values were 0 without a scaler, {} "
        "with it.",
        format_share(without->zero_share), format_share(with->zero_share));
  } else {
    text = "Small gradients become 0; this run did not record how many.";
  }
  return text +
         loss_parity(context.amp.first(), context.runs.of("no_scaler").first(),
                     "those with a scaler") +
         overflow_text(context);
}

// "1.26 ± 0.03 times the rows per second of plain fp32", with a clause before it.
std::string rows_per_s_text(const AnswerContext& context, const Comparison& faster) {
  if (!context.times_count()) return "";
  return fmt::format(", at {} times the rows per second of plain fp32", format_speedup(faster));
}

std::string answer_table(const AnswerContext& context) {
  std::string text = fmt::format(
      "Accumulation trains a batch of {} rows in the memory of {}: its peak was {} where one batch "
      "needed {}{}. {} makes the matrix products cheaper and the activations smaller{}: its peak "
      "was {} instead of {}{}.",
      context.rows, context.micro_rows, format_bytes(peak_of(context.accumulated)),
      format_bytes(peak_of(context.one_batch)), rows_per_s_text(context, context.faster_with_many),
      context.precision, context.saved_by_amp() < 0 ? ", but adds copies of the weights" : "",
      format_bytes(peak_of(context.amp)), format_bytes(peak_of(context.fp32)),
      rows_per_s_text(context, context.faster_with_amp));
  if (context.one_rank()) return text + " With one rank neither communicates.";
  return text + fmt::format(" Accumulation sent {} for {} rows, {} {} for {}.",
                            format_bytes(context.accumulated.first().all_reduces.bytes),
                            context.rows, context.precision,
                            format_bytes(context.amp.first().all_reduces.bytes),
                            context.micro_rows);
}

std::string answer_memory(const AnswerContext& context) {
  const double many = context.saved_by_many();
  const double amp = context.saved_by_amp();
  const std::string winner = std::max(many, amp) <= 0 ? "Neither saved any with this lab's model."
                             : many > amp             ? "Accumulation, with this lab's model."
                                                      : "Mixed precision, with this lab's model.";
  return fmt::format(
      "{} With accumulation {} sufficed for {} rows where one batch took {} ({}); {} took {} where "
      "fp32 took {} ({}). Accumulation keeps only the activations of one micro-step. Autocast "
      "makes activations smaller, but adds copies of the weights, so it saves memory only if there "
      "are many activations. {} Gradients and weights stay in fp32 with both.",
      winner, format_bytes(peak_of(context.accumulated)), context.rows,
      format_bytes(peak_of(context.one_batch)), format_change(-many), context.precision,
      format_bytes(peak_of(context.amp)), format_bytes(peak_of(context.fp32)), format_change(-amp),
      context.many_rows_text());
}

std::string answer_speed(const AnswerContext& context) {
  const Comparison& many = context.faster_with_many;
  const Comparison& amp = context.faster_with_amp;
  const std::string reason =
      fmt::format("Lower precision speeds up the products themselves; accumulation only saves {}.",
                  context.one_rank() ? "updates, and with several ranks communication"
                                     : "communication and updates, which it makes once per step");
  const std::string figures = fmt::format(
      "Against plain fp32 the rows per second were {} times with {} and {} times with {} "
      "micro-steps.",
      format_speedup(amp), context.precision, format_speedup(many), context.micro_steps);
  if (!context.times_count()) {
    return fmt::format("The times of this run cannot tell. {} {}", figures, reason);
  }
  const double margin = std::max(many.margin(), amp.margin());
  const double apart = amp.speedup.mean - many.speedup.mean;
  const std::string winner = std::abs(apart) <= margin ? "Neither clearly, in this run."
                             : apart > 0               ? "Mixed precision, in this run."
                                                       : "Accumulation, in this run.";
  return fmt::format("{} {} {}", winner, figures, reason) + sharing_sentence(context.fp32);
}

std::string answer_combined(const AnswerContext& context) {
  const RunSet& both = context.combined;
  std::string text = "Yes: they act on different things.";
  if (context.times_count()) {
    text += fmt::format(
        " {} micro-steps in {} trained {} times the rows per second of plain fp32 ({} with "
        "accumulation alone, {} with {} alone).",
        context.micro_steps, context.precision, format_speedup(compare_rows(context.fp32, both)),
        format_speedup(context.faster_with_many), format_speedup(context.faster_with_amp),
        context.precision);
  }
  text += fmt::format(
      " The peak was {} for {} rows. The accumulation logic stays as it is: the divided loss is "
      "scaled, and the scaler steps once, after the last micro-step.",
      format_bytes(peak_of(both)), rows_of(both));
  return text +
         loss_parity(context.accumulated.first(), both.first(), "those of accumulation in fp32");
}

}  // namespace

std::vector<Answer> answer_questions(const AnswerContext& context) {
  return {
      {"accumulation", "Why is the loss divided?", answer_divided(context)},
      {"accumulation", "Why is synchronisation skipped?", answer_skipped(context)},
      {"accumulation", "What happens without no_sync?", answer_without_no_sync(context)},
      {"precision", "Why mixed precision?", answer_why_mixed(context)},
      {"precision", "Why is a GradScaler needed?", answer_why_scaler(context)},
      {"precision", "What happens without it?", answer_without_scaler(context)},
      {"comparison", "How do goal, memory, speed and communication compare?",
       answer_table(context)},
      {"comparison", "Which saves more memory?", answer_memory(context)},
      {"comparison", "Which gains more speed?", answer_speed(context)},
      {"comparison", "Can they be combined?", answer_combined(context)},
  };
}

}  // namespace lockstep::cli::practical7
