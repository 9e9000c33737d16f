#include <gtest/gtest.h>

#include <cmath>

#include "cli/lab/lab7.hpp"
#include "cli/lab/lab7_charts.hpp"
#include "cli/lab/lab7_tables.hpp"
#include "lab7_support.hpp"

namespace lockstep::cli {
namespace {

using test::made_lab7;
using test::mentions;
using test::row_with;

TEST(Lab7Tables, BothTechniquesSideBySide) {
  const Table table = techniques_table(made_lab7());
  EXPECT_EQ(row_with(table, "goal")[1], "a batch of 256 rows in the memory of 64");
  EXPECT_EQ(row_with(table, "peak memory"),
            (std::vector<std::string>{"peak memory", "40.0 MiB", "44.0 MiB"}));
  EXPECT_EQ(row_with(table, "… against")[1], "64.0 MiB in one batch of 256 rows: -38 %");
  EXPECT_EQ(row_with(table, "… against")[2], "40.0 MiB in fp32: +10 %");
  EXPECT_EQ(row_with(table, "speed")[1], "1.25 ± 0.00 × the rows/s of fp32");
  EXPECT_EQ(row_with(table, "speed")[2], "2.00 ± 0.00 × the rows/s of fp32");
  EXPECT_EQ(row_with(table, "communication")[1], "2 all-reduces, 16.0 MiB for 256 rows");
  EXPECT_EQ(table.rows().back()[1], "8 all-reduces, 64.0 MiB if each micro-step syncs");
  EXPECT_EQ(table.rows().back()[2], "2 all-reduces, 16.0 MiB in fp32");
}

TEST(Lab7Tables, WaysToALargeBatch) {
  const Table table = accumulation_table(made_lab7());
  EXPECT_EQ(table.rows().size(), 5U);
  EXPECT_EQ(row_with(table, "fp32 alone"),
            (std::vector<std::string>{"fp32 alone", "1 × 64", "100 ± 0 ms", "640", "2", "16.0 MiB",
                                      "10.0 ms", "0.5", "40.0 MiB"}));
  EXPECT_EQ(row_with(table, "sync each"),
            (std::vector<std::string>{"sync each", "4 × 64", "400 ± 0 ms", "640", "8", "64.0 MiB",
                                      "40.0 ms", "0.5 (1.000 ×)", "40.0 MiB"}));
  EXPECT_EQ(row_with(table, "undivided")[7], "2 (4.000 ×)");
  EXPECT_EQ(row_with(table, "one batch")[1], "1 × 256");
  EXPECT_EQ(row_with(table, "one batch").back(), "64.0 MiB");
}

TEST(Lab7Tables, StabilityIsCounted) {
  const Table table = precision_table(made_lab7());
  EXPECT_EQ(row_with(table, "fp32"),
            (std::vector<std::string>{"fp32", "100 ± 0 ms", "1", "—", "—", "0 of 4", "0.2"}));
  EXPECT_EQ(row_with(table, "bf16, scaler"),
            (std::vector<std::string>{"bf16, scaler", "50.0 ± 0.0 ms", "2.00 ± 0.00", "0", "65536",
                                      "0 of 4", "0.2"}));
  EXPECT_EQ(row_with(table, "bf16, no scaler")[2], "—") << "it ran once";
  EXPECT_EQ(row_with(table, "overflow in step 2, scaler")[3], "1");
  EXPECT_EQ(row_with(table, "overflow in step 2, scaler")[4], "32768");
  const auto without = row_with(table, "overflow in step 2, no scaler");
  EXPECT_EQ(without[5], "2 of 4");
  EXPECT_EQ(without[6], "not finite");
}

TEST(Lab7Tables, MemoryAndGradientsAreSplit) {
  const Lab7Results results = made_lab7();
  EXPECT_EQ(row_with(memory_split_table(results), "bf16"),
            (std::vector<std::string>{"bf16", "44.0 MiB", "16.0 MiB", "16.0 MiB", "0 B", "8.00 MiB",
                                      "4.00 MiB"}));
  EXPECT_EQ(row_with(memory_split_table(results), "one batch of 256").back(), "32.0 MiB");
  const Table gradients = gradients_table(results);
  EXPECT_EQ(row_with(gradients, "fp32"),
            (std::vector<std::string>{"fp32", "4000000", "0.1 %", "12 %", "0.03 %", "0 %"}));
  EXPECT_TRUE(mentions(gradients.notes().front(), "No run here used fp16"));
  EXPECT_FALSE(
      mentions(gradients_table(made_lab7({.amp = "fp16"})).notes().front(), "No run here"));
}

TEST(Lab7Tables, NoiseAndABusyMachineAreWarnedAbout) {
  Lab7Results results = made_lab7();
  for (const auto& table : lab7_report(results).tables) {
    EXPECT_FALSE(mentions(table.table.terminal(false), "Warning")) << table.name;
  }
  results.amp.runs[0].step_ms.mean = 90;
  EXPECT_TRUE(mentions(precision_table(results).terminal(false), "Warning: step times varied"));
  results.others_busy_cores = 1;
  EXPECT_TRUE(mentions(accumulation_table(results).terminal(false), "kept 1.0 cores busy"));
}

TEST(Lab7Figures, ShowSpeedMemoryAndLosses) {
  const auto figures = lab7_figures(made_lab7());
  ASSERT_EQ(figures.size(), 3U);
  const auto& speed = std::get<BarChart>(figures[0].chart);
  ASSERT_EQ(speed.series.size(), 1U);
  EXPECT_EQ(speed.categories.size(), speed.series[0].values.size());
  EXPECT_DOUBLE_EQ(speed.series[0].values[4], 2) << speed.categories[4];
  const auto& memory = std::get<BarChart>(figures[1].chart);
  EXPECT_TRUE(memory.stacked);
  ASSERT_EQ(memory.series.size(), 5U);
  for (const auto& series : memory.series) {
    EXPECT_EQ(series.values.size(), memory.categories.size()) << series.name;
  }
  EXPECT_EQ(memory.series.back().values[2], static_cast<double>(32_MiB)) << "one batch";
  const auto& losses = std::get<LineChart>(figures[2].chart);
  ASSERT_EQ(losses.series.size(), 4U);
  EXPECT_EQ(losses.series[3].x, (std::vector<double>{1, 2, 3, 4}));
  EXPECT_TRUE(std::isnan(losses.series[3].y[2])) << "a gap";
  Lab7Results bare = made_lab7();
  for (auto& run : bare.fp32.runs) run.memory.reset();
  const auto figures_of_bare = lab7_figures(bare);
  EXPECT_TRUE(std::isnan(std::get<BarChart>(figures_of_bare[1].chart).series[0].values[0]));
}

TEST(Lab7Report, HoldsAllParts) {
  const LabReport report = lab7_report(made_lab7());
  EXPECT_EQ(report.title, "Practical 7: gradient accumulation and mixed precision");
  EXPECT_EQ(report.stamp.versions.at("libtorch"), "2.11.0");
  EXPECT_EQ(report.tables.size(), 5U);
  EXPECT_EQ(report.figures.size(), 3U);
  EXPECT_EQ(lab7().folder, "reports/lab7");
}

}  // namespace
}  // namespace lockstep::cli
