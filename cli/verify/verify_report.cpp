#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>

#include "cli/doctor/facts.hpp"
#include "cli/verify/verify.hpp"
#include "lockstep/units.hpp"
#include "lockstep/version.hpp"

namespace lockstep::cli {
namespace {

std::string verdict_cell(const VerifiedRun& run) {
  return run.refusal.empty() ? verdict_text(run.judgement.verdict) : "not offered";
}

std::string small(double value) {
  return value == 0 ? "0" : fmt::format("{:.1e}", value);
}

// Tensors whose tolerance is as large as they are were compared in vain.
std::string tensors_cell(const Judgement& judged) {
  if (judged.tensors == 0) return "—";
  return judged.loose == 0 ? std::to_string(judged.tensors)
                           : fmt::format("{}, {} loosely", judged.tensors, judged.loose);
}

Table runs_table(const std::vector<VerifiedRun>& runs) {
  Table table("Runs against one rank", {{"run"},
                                        {"verdict"},
                                        {"steps", Align::kRight},
                                        {"tensors", Align::kRight},
                                        {"largest difference", Align::kRight},
                                        {"its tolerance", Align::kRight},
                                        {"in"},
                                        {"time", Align::kRight}});
  for (const auto& run : runs) {
    const Judgement& judged = run.judgement;
    const bool compared = judged.tensors > 0 && judged.largest > 0;
    table.add_row({run.family.empty() ? run.name : run.family + ": " + run.name, verdict_cell(run),
                   judged.steps > 0 ? std::to_string(judged.steps) : "—", tensors_cell(judged),
                   compared ? small(judged.largest) : "—",
                   compared ? small(judged.largest_tolerance) : "—",
                   compared ? judged.largest_at : "—", format_seconds(run.seconds)});
  }
  table.add_note(
      "Differences are 2-norms over a tensor, relative to its norm. The tolerance is measured: 8 "
      "times how far the same tensor moves by that step if every weight begins one rounding away, "
      "in the precision of the run. Loosely: by a tolerance of more than half of the norm.");
  for (const auto& run : runs) {
    if (!run.judgement.explanation.empty()) {
      table.add_note(
          run.judgement.inside
              ? fmt::format("{}: {}. Compared inside the run only: rows, averages, replicas, "
                            "rates, buffers and random numbers.",
                            run.name, run.judgement.explanation)
              : fmt::format("{}: {}. It is one process: of its inside, only rows and rates could "
                            "be compared.",
                            run.name, run.judgement.explanation));
    }
    if (!run.refusal.empty()) table.add_note(fmt::format("{}: {}", run.name, run.refusal));
  }
  return table;
}

Table findings_table(const std::vector<VerifiedRun>& runs) {
  Table table(
      "What is wrong",
      {{"run"}, {"step", Align::kRight}, {"module"}, {"ranks"}, {"likely cause"}, {"seen"}});
  for (const auto& run : runs) {
    if (!run.judgement.finding) continue;
    const Divergence& found = *run.judgement.finding;
    table.add_row({run.family.empty() ? run.name : run.family + ": " + run.name,
                   found.step > 0 ? std::to_string(found.step) : "—",
                   found.where.empty() ? "whole step" : module_of(found.where),
                   ranks_text(found.ranks), found.cause,
                   found.where.empty() ? found.text : found.where + ": " + found.text});
  }
  return table;
}

std::string conclusion(const std::vector<VerifiedRun>& runs) {
  std::map<Verdict, int> counts;
  int refused = 0;
  for (const auto& run : runs) {
    if (run.refusal.empty()) {
      ++counts[run.judgement.verdict];
    } else {
      ++refused;
    }
  }
  std::vector<std::string> parts;
  for (const auto& [verdict, count] : counts) {
    parts.push_back(fmt::format("{} {}", count, verdict_text(verdict)));
  }
  if (refused > 0) parts.push_back(fmt::format("{} not offered by the program", refused));
  const std::string sum = fmt::format("{}", fmt::join(parts, ", "));
  if (!any_wrong(runs) && !any_compared(runs)) {
    return fmt::format("Nothing could be compared: {}.", sum);
  }
  return any_wrong(runs) ? fmt::format(
                               "No. {}. The table says where each wrong run leaves the serial one "
                               "first, and what the difference looks like.",
                               sum)
                         : fmt::format("Yes. {}.", sum);
}

}  // namespace

LabReport verify_report(const std::vector<std::string>& program,
                        const std::vector<VerifiedRun>& runs) {
  LabReport report;
  report.title = fmt::format("Verification of {}", fmt::join(program, " "));
  report.stamp.host = describe_host();
  report.stamp.versions = {{"lockstep", kVersion}};
  report.tables = {{"runs", runs_table(runs)}};
  if (any_wrong(runs)) report.tables.push_back({"findings", findings_table(runs)});
  report.answers = {{"verification", "Is every parallel run the serial run?", conclusion(runs)}};
  return report;
}

}  // namespace lockstep::cli
