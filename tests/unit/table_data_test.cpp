#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/table_data.hpp"

namespace lockstep::test::table_data_test {
namespace {

std::string csv_of_column(const std::string& title, const std::vector<std::string>& cells) {
  Table table("T", {{title}});
  for (const auto& cell : cells) table.add_row({cell});
  return table.csv();
}

TEST(TableData, QuantitiesAreNumbersInOneUnit) {
  EXPECT_EQ(
      csv_of_column("step time", {"77.8 ± 5.1 ms", "1.23 ± 0.05 s", "213 ± 4 µs", "—"}),
      "step_time_mean_ms,step_time_deviation_ms\r\n77.8,5.1\r\n1230,50\r\n0.213,0.004\r\n,\r\n");
  EXPECT_EQ(csv_of_column("range", {"40.1 … 44 ms"}),
            "range_least_ms,range_most_ms\r\n40.1,44\r\n");
  EXPECT_EQ(csv_of_column("peak", {"24.0 MiB", "512 KiB", "2.00 GiB", "0 B"}),
            "peak_mib\r\n24\r\n0.5\r\n2048\r\n0\r\n");
  EXPECT_EQ(csv_of_column("copies", {"601 KiB", "1.07 MiB"}), "copies_mib\r\n0.587\r\n1.07\r\n")
      << "no digits that the cell did not have";
  EXPECT_EQ(csv_of_column("against", {"-28 %", "+3 %", "±0 %"}),
            "against_percent\r\n-28\r\n3\r\n0\r\n");
  EXPECT_EQ(csv_of_column("total", {"2 min 05 s"}), "total_ms\r\n125000\r\n");
  EXPECT_EQ(csv_of_column("speed-up", {"1", "1.87 ± 0.02"}),
            "speed_up_mean,speed_up_deviation\r\n1,\r\n1.87,0.02\r\n");
  EXPECT_EQ(csv_of_column("extra, peak / final", {"+6.00 MiB / -9.01 MiB", "—"}),
            "extra_peak_mib,extra_final_mib\r\n6,-9.01\r\n,\r\n");
  EXPECT_EQ(csv_of_column("parameters", {"4198400", "4,198,400", "-1,024"}),
            "parameters\r\n4198400\r\n4198400\r\n-1024\r\n");
  EXPECT_EQ(csv_of_column("total (s)", {"1.5 ± 0.2"}),
            "total_mean_s,total_deviation_s\r\n1.5,0.2\r\n");
}

TEST(TableData, SeveralNumbersInACellAreSeveralColumns) {
  EXPECT_EQ(csv_of_column("rows", {"22 22 20", "32 32", "64"}),
            "rows_0,rows_1,rows_2\r\n22,22,20\r\n32,32,\r\n64,,\r\n");
  EXPECT_EQ(csv_of_column("micro-steps × rows", {"4 × 256"}), "micro_steps,rows\r\n4,256\r\n");
  EXPECT_EQ(csv_of_column("micro × rows", {"4 × 8", "3 × 11 11 10"}),
            "micro,rows_0,rows_1,rows_2\r\n4,8,,\r\n3,11,11,10\r\n");
  EXPECT_EQ(csv_of_column("not finite", {"0 of 8", "—"}),
            "not_finite,not_finite_of\r\n0,8\r\n,\r\n");
  EXPECT_EQ(csv_of_column("busy", {"86 to 88 %", "95 %"}),
            "busy_least_percent,busy_most_percent\r\n86,88\r\n95,95\r\n");
}

TEST(TableData, RemarksHaveAColumnOfTheirOwn) {
  EXPECT_EQ(csv_of_column("devices", {"2", "4, shared"}),
            "devices,devices_remark\r\n2,\r\n4,shared\r\n");
  EXPECT_EQ(csv_of_column("loss gap", {"0 %", "< 0.001 %"}),
            "loss_gap_percent,loss_gap_remark\r\n0,\r\n0.001,less than\r\n");
  EXPECT_EQ(csv_of_column("last loss", {"0.5477", "0.5529", "not finite"}),
            "last_loss,last_loss_remark\r\n0.5477,\r\n0.5529,\r\n,not finite\r\n");
  EXPECT_EQ(csv_of_column("step 20", {"0.431", "not finite", "not finite", "—"}),
            "step_20,step_20_remark\r\n0.431,\r\n,not finite\r\n,not finite\r\n,\r\n");
  EXPECT_EQ(csv_of_column("time", {"3 ms", "2 MiB", "4 ms"}),
            "time_ms,time_remark\r\n3,\r\n,2 MiB\r\n4,\r\n");
}

TEST(TableData, TitlesAreSpelledOut) {
  Table table("T", {{"rows/s"}, {"Δ peak"}, {"⌈rows/devices⌉"}, {"activations, fp32"}, {"… bf16"}});
  table.add_row({"1", "+2 MiB", "3", "4 MiB", "5 MiB"});
  EXPECT_EQ(table.csv(),
            "rows_per_s,delta_peak_mib,ceil_rows_per_devices,activations_fp32_mib,"
            "activations_bf16_mib\r\n1,2,3,4,5\r\n");
}

TEST(TableData, TextStaysText) {
  EXPECT_EQ(csv_of_column("last loss", {"not finite", "not finite"}),
            "last_loss\r\nnot finite\r\nnot finite\r\n");
  EXPECT_EQ(csv_of_column("shape", {"[22, 16]"}), "shape\r\n\"[22, 16]\"\r\n");
  EXPECT_EQ(csv_of_column("odd", {"inf", "1e999", "12 parsecs"}),
            "odd\r\ninf\r\n1e999\r\n12 parsecs\r\n");
}

TEST(TableData, ATableOfMeasuresIsTurnedRound) {
  Table table("T", {{""}, {"code 1"}, {"code 2"}});
  table.add_row({"memory: peak", "40.0 MiB", "44.8 MiB"});
  table.add_row({"… weights", "16.0 MiB", "16.0 MiB"});
  EXPECT_EQ(table.csv(),
            "name,memory_peak_mib,memory_weights_mib\r\ncode 1,40,16\r\ncode 2,44.8,16\r\n");
}

TEST(TableData, ColumnsHaveDifferentNames) {
  Table table("T", {{"measured"}, {"measured"}, {"measured"}});
  table.add_row({"1 ms", "2 ms", "3 %"});
  EXPECT_EQ(table.csv(), "measured_ms,measured_2_ms,measured_percent\r\n1,2,3\r\n");
}

TEST(TableData, JsonHasNumbersTextsAndNothing) {
  Table table("T", {{"name"}, {"time"}});
  table.add_row({"a", "1.5 ms"});
  table.add_row({"b", "—"});
  EXPECT_EQ(json_of(data_of(table)),
            nlohmann::json::parse(R"({"title": "T", "columns": [{"name": "name", "unit": ""},
              {"name": "time", "unit": "ms"}], "rows": [["a", 1.5], ["b", null]]})"));
}

}  // namespace
}  // namespace lockstep::test::table_data_test
