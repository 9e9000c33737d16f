#include "cli/verify/verify.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <ctime>
#include <filesystem>

#include "base/process.hpp"
#include "cli/lab/folder_lock.hpp"
#include "cli/lab/lab_report.hpp"
#include "lockstep/cli_parse.hpp"
#include "lockstep/error.hpp"
#include "lockstep/units.hpp"
#include "report/text.hpp"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

constexpr int kMostCleanRuns = 10'000;

const std::vector<Example> kVerifyExamples = {
    {"lockstep verify practical6_ddp", "is the parallel run the serial run?"},
    {"lockstep verify --quick ./train --batch 60", "two and three ranks, in a minute"},
    {"lockstep verify --mutate all", "plant every known bug, and find it"},
    {"lockstep verify --clean 100", "look for false alarms"}};

// The first line of an error that lockstep or the program itself reported.
std::string first_error(const std::string& errors) {
  if (const size_t known = errors.find("error[LS"); known != std::string::npos) {
    return errors.substr(known, errors.find('\n', known) - known);
  }
  const size_t end = errors.find_last_not_of("\n ");
  if (end == std::string::npos) return "it wrote no error";
  const size_t begin = errors.rfind('\n', end);
  return errors.substr(begin == std::string::npos ? 0 : begin + 1, end - begin);
}

[[noreturn]] void fail_reference(const VerifyRunner::Outcome& outcome) {
  throw ChildFailed(
      fmt::format("the program ended with exit code {} on one rank", outcome.exit_code),
      outcome.lacks_space() ? "free some space, or give --out a folder on a larger disk"
                            : "run it by itself until it works, then verify it",
      {"it said:\n" + outcome.errors}, outcome.exit_code);
}

// How long a run may take that is to do what the reference did.
std::chrono::seconds limit_of(double reference_seconds) {
  constexpr double kLeast = 60;
  constexpr double kTimes = 20;  // several ranks share the cores that it had alone
  return std::chrono::seconds(static_cast<int64_t>(std::max(kLeast, kTimes * reference_seconds)));
}

// A run that ended with an error, by the steps that it recorded, else by what it said.
Judgement judge_failed(const Baseline& baseline, const VerifyRunner::Outcome& outcome,
                       const Variant& variant) {
  const std::string said = first_error(outcome.errors);
  Judgement judgement;
  if (const TracedRun run(outcome.recording); !run.steps().empty()) {
    judgement = judge(*baseline.reference, baseline.growth, run, variant.facts);
  }
  // What its last step lacks, it lacks because it ended.
  if (judgement.verdict != Verdict::kWrong || judgement.finding->cause.ends_with("-missing")) {
    judgement.verdict = Verdict::kWrong;
    const int64_t step = judgement.finding ? judgement.finding->step : judgement.steps + 1;
    judgement.finding = Divergence{step, "", {}, "refused", said};
  } else {
    judgement.finding->text += "; the run ended with " + said;
  }
  return judgement;
}

// A run that went on from a checkpoint has every bit of the same run without a kill, with dropout
// and in bf16 too, where one rank alone tells little.
void judge_resumed(const VerifyRunner& runner, const Baseline& baseline,
                   const VerifyRunner::Outcome& resumed, const Family& family,
                   const Variant& variant, const std::map<std::string, std::string>& variables,
                   Judgement& judgement) {
  Variant whole = variant;
  whole.name += ", without the kill";
  whole.launch.clear();
  const auto outcome = runner.run(whole, family.arguments, variables, limit_of(baseline.seconds));
  if (outcome.exit_code != 0) {
    judgement = judge_failed(baseline, outcome, whole);
    judgement.finding->text = "the same run without a kill: " + judgement.finding->text;
  } else {
    RunFacts facts = variant.facts;
    facts.same_bits = true;
    const Judgement same =
        judge(TracedRun(outcome.recording), {}, TracedRun(resumed.recording), facts);
    if (same.verdict == Verdict::kWrong) judgement = same;
  }
  runner.discard(outcome);
}

