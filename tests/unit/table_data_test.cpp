#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "base/table_data.hpp"

namespace lockstep::test::table_data_test {
namespace {

using Kind = CellValue::Kind;

std::string csv_of_column(const std::string& title, const std::vector<TableCell>& cells) {
  Table table("T", {{title}});
  for (const auto& cell : cells) table.add_row({cell});
  return table.csv();
}

TableCell plain(const std::string& text, double number) {
  return {text, {.numbers = {number}}};
}

TableCell of(const std::string& text, const std::string& unit, std::vector<double> numbers,
             Kind kind = Kind::kValue) {
  return {text, {.kind = kind, .unit = unit, .numbers = std::move(numbers)}};
}

TEST(TableData, QuantitiesAreNumbersInOneUnit) {
  EXPECT_EQ(csv_of_column("step time", {of("77.8 ± 5.1 ms", "ms", {77.8, 5.1}, Kind::kMean),
                                        of("1.23 ± 0.05 s", "ms", {1230, 50}, Kind::kMean), "—"}),
            "step_time_mean_ms,step_time_deviation_ms\r\n77.8,5.1\r\n1230,50\r\n,\r\n");
  EXPECT_EQ(csv_of_column("range", {of("40.1 … 44 ms", "ms", {40.1, 44}, Kind::kRange)}),
            "range_least_ms,range_most_ms\r\n40.1,44\r\n");
  EXPECT_EQ(csv_of_column("copies", {of("601 KiB", "mib", {0.5869140625}), of("0 B", "mib", {0})}),
            "copies_mib\r\n0.5869140625\r\n0\r\n")
      << "all digits, whatever the text shows";
  EXPECT_EQ(csv_of_column("against", {of("-28 %", "percent", {-28}), of("±0 %", "percent", {0})}),
            "against_percent\r\n-28\r\n0\r\n");
  EXPECT_EQ(
      csv_of_column("speed-up", {plain("1", 1), of("1.87 ± 0.02", "", {1.87, 0.02}, Kind::kMean)}),
      "speed_up_mean,speed_up_deviation\r\n1,\r\n1.87,0.02\r\n");
  EXPECT_EQ(csv_of_column("extra, peak / final",
                          {of("+6.00 MiB / -9.01 MiB", "mib", {6, -9.01}, Kind::kList), "—"}),
            "extra_peak_mib,extra_final_mib\r\n6,-9.01\r\n,\r\n");
  EXPECT_EQ(csv_of_column("parameters", {plain("4,198,400", 4198400)}),
            "parameters\r\n4198400\r\n");
  EXPECT_EQ(csv_of_column("total (s)", {of("1.5 ± 0.2", "", {1.5, 0.2}, Kind::kMean)}),
            "total_mean_s,total_deviation_s\r\n1.5,0.2\r\n");
}

TEST(TableData, SeveralNumbersInACellAreSeveralColumns) {
  EXPECT_EQ(csv_of_column("rows", {of("22 22 20", "", {22, 22, 20}, Kind::kList),
                                   of("32 32", "", {32, 32}, Kind::kList), plain("64", 64)}),
            "rows_0,rows_1,rows_2\r\n22,22,20\r\n32,32,\r\n64,,\r\n");
  EXPECT_EQ(csv_of_column("micro-steps × rows", {of("4 × 256", "", {4, 256}, Kind::kProduct)}),
            "micro_steps,rows\r\n4,256\r\n");
  EXPECT_EQ(
      csv_of_column("micro × rows", {of("4 × 8", "", {4, 8}, Kind::kProduct),
                                     of("3 × 11 11 10", "", {3, 11, 11, 10}, Kind::kProduct)}),
      "micro,rows_0,rows_1,rows_2\r\n4,8,,\r\n3,11,11,10\r\n");
  EXPECT_EQ(csv_of_column("not finite", {of("0 of 8", "", {0, 8}, Kind::kShare), "—"}),
            "not_finite,not_finite_of\r\n0,8\r\n,\r\n");
  EXPECT_EQ(csv_of_column("busy", {of("86 to 88 %", "percent", {86, 88}, Kind::kRange),
                                   of("95 %", "percent", {95})}),
            "busy_least_percent,busy_most_percent\r\n86,88\r\n95,95\r\n");
}

TEST(TableData, RemarksHaveAColumnOfTheirOwn) {
  const TableCell shared("4, shared", {.numbers = {4}, .remark = "shared"});
  EXPECT_EQ(csv_of_column("devices", {plain("2", 2), shared}),
            "devices,devices_remark\r\n2,\r\n4,shared\r\n");
  EXPECT_EQ(
      csv_of_column("last loss", {plain("0.5477", 0.5477), plain("0.5529", 0.5529), "not finite"}),
      "last_loss,last_loss_remark\r\n0.5477,\r\n0.5529,\r\n,not finite\r\n");
  EXPECT_EQ(csv_of_column("step 20", {plain("0.431", 0.431), "not finite", "not finite", "—"}),
            "step_20,step_20_remark\r\n0.431,\r\n,not finite\r\n,not finite\r\n,\r\n");
  EXPECT_EQ(csv_of_column("time",
                          {of("3 ms", "ms", {3}), of("2 MiB", "mib", {2}), of("4 ms", "ms", {4})}),
            "time_ms,time_remark\r\n3,\r\n,2 MiB\r\n4,\r\n");
}

TEST(TableData, TitlesAreSpelledOut) {
  Table table("T", {{"rows/s"}, {"Δ peak"}, {"⌈rows/devices⌉"}, {"activations, fp32"}, {"… bf16"}});
  table.add_row({plain("1", 1), of("+2 MiB", "mib", {2}), plain("3", 3), of("4 MiB", "mib", {4}),
                 of("5 MiB", "mib", {5})});
  EXPECT_EQ(table.csv(),
            "rows_per_s,delta_peak_mib,ceil_rows_per_devices,activations_fp32_mib,"
            "activations_bf16_mib\r\n1,2,3,4,5\r\n");
}

TEST(TableData, TextStaysText) {
  EXPECT_EQ(csv_of_column("last loss", {"not finite", "not finite"}),
            "last_loss\r\nnot finite\r\nnot finite\r\n");
  EXPECT_EQ(csv_of_column("shape", {"[22, 16]"}), "shape\r\n\"[22, 16]\"\r\n");
  EXPECT_EQ(csv_of_column("odd", {"inf", "12 ms", "12 parsecs"}),
            "odd\r\ninf\r\n12 ms\r\n12 parsecs\r\n")
      << "no number is read from a text";
  EXPECT_EQ(csv_of_column("loss", {plain("0.5", 0.5), plain("inf", INFINITY)}),
            "loss\r\n0.5\r\n\r\n");
}

TEST(TableData, ATableOfMeasuresIsTransposed) {
  Table table("T", {{""}, {"code 1"}, {"code 2"}});
  table.add_row({"memory: peak", of("40.0 MiB", "mib", {40}), of("44.8 MiB", "mib", {44.8})});
  table.add_row({"… weights", of("16.0 MiB", "mib", {16}), of("16.0 MiB", "mib", {16})});
  EXPECT_EQ(table.csv(),
            "name,memory_peak_mib,memory_weights_mib\r\ncode 1,40,16\r\ncode 2,44.8,16\r\n");
}

TEST(TableData, ColumnsHaveDifferentNames) {
  Table table("T", {{"measured"}, {"measured"}, {"measured"}});
  table.add_row({of("1 ms", "ms", {1}), of("2 ms", "ms", {2}), of("3 %", "percent", {3})});
  EXPECT_EQ(table.csv(), "measured_ms,measured_2_ms,measured_percent\r\n1,2,3\r\n");
}

TEST(TableData, JsonHasNumbersTextsAndNothing) {
  Table table("T", {{"name"}, {"time"}});
  table.add_row({"a", of("1.5 ms", "ms", {1.5})});
  table.add_row({"b", "—"});
  EXPECT_EQ(json_of(data_of(table)),
            nlohmann::json::parse(R"({"title": "T", "columns": [{"name": "name", "unit": ""},
              {"name": "time", "unit": "ms"}], "rows": [["a", 1.5], ["b", null]]})"));
}

}  // namespace
}  // namespace lockstep::test::table_data_test
