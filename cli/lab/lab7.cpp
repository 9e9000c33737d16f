// Practical 7: gradient accumulation and mixed precision.

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "cli/lab/lab7.hpp"
#include "cli/lab/lab_charts.hpp"
#include "cli/lab/lab_tables.hpp"

namespace lockstep::cli::practical7 {
namespace {

// ---- Plan: the keys of TrainingVariant.

// Wide layers and many rows: lower precision shows where matrix products outweigh everything else.
AccumulationDefaults defaults_for(bool quick) {
  if (quick) return {{8, 256, 1024, 1024, 2}, {10, 4096, 2048, 4096, 2}, {4}};
  return {{20, 256, 1024, 1024, 2}, {30, 4096, 2048, 4096, 2}, {4, 8}};
}

// fp32 alone; accumulation with and without no_sync, and as one large batch; autocast with and
// without a scaler, with and without a planted overflow; both techniques together; and two studies
// with models of their own, of the divided loss and of memory.
LabPlan plan(const LabOptions& options, const Hardware& hardware) {
  const auto config = choose_config(options, hardware, defaults_for(options.quick));
  const std::string& amp = config.amp;
  std::vector<TrainingVariant> timed = {{}, {.amp = amp}};
  std::vector<TrainingVariant> once;
  for (const int64_t micro_steps : config.accum_steps) {
    timed.push_back({.accum_steps = micro_steps});
    timed.push_back({.accum_steps = micro_steps, .sync_every_step = true});
    timed.push_back({.row_factor = micro_steps});
  }
  timed.push_back({.accum_steps = config.accum_steps.front(), .amp = amp});
  // In the middle, so that the curve is seen to go on after it.
  const int64_t overflow_at = std::max<int64_t>(1, config.sizes.steps / 2);
  once.push_back({.amp = amp, .scaler = false});
  once.push_back({.amp = amp, .overflow_at = overflow_at});
  once.push_back({.amp = amp, .scaler = false, .overflow_at = overflow_at});
  auto studies = divisor_study(config);
  const auto memory = memory_study(config, 3);
  studies.insert(studies.end(), memory.begin(), memory.end());
  return plan_variants(timed, once, studies, options.repetitions(), config);
}

// ---- Tables

Table techniques_table(const AnswerContext& context) {
  const RunSet& deep_fp32 = context.many_rows_fp32();
  const RunSet& deep_amp = context.many_rows_amp();
  Table table("Accumulation and mixed precision",
              {{""},
               {fmt::format("accumulation, {} micro-steps", context.micro_steps)},
               {fmt::format("{} autocast, GradScaler", context.precision)}});
  // Calls cell(with, without): the set-up with the technique, and the one it is compared with.
  const auto add = [&](const std::string& measure, const RunSet& without_many, const auto& cell) {
    table.add_row(
        {measure, cell(context.accumulated, without_many), cell(context.amp, context.fp32)});
  };
  const auto change = [](const RunSet& with, const RunSet& without) {
    return format_change(relative_change(peak_of(without), peak_of(with)));
  };
  const auto peak = [](const RunSet& set_up) { return bytes_cell(peak_of(set_up)); };
  const auto bytes = [](const RunSet& set_up) {
    return bytes_cell(set_up.first().all_reduces.bytes);
  };
  table.add_row(
      {"goal", fmt::format("a batch of {} rows", context.rows), "faster, smaller values"});
  add("memory: peak", context.one_batch,
      [&](const RunSet& with, const RunSet&) { return peak(with); });
  add("… without it", context.one_batch,
      [&](const RunSet&, const RunSet& without) { return peak(without); });
  add("… change", context.one_batch, change);
  table.add_row(
      {fmt::format("… deep model, {} rows", rows_of(deep_amp)), "—", change(deep_amp, deep_fp32)});
  add("speed: rows/s over fp32", context.fp32, [](const RunSet& with, const RunSet& without) {
    return format_speedup(compare_rows(without, with));
  });
  add("communication: calls", context.synced, [](const RunSet& with, const RunSet&) {
    return number_cell("{:g}", with.first().all_reduces.count);
  });
  add("… bytes", context.synced, [&](const RunSet& with, const RunSet&) { return bytes(with); });
  add("… bytes without it", context.synced,
      [&](const RunSet&, const RunSet& without) { return bytes(without); });
  add("… for rows", context.synced,
      [](const RunSet& with, const RunSet&) { return count_cell(rows_of(with)); });
  table.add_note(
      fmt::format("Without accumulation: in memory, one batch of {} rows; in communication, "
                  "all-reduces in each "
                  "micro-step. Without autocast: fp32. Communication is that of an optimizer step; "
                  "gradients are sent in fp32 under autocast too.",
                  context.rows));
  return table;
}

// The norm of the first gradient.
TableCell norm_cell(const SetRow& row) {
  const auto gradients = gradients_of(*row.set_up);
  return gradients ? number_cell("{:.4g}", gradients->norm) : "—";
}

// How many times the base's norm it is.
TableCell norm_ratio_cell(const SetRow& row) {
  const auto ratio = row.base == nullptr ? std::nullopt : norm_ratio(*row.base, *row.set_up);
  return ratio ? number_cell("{:.3f}", *ratio) : "—";
}

// fp32 alone, and for each number of micro-steps the three ways to train as many rows.
std::vector<SetRow> large_batches(const AnswerContext& context) {
  std::vector<SetRow> rows = {{"fp32 alone", &context.fp32}};
  for (const auto& accumulated : context.runs.all("accumulated")) {
    const auto of = [&](const char* what) { return &context.runs.of(what, accumulated.size); };
    rows.push_back({"no_sync", &accumulated});
    rows.push_back({"sync each", of("synced"), &accumulated});
    rows.push_back({"one batch", of("one_batch"), &accumulated});
  }
  return rows;
}

Table accumulation_table(const AnswerContext& context) {
  Table table = make_table<SetRow>(
      "Accumulation: ways to make a large batch",
      {name_column("set-up"),
       micro_rows_column(),
       step_column(),
       {"rows/s", [](const SetRow& row) { return number_cell("{:.0f}", rows_per_s(*row.set_up)); }},
       peak_column(),
       {"norm", norm_cell},
       {"ratio", norm_ratio_cell}},
      large_batches(context));
  table.add_note("Norm: of the first gradient, before the update; ratio: over that with no_sync.");
  add_method_note(table, context.fp32);
  return table;
}

Table synchronisation_table(const AnswerContext& context) {
  Table table = make_table<SetRow>(
      "Accumulation: communication of an optimizer step",
      {name_column("set-up"),
       micro_rows_column(),
       {"all-reduces",
        [](const SetRow& row) { return number_cell("{:g}", row.first().all_reduces.count); }},
       {"bytes", [](const SetRow& row) { return bytes_cell(row.first().all_reduces.bytes); }},
       {"time",
        [](const SetRow& row) { return format_ms(communication_of(*row.set_up).total_ms); }},
       {"exposed",
        [](const SetRow& row) { return format_ms(communication_of(*row.set_up).exposed_ms); }}},
      large_batches(context));
  table.add_note("Exposed: the part of the time that no computation hid.");
  return table;
}

// A loss of the set-up's first run; steps count from 1.
TableCell loss_cell(const SetRow& row, size_t step) {
  const auto& losses = row.first().losses;
  if (step < 1 || step > losses.size()) return "—";
  const double loss = losses[step - 1];
  if (!std::isfinite(loss)) return "not finite";
  return loss >= 1e3 && loss < 1e6 ? number_cell("{:.0f}", loss) : number_cell("{:.3g}", loss);
}

// An option of a program, as a number if it is one.
TableCell option_cell(const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = error == std::errc() && end == text.data() + text.size();
  return whole ? TableCell(text, {.numbers = {value}}) : TableCell(text);
}

Table divisor_table(const AnswerContext& context) {
  const size_t steps = context.divided.first().losses.size();
  std::vector<SetColumn> columns = {name_column("loss"),
                                    {"rate",
                                     [](const SetRow& row) -> TableCell {
                                       const auto rate = row.first().options.find("lr");
                                       if (rate == row.first().options.end()) return "—";
                                       return option_cell(rate->second);
                                     }},
                                    {"norm", norm_cell},
                                    {"ratio", norm_ratio_cell}};
  for (const size_t step : {size_t{1}, steps / 3, 2 * steps / 3, steps}) {
    columns.push_back(
        {fmt::format("step {}", step), [step](const SetRow& row) { return loss_cell(row, step); }});
  }
  Table table =
      make_table<SetRow>("Why the loss is divided: the losses of a small model", columns,
                         {{fmt::format("divided by {}", context.divided.size), &context.divided},
                          {"undivided", &context.undivided, &context.divided},
                          {fmt::format("divided by {}", context.larger_rate.size),
                           &context.larger_rate, &context.divided}});
  table.add_note(
      "Rate: the learning rate. Norm: of the first gradient, before the update; ratio: over that "
      "of "
      "the first row. Then the loss in some of the steps.");
  return table;
}

Table precision_table(const AnswerContext& context) {
  Table table = make_table<SetRow>(
      "Precision: speed",
      {name_column("set-up"),
       micro_rows_column(),
       step_column(),
       range_column(),
       {"speed-up",
        [](const SetRow& row) {
          return row.base == nullptr ? count_cell(1)
                                     : format_speedup(compare_rows(*row.base, *row.set_up));
        }}},
      {{"fp32", &context.fp32},
       {context.precision, &context.amp, &context.fp32},
       {context.precision, &context.combined, &context.fp32}});
  table.add_note("Speed-up: in rows per second.");
  add_method_note(table, context.fp32);
  return table;
}

Table stability_table(const AnswerContext& context) {
  Table table = make_table<SetRow>(
      "Precision: stability, without and with an infinite gradient",
      {name_column("set-up"),
       {"skipped", [](const SetRow& row) { return skipped_cell(row.first()); }},
       {"final scale", [](const SetRow& row) { return scale_cell(row.first()); }},
       {"not finite",
        [](const SetRow& row) {
          const auto infinite = static_cast<double>(row.first().nonfinite);
          const auto all = static_cast<double>(row.first().losses.size());
          return TableCell(fmt::format("{} of {}", infinite, all),
                           {.kind = CellValue::Kind::kShare, .numbers = {infinite, all}});
        }},
       {"last loss",
        [](const SetRow& row) -> TableCell {
          const auto& losses = row.first().losses;
          if (losses.empty()) return "—";
          return std::isfinite(losses.back()) ? number_cell("{:.4g}", losses.back()) : "not finite";
        }}},
      {{"fp32", &context.fp32},
       {context.precision + ", scaler", &context.amp},
       {context.precision + ", no scaler", &context.runs.of("no_scaler")},
       {"overflow, scaler", &context.runs.of("overflow")},
       {"overflow, no scaler", &context.runs.of("overflow_no_scaler")}});
  table.add_note(
      fmt::format("Overflow: {} with an infinite gradient planted in step {}. Skipped: optimizer "
                  "steps that the "
                  "scaler left out. Not finite: losses that were infinite or not a number.",
                  context.precision, context.overflow_at()));
  return table;
}

// "bf16, 4 × 256": precision, micro-steps and their rows.
std::string memory_name(const RunSet& set_up) {
  const RunRecord& run = set_up.first();
  return fmt::format("{}, {} × {}", run.amp == "off" ? "fp32" : run.amp, run.accum_steps,
                     rows_of(set_up) / run.accum_steps);
}

Table memory_split_table(const AnswerContext& context) {
  std::vector<const RunSet*> set_ups = {&context.fp32};
  for (const auto& accumulated : context.runs.all("accumulated")) {
    set_ups.push_back(&accumulated);
    set_ups.push_back(&context.runs.of("one_batch", accumulated.size));
  }
  set_ups.push_back(&context.amp);
  set_ups.push_back(&context.combined);
  std::vector<SetRow> rows;
  for (const RunSet* set_up : set_ups) rows.push_back({memory_name(*set_up), set_up});
  std::vector<SetColumn> columns = {name_column("set-up"), peak_column()};
  for (const auto& part : kMemoryParts) columns.push_back(part_column(part));
  Table table = make_table("Memory: what the peak is made of", columns, rows);
  table.add_note(
      "Set-up: precision, micro-steps × rows. Peak: the largest of all devices. The parts are "
      "those "
      "of rank 0. Copies: of the weights, in "
      "low precision. Activations: the rest of the peak, inputs and temporaries included.");
  return table;
}

// A line of memory_rows_table(): the same training in fp32 and in lower precision.
struct MemoryPair {
  std::string model;
  const RunSet* fp32;
  const RunSet* amp;
};

Table memory_rows_table(const AnswerContext& context) {
  std::vector<MemoryPair> pairs = {{"lab", &context.fp32, &context.amp}};
  for (const auto& fp32 : context.runs.all("memory_fp32")) {
    pairs.push_back({"deep", &fp32, &context.runs.of("memory_amp", fp32.size)});
  }
  const std::string& precision = context.precision;
  const auto peak = [](const RunSet* MemoryPair::*run) {
    return [run](const MemoryPair& pair) { return bytes_cell(peak_of(*(pair.*run))); };
  };
  const auto part = [](const RunSet* MemoryPair::*run, int64_t MemorySplit::*bytes) {
    return [=](const MemoryPair& pair) { return part_cell(*(pair.*run), bytes); };
  };
  Table table = make_table<MemoryPair>(
      fmt::format("Memory in fp32 and {}, over the rows of a step", precision),
      {{"model", [](const MemoryPair& pair) { return pair.model; }, Align::kLeft},
       {"rows", [](const MemoryPair& pair) { return count_cell(rows_of(*pair.fp32)); }},
       {"peak, fp32", peak(&MemoryPair::fp32)},
       {"… " + precision, peak(&MemoryPair::amp)},
       {"change",
        [](const MemoryPair& pair) {
          return format_change(relative_change(peak_of(*pair.fp32), peak_of(*pair.amp)));
        }},
       {"activations, fp32", part(&MemoryPair::fp32, &MemorySplit::activations)},
       {"… " + precision, part(&MemoryPair::amp, &MemorySplit::activations)},
       {"copies", part(&MemoryPair::amp, &MemorySplit::low_precision)}},
      pairs);
  table.add_note(
      "Model: that of this lab, and a deep, narrow one. Copies: of the weights, in low precision. "
      "They do not grow with the rows, but the activations do, and autocast halves most of them: "
      "the input, the output and the loss stay in fp32.");
  return table;
}

Table gradients_table(const AnswerContext& context) {
  const auto cell = [](auto text_of) {
    return [text_of](const SetRow& row) {
      const auto check = gradients_of(*row.set_up);
      return check ? text_of(*check) : TableCell("—");
    };
  };
  const auto share = [&cell](double GradientCheck::*fraction) {
    return cell([fraction](const GradientCheck& check) { return format_share(check.*fraction); });
  };
  Table table = make_table<SetRow>(
      "Gradients of the first step, and what fp16 would keep of them",
      {name_column("set-up"),
       {"values", cell([](const GradientCheck& check) { return format_count(check.count); })},
       {"0 already", share(&GradientCheck::zero_share)},
       {"lost in fp16", share(&GradientCheck::fp16_lost)},
       {"lost, scaled", share(&GradientCheck::fp16_lost_scaled)},
       {"too large", share(&GradientCheck::fp16_overflow_scaled)}},
      {{"fp32", &context.fp32},
       {context.precision + ", scaler", &context.amp},
       {context.precision + ", no scaler", &context.runs.of("no_scaler")}});
  table.add_note(fmt::format(
      "Lost: values that fp16 would round to 0, as they are and multiplied by 65536, the scaler's "
      "first scale. Too large: for fp16, multiplied so. {}",
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
    const Comparison faster = compare_rows(fp32, *row.set_up);
    chart.categories.push_back(row.name);
    series.values.push_back(faster.speedup.mean);
    series.deviations.push_back(row.set_up == &fp32 ? 0 : faster.speedup.stddev);
  }
  chart.series = {series};
  return chart;
}

// The losses of divisor_study(), up to twice the first: a loss that diverges would hide the others.
LineChart divisor_chart(const AnswerContext& context) {
  const auto rate = [](const RunSet& set_up) {
    const auto found = set_up.first().options.find("lr");
    return found == set_up.first().options.end() ? "" : ", learning rate " + found->second;
  };
  LineChart chart = loss_chart("Loss of the small model",
                               {{"divided" + rate(context.divided), &context.divided},
                                {"undivided" + rate(context.undivided), &context.undivided},
                                {"divided" + rate(context.larger_rate), &context.larger_rate}});
  chart.log_y = false;
  chart.from_zero = true;
  for (auto& series : chart.series) {
    bool left = false;
    for (auto& loss : series.y) {
      left = left || !(loss <= 2 * series.y.front());
      if (left) loss = std::nan("");
    }
  }
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
      {divisor_chart(context),
       "Why the loss is divided. A line ends where its loss exceeds twice the first one; lines "
       "that "
       "coincide had the same losses."},
  };
}

LabReport report(const LabRuns& runs) {
  const AnswerContext context(runs);
  return {.title = "Practical 7: gradient accumulation and mixed precision",
          .stamp = context.fp32.first(),
          .trained = context.trained("7"),
          .warning = context.warning,
          .tables = {{"techniques", techniques_table(context)},
                     {"accumulation", accumulation_table(context)},
                     {"synchronisation", synchronisation_table(context)},
                     {"divisor", divisor_table(context)},
                     {"precision", precision_table(context)},
                     {"stability", stability_table(context)},
                     {"memory", memory_split_table(context)},
                     {"memory_rows", memory_rows_table(context)},
                     {"gradients", gradients_table(context)}},
          .figures = figures(context),
          .answers = answer_questions(context),
          .code = {course_source("practical7_accumulation"), course_source("practical7_amp")}};
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
