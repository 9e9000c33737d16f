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
  const std::vector<TrainingVariant> once = {{.row_factor = first},
                                             {.accum_steps = first, .divide = false}};
  return plan_variants(timed, once, options.repetitions(), config);
}

struct AnswerContext : AccumulationContext {
  using AccumulationContext::AccumulationContext;

  const RunSet& longest() const { return runs.all("accumulated").back(); }
  bool several() const { return runs.all("accumulated").size() > 1; }
};

// ---- Tables

// The base of a row is the run in fp32 with the same effective batch.
std::string deviation_cell(const SetRow& row) {
  if (row.base == nullptr) return "—";
  const auto deviation = loss_deviation(row.base->first(), row.first());
  return deviation ? format_share(*deviation) : "not finite";
}

std::string finite_cell(const SetRow& row) {
  const auto losses = static_cast<int64_t>(row.first().losses.size());
  return fmt::format("{} of {}", losses - row.first().nonfinite, losses);
}

Table codes_table(const AnswerContext& context) {
  std::vector<SetColumn> lines = {
      micro_rows_column(),
      step_column("time: optimizer step"),
      {"time: per row", [](const SetRow& row) { return format_ms(ms_per_row(*row.set_up)); }},
      {"time: whole run",
       [](const SetRow& row) { return format_seconds(mean_total_s(*row.set_up)); }},
      {"speed per row",
       [&context](const SetRow& row) {
         return row.base == nullptr ? "1"
                                    : format_speedup(compare_per_row(context.fp32, *row.set_up));
       }},
      {"memory: peak", peak_column().cell}};
  for (const auto& part : kMemoryParts) {
    lines.push_back({std::string("… ") + part.name, [bytes = part.bytes](const SetRow& row) {
                       return part_cell(*row.set_up, bytes);
                     }});
  }
  lines.push_back({"stability: finite losses", finite_cell});
  lines.push_back({"… skipped steps", [](const SetRow& row) { return skipped_cell(row.first()); }});
  lines.push_back({"… final scale", [](const SetRow& row) { return scale_cell(row.first()); }});
  lines.push_back({"… largest loss deviation", deviation_cell});
  Table table =
      make_transposed_table("Codes 1, 2, 3: time, memory and stability", lines,
                            {{"fp32 alone", &context.fp32},
                             {"code 1: accumulation", &context.accumulated, &context.one_batch},
                             {"code 2: AMP", &context.amp, &context.fp32},
                             {"code 3: both", &context.combined, &context.one_batch}});
  table.add_note(fmt::format(
      "AMP: {} autocast and GradScaler. Loss: largest deviation from fp32 with the same rows per "
      "update, in one batch. Mean ± deviation over {} runs of {} timed steps.",
      context.precision, context.fp32.runs.size(), context.fp32.first().step_ms.n));
  add_noise_notes(table, context.runs, context.faster_with_amp);
  return table;
}

// "20 % less time per row than 4"; equal where the difference is within the noise.
std::string per_row_phrase(const Comparison& faster, const std::string& against) {
  const double speedup = faster.speedup.mean;
  if (!(speedup > 0) || std::abs(speedup - 1) <= faster.margin()) {
    return fmt::format("as fast per row as {}", against);
  }
  return fmt::format("{:.0f} % {} per row than {}", std::abs(1 / speedup - 1) * 100,
                     speedup > 1 ? "less time" : "more time", against);
}

std::string peak_phrase(const RunSet& before, const RunSet& set_up) {
  const double change = relative_change(peak_of(before), peak_of(set_up));
  return std::abs(change) < 0.01 ? "same peak" : "peak " + format_change(change);
}

// Code 1 against its first point.
std::string observe_accumulated(const AnswerContext& context, const RunSet& set_up) {
  if (&set_up == &context.accumulated) {
    return per_row_phrase(compare_per_row(context.fp32, set_up), "fp32 alone");
  }
  return fmt::format("{}, {}",
                     per_row_phrase(compare_per_row(context.accumulated, set_up),
                                    std::to_string(context.micro_steps)),
                     peak_phrase(context.accumulated, set_up));
}

// Code 3 against code 1.
std::string observe_combined(const AnswerContext& context, const RunSet& set_up) {
  const RunSet& accumulated = context.runs.of("accumulated", set_up.size);
  return fmt::format("{:.2f} × code 1's speed, {}", compare(accumulated, set_up).speedup.mean,
                     peak_phrase(accumulated, set_up));
}

