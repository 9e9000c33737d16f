#include <gtest/gtest.h>

#include <filesystem>

#include "cli/lab/saved_lab.hpp"
#include "cli/own/comparison.hpp"
#include "cli/own/new_program.hpp"
#include "cli/own/run_report.hpp"
#include "lab_support.hpp"
#include "support.hpp"

namespace lockstep::cli::own_programs_test {
namespace {

using test::expect_error;
using test::mentions;
using test::ScratchFolder;

std::vector<std::string> names_of(const std::vector<std::string>& words) {
  std::vector<std::string> names;
  for (const auto& side : compared_sides(words)) names.push_back(side.name);
  return names;
}

TEST(ComparedSides, AreCutAtVs) {
  const auto sides = compared_sides({"./a", "-x", "vs", "lockstep", "run", "./b", "vs", "./c"});
  ASSERT_EQ(sides.size(), 3U);
  EXPECT_EQ(sides[0].command, (std::vector<std::string>{"./a", "-x"}));
  EXPECT_EQ(sides[1].command, (std::vector<std::string>{"lockstep", "run", "./b"}));
  EXPECT_EQ(sides[2].command, (std::vector<std::string>{"./c"}));
}

TEST(ComparedSides, AreNamedByWhatDiffers) {
  using Names = std::vector<std::string>;
  EXPECT_EQ(names_of({"./m", "--a", "vs", "./m", "--b"}), (Names{"--a", "--b"}));
  EXPECT_EQ(names_of({"./m", "--lr", "1", "-q", "vs", "./m", "--lr", "2", "-q"}),
            (Names{"--lr 1", "--lr 2"}));
  EXPECT_EQ(names_of({"sleep", "1", "vs", "sleep", "2"}), (Names{"sleep 1", "sleep 2"}));
  EXPECT_EQ(names_of({"bin/m", "vs", "bin/m", "--fast"}), (Names{"m", "--fast"}));
  EXPECT_EQ(names_of({"m", "vs", "m"}), (Names{"m", "m again"})) << "the same command, for noise";
  const std::string path = "a/folder/with/a/very/long/name/";
  EXPECT_EQ(names_of({path + "m", "vs", path + "n"}), (Names{"A", "B"}));
}

TEST(ComparedSides, RefusesWhatCannotBeCompared) {
  expect_error(Code::kUsage, {"vs is missing"}, [] { compared_sides({}); });
  expect_error(Code::kUsage, {"vs is missing"}, [] { compared_sides({"./a"}); });
  expect_error(Code::kUsage, {"no command on one side"}, [] { compared_sides({"vs", "./a"}); });
  expect_error(Code::kUsage, {"3 names for 2 commands"}, [] {
    compared_sides({"a", "vs", "b"}, {"x", "y", "z"});
  });
}

SavedComparison comparison_of(std::vector<double> first_s, std::vector<double> second_s) {
  return {.title = "Two",
          .command = "lockstep compare",
          .date = 1'000'000'000,
          .others_busy_cores = 0,
          .sides = {{"slow", {"./slow"}, std::move(first_s)},
                    {"fast", {"./fast", "a b"}, std::move(second_s)}}};
}

TEST(Comparison, SaysWhichIsFasterAndByHowMuch) {
  const ScratchFolder folder;
  const auto report =
      comparison_report(comparison_of({2.02, 2.0, 1.98}, {1, 1, 1}), folder.file(""));
  EXPECT_TRUE(mentions(report.answers.front().text, "fast is 2.00 ± 0.02 times faster than slow."));
  EXPECT_EQ(report.warning, "");
  EXPECT_EQ(report.tables.front().table.rows()[0].back(), "2.00 ± 0.02");
  EXPECT_EQ(report.tables.front().table.rows()[1].back(), "1");
  EXPECT_EQ(report.answers.size(), 1U) << "nothing is known of steps";
}

TEST(Comparison, WarnsOfNoise) {
  const ScratchFolder folder;
  auto noisy = comparison_of({1, 2, 3}, {1, 1, 1});
  EXPECT_TRUE(mentions(comparison_report(noisy, folder.file("")).warning, "varied by 50 %"));
  auto busy = comparison_of({2, 2}, {1, 1});
  busy.others_busy_cores = 1.5;
  EXPECT_TRUE(mentions(comparison_report(busy, folder.file("")).warning, "1.5 cores busy"));
  const auto same = comparison_report(comparison_of({1, 1.01}, {1.01, 1}), folder.file(""));
  EXPECT_TRUE(mentions(same.answers.front().text, "differ by no more than the noise"));
}

TEST(Comparison, IsKept) {
  const ScratchFolder folder;
  const auto saved = comparison_of({2, 2.5}, {1, 1.5});
  save_comparison(saved, folder.file(""));
  const auto read = read_comparison(folder.file(""));
  EXPECT_EQ(read.title, saved.title);
  EXPECT_EQ(read.date, saved.date);
  ASSERT_EQ(read.sides.size(), 2U);
  EXPECT_EQ(read.sides[1].command, saved.sides[1].command);
  EXPECT_EQ(read.sides[1].wall_s, saved.sides[1].wall_s);
  EXPECT_EQ(compared_record(read, 1, 0), "2-fast-run1");

  save_comparison(comparison_of({}, {}), folder.file(""));
  expect_error(Code::kRecord, {"was not finished"}, [&] { read_comparison(folder.file("")); });
  test::write_bytes(folder.file(kSavedComparison), R"({"schema": 1, "title": "x"})");
  expect_error(Code::kRecord, {"damaged"}, [&] { read_comparison(folder.file("")); });
  test::write_bytes(folder.file(kSavedComparison), "[]");
  expect_error(Code::kRecord, {"not a JSON object"}, [&] { read_comparison(folder.file("")); });
}

TEST(SavedLab, IsKept) {
  const ScratchFolder folder;
  Experiment experiment;
  experiment.name = "dp-run1";
  experiment.devices = 2;
  experiment.keys = {{"dp", 2}, {"all", 0}};
  const SavedLab saved{
      .lab = "5",
      .command = "lockstep lab 5",
      .date = 1'000'000'000,
      .others_busy_cores = 0.5,
      .options = {.devices = "cpu:2", .quick = true, .batch = 7, .own = {{"--split-rows", "9"}}},
      .experiments = {experiment},
      .author = "Ada"};
  save_lab(saved, folder.file(""));
  const SavedLab read = read_saved_lab(folder.file(""));
  EXPECT_EQ(read.lab, "5");
  EXPECT_EQ(read.author, "Ada");
  EXPECT_EQ(read.date, saved.date);
  EXPECT_EQ(read.options.devices, "cpu:2");
  EXPECT_TRUE(read.options.quick);
  EXPECT_EQ(read.options.batch, 7);
  EXPECT_FALSE(read.options.steps);
  EXPECT_EQ(read.options.own, saved.options.own);
  ASSERT_EQ(read.experiments.size(), 1U);
  EXPECT_EQ(read.experiments[0].name, "dp-run1");
  EXPECT_EQ(read.experiments[0].keys, experiment.keys);
  EXPECT_EQ(read.experiments[0].devices, 2);
  expect_error(Code::kFileRead, {"dp-run1"}, [&] { saved_runs(read, folder.file("")); });
}

// `lockstep report --out` writes records under the names that lab.json gives.
TEST(SavedLab, ForeignFilesAreRefused) {
  const ScratchFolder folder;
  const auto expect_refused = [&](const std::string& experiment, const std::string& date) {
    test::write_bytes(
        folder.file(kSavedLab),
        R"({"schema": 1, "lab": "5", "command": "", "others_busy_cores": 0, "date": )" + date +
            R"(, "options": {"devices": "", "out": "", "quick": true,
                          "sizes": {}, "own": {}}, "experiments": [)" +
            experiment + "]}");
    expect_error(Code::kRecord, {"lab.json is damaged"}, [&] { read_saved_lab(folder.file("")); });
  };
  const auto named = [](const std::string& name) {
    return R"({"name": ")" + name + R"(", "devices": 1, "keys": []})";
  };
  for (const char* name : {"../elsewhere", "/etc/passwd", "", ".", "..", "a/b", "a\\u0000b"}) {
    expect_refused(named(name), "1");
  }
  expect_refused(R"({"name": "a", "devices": 1e18, "keys": []})", "1");
  expect_refused(R"({"name": "a", "devices": 1, "keys": [["x", 1.5]]})", "1");
  expect_refused(named("a"), "1e300");
  expect_refused(named("a"), "9223372036854775807");
}

TEST(LabOptions, NumbersOfAForeignFileAreChecked) {
  const LabOptions options{.own = {{"--a", "x"}, {"--b", "1,2"}, {"--c", "99999999999999999999"}}};
  expect_error(Code::kUsage, {"--a \"x\""}, [&] { options.count("--a"); });
  expect_error(Code::kUsage, {"--c"}, [&] { options.list("--c"); });
  EXPECT_EQ(options.list("--b"), (std::vector<int>{1, 2}));
}

TEST(ProgramName, IsThatOfATarget) {
  for (const char* name : {"mine", "My-program_2"}) EXPECT_NO_THROW(check_program_name(name));
  for (const char* name : {"", "2nd", "-x", "a b", "a/b", "a;b", "$x", "all", "test"}) {
    expect_error(Code::kUsage, {"cannot be the name of a program"},
                 [name] { check_program_name(name); });
  }
}

RunRecord plain_run() {
  RunRecord run;
  run.program = "mine";
  run.options = {{"lr", "0.5"}, {"width", "8"}};
  run.devices = {{.name = "cpu:0", .physical = "core 0", .peak_bytes = 1024}};
  run.step_ms = summarize(std::vector<double>{1, 3});
  run.losses = {2, 1};
  return run;
}

const Table* table_named(const LabReport& report, const std::string& name) {
  for (const auto& table : report.tables) {
    if (table.name == name) return &table.table;
  }
  return nullptr;
}

TEST(RunReport, HasOnlyTablesThatSaySomething) {
  const LabReport report = report_on_runs("Runs", {{"one", {1, {plain_run()}}}});
  for (const char* name : {"runs", "time", "devices"})
    EXPECT_NE(table_named(report, name), nullptr);
  for (const char* name : {"communication", "ranks", "precision", "memory", "stages"}) {
    EXPECT_EQ(table_named(report, name), nullptr) << name;
  }
  EXPECT_EQ(report.figures.size(), 3U) << "time, memory, loss";
}

TEST(RunReport, TellsWhatARecordHolds) {
  RunRecord run = plain_run();
  run.options["lr"] = "0.1";
  run.world_size = 2;
  run.devices.push_back({.name = "cpu:1", .physical = "core 1"});
  run.ranks = {{"a", 2}, {"b", 3}};
  run.all_reduces = {2, 4096};
  run.comm_ms = 1;
  run.exposed_comm_ms = 0.5;
  run.backward_ms = 1;
  run.buckets = {{.index = 0, .bytes = 4096, .parameters = 2, .launched_ms = 0, .finished_ms = 2}};
  run.accum_steps = 4;
  run.effective_batch = 32;
  run.memory = MemorySplit{.weights = 512};
  run.pipeline.emplace();
  run.pipeline->schedule = "gpipe";
  run.pipeline->micro_batches = 4;
  run.pipeline->stages.push_back({.device = "cpu:0"});
  const LabReport report =
      report_on_runs("Runs", {{"one", {1, {plain_run()}}}, {"two", {2, {run}}}});
  EXPECT_EQ(table_named(report, "time")->rows().size(), 2U);
  EXPECT_EQ(table_named(report, "devices")->rows().size(), 3U);
  EXPECT_EQ(table_named(report, "communication")->rows()[0][3], "1.00 ms");
  EXPECT_EQ(table_named(report, "ranks")->rows()[1][2], "b");
  EXPECT_EQ(table_named(report, "precision")->rows()[0][1], "4 × 8");
  EXPECT_EQ(table_named(report, "memory")->rows()[0][1], "512 B");
  EXPECT_EQ(table_named(report, "stages")->rows()[0][3], "cpu:0");
  EXPECT_NE(table_named(report, "buckets-1"), nullptr);
  EXPECT_EQ(report.trained, (LabFacts{{"width", "8"}})) << "what both have in common";
}

}  // namespace
}  // namespace lockstep::cli::own_programs_test
