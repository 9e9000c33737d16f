// MetricsLog: lines and records on disk, resuming, damage. tests/parity/train_parity.py reads the
// event files with a reader of its own.

#include "lockstep/metrics_log.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <sstream>
#include <string>
#include <vector>

#include "base/event_file.hpp"
#include "support.hpp"

namespace lockstep {
namespace {

using test::expect_error;
using test::read_bytes;
using test::ScratchFolder;
using test::write_bytes;

std::vector<std::string> event_files(const std::string& folder) {
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().filename().string().starts_with("events.")) {
      files.push_back(entry.path().string());
    }
  }
  std::sort(files.begin(), files.end());
  return files;
}

// Lines without their times: "1,loss,0.5".
std::vector<std::string> lines_of(const std::string& folder) {
  std::istringstream text(read_bytes(folder + "/metrics.csv"));
  std::vector<std::string> lines;
  for (std::string line; std::getline(text, line);) {
    const size_t first = line.find(',');
    lines.push_back(line.substr(0, first) + line.substr(line.find(',', first + 1)));
  }
  return lines;
}

TEST(EventFile, TheChecksumIsCastagnolis) {
  EXPECT_EQ(crc32c("123456789"), 0xe3069283U);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aaU);  // RFC 3720, B.4
  EXPECT_EQ(crc32c(""), 0U);
}

TEST(EventFile, AnEventIsTheProtocolsBytes) {
  const std::pair<std::string_view, double> scalar{"a", 1.5};
  const std::string expected =
      std::string("\x09\0\0\0\0\0\0\x24\x40", 9) + "\x10\xac\x02" +  // time 10, step 300
      "\x2a\x0a\x0a\x08\x0a\x01" + "a" + std::string("\x15\0\0\xc0\x3f", 5);
  EXPECT_EQ(scalar_event(10, 300, {&scalar, 1}), expected);
}

TEST(MetricsLog, WritesLinesAndRecords) {
  const ScratchFolder scratch;
  const std::string folder = scratch.file("run/metrics");
  {
    MetricsLog log(folder);
    log.write(1, {{"loss", 0.5}, {"lr", 1e-3}});
    log.write(1, "accuracy, \"top 1\"", 0.25);
    log.write(7, "loss", 0.1);
  }
  EXPECT_EQ(lines_of(folder),
            (std::vector<std::string>{"step,name,value", "1,loss,0.5", "1,lr,0.001",
                                      "1,\"accuracy, \"\"top 1\"\"\",0.25", "7,loss,0.1"}));
  ASSERT_EQ(event_files(folder).size(), 1U);
  const std::string events = read_bytes(event_files(folder)[0]);
  EXPECT_EQ(keep_events(events, 100), events.size());
  EXPECT_EQ(last_event_step(events), 7);
  EXPECT_LT(keep_events(events, 1), events.size());
}

TEST(MetricsLog, OnlyRankZeroWritesUnlessAsked) {
  const ScratchFolder scratch;
  MetricsLog quiet(scratch.file("a"), {.rank = 1});
  quiet.write(1, "loss", 1);
  EXPECT_FALSE(std::filesystem::exists(scratch.file("a")));
  MetricsLog(scratch.file("b"), {.rank = 1, .every_rank = true}).write(1, "loss", 1);
  EXPECT_EQ(lines_of(scratch.file("b/rank1")).size(), 2U);
}

TEST(MetricsLog, AResumedRunHasEachStepOnce) {
  const ScratchFolder scratch;
  const std::string folder = scratch.file("run");
  {
    MetricsLog log(folder, {.resumed_after = 0});
    for (int64_t step = 1; step <= 5; ++step) log.write(step, "loss", static_cast<double>(step));
  }
  {
    MetricsLog log(folder, {.resumed_after = 3});
    for (int64_t step = 4; step <= 6; ++step)
      log.write(step, "loss", 10.0 + static_cast<double>(step));
  }
  EXPECT_EQ(lines_of(folder),
            (std::vector<std::string>{"step,name,value", "1,loss,1", "2,loss,2", "3,loss,3",
                                      "4,loss,14", "5,loss,15", "6,loss,16"}));
  const auto files = event_files(folder);
  ASSERT_EQ(files.size(), 2U);
  EXPECT_EQ(last_event_step(read_bytes(files[0])), 3) << "later ones were removed";
  EXPECT_EQ(last_event_step(read_bytes(files[1])), 6) << "the newer file has the later name";
}

