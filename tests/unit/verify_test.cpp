// The judgement of `lockstep verify`, on recordings made by hand.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <span>

#include "base/mutation.hpp"
#include "base/safetensors.hpp"
#include "cli/verify/judge.hpp"
#include "cli/verify/least_squares.hpp"
#include "cli/verify/variants.hpp"
#include "cli/verify/verify.hpp"
#include "tests/support.hpp"

namespace lockstep::cli::verify_test {
namespace {

using nlohmann::json;
using Values = std::vector<float>;

constexpr float kRate = 0.5F;
const Values kOnes(16, 1.0F);

Values ramp(float from, float by, size_t count = 16) {
  Values values;
  for (size_t i = 0; i < count; ++i) values.push_back(from + by * static_cast<float>(i * i % 7));
  return values;
}

Values times(const Values& values, float factor) {
  Values result = values;
  for (float& each : result) each *= factor;
  return result;
}

Values mean_of(const Values& a, const Values& b) {
  Values result = a;
  for (size_t i = 0; i < a.size(); ++i) result[i] = (a[i] + b[i]) / 2;
  return result;
}

// A recording of one parameter, "net.weight".
class Recording {
 public:
  explicit Recording(int ranks) : ranks_(ranks) {}

  // One rank's step: its own gradient, the one that its optimizer used, and the weight afterwards.
  void add(int64_t step, int rank, const Values& own, const Values& used, const Values& weight,
           json more = {}, std::map<std::string, Values> tensors = {}) {
    std::vector<int64_t> rows(static_cast<size_t>(4 / ranks_));
    std::iota(rows.begin(), rows.end(), 4 * step + rank * (4 / ranks_));
    json facts = {{"step", step},
                  {"rank", rank},
                  {"ranks", ranks_},
                  {"weight", 1.0},
                  {"rows", rows},
                  {"forward_buffers", json::array()},
                  {"forwards", 2},
                  {"sent_bytes", ranks_ > 1 ? 64 : 0},
                  {"averages", json::object()},
                  {"before", {{"net.weight", 7}}},
                  {"kinds", json::array()},
                  {"wrappers", {"ddp"}},
                  {"dtype", "float32"},
                  {"sent_dtype", "float32"},
                  {"generator", rank},
                  {"slices", json::object()}};
    if (ranks_ > 1) facts["averages"]["net.weight"] = 1;
    if (more.is_object()) facts.update(more);
    std::map<std::string, Values> local;
    if (ranks_ > 1 && !own.empty()) local["local/net.weight"] = own;
    for (auto each = tensors.begin(); each != tensors.end();) {
      auto next = std::next(each);
      if (each->first.starts_with("local/")) local.insert(tensors.extract(each));
      each = next;
    }
    write(step, rank, "facts", local, facts);
    tensors["gradient/net.weight"] = used;
    tensors["weight/net.weight"] = weight;
    write(step, rank, "update-0", tensors,
          {{"step", step},
           {"rank", rank},
           {"factor", 1.0},
           {"rates", {{"net.weight", rate_}}},
           {"slices", json::object()}});
  }

  // An update of another optimizer, which multiplied this parameter's gradient by a factor.
  void add_update(int64_t step, int rank, int index, const std::string& name, const Values& used,
                  double factor) const {
    write(step, rank, fmt::format("update-{}", index),
          {{"gradient/" + name, used}, {"weight/" + name, kOnes}},
          {{"step", step},
           {"rank", rank},
           {"factor", factor},
           {"rates", {{name, rate_}}},
           {"slices", json::object()}});
  }

  void add_loss(int64_t step, int rank, double loss) const {
    std::ofstream file(folder_->file(fmt::format("rank-{}.losses", rank)), std::ios::app);
    file << fmt::format("{} {:.17g}\n", step, loss);
  }

  void set_rate(float rate) { rate_ = rate; }

  TracedRun read() const { return TracedRun(folder_->file("")); }

 private:
  void write(int64_t step, int rank, const std::string& what,
             const std::map<std::string, Values>& tensors, const json& facts) const {
    std::vector<TensorBytes> bytes;
    for (const auto& [name, values] : tensors) {
      bytes.push_back({name,
                       Dtype::kF32,
                       {static_cast<int64_t>(values.size())},
                       std::as_bytes(std::span(values))});
    }
    write_safetensors(
        folder_->file(fmt::format("step-{}.rank-{}.{}.safetensors", step, rank, what)), bytes,
        {{"lockstep_verify", facts.dump()}});
  }

