#include "cli/lab/lab7_tables.hpp"

#include <fmt/format.h>

#include <cmath>

#include "cli/lab/lab_measures.hpp"
#include "cli/lab/lab_text.hpp"
#include "lockstep/units.hpp"

namespace lockstep::cli {
namespace {

std::string all_reduces_of(const RunSet& set_up) {
  const AllReduces& calls = set_up.runs.front().all_reduces;
  return fmt::format("{:g} all-reduces, {}", calls.count, format_bytes(calls.bytes));
}

std::string speed_of(const RunSet& base, const RunSet& other) {
  return fmt::format("{} × the rows/s of fp32", format_speedup(compare_per_row(base, other)));
}

std::string peak_against(const RunSet& base, const RunSet& other, const std::string& whose) {
  const int64_t before = peak_of(base);
  return fmt::format("{} {}: {}", format_bytes(before), whose,
                     format_change(relative_change(before, peak_of(other))));
}

// "4.00 × divided" beside the norm itself.
std::string norm_cell(const RunSet& divided, const RunSet& set_up) {
  const auto gradients = gradients_of(set_up);
  if (!gradients) return "—";
  const auto ratio = norm_ratio(divided, set_up);
  if (!ratio || &divided == &set_up) return fmt::format("{:.4g}", gradients->norm);
  return fmt::format("{:.4g} ({:.3f} ×)", gradients->norm, *ratio);
}

void add_accumulation_row(Table& table, const std::string& name, const RunSet& divided,
                          const RunSet& set_up) {
  const RunRecord& run = set_up.runs.front();
  const Stats step = pooled_step_ms(set_up);
  table.add_row({name, fmt::format("{} × {}", run.accum_steps, rows_of(set_up) / run.accum_steps),
                 format_step_ms(step.mean, step.stddev), fmt::format("{:.0f}", rows_per_s(set_up)),
                 fmt::format("{:g}", run.all_reduces.count), format_bytes(run.all_reduces.bytes),
                 format_ms(communication_of(set_up).exposed_ms), norm_cell(divided, set_up),
                 format_bytes(peak_of(set_up))});
}

std::string loss_text(double loss) {
  return std::isfinite(loss) ? fmt::format("{:.4g}", loss) : "not finite";
}

// One run against one other says little about speed.
std::string speedup_cell(const RunSet& fp32, const RunSet& set_up) {
  if (&fp32 == &set_up) return "1";
  if (set_up.runs.size() < fp32.runs.size()) return "—";
  return format_speedup(compare(fp32, set_up));
}

void add_precision_row(Table& table, const std::string& name, const RunSet& fp32,
                       const RunSet& set_up) {
  const RunRecord& run = set_up.runs.front();
  const Stats step = pooled_step_ms(set_up);
  table.add_row({name, format_step_ms(step.mean, step.stddev), speedup_cell(fp32, set_up),
                 run.scale ? std::to_string(run.skipped_steps.size()) : "—",
                 run.scale ? fmt::format("{:g}", *run.scale) : "—",
                 fmt::format("{} of {}", run.nonfinite, run.losses.size()),
                 run.losses.empty() ? "—" : loss_text(run.losses.back())});
}

void add_split_row(Table& table, const std::string& name, const RunSet& set_up) {
  const auto split = memory_of(set_up);
  const auto cell = [&split](int64_t MemorySplit::*part) {
    return split ? format_bytes((*split).*part) : std::string("—");
  };
  table.add_row({name, format_bytes(peak_of(set_up)), cell(&MemorySplit::weights),
                 cell(&MemorySplit::gradients), cell(&MemorySplit::optimizer_state),
                 cell(&MemorySplit::low_precision), cell(&MemorySplit::activations)});
}

void add_gradient_row(Table& table, const std::string& name, const RunSet& set_up) {
  const auto check = gradients_of(set_up);
  if (!check) {
    table.add_row({name, "—", "—", "—", "—", "—"});
    return;
  }
  table.add_row({name, std::to_string(check->count), format_share(check->zero_share),
                 format_share(check->fp16_lost), format_share(check->fp16_lost_scaled),
                 format_share(check->fp16_overflow_scaled)});
}

}  // namespace

Table techniques_table(const Lab7Results& results) {
  const AccumulationRuns& many = results.first();
  const int64_t rows = rows_of(many.no_sync);
  const int64_t micro_rows = rows_of(results.fp32);
  Table table("Accumulation and mixed precision",
              {{""},
               {fmt::format("accumulation, {} micro-steps", many.micro_steps)},
               {fmt::format("{} autocast, GradScaler", results.precision())}});
  table.add_row({"goal", fmt::format("a batch of {} rows in the memory of {}", rows, micro_rows),
                 "faster products, smaller activations"});
  table.add_row(
      {"peak memory", format_bytes(peak_of(many.no_sync)), format_bytes(peak_of(results.amp))});
  table.add_row(
      {"… against",
       peak_against(many.one_batch, many.no_sync, fmt::format("in one batch of {} rows", rows)),
       peak_against(results.fp32, results.amp, "in fp32")});
  table.add_row(
      {"speed", speed_of(results.fp32, many.no_sync), speed_of(results.fp32, results.amp)});
  table.add_row({"communication", fmt::format("{} for {} rows", all_reduces_of(many.no_sync), rows),
                 fmt::format("{} for {} rows", all_reduces_of(results.amp), micro_rows)});
  table.add_row({"… against",
                 fmt::format("{} if each micro-step syncs", all_reduces_of(many.synced)),
                 fmt::format("{} in fp32", all_reduces_of(results.fp32))});
  table.add_note(
      "Communication: all-reduces of an optimizer step and their bytes. Gradients are sent in fp32 "
      "under autocast too.");
  add_noise_notes(table, results.others_busy_cores, compare_per_row(results.fp32, results.amp));
  return table;
}

Table accumulation_table(const Lab7Results& results) {
  Table table("Accumulation: ways to make a large batch", {{"set-up"},
                                                           {"micro-steps × rows"},
                                                           {"step time", Align::kRight},
                                                           {"rows/s", Align::kRight},
                                                           {"all-reduces", Align::kRight},
                                                           {"bytes", Align::kRight},
                                                           {"exposed", Align::kRight},
                                                           {"gradient norm", Align::kRight},
                                                           {"peak", Align::kRight}});
  add_accumulation_row(table, "fp32 alone", results.fp32, results.fp32);
  for (const auto& runs : results.accumulations) {
    add_accumulation_row(table, "no_sync", runs.no_sync, runs.no_sync);
    add_accumulation_row(table, "sync each", runs.no_sync, runs.synced);
    add_accumulation_row(table, "undivided", runs.no_sync, runs.undivided);
    add_accumulation_row(table, "one batch", runs.no_sync, runs.one_batch);
  }
  table.add_note(
      "All-reduces, bytes and exposed communication per optimizer step. Gradient norm: of the "
      "first step, before the update, and against that with no_sync.");
  add_method_note(table, results.fp32);
  add_noise_notes(table, results.others_busy_cores,
                  compare(results.first().synced, results.first().no_sync));
  return table;
}

Table precision_table(const Lab7Results& results) {
  const std::string& amp = results.precision();
  Table table("Precision: speed and stability", {{"set-up"},
                                                 {"step time", Align::kRight},
                                                 {"speed-up", Align::kRight},
                                                 {"skipped", Align::kRight},
                                                 {"final scale", Align::kRight},
                                                 {"not finite", Align::kRight},
                                                 {"last loss", Align::kRight}});
  add_precision_row(table, "fp32", results.fp32, results.fp32);
  add_precision_row(table, amp + ", scaler", results.fp32, results.amp);
  add_precision_row(table, amp + ", no scaler", results.fp32, results.no_scaler);
  const std::string planted = fmt::format("overflow in step {}, ", results.overflow_at);
  add_precision_row(table, planted + "scaler", results.fp32, results.overflow);
  add_precision_row(table, planted + "no scaler", results.fp32, results.overflow_no_scaler);
  table.add_note(
      "Skipped: optimizer steps that the scaler left out. Not finite: losses that were infinite or "
      "not a number. Set-ups without a speed-up ran once.");
  add_noise_notes(table, results.others_busy_cores, compare(results.fp32, results.amp));
  return table;
}

Table memory_split_table(const Lab7Results& results) {
  Table table("Memory: what the peak is made of", {{"set-up"},
                                                   {"peak", Align::kRight},
                                                   {"weights", Align::kRight},
                                                   {"gradients", Align::kRight},
                                                   {"optimizer state", Align::kRight},
                                                   {"low-precision copies", Align::kRight},
                                                   {"activations", Align::kRight}});
  const std::string& amp = results.precision();
  add_split_row(table, "fp32", results.fp32);
  for (const auto& runs : results.accumulations) {
    add_split_row(table, fmt::format("{} micro-steps", runs.micro_steps), runs.no_sync);
    add_split_row(table, fmt::format("one batch of {}", rows_of(runs.one_batch)), runs.one_batch);
  }
  add_split_row(table, amp, results.amp);
  add_split_row(table, fmt::format("{}, {} micro-steps", amp, results.first().micro_steps),
                results.combined);
  table.add_note(
      "Peak: the largest of all devices. The parts are those of rank 0; activations are the rest "
      "of its peak, inputs and temporaries included.");
  return table;
}

Table gradients_table(const Lab7Results& results) {
  Table table("Gradients of the first step, and what fp16 would keep of them",
              {{"set-up"},
               {"values", Align::kRight},
               {"0 already", Align::kRight},
               {"lost in fp16", Align::kRight},
               {"lost, scaled", Align::kRight},
               {"too large, scaled", Align::kRight}});
  const std::string& amp = results.precision();
  add_gradient_row(table, "fp32", results.fp32);
  add_gradient_row(table, amp + ", scaler", results.amp);
  add_gradient_row(table, amp + ", no scaler", results.no_scaler);
  table.add_note(fmt::format(
      "Lost: values that fp16 would round to 0, as they are and multiplied by 65536, the scaler's "
      "first scale. {}",
      amp == "fp16" ? "Computed from the gradients that the runs left in fp32."
                    : "No run here used fp16: these shares are computed from the gradients of runs "
                      "in fp32 and bf16."));
  return table;
}

}  // namespace lockstep::cli
