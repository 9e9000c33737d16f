#include <gtest/gtest.h>

#include <unistd.h>

#include <filesystem>
#include <limits>

#include "base/file.hpp"
#include "cli/lab/folder_lock.hpp"
#include "cli/lab/lab_plan.hpp"
#include "cli/lab/lab_text.hpp"
#include "lab_support.hpp"
#include "support.hpp"

namespace lockstep::cli::lab_test {
namespace {

using test::cores;
using test::expect_error;
using test::made_set;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

auto run(const LabRequest& request) {
  return [request] { run_lab_command(request, "lockstep lab"); };
}

TEST(LabCommand, RefusesWhatALabDoesNotHave) {
  expect_error(Code::kUsage, {"there is no lab \"8\"", "5, 6, 7, 10 and homework2"},
               run({"8", {}}));
  expect_error(Code::kUsage, {"lab 5 has no --ranks", "belongs to lab 6"},
               run({"5", {.own = {{"--ranks", "2"}}}}));
  expect_error(Code::kUsage, {"lab 5 has no --bucket-mib"},
               run({"5", {.own = {{"--bucket-mib", "1"}}}}));
  expect_error(Code::kUsage, {"lab 6 has no --split-rows"},
               run({"6", {.own = {{"--split-rows", "9"}}}}));
  expect_error(Code::kUsage, {"lab 6 has no --split-devices", "belongs to lab 5"},
               run({"6", {.own = {{"--split-devices", "2"}}}}));
}

TEST(LabCommand, LabsOfIssueFiveHaveTheirFlags) {
  expect_error(Code::kUsage, {"there is no lab \"8\"", "5, 6, 7, 10 and homework2", "lab all"},
               run({"8", {}}));
  expect_error(Code::kUsage, {"lab 7 has no --ranks", "belongs to lab 6"},
               run({"7", {.own = {{"--ranks", "2"}}}}));
  expect_error(Code::kUsage, {"lab homework2 has no --split-rows", "belongs to lab 5"},
               run({"homework2", {.own = {{"--split-rows", "9"}}}}));
  expect_error(Code::kUsage, {"lab 5 has no --amp", "belongs to lab 7 and lab homework2"},
               run({"5", {.own = {{"--amp", "bf16"}}}}));
  expect_error(Code::kUsage, {"lab 6 has no --accum-steps"},
               run({"6", {.own = {{"--accum-steps", "4"}}}}));
}

TEST(LabCommand, FlagsOfPractical10BelongToIt) {
  expect_error(Code::kUsage, {"lab 7 has no --micro-batches", "belongs to lab 10"},
               run({"7", {.own = {{"--micro-batches", "2"}}}}));
  expect_error(Code::kUsage, {"lab 5 has no --batches"}, run({"5", {.own = {{"--batches", "2"}}}}));
  expect_error(Code::kUsage, {"lab 6 has no --stages"}, run({"6", {.own = {{"--stages", "2"}}}}));
  expect_error(Code::kUsage, {"lab 10 has no --amp"}, run({"10", {.own = {{"--amp", "bf16"}}}}));
}

// A folder that is removed at the end of the test.
class LabFolder {
 public:
  LabFolder() { std::filesystem::create_directories(path / "records"); }
  ~LabFolder() { std::filesystem::remove_all(path); }
  LabFolder(const LabFolder&) = delete;
  LabFolder& operator=(const LabFolder&) = delete;

  std::string text(const char* name) const { return read_text_file((path / name).string()); }
  bool has(const char* name) const { return std::filesystem::exists(path / name); }