void run_and_judge(const VerifyRunner& runner, const Baseline& baseline, const Family& family,
                   const Variant& variant, const std::map<std::string, std::string>& variables,
                   VerifiedRun& run) {
  const auto outcome = runner.run(variant, family.arguments, variables, limit_of(baseline.seconds));
  run.seconds = outcome.seconds;
  Judgement& judgement = run.judgement;
  Variant recorded = variant;
  recorded.facts.processes = variant.ranks;
  const TracedRun traced(outcome.recording);
  if (outcome.lacks_space()) {
    run.failure = first_error(outcome.errors);
  } else if (outcome.exit_code == 2 && traced.steps().empty()) {
    run.refusal = first_error(outcome.errors);  // one that has begun to train has not refused to
  } else if (outcome.exit_code == 0) {
    judgement = judge(*baseline.reference, baseline.growth, traced, recorded.facts);
  } else {
    judgement = judge_failed(baseline, outcome, variant);
  }
  if (judgement.steps > 0 && !judgement.is_parallel && judgement.verdict != Verdict::kWrong) {
    run.refusal = variant.ranks > 1
                      ? "each process trained alone on all rows: it is no program of ranks"
                      : "it is one process without DataParallel or stages, and divided nothing";
  }
  const bool resumed = run.is_judged() && variant.facts.resumed_after > 0;
  if (resumed && judgement.verdict != Verdict::kWrong) {
    judge_resumed(runner, baseline, outcome, family, recorded, variables, judgement);
  }
  runner.discard(outcome);
}

// Where each rank takes as many rows as the serial run alone, one rank that takes those of all is
// what the run must be compared with. Without such a run, or if it has other rows or the program's
// learning rate depends on the number of ranks, the judgement stays what it is.
void compare_with_larger_batch(const VerifyRunner& runner, const VerifyRequest& request,
                               const ProgramFlags& flags, const Family& family,
                               const Variant& variant, VerifiedRun& run) {
  const int64_t batch = flags.number(request.program, "--batch");
  if (!flags.has("--batch") || batch <= 0 || variant.facts.micro_steps > 1) return;
  Family larger = family;
  larger.name = fmt::format("{} {} times the rows", family.name, variant.ranks);
  larger.arguments.insert(larger.arguments.end(),
                          {"--batch", std::to_string(batch * variant.ranks)});
  try {
    const Baseline baseline = make_baseline(runner, larger, 1);
    VerifiedRun again;
    if (!baseline.flaw) again = verify_variant(runner, baseline, family, variant);
    runner.discard(baseline.run);
    const auto& finding = again.judgement.finding;
    const bool is_other_rate =
        finding && (finding->cause == "rate-differs" || finding->cause == "update-differs");
    if (baseline.flaw || !again.is_judged() || again.judgement.is_other_training || is_other_rate ||
        (finding && finding->cause.starts_with("rows-"))) {
      return;
    }
    again.name = fmt::format("{}, against {} rows on one", run.name, batch * variant.ranks);
    again.seconds += run.seconds;
    run = std::move(again);
  } catch (const Error&) {  // the program does not take so many
  }
}

void tell(const std::string& line) {
  print_error(line + "\n");
}

std::string title_of(const std::string& family, const std::string& name) {
  return family.empty() ? name : fmt::format("{}: {}", family, name);
}

// A family whose reference fails: the first one's is an Error, since the program does not work.
VerifiedRun failed_reference(const Family& family, const Error& error, bool refused) {
  VerifiedRun run{.family = family.name, .name = "1 rank"};
  (refused ? run.refusal : run.failure) =
      error.notes().empty() ? error.message() : first_error(error.notes().front());
  return run;
}

