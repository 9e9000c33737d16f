#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <map>

#include "base/lists.hpp"
#include "base/mutation.hpp"
#include "base/process.hpp"
#include "cli/lab/folder_lock.hpp"
#include "cli/lab/lab_report.hpp"
#include "cli/lab/lab_text.hpp"
#include "cli/verify/verify.hpp"
#include "lockstep/error.hpp"
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
  std::string_view other_cause = "";  // of a bug that is a race: what it spoils depends on timing

  bool is_named(std::string_view seen) const { return seen == cause || seen == other_cause; }
  bool is_killed() const {
    return std::find(launch.begin(), launch.end(), "--max-restarts") != launch.end();
  }
};

const Words kCourse = {"--steps", "4", "--dim", "32", "--hidden", "48", "--quiet"};

Words with(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

std::vector<MutationCase> mutation_cases() {
  const char* models = "verify_models";
  const char* hybrid = "practical10_hybrid";
  const char* replicas = "practical5_dp";
  const Words four = {"--steps", "4"};
  const auto plus = [&](const Words& more) { return with(four, more); };
  const auto model = [&](const char* name) { return plus({"--model", name}); };
  const Words windows = plus({"--batch", "60", "--accum-steps", "1"});
  const Words in_windows = {"--batch", "20", "--accum-steps", "3"};
  const Words bf16 = plus({"--amp", "bf16"});
  const Words overflowing = with(bf16, {"--overflow-at", "3"});
  const Words masters = {"--amp", "bf16", "--master-weights"};
  const Words adamw = {"--optimizer", "adamw", "--lr", "0.01"};
  const Words clipped = {"--clip", "0.05"};
  const Words in_units = {"--sharding", "gradients"};
  const Words in_parts = {"--sharding", "parameters"};
  const Words two_stages = {"--stages", "2"};
  const Words two_slices = {"--tensor-parallel", "2"};
  const Words staged = with(kCourse, {"--stages", "1", "--micro-batches", "1", "--schedule",
                                      "gpipe", "--place", "same", "--accum-steps", "1"});
  const Words staged_windows = with(staged, {"--batch", "64"});
  const Words staged_bf16 = with(staged, {"--amp", "bf16"});
  const Words staged_uneven = with(staged, {"--batch", "22"});
  const Words stages = with(two_stages, {"--micro-batches", "4"});
  const Words stages_windows = with(stages, {"--batch", "32", "--accum-steps", "2"});
  const Words on_ranks = with(stages, {"--place", "ranks"});
  const Words on_four = with(on_ranks, two_slices);
  const Words devices = with(kCourse, {"--devices", "cpu:1"});
  const Words three = {"--devices", "cpu:3"};
  const Words killed = {"--max-restarts", "1", "--inject", "kill@rank=1,step=4"};
  const Words nan = {"--inject", "nan@rank=1,step=3"};
  const Words pipe = model("stages");
  const Words clipped_pipe = with(pipe, clipped);
  const Words uneven_norms = with(model("synced"), {"--feature", "uneven"});
  const char* weighed = "rows-weighted-wrongly";
  return {
      {kMeanNotDivided, models, four, {}, 2, "summed"},
      {kMeanDividedTwice, models, four, {}, 3, "divided-twice"},
      {kParameterNotAveraged, models, four, {}, 2, "not-averaged"},
      {kRanksCountedAlike, "practical6_ddp", kCourse, {}, 3, "counted-alike"},
      {kBucketTailDropped, models, four, {}, 2, "tail-dropped"},
      {kBucketLagsOneStep, models, four, {}, 2, "lags-one-step"},
      {kMicroBatchTwice, models, windows, in_windows, 2, weighed},
      {kNoSyncIgnored, models, windows, in_windows, 2, "averaged-too-often"},
      {kSyncBoundaryOff, models, windows, in_windows, 2, "sync-boundary"},
      {kInitialBroadcastMissing, models, four, {}, 2, "initial-weights"},
      {kBuffersNotShared, models, model("cnn"), {}, 2, "buffers-differ"},
      {kTiedDividedTwice, models, model("tied"), {}, 2, "divided-twice"},
      {kFrozenUpdated, models, four, {}, 2, "frozen-changed"},
      {kDropoutOneSeed, models, model("transformer"), {}, 2, "one-seed"},
      {kShardShifted, models, four, {}, 3, "rows-shifted"},
      {kSamplesDuplicated, models, four, {}, 2, "rows-repeated"},
      {kLossNotDivided, hybrid, staged_windows, stages_windows, 1, "scaled"},
      {kGradientsNotUnscaled, models, bf16, {}, 2, "scaled"},
      {kOverflowNotSkipped, models, overflowing, {}, 2, "overflow-not-skipped"},
      {kSkipNotAgreed, hybrid, staged_bf16, on_ranks, 2, "skip-not-agreed", nan},
      {kMasterNotWritten, models, plus(masters), {}, 2, "master-not-written"},
      {kWeightDecayTwice, models, plus(adamw), {}, 2, "weight-decay"},
      {kRateAhead, models, four, {}, 2, "rate-differs"},
      {kClippedByLocalNorm, models, plus(clipped), in_units, 2, "factor-differs"},
      {kClippedByLocalNorm, models, clipped_pipe, two_stages, 2, "factor-differs"},
      {kClippedByLocalNorm, models, clipped_pipe, two_slices, 2, "factor-differs"},
      {kStateNotRestored, models, {"--steps", "6"}, {}, 2, "state-not-restored", killed},
      {kShardsStale, models, four, in_units, 2, "stale-weights"},
      {kShardsSummed, models, four, in_parts, 2, "summed"},
      {kMicroBatchesCountedAlike, hybrid, staged_uneven, stages, 1, "counted-alike"},
      {kPipelineRanksCountedAlike, hybrid, staged_uneven, stages, 3, "counted-alike"},
      {kBiasOnEveryRank, hybrid, staged, on_four, 4, "forward-wrong"},
      {kReplicaForgotten, replicas, devices, three, 1, weighed},
      {kReplicaStale, replicas, devices, three, 1, "stale-weights"},
      {kMastersKeepStart, models, plus(masters), {}, 2, "replicas-differ"},
      {kMastersKeepStart, models, with(pipe, masters), {}, 2, "master-not-written"},
      {kCastsKept, models, with(bf16, {"--lr", "2"}), {}, 2, "stale-weights"},
      {kKeptGradientOverwritten, models, plus({"--feature", "surgery"}), {}, 2, weighed},
      {kWrappersOverlap, models, model("twins"), {}, 2, weighed, {}, "stale-weights"},
      {kSyncNormUnweighted, models, uneven_norms, {}, 2, weighed},
      {kEvaluationStale, models, plus({"--feature", "evaluation"}), in_units, 2, "stale-weights"},
      {kGatheredChangeRepeated, models, plus({"--feature", "halved"}), in_parts, 2,
       "stale-weights"},
      {kFrozenGetsZeros, models, with(pipe, adamw), {}, 2, "frozen-changed"},
      {kMeanOfMeans, models, pipe, stages, 2, "forward-wrong"},
      {kNormCountedPerRank, models, clipped_pipe, two_stages, 2, "scaled"},
      {kTiedMastersKeepStart, models, with(pipe, masters), two_stages, 2, "replicas-differ"}};
}

// The number after a flag; 1 without it.
int64_t count_after(const Words& words, const std::string& flag) {
  const auto found = std::find(words.begin(), words.end(), flag);
  return found == words.end() ? 1 : std::stoll(*std::next(found));
}

Variant variant_of(const MutationCase& each) {
  Variant variant{.name = "spoiled", .ranks = each.ranks, .arguments = each.variant};
  variant.launch = each.launch;
  variant.saves = each.is_killed();
  variant.facts = {.divides_rows = true,
                   .resumed_after = each.is_killed() ? 2 : 0,
                   .micro_steps = count_after(each.variant, "--accum-steps"),
                   .ranks = each.ranks};
  return variant;
}

// References that several bugs are compared with are run once.
class Baselines {
 public:
  Baselines(const RecordingsFolder& recordings, const Interrupts& interrupts)
      : recordings_(recordings), interrupts_(interrupts) {}

  const Baseline& of(const std::string& program, const Words& arguments) {
    const auto key = std::pair(program, arguments);
    auto found = baselines_.find(key);
    if (found == baselines_.end()) {
      found = baselines_.emplace(key, make_baseline(runner(program), {program, arguments, {}}, 1))
                  .first;
      if (const auto& flaw = found->second.flaw) {
        throw Error(Code::kInternal,
                    fmt::format("nothing can be compared with {} {}: {}", program,
                                fmt::join(arguments, " "), flaw->text),
                    "mend the program first");
      }
    }
    return found->second;
  }

  VerifyRunner& runner(const std::string& program) {
    auto found = runners_.find(program);
    if (found == runners_.end()) {
      found =
          runners_.emplace(program, VerifyRunner({sibling_path(program)}, recordings_, interrupts_))
              .first;
    }
    return found->second;
  }

 private:
  const RecordingsFolder& recordings_;
  const Interrupts& interrupts_;
  std::map<std::string, VerifyRunner> runners_;
  std::map<std::pair<std::string, Words>, Baseline> baselines_;
};

const MutationInfo& info_of(Mutation mutation) {
  const auto all = all_mutations();
  return *std::find_if(all.begin(), all.end(),
                       [mutation](const MutationInfo& each) { return each.mutation == mutation; });
}

std::vector<MutationCase> cases_of(const MutationInfo& info) {
  auto cases = mutation_cases();
  std::erase_if(cases, [&](const MutationCase& each) { return each.mutation != info.mutation; });
  if (!cases.empty()) return cases;
  throw Error(Code::kInternal, fmt::format("no run shows the mutation {}", info.name),
              "add one to mutation_cases()");
}

std::vector<MutationCase> chosen_cases(const std::string& names) {
  std::vector<MutationCase> chosen;
  const auto add = [&](const MutationInfo& info) {
    for (auto& each : cases_of(info)) chosen.push_back(std::move(each));
  };
  if (names == "all") {
    for (const auto& each : all_mutations()) add(each);
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
    add(info_of(*mutation));
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

namespace {

// "verify_models on 2 ranks --model cnn"
std::string run_text(const MutationCase& each) {
  Words words = with(each.arguments, each.variant);
  if (each.program == std::string("verify_models")) {
    words.erase(words.begin(), words.begin() + 2);  // the steps
  } else {
    words = each.variant;
  }
  return fmt::format("{} on {} rank{} {}", each.program, each.ranks, each.ranks == 1 ? "" : "s",
                     fmt::join(words, " "));
}

std::string finding_text(const Divergence& finding) {
  return fmt::format(" {} at step {}, {}: {}", finding.cause, finding.step, finding.where,
                     finding.text);
}

// Models without a bug, and ways to run each. The last ones use other features of a wrapper.
std::vector<std::pair<const char*, std::vector<MutationCase>>> clean_cases(int seed) {
  std::vector<std::pair<const char*, std::vector<MutationCase>>> all;
  const Words common = {"--steps", "4", "--seed", std::to_string(seed)};
  for (const char* model : {"mlp", "cnn", "lstm", "transformer", "tied"}) {
    const Words own = with(common, {"--model", model});
    const Words in_windows = {"--batch", "30", "--accum-steps", "2"};
    all.push_back({model,
                   {{.arguments = own, .ranks = 2},
                    {.arguments = own, .ranks = 3},
                    {.arguments = own, .variant = in_windows, .ranks = 2},
                    {.arguments = own, .variant = {"--sharding", "parameters"}, .ranks = 2}}});
  }
  const Words pipe = with(common, {"--model", "stages"});
  all.push_back({"stages",
                 {{.arguments = pipe, .ranks = 2},
                  {.arguments = pipe, .variant = {"--stages", "2", "--micro-batches", "3"}},
                  {.arguments = pipe, .variant = {"--tensor-parallel", "2"}},
                  {.arguments = pipe, .variant = {"--stages", "2"}, .ranks = 4}}});
  const auto feature = [&](const char* name) { return with(common, {"--feature", name}); };
  const Words uneven = with(feature("uneven"), {"--model", "synced"});
  all.push_back({"features",
                 {{.arguments = with(common, {"--model", "twins"}), .ranks = 2},
                  {.arguments = uneven, .ranks = 3},
                  {.arguments = feature("surgery"), .ranks = 2},
                  {.arguments = feature("halved"), .variant = {"--sharding", "gradients"}},
                  {.arguments = feature("two-optimizers"), .ranks = 2},
                  {.arguments = feature("compressed"), .ranks = 3},
                  {.arguments = feature("bare"), .ranks = 2}}});
  const Words dropped = with(common, {"--model", "dropped"});
  const Words parts = with(feature("parts"), {"--model", "dropped"});
  all.push_back({"random numbers",
                 {{.arguments = dropped, .ranks = 2},
                  {.arguments = dropped, .variant = {"--sharding", "parameters"}, .ranks = 2},
                  {.arguments = parts, .ranks = 2},
                  {.arguments = parts, .ranks = 3}}});
  return all;
}

}  // namespace

int run_mutations(const VerifyOptions& options, const std::string& command) {
  const auto cases = chosen_cases(options.mutate);
  require_font();
  const Interrupts interrupts;
  const fs::path folder = options.out;
  make_report_folder(folder);
  const FolderLock lock(folder.string());
  const RecordingsFolder recordings(folder / "recordings", options.keep);
  Baselines baselines(recordings, interrupts);
  Table table("Planted bugs", {{"bug"},
                               {"run"},
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
    const VerifiedRun unspoiled = verify_variant(runner, baseline, family, variant);
    // An injected fault is wrong by itself, but must not be taken for the bug.
    const bool injected = !each.launch.empty() && !each.is_killed();
    const bool clean =
        unspoiled.is_judged() && (injected ? unspoiled.judgement.finding &&
                                                 !each.is_named(unspoiled.judgement.finding->cause)
                                           : !any_wrong({unspoiled}));
    const VerifiedRun spoiled = verify_variant(runner, baseline, family, variant,
                                               {{kMutateVariable, std::string(info.name)}});
    const auto& finding = spoiled.judgement.finding;
    const bool named = finding && each.is_named(finding->cause);
    if (named) ++caught;
    if (!clean) ++alarms;
    print_error(fmt::format("{}: {}{}\n", info.name,
                            named     ? "caught"
                            : finding ? "caught under another name, " + finding->cause
                                      : "escaped",
                            clean ? "" : "; and an alarm without the bug"));
    if (!clean && unspoiled.judgement.finding) {
      print_error(finding_text(*unspoiled.judgement.finding) + "\n");
    }
    const Divergence shown = finding.value_or(Divergence{});
    table.add_row({std::string(info.name), run_text(each), std::string(info.bug),
                   named     ? "yes"
                   : finding ? "wrong name"
                             : "NO",
                   shown.step > 0 ? count_cell(shown.step) : "—",
                   shown.where.empty() ? "whole step" : module_of(shown.where),
                   ranks_text(shown.ranks), shown.cause, shown.text});
  }
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
  const RecordingsFolder recordings(folder / "recordings", options.keep);
  Baselines baselines(recordings, interrupts);
  std::map<std::string, std::map<Verdict, int>> counts;  // [model]
  std::vector<VerifiedRun> alarms;
  int runs = 0;
  for (int seed = 0; runs < options.clean; ++seed) {
    for (const auto& [model, cases] : clean_cases(seed)) {
      for (const auto& each : cases) {
        if (runs == options.clean) break;
        const Baseline& baseline = baselines.of(each.program, each.arguments);
        const Family family{model, each.arguments, {}};
        VerifiedRun run =
            verify_variant(baselines.runner(each.program), baseline, family, variant_of(each));
        ++runs;
        ++counts[model][run.judgement.verdict];
        if (any_wrong({run}) || !run.is_judged()) alarms.push_back(std::move(run));
      }
      print_error(fmt::format("{} of {} runs, {} alarms\n", runs, options.clean, alarms.size()));
    }
  }
  Table table("Runs without a bug", {{"model"},
                                     {"same bits", Align::kRight},
                                     {"reordered sums", Align::kRight},
                                     {"explained", Align::kRight},
                                     {"false alarms", Align::kRight}});
  for (auto& [model, verdicts] : counts) {
    const auto count = [&](Verdict verdict) { return count_cell(verdicts[verdict]); };
    table.add_row({model, count(Verdict::kSameBits), count(Verdict::kReordered),
                   count(Verdict::kExplained), count(Verdict::kWrong)});
  }
  for (const auto& alarm : alarms) {
    table.add_note(alarm.family + ":" +
                   (alarm.judgement.finding ? finding_text(*alarm.judgement.finding)
                                            : " it did not run: " + alarm.refusal + alarm.failure));
  }
  publish_report(
      own_report("False alarms", {{"clean", table}}, "Is there a false alarm?",
                 fmt::format("{} in {} runs without a bug.",
                             alarms.empty() ? "No: none" : std::to_string(alarms.size()), runs)),
      {command, std::time(nullptr), {}}, {}, folder);
  return alarms.empty() ? 0 : 1;
}

}  // namespace lockstep::cli
