// Writes a report with every part that a page can have, for browser_test.py. The figures are made
// up; tables, names and texts are as wide as those of the labs, or wider.
//
// usage: report_fixture FOLDER

#include <filesystem>

#include "report/document.hpp"

namespace {

using namespace lockstep;

Table wide_table() {
  Table table(
      "Schedules: 2 stages in one process, 8 micro-batches, and a title that is too long for a "
      "phone",
      {{"schedule"},
       {"step time", Align::kRight},
       {"speed-up", Align::kRight},
       {"bubble, predicted", Align::kRight},
       {"measured", Align::kRight},
       {"span, predicted", Align::kRight},
       {"measured", Align::kRight},
       {"ratio", Align::kRight},
       {"held", Align::kRight},
       {"peak per device", Align::kRight},
       {"order"},
       {"losses against one device"}});
  for (const char* name : {"sequential", "gpipe", "1f1b", "zero-bubble"}) {
    table.add_row({name, "511 ± 86 ms", "1.81 ± 0.28", "54 %", "57 %", "464 ms", "490 ms", "95 %",
                   "8", "15.2 MiB / 13.5 MiB", "as base", "less than 0.001 % apart"});
  }
  table.add_note("Span: first action to last, without the update; ratio: predicted over measured.");
  return table;
}

Timeline timeline() {
  Timeline chart{.title = "The base: predicted and measured",
                 .rows = {},
                 .legend = {"F: forward", "B: backward", "", "S: synchronisation"}};
  for (int rank = 0; rank < 2; ++rank) {
    for (int stage = 0; stage < 2; ++stage) {
      TimelineRow row{.label = "measured rank " + std::to_string(rank) +
                               " cpu:" + std::to_string(rank + 2 * stage)};
      for (int i = 0; i < 8; ++i) {
        const std::string number = std::to_string(i);
        row.spans.push_back({"F" + number, 3.0 * i + stage, 3.0 * i + stage + 2.5, 0});
        row.spans.push_back({"B" + number, 30 + 5.0 * i - stage, 34 + 5.0 * i - stage, 1});
      }
      row.spans.push_back({"S", 71, 78.5, 3});
      chart.rows.push_back(std::move(row));
    }
  }
  return chart;
}

Document document() {
  Document made{
      .title = "Practical 10: hybrid parallelism, in a report of all parts",
      .date = 1767323040,
      .command =
          "lockstep lab 10 --devices cpu:4 --quick --micro-batches 2,4,8 --out "
          "/home/student/reports/a-folder-with-a-rather-long-name",
      .facts = {{"host", "vm"}, {"cpu", "AMD EPYC 7B13 64-Core Processor"}, {"cores", "2"}},
      .author = "Ada Lovelace",
      .trained = {{"model", "mlp, 1024 wide, 2 hidden layers"},
                  {"optimizer", "SGD, learning rate 0.01"},
                  {"repeat",
                   "lockstep lab 10 --devices cpu:4 --steps 8 --batch 64 --dim "
                   "768 --hidden 768 --depth 2 --micro-batches 2,4,8"}},
      .warning = "Other programs kept 1.8 cores busy: do not rely on the times."};
  const BarChart bars{.title = "Time of a step by schedule",
                      .unit = Unit::kMilliseconds,
                      .categories = {"sequential", "gpipe", "1f1b", "zero-bubble"},
                      .series = {{"span, predicted", {464, 235, 288, 244}, {}},
                                 {"span, measured", {490, 263, 322, 263}, {20, 30, 40, 20}}}};
  made.sections = {
      {.heading = "Measurements",
       .tables = {wide_table()},
       .figures = {{timeline(), "The last step of the first run: predicted and measured."},
                   {bars, "2 stages in one process, 8 micro-batches."},
                   {bars, "The same again, beside it."}}},
      {.heading = "Questions: 10.1 base",
       .questions = {{"When does synchronisation happen?",
                      "Once per step for each stage, after its last backward.", "10.1",
                      "I saw it in the figure.\n\n- first forward\n- then backward"}}}};
  made.records = {{"base", "records/base.json"}};
  made.code = {{"practical10_hybrid.cpp",
                "int main() {\n  // " + std::string(160, '-') + "\n  return 0;\n}\n"}};
  return made;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  std::filesystem::create_directories(std::filesystem::path(argv[1]) / "records");
  write_report(document(), argv[1]);
  return 0;
}
