#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>

#include "base/counted.hpp"
#include "cli/lab/lab_text.hpp"
#include "cli/verify/verify.hpp"
#include "lockstep/version.hpp"

namespace lockstep::cli {
namespace {

TableCell small(double value) {
  return value == 0 ? count_cell(0) : number_cell("{:.1e}", value);
}

std::string title_of(const VerifiedRun& run) {
  return run.family.empty() ? run.name : run.family + ": " + run.name;
}

// Tensors whose tolerance is as large as they are were compared in vain.
TableCell tensors_cell(const Judgement& judged) {
  if (judged.tensors == 0) return "—";
  TableCell cell = count_cell(judged.tensors);
  if (judged.loose == 0) return cell;
  cell.value.remark = fmt::format("{} loosely", judged.loose);
  cell += ", " + cell.value.remark;
  return cell;
}

// What was checked inside a run that could not be compared with the reference.
std::vector<std::string> checked_inside(const Judgement& judged) {
  std::vector<std::string> checked = {"replicas", "rates", "random numbers", "buffers"};
  for (const char* each : {"averages", "rows"}) {
    const auto& missing = judged.unrecorded;
    if (std::find(missing.begin(), missing.end(), each) == missing.end()) {
      checked.insert(checked.begin(), each);
    }
  }
  return checked;
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
    table.add_row({title_of(run), verdict_text(run),
                   judged.steps > 0 ? count_cell(judged.steps) : "—", tensors_cell(judged),
                   compared ? small(judged.largest) : "—",
                   compared ? small(judged.largest_tolerance) : "—",
                   compared ? judged.largest_at : "—", seconds_cell(run.seconds)});
  }
  table.add_note(
      "Differences are 2-norms over a tensor, relative to its norm. The tolerance is measured: 8 "
      "times how far the same tensor moves by that step if every weight begins one rounding away, "
      "in the precision of the run. Loosely: by a tolerance of more than half of the norm.");
  for (const auto& run : runs) {
    const Judgement& judged = run.judgement;
    if (!judged.explanation.empty()) {
      table.add_note(
          judged.inside
              ? fmt::format("{}: {}. It was not compared with one rank. Compared inside the run: "
                            "{}.",
                            title_of(run), judged.explanation,
                            fmt::join(checked_inside(judged), ", "))
              : fmt::format("{}: {}. It was not compared with one rank. It is one process: of its "
                            "inside, only rows and rates could be compared.",
                            title_of(run), judged.explanation));
    }
    if (!judged.unrecorded.empty()) {
      table.add_note(fmt::format("{}: {} were not recorded, and so not checked.", title_of(run),
                                 fmt::join(judged.unrecorded, " and ")));
    }
    for (const std::string& why : {run.refusal, run.failure}) {
      if (!why.empty()) table.add_note(fmt::format("{}: {}", title_of(run), why));
    }
  }
  return table;
}

Table findings_table(const std::vector<VerifiedRun>& runs) {
  Table table(
      "What is wrong",
      {{"run"}, {"step", Align::kRight}, {"module"}, {"ranks"}, {"likely cause"}, {"seen"}});
  for (const auto& run : runs) {
    if (!run.is_judged() || !run.judgement.finding) continue;
    const Divergence& found = *run.judgement.finding;
    table.add_row({title_of(run), found.step > 0 ? count_cell(found.step) : "—",
                   found.where.empty() ? "whole step" : module_of(found.where),
                   ranks_text(found.ranks), found.cause,
                   found.where.empty() ? found.text : found.where + ": " + found.text});
  }
  return table;
}

std::string conclusion(const std::vector<VerifiedRun>& runs) {
  std::map<std::string, int> counts;
  int64_t tensors = 0;
  int64_t loose = 0;
  int failed = 0;
  int explained = 0;
  for (const auto& run : runs) {
    ++counts[verdict_text(run)];
    tensors += run.judgement.tensors;
    loose += run.judgement.loose;
    if (!run.failure.empty()) ++failed;
    if (run.is_judged() && run.judgement.verdict == Verdict::kExplained) ++explained;
  }
  std::vector<std::string> parts;
  for (const auto& [verdict, count] : counts) parts.push_back(fmt::format("{} {}", count, verdict));
  std::string text = fmt::format("{}.", fmt::join(parts, ", "));
  if (any_wrong(runs)) {
    return fmt::format(
        "No. {} The table says where each wrong run leaves the serial one first, and what the "
        "difference looks like.",
        text);
  }
  if (loose > 0) {
    text += fmt::format(
        " {} of {} tensors were compared loosely: a difference of half their norm "
        "would have passed.",
        loose, tensors);
  }
  const int64_t compared = compared_runs(runs);
  if (explained > 0) {
    text += fmt::format(
        " {} {} another training or draw{} random numbers of {} own, and {} not compared with the "
        "serial run: only what must hold inside {} was checked. To compare {}, verify without "
        "dropout, and with as many rows in an update as one rank has.",
        counted(explained, "run"), explained == 1 ? "is" : "are", explained == 1 ? "s" : "",
        explained == 1 ? "its" : "their", explained == 1 ? "was" : "were",
        explained == 1 ? "it" : "them", explained == 1 ? "it" : "them");
  }
  if (failed > 0)
    return fmt::format("Not shown: {} could not be judged. {}", counted(failed, "run"), text);
  if (compared > 0) return fmt::format("Yes, for {} compared. {}", counted(compared, "run"), text);
  return fmt::format("{}: {}", explained > 0 ? "Not shown" : "Nothing could be compared", text);
}

}  // namespace

std::string verdict_text(const VerifiedRun& run) {
  if (!run.failure.empty()) return "not judged";
  return run.refusal.empty() ? verdict_text(run.judgement.verdict) : "not offered";
}

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
