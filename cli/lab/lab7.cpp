// Practical 7: gradient accumulation and mixed precision.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "cli/lab/accumulation.hpp"
#include "cli/lab/lab_charts.hpp"
#include "cli/lab/lab_tables.hpp"
#include "lockstep/units.hpp"

namespace lockstep::cli::practical7 {
namespace {

// ---- Plan: the keys of TrainingVariant.

// Wide layers and many rows: lower precision shows where matrix products outweigh everything else.
AccumulationDefaults defaults_for(bool quick) {
  if (quick) return {{8, 256, 1024, 1024, 2}, {10, 4096, 2048, 4096, 2}, {4}};
  return {{20, 256, 1024, 1024, 2}, {30, 4096, 2048, 4096, 2}, {4, 8}};
}

// fp32 alone; accumulation with and without no_sync, undivided, and as one large batch; autocast
// with and without a scaler, with and without a planted overflow; both techniques together.
LabPlan plan(const LabOptions& options, const Hardware& hardware) {
  const auto config = choose_config(options, hardware, defaults_for(options.quick));
  const std::string& amp = config.amp;
  std::vector<TrainingVariant> timed = {{}, {.amp = amp}};
  std::vector<TrainingVariant> once;
  for (const int64_t micro_steps : config.accum_steps) {
    timed.push_back({.accum_steps = micro_steps});
    timed.push_back({.accum_steps = micro_steps, .sync_every_step = true});
    timed.push_back({.row_factor = micro_steps});
    once.push_back({.accum_steps = micro_steps, .divide = false});
  }
  timed.push_back({.accum_steps = config.accum_steps.front(), .amp = amp});
  // In the middle, so that the curve is seen to go on after it.
  const int64_t overflow_at = std::max<int64_t>(1, config.sizes.steps / 2);
  once.push_back({.amp = amp, .scaler = false});
  once.push_back({.amp = amp, .overflow_at = overflow_at});
  once.push_back({.amp = amp, .scaler = false, .overflow_at = overflow_at});
  return plan_variants(timed, once, options.repetitions(), config);
}

struct AnswerContext : AccumulationContext {
  Comparison faster_with_many;  // per row, than fp32 alone

  explicit AnswerContext(const LabRuns& of)
      : AccumulationContext(of), faster_with_many(compare_per_row(fp32, accumulated)) {}

