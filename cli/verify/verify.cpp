#include "cli/verify/verify.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <ctime>
#include <filesystem>
#include <regex>

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
  static const std::regex kError(R"((error\[LS\d+\]: [^\n]*))");
  std::smatch found;
  if (std::regex_search(errors, found, kError)) return found[1];
  const size_t end = errors.find_last_not_of("\n ");
  if (end == std::string::npos) return "it wrote no error";
  const size_t begin = errors.rfind('\n', end);
  return errors.substr(begin == std::string::npos ? 0 : begin + 1, end - begin);
}

[[noreturn]] void fail_reference(const VerifyRunner::Outcome& outcome) {
  throw ChildFailed(
      fmt::format("the program ended with exit code {} on one rank", outcome.exit_code),
      "run it by itself until it works, then verify it", {"it said:\n" + outcome.errors},
      outcome.exit_code);
}

// A run that ended with an error, by the steps that it recorded, else by what it said.
Judgement judge_failed(const Baseline& baseline, const VerifyRunner::Outcome& outcome,
                       const Variant& variant) {
  const std::string said = first_error(outcome.errors);
  Judgement judgement;
  try {
    judgement =
        judge(*baseline.reference, baseline.growth, TracedRun(outcome.recording), variant.facts);
  } catch (const Error&) {  // it ended before its first step
  }
  if (judgement.verdict != Verdict::kWrong) {
    judgement.verdict = Verdict::kWrong;
    judgement.finding = Divergence{judgement.steps + 1, "", {}, "refused", said};
  } else {
    judgement.finding->text += "; the run ended with " + said;
  }
  return judgement;
}

bool has_steps(const fs::path& recording) {
  return std::any_of(fs::directory_iterator(recording), fs::directory_iterator(),
                     [](const fs::directory_entry& entry) {
                       return entry.path().filename().string().starts_with("step-");
                     });
}

// A run that went on from a checkpoint has every bit of the same run without a kill, with dropout
// and in bf16 too, where one rank alone tells little.
void judge_resumed(const VerifyRunner& runner, const VerifyRunner::Outcome& resumed,
                   const Family& family, const Variant& variant,
                   const std::map<std::string, std::string>& variables, Judgement& judgement) {
  Variant whole = variant;
  whole.launch.clear();
  const auto outcome = runner.run(whole, family.arguments, variables);
  if (outcome.exit_code != 0) return;
  RunFacts facts = variant.facts;
  facts.same_bits = true;
  const Judgement same =
      judge(TracedRun(outcome.recording), {}, TracedRun(resumed.recording), facts);
  if (same.verdict == Verdict::kWrong) judgement = same;
  fs::remove_all(outcome.recording);
}

void tell(const std::string& line) {
  print_error(line + "\n");
}

std::string title_of(const std::string& family, const std::string& name) {
  return family.empty() ? name : fmt::format("{}: {}", family, name);
}

int verify_program(const VerifyOptions& options, const Words& program, const std::string& command) {
  require_font();
  const Interrupts interrupts;
  const fs::path folder = options.out;
  const VerifyRunner runner(program, folder / "recordings", interrupts);
  make_report_folder(folder);
  const FolderLock lock(folder.string());
  const VerifyRequest request{program, options.quick, options.ranks};
  std::vector<VerifiedRun> runs;
  for (const Family& family : plan_variants(request, runner.flags())) {
    const Baseline baseline = make_baseline(runner, family.arguments, options.quick ? 1 : 2);
    VerifiedRun repeated{.family = family.name, .name = "1 rank, twice"};
    repeated.judgement.steps = static_cast<int64_t>(baseline.reference->steps().size());
    repeated.judgement.finding = baseline.flaw;
    if (baseline.flaw) repeated.judgement.verdict = Verdict::kWrong;
    repeated.seconds = baseline.seconds;
    runs.push_back(std::move(repeated));
    tell(fmt::format("{}: {}", title_of(family.name, "1 rank"), format_seconds(baseline.seconds)));
    for (const Variant& variant : family.variants) {
      runs.push_back(verify_variant(runner, baseline, family, variant));
      const VerifiedRun& run = runs.back();
      tell(fmt::format("{}: {}, {}", title_of(family.name, variant.name),
                       run.refusal.empty() ? verdict_text(run.judgement.verdict) : "not offered",
                       format_seconds(run.seconds)));
    }
    if (!options.keep) fs::remove_all(folder / "recordings");
  }
  publish_report(verify_report(program, runs), {command, std::time(nullptr), {}}, {}, folder);
  return any_wrong(runs) || !any_compared(runs) ? 1 : 0;
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

Baseline make_baseline(const VerifyRunner& runner, const Words& arguments, int perturbed) {
  const Variant one{.name = "1 rank"};
  const auto run = [&](std::map<std::string, std::string> variables) {
    auto outcome = runner.run(one, arguments, std::move(variables));
    if (outcome.exit_code != 0) fail_reference(outcome);
    return outcome;
  };
  const auto first = run({});
  Baseline baseline;
  baseline.seconds = first.seconds;
  baseline.reference = std::make_unique<TracedRun>(first.recording);
  const TracedRun& reference = *baseline.reference;
  const TracedStep step = reference.read(reference.steps().front());
  baseline.dtype =
      step.facts.empty() ? "float32" : step.facts.begin()->second.at("dtype").get<std::string>();
  for (int seed = 1; seed <= perturbed; ++seed) {
    const auto moved =
        run({{"LOCKSTEP_VERIFY_PERTURB", fmt::format("{}:{}", baseline.dtype, seed)}});
    baseline.growth.add(reference, TracedRun(moved.recording));
    fs::remove_all(moved.recording);
  }
  const auto again = run({});
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
  fs::remove_all(again.recording);
  return baseline;
}

VerifiedRun verify_variant(const VerifyRunner& runner, const Baseline& baseline,
                           const Family& family, const Variant& variant,
                           const std::map<std::string, std::string>& variables) {
  VerifiedRun run{.family = family.name, .name = variant.name};
  const auto outcome = runner.run(variant, family.arguments, variables);
  run.seconds = outcome.seconds;
  Judgement& judgement = run.judgement;
  Variant recorded = variant;
  recorded.facts.processes = variant.ranks;
  // A program that has begun to train has not refused to.
  if (outcome.exit_code == 2 && !has_steps(outcome.recording)) {
    run.refusal = first_error(outcome.errors);
  } else if (outcome.exit_code == 0) {
    judgement =
        judge(*baseline.reference, baseline.growth, TracedRun(outcome.recording), recorded.facts);
  } else {
    judgement = judge_failed(baseline, outcome, variant);
  }
  if (judgement.tensors > 0 && !judgement.is_parallel && judgement.verdict != Verdict::kWrong) {
    run.refusal = "it is one process without DataParallel or stages, and divided nothing";
  }
  const bool resumed = run.refusal.empty() && variant.facts.resumed_after > 0;
  if (resumed && judgement.verdict != Verdict::kWrong) {
    judge_resumed(runner, outcome, family, recorded, variables, judgement);
  }
  fs::remove_all(outcome.recording);
  return run;
}

bool any_compared(const std::vector<VerifiedRun>& runs) {
  return std::any_of(runs.begin(), runs.end(), [](const VerifiedRun& run) {
    return run.refusal.empty() && run.judgement.tensors > 0;
  });
}

bool any_wrong(const std::vector<VerifiedRun>& runs) {
  for (const auto& run : runs) {
    if (run.refusal.empty() && run.judgement.verdict == Verdict::kWrong) return true;
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
