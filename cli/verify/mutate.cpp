#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <map>

#include "base/lists.hpp"
#include "base/mutation.hpp"
#include "base/process.hpp"
#include "cli/doctor/facts.hpp"
#include "cli/lab/folder_lock.hpp"
#include "cli/own/report_folder.hpp"
#include "cli/verify/verify.hpp"
#include "lockstep/cli_parse.hpp"
#include "lockstep/error.hpp"
#include "lockstep/units.hpp"
#include "lockstep/version.hpp"
#include "report/text.hpp"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;
using enum Mutation;

// Where a bug shows, and what verify must call it.
struct MutationCase {
  Mutation mutation = kNone;
  const char* program = "verify_models";
  Words arguments = {};  // of the reference too
  Words variant = {};    // of the spoiled run only
  int ranks = 2;
  const char* cause = "";  // the word that must be found
  Words launch = {};
  bool saves = false;
  int64_t micro_steps = 1;
};

const Words kCourse = {"--steps", "4", "--dim", "32", "--hidden", "48", "--quiet"};

Words with(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

std::vector<MutationCase> mutation_cases() {
  const Words three = {"--steps", "4"};
  const Words windows = with(three, {"--batch", "60", "--accum-steps", "1"});
  const Words in_windows = {"--batch", "20", "--accum-steps", "3"};
  const Words bf16 = with(three, {"--amp", "bf16"});
  const Words adamw = with(three, {"--optimizer", "adamw", "--lr", "0.01"});
  const Words staged = with(kCourse, {"--stages", "1", "--micro-batches", "1", "--schedule",
                                      "gpipe", "--place", "same", "--accum-steps", "1"});
  const Words stages = {"--stages", "2", "--micro-batches", "4"};
  const Words on_ranks = with(stages, {"--place", "ranks"});
  const char* pipeline = "practical10_hybrid";
  return {
      {kMeanNotDivided, "verify_models", three, {}, 2, "summed"},
      {kMeanDividedTwice, "verify_models", three, {}, 3, "divided-twice"},
      {kParameterNotAveraged, "verify_models", three, {}, 2, "not-averaged"},
      {kRanksCountedAlike, "practical6_ddp", kCourse, {}, 3, "counted-alike"},
      {kBucketTailDropped, "verify_models", three, {}, 2, "tail-dropped"},
      {kBucketLagsOneStep, "verify_models", three, {}, 2, "lags-one-step"},
      {kMicroBatchTwice,
       "verify_models",
       windows,
       in_windows,
       2,
       "rows-weighted-wrongly",
       {},
       false,
       3},
      {kNoSyncIgnored, "verify_models", windows, in_windows, 2, "averaged-too-often", {}, false, 3},
      {kSyncBoundaryOff, "verify_models", windows, in_windows, 2, "sync-boundary", {}, false, 3},
      {kInitialBroadcastMissing, "verify_models", three, {}, 2, "initial-weights"},
      {kBuffersNotShared,
       "verify_models",
       with(three, {"--model", "cnn"}),
       {},
       2,
       "buffers-differ"},
      {kTiedDividedTwice,
       "verify_models",
       with(three, {"--model", "tied"}),
       {},
       2,
       "divided-twice"},
      {kFrozenUpdated, "verify_models", three, {}, 2, "frozen-changed"},
      {kDropoutOneSeed,
       "verify_models",
       with(three, {"--model", "transformer"}),
       {},
       2,
       "one-seed"},
      {kShardShifted, "verify_models", three, {}, 3, "rows-shifted"},
      {kSamplesDuplicated, "verify_models", three, {}, 2, "rows-repeated"},
      {kLossNotDivided,
       pipeline,
       with(staged, {"--batch", "64"}),
       with(stages, {"--batch", "32", "--accum-steps", "2"}),
       1,
       "scaled",
       {},
       false,
       2},
      {kGradientsNotUnscaled, "verify_models", bf16, {}, 2, "scaled"},
      {kOverflowNotSkipped,
       "verify_models",
       with(bf16, {"--overflow-at", "3"}),
       {},
       2,
       "overflow-not-skipped"},
      {kSkipNotAgreed,
       pipeline,
       with(staged, {"--amp", "bf16"}),
       on_ranks,
       2,
       "skip-not-agreed",
       {"--inject", "nan@rank=1,step=3"}},
      {kMasterNotWritten,
       "verify_models",
       with(bf16, {"--master-weights"}),
       {},
       2,
       "master-not-written"},
      {kWeightDecayTwice, "verify_models", adamw, {}, 2, "weight-decay"},
      {kRateAhead, "verify_models", three, {}, 2, "rate-differs"},
      {kClippedByLocalNorm,
       "verify_models",
       with(three, {"--clip", "0.05"}),
       {"--sharding", "gradients"},
       2,
       "factor-differs"},
      {kStateNotRestored,
       "verify_models",
       with({"--steps", "6"}, {}),
       {},
       2,
       "state-not-restored",
       {"--max-restarts", "1", "--inject", "kill@rank=1,step=4"},
       true},
      {kShardsStale, "verify_models", three, {"--sharding", "gradients"}, 2, "stale-weights"},
      {kShardsSummed, "verify_models", three, {"--sharding", "parameters"}, 2, "summed"},
      {kMicroBatchesCountedAlike, pipeline, with(staged, {"--batch", "22"}),
       with(stages, {"--batch", "22"}), 1, "counted-alike"},
      {kPipelineRanksCountedAlike, pipeline, with(staged, {"--batch", "22"}),
       with(stages, {"--batch", "22"}), 3, "counted-alike"},
      {kBiasOnEveryRank, pipeline, staged,
       with(stages, {"--place", "ranks", "--tensor-parallel", "2"}), 4, "forward-wrong"},
      {kReplicaForgotten,
       "practical5_dp",
       with(kCourse, {"--devices", "cpu:1"}),
       {"--devices", "cpu:3"},
       1,
       "rows-weighted-wrongly"},
      {kReplicaStale,
       "practical5_dp",
       with(kCourse, {"--devices", "cpu:1"}),
       {"--devices", "cpu:3"},
       1,
       "stale-weights"},
      {kMastersKeepStart,
       "verify_models",
       with(bf16, {"--master-weights"}),
       {},
       2,
       "replicas-differ"},
      {kCastsKept, "verify_models", with(bf16, {"--lr", "2"}), {}, 2, "stale-weights"}};
}

Variant variant_of(const MutationCase& each) {
  Variant variant{.name = "spoiled", .ranks = each.ranks, .arguments = each.variant};
  variant.launch = each.launch;
  variant.saves = each.saves;
  variant.facts = {.divides_rows = true,
                   .resumed_after = each.saves ? 2 : 0,
                   .micro_steps = each.micro_steps,
                   .ranks = each.ranks};
  return variant;
}

// References that several bugs are compared with are run once.
class Baselines {
 public:
  Baselines(fs::path folder, const Interrupts& interrupts)
      : folder_(std::move(folder)), interrupts_(interrupts) {}

  const Baseline& of(const std::string& program, const Words& arguments) {
    const auto key = std::pair(program, arguments);
    auto found = baselines_.find(key);
    if (found == baselines_.end()) {
      found = baselines_.emplace(key, make_baseline(runner(program), arguments, 1)).first;
    }
    return found->second;
  }

  VerifyRunner& runner(const std::string& program) {
    auto found = runners_.find(program);
    if (found == runners_.end()) {
      found = runners_
                  .emplace(program,
                           VerifyRunner({sibling_path(program)}, folder_ / program, interrupts_))
                  .first;
    }
    return found->second;
  }

 private:
  fs::path folder_;
  const Interrupts& interrupts_;
  std::map<std::string, VerifyRunner> runners_;
  std::map<std::pair<std::string, Words>, Baseline> baselines_;
};

const MutationInfo& info_of(Mutation mutation) {
  const auto all = all_mutations();
  return *std::find_if(all.begin(), all.end(),
                       [mutation](const MutationInfo& each) { return each.mutation == mutation; });
}

MutationCase case_of(const MutationInfo& info) {
  for (auto& each : mutation_cases()) {
    if (each.mutation == info.mutation) return each;
  }
  throw Error(Code::kInternal, fmt::format("no run shows the mutation {}", info.name),
              "add one to mutation_cases()");
}

std::vector<MutationCase> chosen_cases(const std::string& names) {
  std::vector<MutationCase> chosen;
  if (names == "all") {
    for (const auto& each : all_mutations()) chosen.push_back(case_of(each));
    return chosen;
  }
  std::vector<std::string> known = {"all"};
  for (const auto& each : all_mutations()) known.emplace_back(each.name);
  for (const std::string_view name : split_list(names, ',')) {
    const auto mutation = mutation_named(name);
    if (!mutation) {
      const std::string near = did_you_mean(std::string(name), known);
      throw Error(Code::kUsage, fmt::format("there is no mutation \"{}\"", name),
                  near.empty() ? fmt::format("write one of {}", fmt::join(known, ", "))
                               : fmt::format("did you mean {}?", near));
    }
    chosen.push_back(case_of(info_of(*mutation)));
  }
  return chosen;
}

LabReport own_report(const std::string& title, std::vector<NamedTable> tables,
                     const std::string& question, const std::string& answer) {
  LabReport report;
  report.title = title;
  report.stamp.host = describe_host();
  report.stamp.versions = {{"lockstep", kVersion}};
  report.tables = std::move(tables);
  report.answers = {{"verification", question, answer}};
  return report;
}

}  // namespace