  std::unique_ptr<test::ScratchFolder> folder_ = std::make_unique<test::ScratchFolder>();
  int ranks_;
  float rate_ = kRate;
};

const Values kOwn0 = ramp(1, 0.25F);
const Values kOwn1 = ramp(-2, 0.5F);
const Values kMean = mean_of(kOwn0, kOwn1);
const Values kWeight = ramp(3, 0.125F);

Recording serial() {
  Recording recording(1);
  recording.add(1, 0, {}, kMean, kWeight);
  return recording;
}

Judgement judged(const Recording& run, const RunFacts& facts = {.divides_rows = true, .ranks = 2}) {
  const Recording one = serial();
  return judge(one.read(), {}, run.read(), facts);
}

// Two ranks that use this gradient.
Recording parallel(const Values& used0, const Values& used1, json of_rank_1 = {}) {
  Recording recording(2);
  recording.add(1, 0, kOwn0, used0, kWeight);
  recording.add(1, 1, kOwn1, used1, kWeight, std::move(of_rank_1));
  return recording;
}

TEST(Verify, RightRunsAreNamedByHowFarTheyAre) {
  EXPECT_EQ(judged(parallel(kMean, kMean)).verdict, Verdict::kSameBits);
  Values rounded = kMean;
  rounded[3] = std::nextafter(rounded[3], 10.0F);
  const Judgement reordered = judged(parallel(rounded, rounded));
  EXPECT_EQ(reordered.verdict, Verdict::kReordered);
  EXPECT_EQ(reordered.largest_at, "gradient/net.weight");
  EXPECT_GT(reordered.largest, 0);
  EXPECT_LT(reordered.largest, reordered.largest_tolerance);
}

TEST(Verify, AWrongMeanIsNamedByWhatItConsistsOf) {
  const auto cause = [](const Recording& run) {
    const Judgement found = judged(run);
    EXPECT_EQ(found.verdict, Verdict::kWrong);
    EXPECT_EQ(found.finding.value().where, "net.weight");
    EXPECT_EQ(found.finding->step, 1);
    return found.finding->cause;
  };
  EXPECT_EQ(cause(parallel(times(kMean, 2), times(kMean, 2))), "summed");
  EXPECT_EQ(cause(parallel(times(kMean, 0.5F), times(kMean, 0.5F))), "divided-twice");
  EXPECT_EQ(cause(parallel(kOwn0, kOwn1)), "not-averaged");
  Values tail = kMean;
  for (size_t i = 12; i < tail.size(); ++i) tail[i] = kOwn0[i];
  EXPECT_EQ(cause(parallel(tail, kMean)), "tail-dropped");
}

TEST(Verify, BrokenInvariantsNameTheRank) {
  const auto finding = [](const json& of_rank_1) {
    const Judgement found = judged(parallel(kMean, kMean, of_rank_1));
    EXPECT_EQ(found.verdict, Verdict::kWrong);
    return found.finding.value_or(Divergence{});
  };
  Divergence found = finding({{"rows", {4, 5}}});  // rank 0's
  EXPECT_EQ(found.cause, "rows-repeated");
  EXPECT_EQ(found.ranks, std::vector<int>{1});
  found = finding({{"rows", {7, 99}}});
  EXPECT_EQ(found.cause, "rows-shifted");
  EXPECT_EQ(finding({{"before", {{"net.weight", 8}}}}).cause, "initial-weights");
  EXPECT_EQ(finding({{"forward_buffers", {1}}}).cause, "buffers-differ");
  EXPECT_EQ(finding({{"averages", {{"net.weight", 2}}}}).cause, "averaged-too-often");
}

TEST(Verify, AnUpdateIsJudgedApartFromItsGradient) {
  Recording run(2);
  run.add(1, 0, kOwn0, kMean, times(kWeight, 0.99F));
  run.add(1, 1, kOwn1, kMean, times(kWeight, 0.99F));
  const Judgement found = judged(run);
  EXPECT_EQ(found.finding.value().cause, "weight-decay");
  Recording apart(2);
  apart.add(1, 0, kOwn0, kMean, kWeight);
  apart.add(1, 1, kOwn1, kMean, times(kWeight, 1.25F));
  EXPECT_EQ(judged(apart).finding.value().cause, "replicas-differ");
}

TEST(Verify, DropoutAndAnotherBatchAreExplained) {
  Recording run(2);
  const json drops = {{"kinds", {"dropout"}}};
  run.add(1, 0, kOwn0, kMean, times(kWeight, 1.5F), drops);
  run.add(1, 1, kOwn1, kMean, times(kWeight, 1.5F), drops);
  const Judgement found = judged(run);
  EXPECT_EQ(found.verdict, Verdict::kExplained);
  EXPECT_NE(found.explanation.find("dropout"), std::string::npos);
  Recording same_seed(2);
  for (const int rank : {0, 1}) {
    json facts = drops;
    facts["generator"] = 5;
    same_seed.add(1, rank, rank == 0 ? kOwn0 : kOwn1, kMean, kWeight, facts);
  }
  EXPECT_EQ(judged(same_seed).finding.value().cause, "one-seed");
}

TEST(Verify, TheToleranceFollowsTheMeasuredGrowth) {
  Recording moved(1);
  Values far = kWeight;
  far[0] += 0.01F;
  moved.add(1, 0, {}, kMean, far);
  const Recording one = serial();
  RoundingGrowth growth;
  growth.add(one.read(), moved.read());
  EXPECT_NEAR(growth.tolerance(1, "weight/net.weight", 1), RoundingGrowth::kSafety * 0.01, 1e-4);
  EXPECT_LT(growth.tolerance(1, "gradient/net.weight", 1), 1e-5);
}

TEST(Verify, AGradientOfNoiseLendsItsToleranceToNoOther) {
  const auto run = [](float noise) {
    Recording recording(1);
    recording.add(1, 0, {}, kMean, kWeight, {},
                  {{"gradient/key.bias", Values(16, noise)}, {"gradient/a.weight", kOwn0}});
    return recording;
  };
  const Recording one = run(1e-8F);
  const Recording moved = run(-1e-8F);
  RoundingGrowth growth;
  growth.add(one.read(), moved.read());
  EXPECT_GE(growth.tolerance(1, "gradient/key.bias", 4e-8), 4e-7);
  EXPECT_LT(growth.tolerance(1, "gradient/net.weight", 1), 1e-4);
}

TEST(Verify, WhatWasNotRecordedIsNotRight) {
  const auto cause = [](const Recording& run) {
    return judged(run, {.divides_rows = true, .ranks = 2, .processes = 2})
        .finding.value_or(Divergence{})
        .cause;
  };
  Recording alone(2);
  alone.add(1, 0, kOwn0, kMean, kWeight);
  EXPECT_EQ(cause(alone), "rank-missing");
  EXPECT_EQ(cause(parallel(kMean, kMean, {{"rows", {6}}})), "rows-missing");
  Recording longer = parallel(kMean, kMean);
  for (const int rank : {0, 1}) longer.add(2, rank, rank == 0 ? kOwn0 : kOwn1, kMean, kWeight);
  EXPECT_EQ(cause(longer), "steps-missing");
  Recording renamed(2);
  for (const int rank : {0, 1}) {
    renamed.add(1, rank, rank == 0 ? kOwn0 : kOwn1, kMean, kWeight, {}, {{"weight/other", kMean}});
  }
  EXPECT_EQ(cause(renamed), "name-unknown");
}

TEST(Verify, RanksThatTrainAloneAreNoOtherTraining) {
  Recording run(2);
  const json all = {{"rows", {4, 5, 6, 7}}, {"averages", json::object()}};
  for (const int rank : {0, 1}) run.add(1, rank, kOwn0, kMean, kWeight, all);
  EXPECT_EQ(judged(run).finding.value().cause, "rows-repeated");
}

TEST(Verify, TheReferenceOnceMoreIsNoParallelRun) {
  const Recording one = serial();
  const Recording again = serial();
  EXPECT_FALSE(judge(one.read(), {}, again.read(), {.divides_rows = true}).is_parallel);
  EXPECT_TRUE(judged(parallel(kMean, kMean)).is_parallel);
}

TEST(Verify, AMeanNeedsAPartOfEachRank) {
  Recording nobody(2);
  for (const int rank : {0, 1}) {
    nobody.add(1, rank, {}, kMean, kWeight, {{"averages", json::object()}});
  }
  EXPECT_EQ(judged(nobody).finding.value().cause, "not-averaged");
  Recording one_of_two(2);
  one_of_two.add(1, 0, kMean, kMean, kWeight);
  one_of_two.add(1, 1, {}, kMean, kWeight);
  const Judgement found = judged(one_of_two);
  EXPECT_EQ(found.finding.value().cause, "not-averaged");
  EXPECT_EQ(found.finding->ranks, std::vector<int>{1});
}

TEST(Verify, AProgramMayAverageOftenOnPurpose) {
  Recording run(2);
  const json twice = {{"averages", {{"net.weight", 2}}}, {"synchronised_forwards", 2}};
  run.add(1, 0, kOwn0, kMean, kWeight, twice);
  run.add(1, 1, kOwn0, kMean, kWeight, twice);  // what went into the second average
  EXPECT_EQ(judged(run).verdict, Verdict::kSameBits);
}

TEST(Verify, RatesAreComparedInExplainedRunsToo) {
  Recording one(1);
  Recording run(2);
  const json drops = {{"kinds", {"dropout"}}};
  one.add(1, 0, {}, kMean, kWeight, drops);
  run.set_rate(kRate / 2);
  for (const int rank : {0, 1}) run.add(1, rank, rank == 0 ? kOwn0 : kOwn1, kMean, kWeight, drops);
  const Judgement found = judge(one.read(), {}, run.read(), {.divides_rows = true, .ranks = 2});
  EXPECT_EQ(found.finding.value().cause, "rate-differs");
}

// All ranks may leave out the same layer; masks of dropout must differ where rows do.
TEST(Verify, RandomNumbersOfAForwardMayBeThoseOfAllRanks) {
  for (const char* kind : {"dropout", "random"}) {
    const json draws = {{"kinds", {kind}}, {"generator", 5}};
    Recording one(1);
    one.add(1, 0, {}, kMean, kWeight, draws);
    Recording run(2);
    for (const int rank : {0, 1}) {
      run.add(1, rank, rank == 0 ? kOwn0 : kOwn1, kMean, kWeight, draws);
    }
    const Judgement found = judge(one.read(), {}, run.read(), {.divides_rows = true, .ranks = 2});
    const bool drops = std::string(kind) == "dropout";
    EXPECT_EQ(found.verdict, drops ? Verdict::kWrong : Verdict::kExplained);
    EXPECT_EQ(found.finding ? found.finding->cause : "", drops ? "one-seed" : "");
  }
}

TEST(Verify, VirtualShardsAllowNoRoundingAndNoExcuse) {
  const RunFacts in_parts = {.divides_rows = true, .same_bits = true, .ranks = 2};
  EXPECT_EQ(judged(parallel(kMean, kMean), in_parts).verdict, Verdict::kSameBits);
  Values rounded = kMean;
  rounded[3] = std::nextafter(rounded[3], 10.0F);
  Judgement found = judged(parallel(rounded, rounded), in_parts);
  EXPECT_EQ(found.finding.value().cause, "bits-differ");
  EXPECT_EQ(found.finding->where, "net.weight");
  EXPECT_NE(found.finding->text.find("1 of 16 elements"), std::string::npos);
  const json drops = {{"kinds", {"dropout"}}};
  Recording run(2);
  run.add(1, 0, kOwn0, kMean, times(kWeight, 1.5F), drops);
  run.add(1, 1, kOwn1, kMean, times(kWeight, 1.5F), drops);
  EXPECT_EQ(judged(run, in_parts).finding.value().cause, "bits-differ");
}

TEST(Verify, AProgramsOwnVirtualShardsMustHaveTheSameBits) {
  const json in_parts = {
      {"kinds", {"dropout"}}, {"wrappers", {"virtual_shards"}}, {"generator", 5}};
  json parts_of_rank = in_parts;
  parts_of_rank["forwards"] = 1;
  const auto judged_parts = [&](const Values& weight) {
    Recording one(1);
    one.add(1, 0, {}, kMean, kWeight, in_parts);
    Recording run(2);
    for (const int rank : {0, 1}) run.add(1, rank, {}, kMean, weight, parts_of_rank);
    return judge(one.read(), {}, run.read(), {.divides_rows = true, .ranks = 2});
  };
  EXPECT_EQ(judged_parts(kWeight).verdict, Verdict::kSameBits) << "one seed is what they need";
  EXPECT_EQ(judged_parts(times(kWeight, 1.5F)).finding.value().cause, "bits-differ");
}

TEST(Verify, EachOptimizerHasAFactorOfItsOwn) {
  Recording one(1);
  one.add(1, 0, {}, kMean, kWeight);
  one.add_update(1, 0, 1, "other", times(kMean, 0.25F), 0.25);
  Recording run(2);
  for (const int rank : {1, 0}) {
    const Values& own = rank == 0 ? kOwn0 : kOwn1;
    run.add_update(1, rank, 1, "other", times(kMean, 0.25F), 0.25);
    run.add(1, rank, own, kMean, kWeight, {{"averages", {{"net.weight", 1}, {"other", 1}}}},
            {{"local/other", own}});
  }
  const Judgement found = judge(one.read(), {}, run.read(), {.divides_rows = true, .ranks = 2});
  EXPECT_EQ(found.verdict, Verdict::kSameBits) << found.finding.value_or(Divergence{}).text;
}

TEST(Verify, SmallGradientsInHalfPrecisionAreRoundedToItsSmallestNumbers) {
  const auto verdict = [](const char* sent) {
    const float tiny = 0x1p-23F;
    Recording one(1);
    one.add(1, 0, {}, Values(16, 1.5F * tiny), kWeight);
    Recording run(2);
    for (const int rank : {0, 1}) {
      run.add(1, rank, Values(16, rank == 0 ? tiny : 2 * tiny), Values(16, 2 * tiny), kWeight,
              {{"sent_dtype", sent}});
    }
    return judge(one.read(), {}, run.read(), {.divides_rows = true, .ranks = 2})
        .finding.value_or(Divergence{})
        .cause;
  };
  EXPECT_EQ(verdict("float32"), "mean-wrong");
  EXPECT_NE(verdict("float16"), "mean-wrong");
}

TEST(Verify, RowsOfAnotherTrainingMayNotOverlap) {
  const auto found = [](std::vector<int64_t> rows0, std::vector<int64_t> rows1) {
    Recording run(2);
    run.add(1, 0, kOwn0, kMean, kWeight, {{"rows", rows0}});
    run.add(1, 1, kOwn1, kMean, kWeight, {{"rows", rows1}});
    return judged(run);
  };
  const Judgement apart = found({4, 5, 6, 7}, {8, 9, 10, 11});
  EXPECT_EQ(apart.verdict, Verdict::kExplained);
  EXPECT_TRUE(apart.is_other_training);
  EXPECT_EQ(apart.tensors, 0) << "nothing was compared with the reference";
  EXPECT_EQ(found({4, 5, 6, 7}, {6, 7, 8, 9}).finding.value().cause, "rows-repeated");
  EXPECT_FALSE(found({4, 4, 6, 7}, {6, 7, 8, 9}).finding) << "the data has equal rows";
}

TEST(Verify, TheBatchMayBeTheSecondDimension) {
  Recording one(1);
  one.add(1, 0, {}, kMean, kWeight, {{"rows", {1, 2, 3}}, {"columns", {4, 5, 6, 7}}});
  Recording run(2);
  for (const int rank : {0, 1}) {
    const int first = 4 + 2 * rank;
    run.add(
        1, rank, rank == 0 ? kOwn0 : kOwn1, kMean, kWeight,
        {{"rows", {10 * first, 10 * first + 1, 10 * first + 2}}, {"columns", {first, first + 1}}});
  }
  EXPECT_EQ(judge(one.read(), {}, run.read(), {.divides_rows = true, .ranks = 2}).verdict,
            Verdict::kSameBits);
}

TEST(Verify, ARunThatDidNotResumeIsNamed) {
  const auto cause = [](int64_t resumed_after) {
    Recording one(1);
    Recording run(2);
    for (const int64_t step : {1, 2, 3, 4, 5}) {
      one.add(step, 0, {}, kMean, kWeight);
      for (const int rank : {0, 1}) {
        run.add(step, rank, rank == 0 ? kOwn0 : kOwn1, kMean, kWeight,
                {{"resumed_after", step > 2 ? resumed_after : 0}});
      }
    }
    return judge(one.read(), {}, run.read(), {.divides_rows = true, .resumed_after = 2, .ranks = 2})
        .finding.value_or(Divergence{})
        .cause;
  };
  EXPECT_EQ(cause(2), "");
  EXPECT_EQ(cause(0), "not-resumed");
}

TEST(Verify, TheLossIsJudged) {
  const auto cause = [](double loss) {
    Recording one = serial();
    one.add_loss(1, 0, 2.5);
    Recording run = parallel(kMean, kMean);
    run.add_loss(1, 0, loss - 1);
    run.add_loss(1, 1, loss + 1);
    return judge(one.read(), {}, run.read(), {.divides_rows = true, .ranks = 2})
        .finding.value_or(Divergence{})
        .cause;
  };
  EXPECT_EQ(cause(2.5), "");
  EXPECT_EQ(cause(7.5), "loss-differs");
}

TEST(Verify, AProgramThatKnowsNothingOfRanksIsNoParallelRun) {
  const auto alone = [](const char* wrapper) {
    Recording run(2);
    const json all = {
        {"rows", {4, 5, 6, 7}}, {"averages", json::object()}, {"wrappers", {wrapper}}};
    for (const int rank : {0, 1}) run.add(1, rank, {}, kMean, kWeight, all);
    return judged(run);
  };
  EXPECT_FALSE(alone("pipeline").is_parallel);
  EXPECT_FALSE(alone("pipeline").finding);
  EXPECT_EQ(alone("ddp").finding.value().cause, "rows-repeated");
}

TEST(Verify, NothingRecordedIsAFinding) {
  const Recording nothing(2);
  EXPECT_EQ(judged(nothing).finding.value().cause, "nothing-recorded");
}

TEST(Verify, OnlyWhatWasComparedIsTheSerialRun) {
  VerifiedRun explained{.name = "2 ranks"};
  explained.judgement.verdict = Verdict::kExplained;
  explained.judgement.explanation = "another training";
  VerifiedRun compared{.name = "3 ranks"};
  compared.judgement.verdict = Verdict::kReordered;
  compared.judgement.tensors = 8;
  compared.judgement.loose = 1;
  VerifiedRun failed{.name = "5 ranks", .failure = "no space"};
  const auto answer = [](const std::vector<VerifiedRun>& runs) {
    return verify_report({"./train"}, runs).answers.front().text;
  };
  EXPECT_EQ(exit_code_of({explained}), 1);
  EXPECT_TRUE(answer({explained}).starts_with("Not shown")) << answer({explained});
  EXPECT_EQ(exit_code_of({explained, compared}), 0);
  const std::string some = answer({explained, compared});
  EXPECT_TRUE(some.starts_with("Yes, for 1 run compared")) << some;
  EXPECT_NE(some.find("1 of 8 tensors were compared loosely"), std::string::npos) << some;
  EXPECT_NE(some.find("was not compared with the serial run"), std::string::npos) << some;
  EXPECT_EQ(exit_code_of({compared, failed}), 1);
  EXPECT_TRUE(answer({compared, failed}).starts_with("Not shown: 1 run could not be judged"));
}

TEST(Verify, ARunOfTooFewStepsIsNotKilled) {
  const auto has_resume = [](std::vector<std::string> program) {
    const ProgramFlags flags = parse_help(
        "  --checkpoint DIR  folder\n"
        "  --steps INT [40]  updates\n");
    const auto families = plan_variants({.program = std::move(program)}, flags);
    return std::any_of(families.front().variants.begin(), families.front().variants.end(),
                       [](const Variant& each) { return each.name == "killed and resumed"; });
  };
  EXPECT_TRUE(has_resume({"./train"}));
  EXPECT_TRUE(has_resume({"./train", "--steps", "5"}));
  EXPECT_FALSE(has_resume({"./train", "--steps", "3"}));
}

TEST(Verify, ALongHelpIsNoMatterForTheStack) {
  const std::string long_text(200'000, 'x');
  const ProgramFlags flags = parse_help("  --batch INT [64]  " + long_text + "\n      " +
                                        long_text + "\n  --quiet  print nothing\n");
  EXPECT_EQ(flags.defaults.at("--batch"), "64");
  EXPECT_TRUE(flags.has("--quiet"));
}

TEST(Verify, ARunThatEndsTooSoonIsWrong) {
  Recording longer(1);
  for (const int64_t step : {1, 2}) longer.add(step, 0, {}, kMean, kWeight);
  const Recording shorter = serial();
  const Judgement found = judge(longer.read(), {}, shorter.read(), {});
  EXPECT_EQ(found.finding.value().cause, "steps-missing");
  EXPECT_EQ(found.finding->step, 2);
}

TEST(Verify, VirtualShardsAreAFamilyOfTheirOwn) {
  const auto family_of = [](std::vector<std::string> program, const std::string& batch) {
    const ProgramFlags flags = parse_help("  --batch INT [" + batch +
                                          "]  rows\n"
                                          "  --virtual-shards INT [0]  parts\n");
    auto families = plan_variants({.program = std::move(program), .quick = true}, flags);
    return families.size() == 2 ? families[1] : Family();
  };
  const Family found = family_of({"./train"}, "64");
  EXPECT_EQ(found.arguments, (std::vector<std::string>{"--virtual-shards", "6", "--batch", "60"}));
  ASSERT_EQ(found.variants.size(), 2U);
  EXPECT_TRUE(found.variants[0].facts.same_bits);
  EXPECT_EQ(family_of({"./train", "--batch", "24"}, "64").arguments,
            (std::vector<std::string>{"--virtual-shards", "6"}));
  EXPECT_TRUE(family_of({"./train", "--batch", "64"}, "64").variants.empty())
      << "six parts do not fit";
  EXPECT_TRUE(family_of({"./train"}, "8").variants.empty());
}

TEST(Verify, HelpTellsWhatAProgramOffers) {
  const ProgramFlags flags = parse_help(
      "Options:\n"
      "  -h,--help                   Print this help\n"
      "  --batch INT [64]            rows of one micro-step\n"
      "  --accum-steps INT [4]       micro-steps\n"
      "  --amp off|bf16|fp16 [off]   precision\n"
      "  --quiet                     print nothing\n");
  EXPECT_EQ(flags.defaults.at("--batch"), "64");
  EXPECT_EQ(flags.choices.at("--amp"), (std::vector<std::string>{"off", "bf16", "fp16"}));
  EXPECT_TRUE(flags.has("--quiet"));
  const auto families = plan_variants({.program = {"./train"}, .quick = true}, flags);
  ASSERT_EQ(families.size(), 1U);
  std::vector<std::string> names;
  for (const auto& variant : families[0].variants) names.push_back(variant.name);
  EXPECT_EQ(names, (std::vector<std::string>{"2 ranks", "3 ranks", "2 ranks, 2 micro-steps",
                                             "3 ranks, 2 micro-steps"}));
}

TEST(Verify, LeastSquaresFindsTheParts) {
  const std::vector<std::vector<double>> columns = {{1, 2, 3, 4}, {0, 1, 0, -1}};
  const Fit fit = least_squares(columns, {2, 3.5, 6, 8.5});
  EXPECT_NEAR(fit.coefficients[0], 2, 1e-6);
  EXPECT_NEAR(fit.coefficients[1], -0.5, 1e-6);
  EXPECT_NEAR(fit.residual, 0, 1e-6);
}

TEST(Mutations, EveryOneHasANameOfItsOwn) {
  std::set<std::string_view> names;
  for (const auto& each : all_mutations()) {
    names.insert(each.name);
    EXPECT_EQ(mutation_named(each.name), each.mutation);
  }
  EXPECT_EQ(names.size(), all_mutations().size());
  EXPECT_GE(names.size(), 20U);
  EXPECT_FALSE(mutation_named("no-such-bug"));
}

}  // namespace
}  // namespace lockstep::cli::verify_test
