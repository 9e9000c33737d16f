// Homework 2: code 1 accumulates gradients, code 2 trains in lower precision, code 3 does both.

#include <fmt/format.h>

#include <cmath>

#include "cli/lab/accumulation.hpp"
#include "cli/lab/lab_charts.hpp"
#include "cli/lab/lab_tables.hpp"
#include "lockstep/units.hpp"

namespace lockstep::cli::homework2 {
namespace {

// ---- Plan: the keys of TrainingVariant; code 1 is "accumulated", code 2 "amp", code 3 "combined".

// An optimizer step has up to 32 micro-steps here: a few of them take minutes.
AccumulationDefaults defaults_for(bool quick) {
  if (quick) return {{8, 256, 1024, 1024, 2}, {8, 4096, 2048, 4096, 2}, {4, 8, 16, 32}};
  return {{16, 256, 1024, 1024, 2}, {20, 4096, 2048, 4096, 2}, {4, 8, 16, 32}};
}

LabPlan plan(const LabOptions& options, const Hardware& hardware) {
  const auto config = choose_config(options, hardware, defaults_for(options.quick));
  const int64_t first = config.accum_steps.front();
  std::vector<TrainingVariant> timed = {{}, {.amp = config.amp}};
  for (const int64_t micro_steps : config.accum_steps) {
    timed.push_back({.accum_steps = micro_steps});
    timed.push_back({.accum_steps = micro_steps, .amp = config.amp});
  }
  timed.push_back({.accum_steps = first, .sync_every_step = true});
  auto studies = divisor_study(config);
  const auto memory = memory_study(config, 1);
  studies.insert(studies.end(), memory.begin(), memory.end());
  return plan_variants(timed, {{.row_factor = first}}, studies, options.repetitions(), config);
}

struct AnswerContext : AccumulationContext {
  using AccumulationContext::AccumulationContext;