int run_mutations(const VerifyOptions& options, const std::string& command) {
  const auto cases = chosen_cases(options.mutate);
  require_font();
  const Interrupts interrupts;
  const fs::path folder = options.out;
  make_report_folder(folder);
  const FolderLock lock(folder.string());
  Baselines baselines(folder / "recordings", interrupts);
  Table table("Planted bugs", {{"bug"},
                               {"what was planted"},
                               {"caught"},
                               {"step", Align::kRight},
                               {"module"},
                               {"ranks"},
                               {"named"},
                               {"seen"}});
  size_t caught = 0;
  size_t alarms = 0;
  for (const auto& each : cases) {
    const MutationInfo& info = info_of(each.mutation);
    const Baseline& baseline = baselines.of(each.program, each.arguments);
    const Family family{"", each.arguments, {}};
    const Variant variant = variant_of(each);
    VerifyRunner& runner = baselines.runner(each.program);
    // An injected fault changes the run by itself: its reference has none.
    const bool injected = !each.launch.empty() && !each.saves;
    const bool clean = injected || !any_wrong({verify_variant(runner, baseline, family, variant)});
    const VerifiedRun spoiled = verify_variant(runner, baseline, family, variant,
                                               {{kMutateVariable, std::string(info.name)}});
    const auto& finding = spoiled.judgement.finding;
    const bool named = finding && finding->cause == each.cause;
    if (named) ++caught;
    if (!clean) ++alarms;
    print_error(fmt::format("{}: {}{}\n", info.name,
                            named     ? "caught"
                            : finding ? "caught under another name, " + finding->cause
                                      : "escaped",
                            clean ? "" : "; and an alarm without the bug"));
    const Divergence shown = finding.value_or(Divergence{});
    table.add_row({std::string(info.name), std::string(info.bug),
                   named     ? "yes"
                   : finding ? "wrong name"
                             : "NO",
                   shown.step > 0 ? std::to_string(shown.step) : "—",
                   shown.where.empty() ? "whole step" : module_of(shown.where),
                   ranks_text(shown.ranks), shown.cause, shown.text});
  }
  if (!options.keep) fs::remove_all(folder / "recordings");
  const bool good = caught == cases.size() && alarms == 0;
  publish_report(
      own_report("Planted bugs", {{"mutations", table}}, "Is every planted bug caught and named?",
                 fmt::format("{}. {} of {} were caught and named, with {} alarms in the "
                             "same runs without the bug.",
                             good ? "Yes" : "No", caught, cases.size(), alarms)),
      {command, std::time(nullptr), {}}, {}, folder);
  return good ? 0 : 1;
}

