#include "cli/lab/homework2_tables.hpp"

#include <fmt/format.h>

#include <cmath>
#include <functional>

#include "cli/lab/lab_measures.hpp"
#include "cli/lab/lab_text.hpp"
#include "lockstep/units.hpp"

namespace lockstep::cli {
namespace {

// A column of codes_table: a code, and the fp32 run of the same effective batch.
struct CodeColumn {
  const RunSet& set_up;
  const RunSet* reference;  // null: it is the reference
};

std::string deviation_cell(const CodeColumn& code) {
  if (code.reference == nullptr) return "—";
  const auto deviation = loss_deviation(code.reference->runs.front(), code.set_up.runs.front());
  return deviation ? format_share(*deviation) : "not finite";
}

std::string part_cell(const RunSet& set_up, int64_t MemorySplit::*part) {
  const auto split = memory_of(set_up);
  return split ? format_bytes((*split).*part) : "—";
}

std::string finite_cell(const RunRecord& run) {
  const auto losses = static_cast<int64_t>(run.losses.size());
  return fmt::format("{} of {}", losses - run.nonfinite, losses);
}

// "+4 %" slower or faster for a row, from a speed-up; nothing where it is within the noise.
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
  if (std::abs(change) < 0.01) return "same peak";
  return "peak " + format_change(change);
}

void add_point_row(Table& table, const char* code, int64_t accum_steps, const RunSet& set_up,
                   const std::string& observation) {
  const AllReduces& calls = set_up.runs.front().all_reduces;
  const double step_ms = pooled_step_ms(set_up).mean;
  table.add_row({fmt::format("{}, {}", code, accum_steps), std::to_string(rows_of(set_up)),
                 format_step_ms(step_ms, pooled_step_ms(set_up).stddev),
                 format_ms(step_ms / static_cast<double>(accum_steps)),
                 format_bytes(peak_of(set_up)),
                 fmt::format("{:g}, {}", calls.count, format_bytes(calls.bytes)), observation});
}

}  // namespace

Table codes_table(const Homework2Results& results) {
  const AccumPoint& first = results.first();
  const std::string k = std::to_string(first.accum_steps);
  const std::string& amp = results.precision();
  Table table("Codes 1, 2, 3: time, memory and stability", {{""},
                                                            {"fp32 alone", Align::kRight},
                                                            {"code 1: accumulation", Align::kRight},
                                                            {"code 2: AMP", Align::kRight},
                                                            {"code 3: both", Align::kRight}});
  const CodeColumn columns[] = {{results.fp32, nullptr},
                                {first.fp32, &results.one_batch},
                                {results.amp, &results.fp32},
                                {first.combined, &results.one_batch}};
  const auto add = [&](const std::string& what,
                       const std::function<std::string(const CodeColumn&)>& cell) {
    std::vector<std::string> cells = {what};
    for (const auto& column : columns) cells.push_back(cell(column));
    table.add_row(std::move(cells));
  };
  const auto add_part = [&](const char* what, int64_t MemorySplit::*part) {
    add(what, [part](const CodeColumn& code) { return part_cell(code.set_up, part); });
  };
  add("micro-steps × rows", [](const CodeColumn& code) {
    const int64_t micro_steps = code.set_up.runs.front().accum_steps;
    return fmt::format("{} × {}", micro_steps, rows_of(code.set_up) / micro_steps);
  });
  add("time: optimizer step", [](const CodeColumn& code) {
    const Stats step = pooled_step_ms(code.set_up);
    return format_step_ms(step.mean, step.stddev);
  });
  add("time: per row", [](const CodeColumn& code) { return format_ms(ms_per_row(code.set_up)); });
  add("time: whole run",
      [](const CodeColumn& code) { return format_seconds(mean_total_s(code.set_up)); });
  add("speed per row", [&](const CodeColumn& code) {
    return code.reference == nullptr ? std::string("1")
                                     : format_speedup(compare_per_row(results.fp32, code.set_up));
  });
  add("memory: peak", [](const CodeColumn& code) { return format_bytes(peak_of(code.set_up)); });
  add_part("… weights", &MemorySplit::weights);
  add_part("… gradients", &MemorySplit::gradients);
  add_part("… optimizer state", &MemorySplit::optimizer_state);
  add_part("… low-precision copies", &MemorySplit::low_precision);
  add_part("… activations", &MemorySplit::activations);
  add("stability: finite losses",
      [](const CodeColumn& code) { return finite_cell(code.set_up.runs.front()); });
  add("… skipped steps", [](const CodeColumn& code) {
    const RunRecord& run = code.set_up.runs.front();
    return run.scale ? std::to_string(run.skipped_steps.size()) : "—";
  });
  add("… final scale", [](const CodeColumn& code) {
    const auto& scale = code.set_up.runs.front().scale;
    return scale ? fmt::format("{:g}", *scale) : "—";
  });
  add("… largest loss deviation", deviation_cell);
  table.add_note(fmt::format(
      "AMP: {} autocast and GradScaler. Loss: largest deviation from fp32 with the same rows per "
      "update, in one batch. Mean ± deviation over {} runs of {} timed steps.",
      amp, results.fp32.runs.size(), results.fp32.runs.front().step_ms.n));
  add_noise_notes(table, results.others_busy_cores, compare(results.fp32, results.amp));
  return table;
}

std::string observe_fp32(const Homework2Results& results, const AccumPoint& point) {
  if (&point == &results.first()) {
    return per_row_phrase(compare_per_row(results.fp32, point.fp32), "fp32 alone");
  }
  const AccumPoint& first = results.first();
  return fmt::format(
      "{}, {}",
      per_row_phrase(compare_per_row(first.fp32, point.fp32), std::to_string(first.accum_steps)),
      peak_phrase(first.fp32, point.fp32));
}

std::string observe_combined(const AccumPoint& point) {
  const Comparison faster = compare(point.fp32, point.combined);
  return fmt::format("{:.2f} × code 1's speed, {}", faster.speedup.mean,
                     peak_phrase(point.fp32, point.combined));
}

Table accum_steps_table(const Homework2Results& results) {
  Table table("Codes 1 and 3 with ACCUM_STEPS", {{"code, steps"},
                                                 {"rows", Align::kRight},
                                                 {"optimizer step", Align::kRight},
                                                 {"micro-step", Align::kRight},
                                                 {"peak", Align::kRight},
                                                 {"all-reduces", Align::kRight},
                                                 {"observation"}});
  for (const auto& point : results.points) {
    add_point_row(table, "1", point.accum_steps, point.fp32, observe_fp32(results, point));
  }
  for (const auto& point : results.points) {
    add_point_row(table, "3", point.accum_steps, point.combined, observe_combined(point));
  }
  table.add_note("Rows: effective batch. All-reduces: number and bytes in an optimizer step.");
  return table;
}

}  // namespace lockstep::cli