  const RunSet& longest() const { return runs.some("accumulated").back(); }
  bool several() const { return runs.all("accumulated").size() > 1; }
};

// ---- Tables: the course's own, with its columns and units.

// A difference in time that the noise hides is "the same" only if the noise is small.
constexpr double kSameTime = 0.05;

// Step times that deviate by more than this share of their mean get a note beside them.
constexpr double kNoisySteps = 0.10;

// Losses further apart than this are no longer those of fp32.
constexpr double kSameTraining = 0.05;

constexpr double kRows = 1000;  // of the column "s per 1000 rows"

double ms_for_rows(const RunSet& set_up) {
  return ms_per_row(set_up) * kRows;
}

// The largest distance of a loss from that of the base, fp32 with the same effective batch.
std::optional<double> loss_gap(const SetRow& row) {
  if (row.base == nullptr) return std::nullopt;
  return loss_deviation(row.base->first(), row.first());
}

TableCell loss_gap_cell(const SetRow& row) {
  const auto gap = loss_gap(row);
  return gap ? format_share(*gap) : "—";
}

std::string stability_cell(const SetRow& row) {
  const RunRecord& run = row.first();
  if (run.nonfinite > 0) {
    return fmt::format("unstable: {} of {} losses not finite", run.nonfinite, run.losses.size());
  }
  if (run.losses.empty()) return "no losses recorded";
  return loss_gap(row).value_or(0) > kSameTraining ? "differs from fp32" : "stable";
}

// The time of the whole run, over its repetitions.
SetColumn total_column(const std::string& title) {
  return {title, [](const SetRow& row) {
            std::vector<double> totals_ms;
            for (const auto& run : row.set_up->runs) totals_ms.push_back(run.total_s * 1e3);
            return format_step_s(summarize(totals_ms));
          }};
}

SetColumn rows_time_column() {
  return {"s per 1000 rows", [](const SetRow& row) {
            Stats step = pooled_step_ms(*row.set_up);
            const double scale =
                kRows / static_cast<double>(std::max<int64_t>(1, rows_of(*row.set_up)));
            step.mean *= scale;
            step.stddev *= scale;
            return format_step_s(step);
          }};
}

SetColumn memory_column() {
  return {"memory (GB)", [](const SetRow& row) {
            return number_cell("{:.3g}", static_cast<double>(peak_of(*row.set_up)) * 1e-9);
          }};
}

Table codes_table(const AnswerContext& context) {
  Table table =
      make_table<SetRow>("Codes 1, 2 and 3 (table A of the page)",
                         {name_column("code"),
                          total_column("time (s)"),
                          rows_time_column(),
                          memory_column(),
                          {"stability", stability_cell, Align::kLeft},
                          {"skipped", [](const SetRow& row) { return skipped_cell(row.first()); }},
                          {"loss gap", loss_gap_cell}},
                         {{"1: accumulation", &context.accumulated, &context.one_batch},
                          {"2: AMP", &context.amp, &context.fp32},
                          {"3: both", &context.combined, &context.one_batch},
                          {"fp32 alone", &context.fp32}});
  const RunRecord& run = context.fp32.first();
  table.add_note(fmt::format(
      "Time: the whole run of {}, of {} rows each with codes 1 and 3 (ACCUM_STEPS {}) and of {} "
      "with code 2, mean ± deviation over {}; per 1000 rows: over the {} of them. Memory: "
      "the peak of a device, 1 GB = 10^9 bytes. AMP: {} autocast and GradScaler.",
      counted(run.losses.size(), "update"), context.rows, context.micro_steps, context.micro_rows,
      counted(context.fp32.runs.size(), "run"), counted(run.step_ms.n, "timed step"),
      context.precision));
  table.add_note(
      "Loss gap: the largest in any update against fp32 with as many rows. Stable: every loss is "
      "finite and the gap is at most 5 %. Skipped: updates that the scaler left out.");
  return table;
}

// "20 % less time per row than 4".
std::string time_phrase(const RunSet& base, const RunSet& set_up, const std::string& against) {
  const Comparison faster = compare_rows(base, set_up);
  const double speedup = faster.speedup.mean;
  if (!(speedup > 0)) return "no times recorded";
  if (std::abs(speedup - 1) > faster.margin()) {
    return fmt::format("{:.0f} % {} time per row than {}", std::abs(1 / speedup - 1) * 100,
                       speedup > 1 ? "less" : "more", against);
  }
  return faster.margin() <= kSameTime ? fmt::format("same time per row as {}", against)
                                      : fmt::format("no clear difference in time from {}", against);
}

constexpr const char* kSamePeak = "same peak";

std::string peak_phrase(const RunSet& base, const RunSet& set_up) {
  const double change = relative_change(peak_of(base), peak_of(set_up));
  return std::abs(change) < 0.005 ? kSamePeak : "peak " + format_change(change);
}

// What is to be seen in a row of table B, against another set-up.
std::string observation(const AnswerContext& context, const RunSet& base, const RunSet& set_up,
                        const std::string& against) {
  if (!context.times_count()) {
    const std::string peak = peak_phrase(base, set_up);
    return fmt::format("{} {} {}", peak, peak == kSamePeak ? "as" : "against", against);
  }
  const Stats step = pooled_step_ms(set_up);
  const double noise = step.mean > 0 ? step.stddev / step.mean : 0;
  return fmt::format("{}, {}{}", time_phrase(base, set_up, against), peak_phrase(base, set_up),
                     noise > kNoisySteps ? fmt::format("; noisy: ± {:.0f} %", noise * 100) : "");
}

Table accum_steps_table(const AnswerContext& context) {
  std::vector<SetRow> rows;  // each named by its code
  for (const auto& set_up : context.runs.all("accumulated")) {
    rows.push_back({"1", &set_up});
    rows.push_back({"3", &context.runs.of("combined", set_up.size)});
  }
  Table table = make_table<SetRow>(
      "Codes 1 and 3 with other ACCUM_STEPS (table B of the page)",
      {{"ACCUM_STEPS", [](const SetRow& row) { return count_cell(row.set_up->size); }},
       {"code", [](const SetRow& row) { return row.name; }},
       total_column("total time (s)"),
       rows_time_column(),
       memory_column(),
       {"observations",
        [&context](const SetRow& row) {
          const RunSet& set_up = *row.set_up;
          if (row.name == "3") {
            return observation(context, context.runs.of("accumulated", set_up.size), set_up,
                               "code 1");
          }
          if (set_up.size == context.micro_steps) {
            return observation(context, context.fp32, set_up, "fp32 alone");
          }
          return observation(context, context.accumulated, set_up,
                             std::to_string(context.micro_steps));
        },
        Align::kLeft}},
      rows);
  table.add_note(fmt::format(
      "Every run has {}, each of ACCUM_STEPS × {} rows. Code 1 is compared with fp32 alone and "
      "with "
      "ACCUM_STEPS {}, code 3 with code 1; a difference must exceed the deviations of both.",
      counted(context.accumulated.first().losses.size(), "update"), context.micro_rows,
      context.micro_steps));
  return table;
}

// ---- Charts

std::vector<Figure> figures(const AnswerContext& context) {
  LineChart time{
      .title = "Time of an optimizer step",
      .x_label = "ACCUM_STEPS",
      .unit = Unit::kMilliseconds,
      .series = {step_series("code 1, fp32", context.runs.all("accumulated")),
                 step_series("code 3, " + context.precision, context.runs.all("combined"))},
      .log_x = true,
      .log_y = true,
      .from_zero = false};
  std::vector<SetRow> set_ups;
  for (const auto& accumulated : context.runs.all("accumulated")) {
    set_ups.push_back({fmt::format("1, {}", accumulated.size), &accumulated});
    set_ups.push_back(
        {fmt::format("3, {}", accumulated.size), &context.runs.of("combined", accumulated.size)});
  }
  set_ups.push_back({"one batch", &context.one_batch});
  return {{time, fmt::format("Each micro-step has {} rows, so the time grows with ACCUM_STEPS.",
                             context.micro_rows)},
          {memory_chart("Peak memory of rank 0", set_ups),
           fmt::format("By code and ACCUM_STEPS, beside fp32 with {} rows in one batch.",
                       rows_of(context.one_batch))}};
}

// ---- Answers

std::string synchronisation_text(const AnswerContext& context) {
  if (context.one_rank()) {
    return " This run had one rank, so it cannot show the cost of synchronisation: what "
           "accumulation saves here are updates.";
  }
  std::string text = fmt::format(
      " Synchronisation: without accumulation every {} rows cost {} ({}), with ACCUM_STEPS {} "
      "every {} rows do.",
      context.micro_rows, count_all_reduces(context.fp32),
      format_bytes(context.fp32.first().all_reduces.bytes), context.micro_steps, context.rows);
  if (!context.times_count()) return text;
  const std::string before = fmt::format("{:.0f}", exposed_share(context.fp32) * 100);
  const std::string after = fmt::format("{:.0f}", exposed_share(context.accumulated) * 100);
  text += " Communication that no computation hid ";
  text += before == after ? fmt::format("stayed at {} % of the step.", after)
                          : fmt::format("went from {} to {} % of the step.", before, after);
  return text +
         fmt::format(" Without no_sync, code 1 was {}.",
                     format_against(compare_rows(context.accumulated, context.synced), "with it"));
}

std::string answer_time(const AnswerContext& context) {
  std::string text = fmt::format(
      "1000 rows took {} with code 1, {} with code 2 and {} with code 3, against {} in plain fp32.",
      format_ms(ms_for_rows(context.accumulated)), format_ms(ms_for_rows(context.amp)),
      format_ms(ms_for_rows(context.combined)), format_ms(ms_for_rows(context.fp32)));
  text += synchronisation_text(context);
  text += fmt::format(" Precision: {} makes the matrix products of every micro-step cheaper",
                      context.precision);
  if (!context.times_count()) {
    return text + "; how much time either saves, the times of this run cannot tell.";
  }
  const Comparison both = compare_rows(context.accumulated, context.combined);
  text +=
      fmt::format("; code 2 was {}, and code 3 {}.",
                  format_against(context.faster_with_amp, "fp32"), format_against(both, "code 1"));
  if (both.speedup.mean > 1 + both.margin()) {
    text += " The two combine: one shortens the computing, the other leaves out communication.";
  }
  return text + sharing_sentence(context.fp32);
}

std::string peaks_text(const AnswerContext& context) {
  return fmt::format("The peak was {} with code 1, {} with code 2 and {} with code 3.",
                     format_bytes(peak_of(context.accumulated)), format_bytes(peak_of(context.amp)),
                     format_bytes(peak_of(context.combined)));
}

std::string answer_memory(const AnswerContext& context) {
  const auto fp32 = memory_of(context.fp32);
  const auto accumulated = memory_of(context.accumulated);
  const auto longest = memory_of(context.longest());
  const auto one_batch = memory_of(context.one_batch);
  const auto amp = memory_of(context.amp);
  if (!fp32 || !accumulated || !longest || !one_batch || !amp) {
    return peaks_text(context) +
           " These runs did not record what their peaks are made of, so they cannot show more.";
  }
  const std::string state =
      accumulated->optimizer_state == 0
          ? "no optimizer state (plain SGD has none)"
          : format_bytes(accumulated->optimizer_state) + " of optimizer state";
  std::string text = fmt::format(
      "{} All keep {} of weights, {} of gradients and {} in fp32. Accumulation acts on the number "
      "of rows held at once: activations took {} at ACCUM_STEPS {}",
      peaks_text(context), format_bytes(accumulated->weights), format_bytes(accumulated->gradients),
      state, format_bytes(accumulated->activations), context.micro_steps);
  if (context.several()) {
    text +=
        fmt::format(" and {} at {}", format_bytes(longest->activations), context.longest().size);
  }
  text += fmt::format(
      ", but {} in one batch of {} rows. Precision acts on the size of each value: activations and "
      "temporaries took {} in {} against {} in fp32",
      format_bytes(one_batch->activations), rows_of(context.one_batch),
      format_bytes(amp->activations), context.precision, format_bytes(fp32->activations));
  if (amp->low_precision == 0) return text + ".";
  text += fmt::format(", and {} of low-precision weights came on top.",
                      format_bytes(amp->low_precision));
  if (peak_of(context.amp) >= peak_of(context.fp32)) {
    text += " With so few rows these copies cost more than the activations save. " +
            context.many_rows_text();
  }
  return text;
}

// Whether accumulation gave what one large batch gives, after a space.
std::string equivalence_text(const AnswerContext& context) {
  const auto ratio = norm_ratio(context.one_batch, context.accumulated);
  const auto deviation = loss_deviation(context.one_batch.first(), context.accumulated.first());
  if (!ratio || !deviation) return "";
  return fmt::format(
      " The first gradient's norm was {} one batch of {} rows, and the losses {}.",
      std::abs(*ratio - 1) <= kSameNorm ? "that of" : fmt::format("{:.3f} times that of", *ratio),
      rows_of(context.one_batch),
      *deviation == 0 ? "were the same" : "differed by " + at_most(*deviation));
}

std::string answer_batch(const AnswerContext& context) {
  std::string text = fmt::format(
      "The effective batch is the micro-batch times ACCUM_STEPS: {} rows became {} at {}",
      context.micro_rows, context.rows, context.micro_steps);
  if (context.several()) {
    text += fmt::format(" and {} at {}", rows_of(context.longest()), context.longest().size);
  }
  return text +
         ", with one update each. backward() adds to the gradients; a loss divided by ACCUM_STEPS "
         "turns the sum over micro-steps into the mean over all rows, which is what one large "
         "batch gives." +
         equivalence_text(context) +
         " Undivided, the learning rate is in effect ACCUM_STEPS times what was chosen. " +
         context.divisor_text();
}

// Code 3 is what the homework asks for; the report has room for it alone.
std::vector<SourceListing> codes() {
  std::vector<SourceListing> all = {course_source("homework2_combined"),
                                    course_source("practical7_accumulation"),
                                    course_source("practical7_amp")};
  for (auto& code : all) code.printed = &code == &all.front();
  return all;
}

LabReport report(const LabRuns& runs) {
  const AnswerContext context(runs);
  const std::string topic = "time, memory and batch";
  return {.title = "Homework 2: accumulation and mixed precision",
          .stamp = context.fp32.first(),
          .trained = context.trained("homework2"),
          .warning = context.warning,
          .tables = {{"codes", codes_table(context)}, {"accum_steps", accum_steps_table(context)}},
          .figures = figures(context),
          .answers =
              {
                  {topic, "1. Execution time: synchronisation and precision", answer_time(context)},
                  {topic, "2. Memory: accumulation and precision", answer_memory(context)},
                  {topic, "3. Effective batch, and why the loss is divided", answer_batch(context)},
              },
          .code = codes()};
}

}  // namespace

Lab lab() {
  return {.name = "homework2",
          .folder = "reports/homework2",
          .flags = accumulation_flags(),
          .examples = {{"--quick", "codes 1 to 3, the report to hand in"},
                       {"--accum-steps 2,4", "other ACCUM_STEPS"}},
          .plan = plan,
          .report = report};
}

}  // namespace lockstep::cli::homework2