  bool bf16() const { return precision == "bf16"; }
  int64_t overflow_at() const { return runs.of("overflow").size; }
  double saved_by_many() const {
    return -relative_change(peak_of(one_batch), peak_of(accumulated));
  }
  double saved_by_amp() const { return -relative_change(peak_of(fp32), peak_of(amp)); }
};

// ---- Tables

std::string all_reduces_of(const RunSet& set_up) {
  const AllReduces& calls = set_up.first().all_reduces;
  return fmt::format("{:g} all-reduces, {}", calls.count, format_bytes(calls.bytes));
}

std::string peak_against(const RunSet& base, const RunSet& other, const std::string& whose) {
  const int64_t before = peak_of(base);
  return fmt::format("{} {}: {}", format_bytes(before), whose,
                     format_change(relative_change(before, peak_of(other))));
}

Table techniques_table(const AnswerContext& context) {
  const auto speed = [&context](const RunSet& set_up) {
    return fmt::format("{} × the rows/s of fp32",
                       format_speedup(compare_per_row(context.fp32, set_up)));
  };
  Table table("Accumulation and mixed precision",
              {{""},
               {fmt::format("accumulation, {} micro-steps", context.micro_steps)},
               {fmt::format("{} autocast, GradScaler", context.precision)}});
  table.add_row(
      {"goal",
       fmt::format("a batch of {} rows in the memory of {}", context.rows, context.micro_rows),
       "faster products, smaller activations"});
  table.add_row({"peak memory", format_bytes(peak_of(context.accumulated)),
                 format_bytes(peak_of(context.amp))});
  table.add_row({"… against",
                 peak_against(context.one_batch, context.accumulated,
                              fmt::format("in one batch of {} rows", context.rows)),
                 peak_against(context.fp32, context.amp, "in fp32")});
  table.add_row({"speed", speed(context.accumulated), speed(context.amp)});
  table.add_row({"communication",
                 fmt::format("{} for {} rows", all_reduces_of(context.accumulated), context.rows),
                 fmt::format("{} for {} rows", all_reduces_of(context.amp), context.micro_rows)});
  table.add_row({"… against",
                 fmt::format("{} if each micro-step syncs", all_reduces_of(context.synced)),
                 fmt::format("{} in fp32", all_reduces_of(context.fp32))});
  table.add_note(
      "Communication: all-reduces of an optimizer step and their bytes. Gradients are sent in fp32 "
      "under autocast too.");
  add_noise_notes(table, context.runs, compare_per_row(context.fp32, context.amp));
  return table;
}

// The norm of the first gradient, and beside it how many times the base's it is.
std::string norm_cell(const SetRow& row) {
  const auto gradients = gradients_of(*row.set_up);
  if (!gradients) return "—";
  const auto ratio = row.base == nullptr ? std::nullopt : norm_ratio(*row.base, *row.set_up);
  if (!ratio) return fmt::format("{:.4g}", gradients->norm);
  return fmt::format("{:.4g} ({:.3f} ×)", gradients->norm, *ratio);
}

Table accumulation_table(const AnswerContext& context) {
  std::vector<SetRow> rows = {{"fp32 alone", &context.fp32}};
  for (const auto& accumulated : context.runs.all("accumulated")) {
    const auto of = [&](const char* what) { return &context.runs.of(what, accumulated.size); };
    rows.push_back({"no_sync", &accumulated});
    rows.push_back({"sync each", of("synced"), &accumulated});
    rows.push_back({"undivided", of("undivided"), &accumulated});
    rows.push_back({"one batch", of("one_batch"), &accumulated});
  }
  Table table = make_table<SetRow>(
      "Accumulation: ways to make a large batch",
      {name_column("set-up"),
       micro_rows_column(),
       step_column(),
       {"rows/s", [](const SetRow& row) { return fmt::format("{:.0f}", rows_per_s(*row.set_up)); }},
       {"all-reduces",
        [](const SetRow& row) { return fmt::format("{:g}", row.first().all_reduces.count); }},
       {"bytes", [](const SetRow& row) { return format_bytes(row.first().all_reduces.bytes); }},
       {"exposed",
        [](const SetRow& row) { return format_ms(communication_of(*row.set_up).exposed_ms); }},
       {"gradient norm", norm_cell},
       peak_column()},
      rows);
  table.add_note(
      "All-reduces, bytes and exposed communication per optimizer step. Gradient norm: of the "
      "first step, before the update, and against that with no_sync.");
  add_method_note(table, context.fp32);
  add_noise_notes(table, context.runs, compare(context.synced, context.accumulated));
  return table;
}

Table precision_table(const AnswerContext& context) {
  const size_t repetitions = context.fp32.runs.size();
  const std::string planted = fmt::format("overflow in step {}, ", context.overflow_at());
  Table table = make_table<SetRow>(
      "Precision: speed and stability",
      {name_column("set-up"),
       step_column(),
       {"speed-up",
        [=](const SetRow& row) -> std::string {
          if (row.base == nullptr) return "1";
          // One run against one other says little about speed.
          if (row.set_up->runs.size() < repetitions) return "—";
          return format_speedup(compare(*row.base, *row.set_up));
        }},
       {"skipped", [](const SetRow& row) { return skipped_cell(row.first()); }},
       {"final scale", [](const SetRow& row) { return scale_cell(row.first()); }},
       {"not finite",
        [](const SetRow& row) {
          return fmt::format("{} of {}", row.first().nonfinite, row.first().losses.size());
        }},
       {"last loss",
        [](const SetRow& row) -> std::string {
          const auto& losses = row.first().losses;
          if (losses.empty()) return "—";
          return std::isfinite(losses.back()) ? fmt::format("{:.4g}", losses.back()) : "not finite";
        }}},
      {{"fp32", &context.fp32},
       {context.precision + ", scaler", &context.amp, &context.fp32},
       {context.precision + ", no scaler", &context.runs.of("no_scaler"), &context.fp32},
       {planted + "scaler", &context.runs.of("overflow"), &context.fp32},
       {planted + "no scaler", &context.runs.of("overflow_no_scaler"), &context.fp32}});
  table.add_note(
      "Skipped: optimizer steps that the scaler left out. Not finite: losses that were infinite or "
      "not a number. Set-ups without a speed-up ran once.");
  add_noise_notes(table, context.runs, context.faster_with_amp);
  return table;
}

Table memory_split_table(const AnswerContext& context) {
  std::vector<SetColumn> columns = {name_column("set-up"), peak_column()};
  for (const auto& part : kMemoryParts) {
    columns.push_back({part.name, [bytes = part.bytes](const SetRow& row) {
                         return part_cell(*row.set_up, bytes);
                       }});
  }
  std::vector<SetRow> rows = {{"fp32", &context.fp32}};
  for (const auto& accumulated : context.runs.all("accumulated")) {
    const RunSet& one_batch = context.runs.of("one_batch", accumulated.size);
    rows.push_back({fmt::format("{} micro-steps", accumulated.size), &accumulated});
    rows.push_back({fmt::format("one batch of {}", rows_of(one_batch)), &one_batch});
  }
  rows.push_back({context.precision, &context.amp});
  rows.push_back({fmt::format("{}, {} micro-steps", context.precision, context.micro_steps),
                  &context.combined});
  Table table = make_table("Memory: what the peak is made of", columns, rows);
  table.add_note(
      "Peak: the largest of all devices. The parts are those of rank 0; activations are the rest "
      "of its peak, inputs and temporaries included.");
  return table;
}

Table gradients_table(const AnswerContext& context) {
  const auto cell = [](auto text_of) {
    return [text_of](const SetRow& row) {
      const auto check = gradients_of(*row.set_up);
      return check ? text_of(*check) : std::string("—");
    };
  };
  const auto share = [&cell](double GradientCheck::*fraction) {
    return cell([fraction](const GradientCheck& check) { return format_share(check.*fraction); });
  };
  Table table = make_table<SetRow>(
      "Gradients of the first step, and what fp16 would keep of them",
      {name_column("set-up"),
       {"values", cell([](const GradientCheck& check) { return std::to_string(check.count); })},
       {"0 already", share(&GradientCheck::zero_share)},
       {"lost in fp16", share(&GradientCheck::fp16_lost)},
       {"lost, scaled", share(&GradientCheck::fp16_lost_scaled)},
       {"too large, scaled", share(&GradientCheck::fp16_overflow_scaled)}},
      {{"fp32", &context.fp32},
       {context.precision + ", scaler", &context.amp},
       {context.precision + ", no scaler", &context.runs.of("no_scaler")}});
  table.add_note(fmt::format(
      "Lost: values that fp16 would round to 0, as they are and multiplied by 65536, the scaler's "
      "first scale. {}",
      context.bf16() ? "No run here used fp16: these shares are computed from the gradients of "
                       "runs in fp32 and bf16."
                     : "Computed from the gradients that the runs left in fp32."));
  return table;
}

// ---- Charts

BarChart speed_chart(const std::vector<SetRow>& rows, const RunSet& fp32) {
  BarChart chart{.title = "Rows per second, times those of fp32"};
  BarSeries series{.name = "speed-up"};
  for (const auto& row : rows) {
    const Comparison faster = compare_per_row(fp32, *row.set_up);
    chart.categories.push_back(row.name);
    series.values.push_back(faster.speedup.mean);
    series.deviations.push_back(faster.speedup.stddev);
  }
  chart.series = {series};
  return chart;
}

std::vector<Figure> figures(const AnswerContext& context) {
  const std::string& amp = context.precision;
  const std::string k = std::to_string(context.micro_steps);
  const SetRow fp32{"fp32", &context.fp32};
  const SetRow many{k + " micro-steps", &context.accumulated};
  const SetRow one_batch{"one batch", &context.one_batch};
  const SetRow low{amp, &context.amp};
  const SetRow both{fmt::format("{}, {}", amp, k), &context.combined};
  return {
      {speed_chart({fp32, many, {k + ", sync each", &context.synced}, one_batch, low, both},
                   context.fp32),
       fmt::format("Steps of {} rows (fp32, {}) and of {} rows (all others).", context.micro_rows,
                   amp, context.rows)},
      {memory_chart("Peak memory of rank 0", {fp32, many, one_batch, low, both}),
       fmt::format("One batch holds the activations of all {} rows; {} micro-steps those of {}.",
                   rows_of(context.one_batch), k, context.micro_rows)},
      {loss_chart("Loss", {fp32,
                           low,
                           {"overflow, scaler", &context.runs.of("overflow")},
                           {"overflow, no scaler", &context.runs.of("overflow_no_scaler")}}),
       fmt::format("An infinite gradient was planted in step {}; a line ends where its loss is not "
                   "finite.",
                   context.overflow_at())},
  };
}

// ---- Answers

const std::string kOneRank =
    "This run had one rank, so there was nothing to synchronise and it cannot show it; try "
    "--devices cpu:2.";

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
std::string one_batch_text(const AnswerContext& context) {
  const auto norms = norm_ratio(context.one_batch, context.accumulated);
  const auto losses = loss_deviation(context.one_batch.first(), context.accumulated.first());
  if (!norms || !losses) return "";
  const double apart = std::max(std::abs(*norms - 1), *losses);
  return fmt::format(
      " One batch of {} rows gave {:.4g}: {}.", context.rows, gradients_of(context.one_batch)->norm,
      apart <= kSameNorm
          ? "accumulation is equivalent to it, except for rounding"
          : "norm and losses are up to " + share_text(apart) + " apart from accumulation's");
}

std::string answer_divided(const AnswerContext& context) {
  std::string text = fmt::format(
      "backward() adds to the gradients, so {0} micro-steps give the sum of {0} means; dividing "
      "each loss by {0} makes it the mean over all {1} rows.",
      context.micro_steps, context.rows);
  const auto undivided = norm_ratio(context.accumulated, context.undivided);
  if (!undivided) return text + " This run did not record its gradients, so it cannot show it.";
  text += fmt::format(
      " Undivided, the first gradient had the norm {:.4g} instead of {:.4g}, {:.2f} times as much, "
      "and moved the weights as a learning rate of {:.2f} times the size would.",
      gradients_of(context.undivided)->norm, gradients_of(context.accumulated)->norm, *undivided,
      *undivided);
  text += undivided_end(context.accumulated.first(), context.undivided.first());
  return text + one_batch_text(context);
}

std::string answer_skipped(const AnswerContext& context) {
  const std::string reason =
      "The optimizer needs only the sum over all micro-steps, and averaging that sum once over the "
      "ranks gives what averaging each part would.";
  if (context.one_rank()) return reason + " " + kOneRank;
  const AllReduces& once = context.accumulated.first().all_reduces;
  const AllReduces& each = context.synced.first().all_reduces;
  std::string text = fmt::format(
      "{} With no_sync an optimizer step made {:g} all-reduces of together {}; synchronising each "
      "of its {} micro-steps made {:g} of together {}.",
      reason, once.count, format_bytes(once.bytes), context.micro_steps, each.count,
      format_bytes(each.bytes));
  if (const auto ratio = norm_ratio(context.accumulated, context.synced)) {
    const double apart = std::abs(*ratio - 1);
    text += apart <= kSameNorm
                ? " The gradient was the same."
                : fmt::format(" The norms of the gradients were {} apart.", format_share(apart));
  }
  return text;
}

std::string answer_without_no_sync(const AnswerContext& context) {
  if (context.one_rank()) return kOneRank;
  const Comparison slower = compare(context.accumulated, context.synced);
  const AllReduces& once = context.accumulated.first().all_reduces;
  const AllReduces& each = context.synced.first().all_reduces;
  return fmt::format(
             "The weights come out the same, but each of the {} micro-steps sends all gradients: "
             "that "
             "is {} per optimizer step instead of {}. Communication that nothing hid took {} "
             "instead "
             "of {}, and a step took {} instead of {}: it was {}.",
             context.micro_steps, format_bytes(each.bytes), format_bytes(once.bytes),
             format_ms(communication_of(context.synced).exposed_ms),
             format_ms(communication_of(context.accumulated).exposed_ms), step_of(context.synced),
             step_of(context.accumulated), format_against(slower, "with no_sync")) +
         sharing_sentence(context.fp32) + context.noise(slower);
}

std::string answer_why_mixed(const AnswerContext& context) {
  std::string text = fmt::format(
      "Values of 16 bits are half the bytes to move, and matrix products have faster instructions "
      "for them. A step took {} in {} and {} in fp32: {}.",
      step_of(context.amp), context.precision, step_of(context.fp32),
      format_against(context.faster_with_amp, "fp32"));
  const auto fp32 = memory_of(context.fp32);
  const auto amp = memory_of(context.amp);
  if (fp32 && amp) {
    text += fmt::format(" Activations and temporaries took {} against {}",
                        format_bytes(amp->activations), format_bytes(fp32->activations));
    text += amp->low_precision > 0 ? fmt::format(", and {} of low-precision weights came on top.",
                                                 format_bytes(amp->low_precision))
                                   : ".";
  }
  return text + loss_parity(context.fp32.first(), context.amp.first(), "fp32's") +
         context.noise(context.faster_with_amp);
}

std::string answer_why_scaler(const AnswerContext& context) {
  std::string text =
      "fp16 has no number between 0 and 6e-8, so small gradients vanish; if they are multiplied by "
      "a "
      "scale, they survive, and the update divides by it again.";
  if (const auto check = gradients_of(context.fp32)) {
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

std::string answer_without_scaler(const AnswerContext& context) {
  std::string text;
  const auto with = gradients_of(context.amp);
  const auto without = gradients_of(context.runs.of("no_scaler"));
  if (context.bf16()) {
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
         loss_parity(context.amp.first(), context.runs.of("no_scaler").first(),
                     "those with a scaler") +
         overflow_text(context);
}

std::string answer_table(const AnswerContext& context) {
  const AllReduces& many = context.accumulated.first().all_reduces;
  const AllReduces& amp = context.amp.first().all_reduces;
  std::string text = fmt::format(
      "Accumulation trains a batch of {} rows in the memory of {}: its peak is {} where one batch "
      "needs {}, at {:.2f} times the rows per second of plain fp32. {} computes the same batch "
      "with "
      "less work: its peak is {} instead of {}, at {:.2f} times the rows per second.",
      context.rows, context.micro_rows, format_bytes(peak_of(context.accumulated)),
      format_bytes(peak_of(context.one_batch)), context.faster_with_many.speedup.mean,
      context.precision, format_bytes(peak_of(context.amp)), format_bytes(peak_of(context.fp32)),
      context.faster_with_amp.speedup.mean);
  if (context.one_rank()) {
    return text + " With one rank neither communicates.";
  }
  return text + fmt::format(" Accumulation sends {} for {} rows; {} sends {} for {}.",
                            format_bytes(many.bytes), context.rows, context.precision,
                            format_bytes(amp.bytes), context.micro_rows);
}

std::string answer_memory(const AnswerContext& context) {
  const double many = context.saved_by_many();
  const double amp = context.saved_by_amp();
  const std::string winner = std::max(many, amp) <= 0 ? "Neither saved any in this run."
                             : many > amp             ? "Accumulation, in this run."
                                                      : "Mixed precision, in this run.";
  return fmt::format(
      "{} With accumulation {} sufficed for {} rows where one batch took {} ({}); {} took {} where "
      "fp32 took {} ({}). Accumulation keeps only the activations of one micro-step; autocast "
      "makes them smaller, but adds copies of the weights. Gradients and weights stay in fp32 "
      "with both.",
      winner, format_bytes(peak_of(context.accumulated)), context.rows,
      format_bytes(peak_of(context.one_batch)), format_change(-many), context.precision,
      format_bytes(peak_of(context.amp)), format_bytes(peak_of(context.fp32)), format_change(-amp));
}

std::string answer_speed(const AnswerContext& context) {
  const Comparison& many = context.faster_with_many;
  const Comparison& amp = context.faster_with_amp;
  const double margin = std::max(many.margin(), amp.margin());
  const double apart = amp.speedup.mean - many.speedup.mean;
  const std::string winner = std::abs(apart) <= margin ? "Neither clearly, in this run."
                             : apart > 0               ? "Mixed precision, in this run."
                                                       : "Accumulation, in this run.";
  std::string text = fmt::format(
      "{} Against plain fp32 the rows per second were {} times with {} and {} times with {} "
      "micro-steps. Precision speeds up the products themselves; accumulation only saves {}.",
      winner, format_speedup(amp), context.precision, format_speedup(many), context.micro_steps,
      context.one_rank() ? "updates, and with several ranks communication"
                         : "communication and updates, which are made once per step");
  return text + sharing_sentence(context.fp32) + context.noise(amp.unsafe ? amp : many);
}

std::string answer_combined(const AnswerContext& context) {
  const RunSet& both = context.combined;
  const Comparison faster = compare_per_row(context.fp32, both);
  return fmt::format(
             "Yes: they act on different things. {} micro-steps in {} trained {} times the rows "
             "per second of plain fp32 ({:.2f} with accumulation alone, {:.2f} with {} alone), at "
             "a "
             "peak of {} for {} rows. The accumulation logic stays as it is: the divided loss is "
             "scaled, "
             "and the scaler steps once, after the last micro-step.",
             context.micro_steps, context.precision, format_speedup(faster),
             context.faster_with_many.speedup.mean, context.faster_with_amp.speedup.mean,
             context.precision, format_bytes(peak_of(both)), rows_of(both)) +
         loss_parity(context.accumulated.first(), both.first(), "those of accumulation in fp32") +
         context.noise(faster);
}

LabReport report(const LabRuns& runs) {
  const AnswerContext context(runs);
  return {.title = "Practical 7: gradient accumulation and mixed precision",
          .stamp = context.fp32.first(),
          .tables = {{"techniques", techniques_table(context)},
                     {"accumulation", accumulation_table(context)},
                     {"precision", precision_table(context)},
                     {"memory", memory_split_table(context)},
                     {"gradients", gradients_table(context)}},
          .figures = figures(context),
          .answers = {
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
          }};
}

}  // namespace

Lab lab() {
  return {.name = "7",
          .folder = "reports/lab7",
          .flags = accumulation_flags(),
          .examples = {{"", "accumulation and mixed precision"}},
          .plan = plan,
          .report = report};
}

}  // namespace lockstep::cli::practical7
