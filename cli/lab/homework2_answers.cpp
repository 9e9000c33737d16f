#include "cli/lab/homework2_answers.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "cli/lab/lab_measures.hpp"
#include "cli/lab/lab_text.hpp"
#include "lockstep/units.hpp"

namespace lockstep::cli {
namespace {

std::string synchronisation_text(const Homework2Results& results) {
  if (results.ranks() < 2) {
    return " This run had one rank, so it cannot show the cost of synchronisation: what "
           "accumulation saves here are updates.";
  }
  const AccumPoint& first = results.first();
  const AllReduces& calls = results.fp32.runs.front().all_reduces;
  const auto share = [](const RunSet& set_up) {
    const double step_ms = pooled_step_ms(set_up).mean;
    return step_ms > 0 ? communication_of(set_up).exposed_ms / step_ms : 0;
  };
  return fmt::format(
      " Synchronisation: without accumulation every {} rows cost {:g} all-reduces ({}), with "
      "ACCUM_STEPS {} every {}; communication that nothing hid went from {:.0f} to {:.0f} % of the "
      "step. Without no_sync, code 1 was {}.",
      rows_of(results.fp32), calls.count, format_bytes(calls.bytes), first.accum_steps,
      rows_of(first.fp32), share(results.fp32) * 100, share(first.fp32) * 100,
      format_against(compare(first.fp32, results.synced), "with it"));
}

std::string answer_time(const Homework2Results& results) {
  const AccumPoint& first = results.first();
  const Comparison amp = compare(results.fp32, results.amp);
  const Comparison both = compare(first.fp32, first.combined);
  std::string text = fmt::format(
      "A row took {} with code 1, {} with code 2 and {} with code 3, against {} in plain fp32.",
      format_ms(ms_per_row(first.fp32)), format_ms(ms_per_row(results.amp)),
      format_ms(ms_per_row(first.combined)), format_ms(ms_per_row(results.fp32)));
  text += synchronisation_text(results);
  text += fmt::format(
      " Precision: {} makes the matrix products cheaper in every micro-step; code 2 was {}, and "
      "code 3 {}.",
      results.precision(), format_against(amp, "fp32"), format_against(both, "code 1"));
  if (both.speedup.mean > 1 + both.margin()) {
    text += " The two combine: one shortens the computing, the other leaves out communication.";
  }
  if (sharing(results.fp32) > 1) text += " " + shared_remark(results.fp32);
  return text + noise_remark(results.others_busy_cores, amp);
}

std::string peaks_text(const Homework2Results& results) {
  return fmt::format("The peak was {} with code 1, {} with code 2 and {} with code 3.",
                     format_bytes(peak_of(results.first().fp32)),
                     format_bytes(peak_of(results.amp)),
                     format_bytes(peak_of(results.first().combined)));
}

std::string answer_memory(const Homework2Results& results) {
  const AccumPoint& first = results.first();
  const auto fp32 = memory_of(results.fp32);
  const auto accumulated = memory_of(first.fp32);
  const auto longest = memory_of(results.last().fp32);
  const auto one_batch = memory_of(results.one_batch);
  const auto amp = memory_of(results.amp);
  if (!fp32 || !accumulated || !longest || !one_batch || !amp) {
    return peaks_text(results) +
           " These runs did not record what their peaks are made of, so they cannot show more.";
  }
  const std::string state =
      accumulated->optimizer_state == 0
          ? "no optimizer state (plain SGD has none)"
          : format_bytes(accumulated->optimizer_state) + " of optimizer state";
  std::string text = fmt::format(
      "{} All keep {} of weights, {} of gradients and {} in fp32. Accumulation acts on the number "
      "of rows held at once: activations took {} at ACCUM_STEPS {}",
      peaks_text(results), format_bytes(accumulated->weights), format_bytes(accumulated->gradients),
      state, format_bytes(accumulated->activations), first.accum_steps);
  if (results.points.size() > 1) {
    text += fmt::format(" and {} at {}", format_bytes(longest->activations),
                        results.last().accum_steps);
  }
  text += fmt::format(
      ", but {} in one batch of {} rows. Precision acts on the size of each value: activations and "
      "temporaries took {} in {} against {} in fp32",
      format_bytes(one_batch->activations), rows_of(results.one_batch),
      format_bytes(amp->activations), results.precision(), format_bytes(fp32->activations));
  if (amp->low_precision == 0) return text + ".";
  text += fmt::format(", and {} of low-precision weights came on top.",
                      format_bytes(amp->low_precision));
  if (peak_of(results.amp) >= peak_of(results.fp32)) {
    text += " With so few rows these copies cost more than the activations save.";
  }
  return text;
}

std::string undivided_text(const Homework2Results& results) {
  const AccumPoint& first = results.first();
  const auto ratio = norm_ratio(first.fp32, results.undivided);
  if (!ratio) return " These runs did not record their gradients, so they cannot show the factor.";
  std::string text = fmt::format(
      " Undivided, the first gradient's norm was {:.4g} instead of {:.4g}: {:.2f} times, as if the "
      "learning rate had grown so much",
      gradients_of(results.undivided)->norm, gradients_of(first.fp32)->norm, *ratio);
  const RunRecord& run = results.undivided.runs.front();
  const auto& divided = first.fp32.runs.front().losses;
  if (run.nonfinite > 0) return text + ", and the loss did not stay finite.";
  if (run.losses.empty() || divided.empty()) return text + ".";
  return text + fmt::format(", and the loss ended at {:.3g} instead of {:.3g}.", run.losses.back(),
                            divided.back());
}

std::string equivalence_text(const Homework2Results& results) {
  const AccumPoint& first = results.first();
  const auto ratio = norm_ratio(results.one_batch, first.fp32);
  const auto deviation = loss_deviation(results.one_batch.runs.front(), first.fp32.runs.front());
  if (!ratio || !deviation) return "";
  return fmt::format(
      " Divided, it was {} that of one batch of {} rows, and the losses differed by {}.",
      std::abs(*ratio - 1) <= kSameNorm ? "equal to" : fmt::format("{:.3f} times", *ratio),
      rows_of(results.one_batch), at_most(*deviation));
}

std::string answer_batch(const Homework2Results& results) {
  const AccumPoint& first = results.first();
  std::string text = fmt::format(
      "The effective batch is the micro-batch times ACCUM_STEPS: {} rows became {} at {}",
      rows_of(results.fp32), rows_of(first.fp32), first.accum_steps);
  if (results.points.size() > 1) {
    text += fmt::format(" and {} at {}", rows_of(results.last().fp32), results.last().accum_steps);
  }
  return text +
         ", with one update each. backward() adds to the gradients; a loss divided by ACCUM_STEPS "
         "turns the sum over micro-steps into the mean over all rows, which is what one large "
         "batch gives." +
         undivided_text(results) + equivalence_text(results);
}

}  // namespace

std::vector<Answer> answer_homework2(const Homework2Results& results) {
  return {
      {"time, memory and batch", "1. Execution time: synchronisation and precision",
       answer_time(results)},
      {"time, memory and batch", "2. Memory: accumulation and precision", answer_memory(results)},
      {"time, memory and batch", "3. Effective batch, and why the loss is divided",
       answer_batch(results)},
  };
}

}  // namespace lockstep::cli