void verify_family(const VerifyRunner& runner, const VerifyRequest& request,
                   const ProgramFlags& flags, const Family& family,
                   std::vector<VerifiedRun>& runs) {
  Baseline baseline;
  try {
    baseline = make_baseline(runner, family, request.quick ? 1 : 2);
  } catch (const ChildFailed& error) {
    if (runs.empty()) throw;
    runs.push_back(failed_reference(family, error, error.child_exit() == 2));
    return;
  } catch (const Error& error) {
    if (runs.empty()) throw;
    runs.push_back(failed_reference(family, error, false));
    return;
  }
  VerifiedRun repeated{.family = family.name, .name = "1 rank, twice"};
  repeated.judgement.steps = static_cast<int64_t>(baseline.reference->steps().size());
  repeated.judgement.finding = baseline.flaw;
  if (baseline.flaw) repeated.judgement.verdict = Verdict::kWrong;
  repeated.seconds = baseline.seconds;
  runs.push_back(std::move(repeated));
  tell(fmt::format("{}: {}", title_of(family.name, "1 rank"), format_seconds(baseline.seconds)));
  for (const Variant& variant : family.variants) {
    VerifiedRun run = verify_variant(runner, baseline, family, variant);
    if (run.judgement.is_other_training && run.judgement.verdict == Verdict::kExplained) {
      compare_with_larger_batch(runner, request, flags, family, variant, run);
    }
    tell(fmt::format("{}: {}, {}", title_of(family.name, run.name), verdict_text(run),
                     format_seconds(run.seconds)));
    runs.push_back(std::move(run));
  }
  runner.discard(baseline.run);
}

int verify_program(const VerifyOptions& options, const Words& program, const std::string& command) {
  require_font();
  const Interrupts interrupts;
  const fs::path folder = options.out;
  make_report_folder(folder);
  const FolderLock lock(folder.string());
  const RecordingsFolder recordings(folder / "recordings", options.keep);
  const VerifyRunner runner(program, recordings, interrupts);
  const VerifyRequest request{program, options.quick, options.ranks};
  const ProgramFlags flags = runner.flags();
  std::vector<VerifiedRun> runs;
  for (const Family& family : plan_variants(request, flags)) {
    verify_family(runner, request, flags, family, runs);
  }
  publish_report(verify_report(program, runs), {command, std::time(nullptr), {}}, {}, folder);
  return exit_code_of(runs);
}

// NaN equals NaN in every run, and says nothing.
std::optional<Divergence> not_finite(const TracedRun& reference) {
  const TracedStep last = reference.read(reference.steps().back());
  for (const auto& [key, pieces] : last.pieces) {
    if (!key.starts_with("weight/")) continue;
    for (const double each : pieces.front().values()) {
      if (std::isfinite(each)) continue;
      return Divergence{last.step,
                        parameter_of(key),
                        {},
                        "not-finite",
                        "the run on one rank ends with weights that are infinite or NaN"};
    }
  }
  return std::nullopt;
}

}  // namespace

Baseline make_baseline(const VerifyRunner& runner, const Family& family, int perturbed) {
  auto limit = VerifyRunner::kLongestRun;
  const auto run = [&](const char* name, std::map<std::string, std::string> variables) {
    const Variant one{.name = name, .family = family.name};
    auto outcome = runner.run(one, family.arguments, std::move(variables), limit);
    if (outcome.exit_code != 0) fail_reference(outcome);
    return outcome;
  };
  const auto first = run("1 rank", {});
  limit = limit_of(first.seconds);
  Baseline baseline;
  baseline.seconds = first.seconds;
  baseline.run = first;
  baseline.reference = std::make_unique<TracedRun>(first.recording);
  const TracedRun& reference = *baseline.reference;
  if (reference.steps().empty()) {
    throw Error(Code::kUsage, "the program recorded no update",
                "it must update weights by an optimizer of lockstep; after step() of one of "
                "torch::optim, call lockstep::verify_step(optimizer)");
  }
  const TracedStep step = reference.read(reference.steps().front());
  baseline.dtype =
      step.facts.empty() ? "float32" : step.facts.begin()->second.at("dtype").get<std::string>();
  for (int seed = 1; seed <= perturbed; ++seed) {
    const auto moved =
        run("1 rank, weights moved",
            {{"LOCKSTEP_VERIFY_PERTURB", fmt::format("{}:{}", baseline.dtype, seed)}});
    baseline.growth.add(reference, TracedRun(moved.recording));
    runner.discard(moved);
  }
  const auto again = run("1 rank, again", {});
  const Judgement same = judge(reference, baseline.growth, TracedRun(again.recording), {});
  baseline.flaw = not_finite(reference);
  if (!baseline.flaw && same.verdict != Verdict::kSameBits) {
    baseline.flaw =
        Divergence{0,
                   "",
                   {},
                   "not-repeatable",
                   "the same run twice differs: seed its random numbers, and draw rows by number"};
  }
  runner.discard(again);
  return baseline;
}