Table accum_steps_table(const AnswerContext& context) {
  std::vector<SetRow> rows;  // each named by its code
  for (const auto& set_up : context.runs.all("accumulated")) rows.push_back({"1", &set_up});
  for (const auto& set_up : context.runs.all("combined")) rows.push_back({"3", &set_up});
  Table table = make_table<SetRow>(
      "Codes 1 and 3 with ACCUM_STEPS",
      {{"code, steps",
        [](const SetRow& row) { return fmt::format("{}, {}", row.name, row.set_up->size); },
        Align::kLeft},
       {"rows", [](const SetRow& row) { return std::to_string(rows_of(*row.set_up)); }},
       step_column("optimizer step"),
       {"micro-step",
        [](const SetRow& row) {
          return format_ms(pooled_step_ms(*row.set_up).mean /
                           static_cast<double>(row.set_up->size));
        }},
       peak_column(),
       {"all-reduces",
        [](const SetRow& row) {
          const AllReduces& calls = row.first().all_reduces;
          return fmt::format("{:g}, {}", calls.count, format_bytes(calls.bytes));
        }},
       {"observation",
        [&context](const SetRow& row) {
          return row.name == "1" ? observe_accumulated(context, *row.set_up)
                                 : observe_combined(context, *row.set_up);
        },
        Align::kLeft}},
      rows);
  table.add_note("Rows: effective batch. All-reduces: number and bytes in an optimizer step.");
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
      .log_x = true};
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
  const AllReduces& calls = context.fp32.first().all_reduces;
  return fmt::format(
      " Synchronisation: without accumulation every {} rows cost {:g} all-reduces ({}), with "
      "ACCUM_STEPS {} every {}; communication that nothing hid went from {:.0f} to {:.0f} % of the "
      "step. Without no_sync, code 1 was {}.",
      context.micro_rows, calls.count, format_bytes(calls.bytes), context.micro_steps, context.rows,
      exposed_share(context.fp32) * 100, exposed_share(context.accumulated) * 100,
      format_against(compare(context.accumulated, context.synced), "with it"));
}

std::string answer_time(const AnswerContext& context) {
  const Comparison& amp = context.faster_with_amp;
  const Comparison both = compare(context.accumulated, context.combined);
  std::string text = fmt::format(
      "A row took {} with code 1, {} with code 2 and {} with code 3, against {} in plain fp32.",
      format_ms(ms_per_row(context.accumulated)), format_ms(ms_per_row(context.amp)),
      format_ms(ms_per_row(context.combined)), format_ms(ms_per_row(context.fp32)));
  text += synchronisation_text(context);
  text += fmt::format(
      " Precision: {} makes the matrix products cheaper in every micro-step; code 2 was {}, and "
      "code 3 {}.",
      context.precision, format_against(amp, "fp32"), format_against(both, "code 1"));
  if (both.speedup.mean > 1 + both.margin()) {
    text += " The two combine: one shortens the computing, the other leaves out communication.";
  }
  return text + sharing_sentence(context.fp32) + context.noise(amp);
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
    text += " With so few rows these copies cost more than the activations save.";
  }
  return text;
}

std::string undivided_text(const AnswerContext& context) {
  const auto ratio = norm_ratio(context.accumulated, context.undivided);
  if (!ratio) return " These runs did not record their gradients, so they cannot show the factor.";
  std::string text = fmt::format(
      " Undivided, the first gradient's norm was {:.4g} instead of {:.4g}: {:.2f} times as large, "
      "as if "
      "the learning rate had grown as much",
      gradients_of(context.undivided)->norm, gradients_of(context.accumulated)->norm, *ratio);
  const RunRecord& run = context.undivided.first();
  const auto& divided = context.accumulated.first().losses;
  if (run.nonfinite > 0) return text + ", and the loss did not stay finite.";
  if (run.losses.empty() || divided.empty()) return text + ".";
  return text + fmt::format(", and the loss ended at {:.3g} instead of {:.3g}.", run.losses.back(),
                            divided.back());
}

std::string equivalence_text(const AnswerContext& context) {
  const auto ratio = norm_ratio(context.one_batch, context.accumulated);
  const auto deviation = loss_deviation(context.one_batch.first(), context.accumulated.first());
  if (!ratio || !deviation) return "";
  return fmt::format(
      " Divided, it was {} that of one batch of {} rows, and the losses differed by {}.",
      std::abs(*ratio - 1) <= kSameNorm ? "equal to" : fmt::format("{:.3f} times", *ratio),
      rows_of(context.one_batch), at_most(*deviation));
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
         undivided_text(context) + equivalence_text(context);
}

LabReport report(const LabRuns& runs) {
  const AnswerContext context(runs);
  const std::string topic = "time, memory and batch";
  return {.title = "Homework 2: accumulation and mixed precision",
          .stamp = context.fp32.first(),
          .tables = {{"codes", codes_table(context)}, {"accum_steps", accum_steps_table(context)}},
          .figures = figures(context),
          .answers = {
              {topic, "1. Execution time: synchronisation and precision", answer_time(context)},
              {topic, "2. Memory: accumulation and precision", answer_memory(context)},
              {topic, "3. Effective batch, and why the loss is divided", answer_batch(context)},
          }};
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