  const std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("lockstep-lab-" + std::to_string(::getpid()));
};

TEST(LabFolderLock, OneLabAtATime) {
  const LabFolder folder;
  {
    const FolderLock lock(folder.path.string());
    expect_error(Code::kUsage, {"another lab is writing into", std::to_string(::getpid()), "--out"},
                 [&folder] { const FolderLock second(folder.path.string()); });
  }
  EXPECT_FALSE(folder.has(".lock"));
  EXPECT_NO_THROW(const FolderLock again(folder.path.string()));
}

LabReport small_report() {
  Table table("Speed", {{"set-up"}, {"step time", Align::kRight}});
  table.add_row({"single", format_step_ms(77.8, 5.1)});
  LabReport report{.title = "Small",
                   .stamp = {},
                   .tables = {{"speed", table}},
                   .figures = {},
                   .answers = {{"speed", "Faster?", "Yes."},
                               {"speed", "Why?", "It is."},
                               {"memory", "How much?", "Some."}}};
  report.trained = {{"model", "mlp"}};
  report.code = {{"train.cpp", "int main() {}\n"}};
  return report;
}

const ReportOrigin kOrigin{"lockstep lab 5", 1767323040, {"run1"}};

TEST(LabReportFolder, HoldsEverythingToHandIn) {
  const LabFolder folder;
  write_file_atomically((folder.path / "records" / "run1.json").string(), "{}");
  write_lab_report(small_report(), kOrigin, {.author = "Ada", .notes = {}, .zip = true},
                   folder.path.string());
  EXPECT_EQ(folder.text("speed.csv"),
            "set_up,step_time_mean_ms,step_time_deviation_ms\r\nsingle,77.8,5.1\r\n");
  EXPECT_NE(folder.text("tables.json").find("\"step_time_mean\""), std::string::npos);
  EXPECT_EQ(folder.text("code/train.cpp"), "int main() {}\n");
  EXPECT_NE(folder.text("notes.md").find("## 1.2 Why?"), std::string::npos);
  const std::string html = folder.text("report.html");
  for (const char* part : {"Ada", "What was trained", "int main() {}", "2.1 How much?"}) {
    EXPECT_NE(html.find(part), std::string::npos) << part;
  }
  const std::string zip = folder.text("hand-in.zip");
  const std::string top = folder.path.filename().string();
  for (const char* name : {"report.html", "report.pdf", "code/train.cpp", "records/run1.json"}) {
    EXPECT_NE(zip.find(top + "/" + name), std::string::npos) << name;
  }
}

TEST(LabReportFolder, NotesAreReadAndNeverLost) {
  const LabFolder folder;
  const std::string notes = (folder.path / "notes.md").string();
  write_file_atomically(notes, "## 1.2\nMy words.\n");
  write_lab_report(small_report(), kOrigin, {}, folder.path.string());
  EXPECT_NE(folder.text("report.md").find("> My words."), std::string::npos);
  EXPECT_EQ(folder.text("notes.md"), "## 1.2\nMy words.\n");
  write_file_atomically(notes, "## 9.9\nLost.\n");
  expect_error(Code::kUsage, {"\"9.9\"", "1.1 Faster?", "without the notes", "--notes"},
               [&] { write_lab_report(small_report(), kOrigin, {}, folder.path.string()); });
  EXPECT_EQ(folder.text("report.md").find("My words."), std::string::npos);
  EXPECT_EQ(folder.text("notes.md"), "## 9.9\nLost.\n");
  expect_error(Code::kFileRead, {"missing.md"},
               [] { require_notes({.author = {}, .notes = "/missing.md"}); });
}

TEST(LabReportFolder, SaysHowToMakeItAgain) {
  const LabFolder folder;
  std::filesystem::create_directory(folder.path / "report.html");
  expect_error(Code::kFileWrite, {"report.html", "lockstep report " + folder.path.string()},
               [&] { write_lab_report(small_report(), kOrigin, {}, folder.path.string()); });
}

TEST(LabQuestions, HaveTheCoursesNumbers) {
  const auto numbers = [](const std::vector<Answer>& answers) {
    LabReport report = small_report();
    report.answers = answers;
    std::string all;
    for (const auto& section : lab_document(report, "", 0, {}).sections) {
      for (const auto& question : section.questions) all += numbered(question) + "; ";
    }
    return all;
  };
  EXPECT_EQ(numbers({{"speed", "a", ""}, {"speed", "b", ""}, {"memory", "c", ""}}),
            "1.1 a; 1.2 b; 2.1 c; ");
  EXPECT_EQ(numbers({{"10.1 base", "a", ""},
                     {"10.1 base", "b", ""},
                     {"10.2 more", "c", ""},
                     {"beyond", "d", ""}}),
            "10.1.1 a; 10.1.2 b; 10.2 c; A d; ");
  EXPECT_EQ(numbers({{"all", "1. Time", ""}, {"all", "2. Memory", ""}}), "1 Time; 2 Memory; ");
}

TEST(Lab5Plan, PointsReachTheFullCountInAtMostFour) {
  EXPECT_EQ(scaling_points(1), (std::vector<int>{1}));
  EXPECT_EQ(scaling_points(2), (std::vector<int>{1, 2}));
  EXPECT_EQ(scaling_points(4), (std::vector<int>{1, 2, 3, 4}));
  EXPECT_EQ(scaling_points(5), (std::vector<int>{1, 2, 5}));
  EXPECT_EQ(scaling_points(8), (std::vector<int>{1, 2, 4, 8}));
}

TEST(Lab5Plan, SpecOfTheFirstDevices) {
  EXPECT_EQ(spec_of_first(plan_devices("cpu:3", cores(4)), 2), "cpu:2");
  EXPECT_EQ(spec_of_first(plan_devices("cuda:0*4", cores(4, 1)), 3), "cuda:0*3");
  const auto mixed = plan_devices("cuda:1*2,0", cores(4, 2));
  EXPECT_EQ(spec_of_first(mixed, 1), "cuda:1");
  EXPECT_EQ(spec_of_first(mixed, 3), "cuda:1*2,0");
}

TEST(LabMeasures, LossesDeviateOrCannotBeCompared) {
  RunRecord one = test::made_run({});
  RunRecord other = one;
  EXPECT_DOUBLE_EQ(loss_deviation(one, other).value(), 0);
  other.losses[1] = 0.55;
  EXPECT_NEAR(loss_deviation(one, other).value(), 0.1, 1e-12);
  other.losses[3] = kNan;
  EXPECT_FALSE(loss_deviation(one, other));
  other.losses.resize(2);
  EXPECT_FALSE(loss_deviation(one, other)) << "of another length";
  one.losses.clear();
  EXPECT_FALSE(loss_deviation(one, one));
}

TEST(Lab5Tables, StepTimesHaveOneUnit) {
  EXPECT_EQ(format_step_ms(41.23, 0.84), "41.2 ± 0.8 ms");
  EXPECT_EQ(format_step_ms(0.2134, 0.004), "213 ± 4 µs");
  EXPECT_EQ(format_step_ms(1234, 50), "1.23 ± 0.05 s");
}

TEST(LabText, CarriesTheNumbersThatItShows) {
  const auto numbers = [](const TableCell& cell) { return cell.value.numbers; };
  const auto step = format_step_ms(1234, 50);
  EXPECT_EQ(numbers(step), (std::vector<double>{1234, 50}));
  EXPECT_EQ(step.value.unit, "ms");
  EXPECT_EQ(step.value.kind, CellValue::Kind::kMean);
  EXPECT_EQ(numbers(format_range({.min = 0.5, .max = 2})), (std::vector<double>{0.5, 2}));
  EXPECT_EQ(numbers(format_ms(125'000)), std::vector<double>{125'000}) << "2 min 05 s";
  EXPECT_EQ(numbers(signed_ms(-3)), std::vector<double>{-3});
  EXPECT_EQ(numbers(bytes_cell(512 << 10)), std::vector<double>{0.5});
  EXPECT_EQ(numbers(signed_bytes(-1 << 20)), std::vector<double>{-1});
  EXPECT_EQ(bytes_cell(1).value.unit, "mib");
  EXPECT_EQ(numbers(format_share(0.5)), std::vector<double>{50});
  EXPECT_EQ(numbers(percent_range(0.25, 0.5)), (std::vector<double>{25, 50}));
  EXPECT_EQ(numbers(format_rows({22, 20})), (std::vector<double>{22, 20}));
  EXPECT_EQ(numbers(product_cell(4, 64)), (std::vector<double>{4, 64}));
  EXPECT_EQ(numbers(format_count(1234567)), std::vector<double>{1234567});
}

TEST(LabText, ReadsAsAPersonWouldWriteIt) {
  EXPECT_EQ(percent_range(0.853, 0.848), "85 %") << "not \"85 to 85 %\"";
  EXPECT_EQ(percent_range(0.853, 0.914), "85 to 91 %");
  EXPECT_EQ(counted(1, "warm-up step"), "1 warm-up step");
  EXPECT_EQ(counted(2, "process"), "2 processes");
  EXPECT_EQ(rows_text({64}), "64 rows");
  EXPECT_EQ(rows_text({1}), "1 row");
  EXPECT_EQ(rows_text({32, 32}), "32 rows each");
  EXPECT_EQ(rows_text({22, 22, 20}), "22, 22 and 20 rows");
  EXPECT_EQ(against_text(0), "as much as");
  EXPECT_EQ(against_text(-1024), "1.00 KiB less than");
  EXPECT_EQ(format_count(999), "999");
  EXPECT_EQ(format_count(1234567), "1,234,567");
  EXPECT_EQ(format_step_s({.mean = 41.23, .stddev = 0.84}), "0.0412 ± 0.0008");
  EXPECT_EQ(format_range_s({.min = 73.7, .max = 173.9}), "0.074 … 0.174");
  EXPECT_EQ(format_s(12.34), "12.3");
}

TEST(LabText, LossesThatDifferByRoundingHaveNoExponent) {
  const RunRecord one = test::made_run({});
  RunRecord other = one;
  EXPECT_EQ(loss_parity(one, other, "fp32's"), " All 4 losses equal fp32's exactly.");
  other.losses[1] *= 1 + 1e-7;
  EXPECT_EQ(loss_parity(one, other, "fp32's"),
            " Over 4 steps the losses differ from fp32's by less than 0.001 %, which is rounding.");
  other.losses[1] = 0.55;
  EXPECT_EQ(loss_parity(one, other, "fp32's"),
            " Over 4 steps the losses differ from fp32's by at most 10 %.");
}

TEST(LabText, TimesAreJudgedUnlessSomethingSpeaksAgainstIt) {
  EXPECT_EQ(times_warning({}, {Comparison{}}), "");
  EXPECT_TRUE(test::mentions(times_warning({.busy_cores = 0.3}, {}), "kept 0.3 cores busy"));
  EXPECT_EQ(times_warning({.busy_cores = 3, .queued = 0.01}, {}), "")
      << "the runs had their cores all the same";
  EXPECT_TRUE(test::mentions(times_warning({.queued = 0.3}, {}), "had no core for up to 30 %"));
  Comparison unsafe;
  unsafe.unsafe = true;
  unsafe.noise = 0.4;
  EXPECT_TRUE(test::mentions(times_warning({}, {Comparison{}, unsafe}), "varied by 40 %"));
}

TEST(LabText, SharesAndChanges) {
  EXPECT_EQ(format_share(0), "0 %");
  EXPECT_EQ(format_share(1e-9), "< 0.001 %");
  EXPECT_EQ(format_share(0.00012), "0.012 %");
  EXPECT_EQ(format_share(0.1234), "12 %");
  EXPECT_EQ(format_share(1.4), "140 %");
  EXPECT_EQ(format_change(-0.284), "-28 %");
  EXPECT_EQ(format_change(0.001), "±0 %");
  const auto against = [](double base_ms, double ms) {
    return format_against(compare(made_set({.ms = base_ms}), made_set({.ms = ms})), "fp32");
  };
  EXPECT_EQ(against(100, 50), "2.00 times as fast as fp32");
  EXPECT_EQ(against(100, 125), "1.25 times slower than fp32");
  EXPECT_EQ(against(100, 99), "not measurably faster or slower than fp32 (1.01 ± 0.00 times)");
}

}  // namespace
}  // namespace lockstep::cli::lab_test