VerifiedRun verify_variant(const VerifyRunner& runner, const Baseline& baseline,
                           const Family& family, const Variant& variant,
                           const std::map<std::string, std::string>& variables) {
  VerifiedRun run{.family = family.name, .name = variant.name};
  try {
    run_and_judge(runner, baseline, family, variant, variables, run);
  } catch (const Error& error) {
    run.failure = error.message();
  } catch (const std::exception& error) {
    run.failure = error.what();
  }
  return run;
}

int64_t compared_runs(const std::vector<VerifiedRun>& runs) {
  return std::count_if(runs.begin(), runs.end(), [](const VerifiedRun& run) {
    return run.is_judged() && run.judgement.tensors > 0 &&
           run.judgement.verdict != Verdict::kExplained;
  });
}

int exit_code_of(const std::vector<VerifiedRun>& runs) {
  const bool all_judged = std::all_of(runs.begin(), runs.end(),
                                      [](const VerifiedRun& run) { return run.failure.empty(); });
  return all_judged && !any_wrong(runs) && compared_runs(runs) > 0 ? 0 : 1;
}

bool any_wrong(const std::vector<VerifiedRun>& runs) {
  for (const auto& run : runs) {
    if (run.is_judged() && run.judgement.verdict == Verdict::kWrong) return true;
  }
  return false;
}

CLI::App* add_verify_command(CLI::App& app, VerifyOptions& options) {
  auto* command = app.add_subcommand(
      "verify", "prove that a program's parallel runs train as its serial run does");
  command->footer(format_examples(kVerifyExamples));
  command->add_flag("--quick", options.quick, "two and three ranks, and one precision");
  command->add_option("--ranks", options.ranks, "numbers of ranks or devices (default: 2,3,5)")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(CLI::Range(2, 64).description(""))
      ->type_name("LIST");
  command->add_option("--out", options.out, "folder for the report and the tables")
      ->type_name("DIR")
      ->capture_default_str();
  command->add_flag("--keep", options.keep, "keep the recordings of all steps in the folder");
  command
      ->add_option("--mutate", options.mutate,
                   "plant bugs in lockstep itself, and find them; takes no PROGRAM")
      ->type_name("all|NAMES");
  command
      ->add_option("--clean", options.clean,
                   "judge so many runs of models without a bug; takes no PROGRAM")
      ->check(CLI::Range(1, kMostCleanRuns).description(""))
      ->type_name("N");
  // For the usage line only: the program is cut off before parsing.
  command->add_option("PROGRAM")
      ->description("a program on lockstep, and its arguments")
      ->type_name("")
      ->expected(0, 1);
  return command;
}

int run_verify(const VerifyOptions& options, const Words& program, const std::string& command) {
  const bool own = !options.mutate.empty() || options.clean > 0;
  if (own && !program.empty()) {
    throw Error(Code::kUsage,
                fmt::format("{} runs lockstep's own programs, and \"{}\" was given",
                            options.mutate.empty() ? "--clean" : "--mutate", program.front()),
                "leave the program out, or leave the flag out");
  }
  if (!options.mutate.empty() && options.clean > 0) {
    throw Error(Code::kUsage, "--mutate and --clean were both given", "give one of them");
  }
  if (!options.mutate.empty()) return run_mutations(options, command);
  if (options.clean > 0) return run_clean(options, command);
  if (program.empty()) {
    throw Error(Code::kUsage, "no program was given to verify",
                "write lockstep verify ./train, or lockstep verify --mutate all");
  }
  return verify_program(options, program, command);
}

}  // namespace lockstep::cli