int run_clean(const VerifyOptions& options, const std::string& command) {
  require_font();
  const Interrupts interrupts;
  const fs::path folder = options.out;
  make_report_folder(folder);
  const FolderLock lock(folder.string());
  Baselines baselines(folder / "recordings", interrupts);
  std::map<std::string, std::map<Verdict, int>> counts;  // [model]
  std::vector<VerifiedRun> alarms;
  int runs = 0;
  for (int seed = 0; runs < options.clean; ++seed) {
    for (const char* model : {"mlp", "cnn", "lstm", "transformer", "tied"}) {
      const Words arguments = {"--model", model, "--seed", std::to_string(seed), "--steps", "4"};
      const Family family{model, arguments, {}};
      const Words in_windows = {"--batch", "30", "--accum-steps", "2"};
      const std::vector<MutationCase> cases = {
          {.arguments = arguments, .ranks = 2},
          {.arguments = arguments, .ranks = 3},
          {.arguments = arguments, .variant = in_windows, .ranks = 2, .micro_steps = 2},
          {.arguments = arguments, .variant = {"--sharding", "parameters"}, .ranks = 2}};
      for (const auto& each : cases) {
        if (runs == options.clean) break;
        const Baseline& baseline = baselines.of(each.program, arguments);
        VerifiedRun run =
            verify_variant(baselines.runner(each.program), baseline, family, variant_of(each));
        ++runs;
        ++counts[model][run.judgement.verdict];
        if (any_wrong({run})) alarms.push_back(std::move(run));
      }
      print_error(fmt::format("{} of {} runs, {} alarms\n", runs, options.clean, alarms.size()));
    }
  }
  if (!options.keep) fs::remove_all(folder / "recordings");
  Table table("Runs without a bug", {{"model"},
                                     {"same bits", Align::kRight},
                                     {"reordered sums", Align::kRight},
                                     {"explained", Align::kRight},
                                     {"false alarms", Align::kRight}});
  for (auto& [model, verdicts] : counts) {
    const auto count = [&](Verdict verdict) { return std::to_string(verdicts[verdict]); };
    table.add_row({model, count(Verdict::kSameBits), count(Verdict::kReordered),
                   count(Verdict::kExplained), count(Verdict::kWrong)});
  }
  for (const auto& alarm : alarms) {
    table.add_note(fmt::format("{}: {} at step {}: {}", alarm.family,
                               alarm.judgement.finding->cause, alarm.judgement.finding->step,
                               alarm.judgement.finding->text));
  }
  publish_report(
      own_report("False alarms", {{"clean", table}}, "Is there a false alarm?",
                 fmt::format("{} in {} runs without a bug.",
                             alarms.empty() ? "No: none" : std::to_string(alarms.size()), runs)),
      {command, std::time(nullptr), {}}, {}, folder);
  return alarms.empty() ? 0 : 1;
}

}  // namespace lockstep::cli