TEST(MetricsLog, TheStepThatARunIsResumedAfterGetsWhatItLacks) {
  const ScratchFolder scratch;
  const std::string folder = scratch.file("run");
  MetricsLog(folder).write(5, {{"loss", 1}, {"a \"b\", c", 2}});
  {
    MetricsLog log(folder, {.resumed_after = 5});
    log.write(5, {{"loss", 1}, {"a \"b\", c", 2}, {"accuracy", 3}});
    expect_error(Code::kUsage, {"twice"}, [&] { log.write(5, "accuracy", 3); });
  }
  EXPECT_EQ(lines_of(folder), (std::vector<std::string>{"step,name,value", "5,loss,1",
                                                        "5,\"a \"\"b\"\", c\",2", "5,accuracy,3"}));
}

TEST(MetricsLog, WithoutAStepToResumeFromNothingIsLost) {
  const ScratchFolder scratch;
  const std::string folder = scratch.file("run");
  MetricsLog(folder).write(5, "loss", 1);
  MetricsLog log(folder);
  expect_error(Code::kUsage, {"step 5 after those of step 5", "resumed_after"},
               [&] { log.write(5, "loss", 2); });
  log.write(6, "loss", 2);
  EXPECT_EQ(lines_of(folder).size(), 3U);
}

TEST(MetricsLog, RefusesStepsThatGoBackAndNamesWrittenTwice) {
  const ScratchFolder scratch;
  MetricsLog log(scratch.file("run"));
  log.write(2, "loss", 1);
  expect_error(Code::kUsage, {"step 1 after", "ascending"}, [&] { log.write(1, "loss", 1); });
  expect_error(Code::kUsage, {"loss of step 2", "twice"}, [&] { log.write(2, "loss", 1); });
  expect_error(Code::kUsage, {"b of step 3"}, [&] { log.write(3, {{"b", 1}, {"b", 2}}); });
  expect_error(Code::kUsage, {"loss of step 2"}, [&] { log.write(2, "loss", 1); });
  expect_error(Code::kUsage, {"name of a metric"}, [&] { log.write(3, "two\nlines", 1); });
  log.write(3, {{"loss", 1}, {"b", 2}});
  EXPECT_EQ(lines_of(scratch.file("run")).size(), 4U);
}

TEST(MetricsLog, RemovesWhatACrashTore) {
  const ScratchFolder scratch;
  const std::string folder = scratch.file("run");
  {
    MetricsLog log(folder);
    log.write(1, "loss", 1);
    log.write(2, "loss", 2);
  }
  const std::string csv = read_bytes(folder + "/metrics.csv");
  const std::string events_path = event_files(folder)[0];
  const std::string events = read_bytes(events_path);
  const size_t whole_csv = csv.rfind('\n', csv.size() - 2) + 1;  // without the last line
  const size_t whole_events = keep_events(events, 1);
  for (size_t cut = 1; cut < csv.size() - whole_csv; ++cut) {
    write_bytes(folder + "/metrics.csv", csv.substr(0, whole_csv + cut));
    write_bytes(events_path, events.substr(0, std::min(events.size() - 1, whole_events + cut)));
    MetricsLog log(folder);
    log.write(2, "loss", 2);
    EXPECT_EQ(lines_of(folder),
              (std::vector<std::string>{"step,name,value", "1,loss,1", "2,loss,2"}));
    EXPECT_EQ(read_bytes(events_path), events.substr(0, whole_events));
    for (const auto& file : event_files(folder)) {
      if (file != events_path) std::filesystem::remove(file);
    }
  }
}

TEST(MetricsLog, RefusesAFolderThatItCannotUse) {
  const ScratchFolder scratch;
  write_bytes(scratch.file("file"), "");
  expect_error(Code::kFileWrite, {scratch.file("file")},
               [&] { MetricsLog log(scratch.file("file")); });
  std::filesystem::create_directories(scratch.file("other"));
  write_bytes(scratch.file("other/metrics.csv"), "a,b\n1,2\n");
  expect_error(Code::kFileFormat, {"metrics.csv", "MetricsLog"},
               [&] { MetricsLog log(scratch.file("other")); });
  EXPECT_EQ(read_bytes(scratch.file("other/metrics.csv")), "a,b\n1,2\n");
}

}  // namespace
}  // namespace lockstep
