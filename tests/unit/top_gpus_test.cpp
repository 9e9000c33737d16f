#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "cli/nvml.hpp"
#include "cli/top/top_draw.hpp"
#include "cli/top/top_screen.hpp"
#include "lockstep/table.hpp"
#include "lockstep/units.hpp"
#include "top_support.hpp"

namespace lockstep::cli::top_gpus_test {
namespace {

using test::joined;
using test::plain;
using test::two_samples;

GpuSample busy_gpu() {
  return {.index = 0,
          .name = "NVIDIA H200",
          .memory_bytes = 140_GiB,
          .memory_used_bytes = 12_GiB,
          .utilisation = 0.87,
          .power_w = 412.4,
          .power_limit_w = 700,
          .temperature_c = 61,
          .sm_clock_mhz = 1980,
          .processes = std::vector<GpuProcess>{{.pid = 4712, .memory_bytes = 6_GiB}, {.pid = 4713}},
          .compute_capability = "9.0"};
}

TEST(TopGpus, StandAboveTheRunsToTheLetter) {
  TopView view = two_samples();
  view.gpus = {busy_gpu()};
  const auto lines = draw_runs(view, plain(100));
  EXPECT_EQ(lines.at(0),
            "GPU 0  NVIDIA H200  87 %  12.0 GiB of 140 GiB  412 of 700 W  61 °C  1980 MHz  "
            "2 processes");
  EXPECT_EQ(lines.at(1), "");
  EXPECT_TRUE(lines.at(2).starts_with("train-4711"));
  EXPECT_EQ(lines.size(), draw_runs(two_samples(), plain(100)).size() + 2);
  EXPECT_EQ(rank_lines(view).at(0), lines.at(0)) << "a line each where output is no terminal";
  EXPECT_EQ(rank_lines(view).size(), 2U);
}

TEST(TopGpus, WhatTheDriverDoesNotTellIsLeftOut) {
  TopView view;
  view.gpus = {{.index = 3, .name = "Old\033[H", .memory_bytes = 2_GiB, .memory_used_bytes = 0}};
  EXPECT_EQ(joined(draw_runs(view, plain(80))), "GPU 3  Old?[H  0 B of 2.00 GiB\n");
  view.gpus[0].power_w = 30;
  view.gpus[0].processes.emplace(1);
  EXPECT_EQ(joined(draw_runs(view, plain(80))),
            "GPU 3  Old?[H  0 B of 2.00 GiB  30 W  1 process\n");
}

TEST(TopGpus, NoLineIsWiderThanAskedAndAsciiIsAscii) {
  TopView view = two_samples();
  view.gpus = {busy_gpu(), busy_gpu()};
  for (size_t width = 1; width < 120; ++width) {
    for (const auto& line : TopScreen(1).draw(view, 50, plain(width, false))) {
      EXPECT_LE(display_width(line), width) << line;
      for (const char c : line) EXPECT_LT(static_cast<unsigned char>(c), 0x80) << line;
    }
  }
  EXPECT_NE(joined(draw_runs(view, plain(100, false))).find("61 C"), std::string::npos);
}

TEST(TopGpus, AreShownAlsoWhereNoRunGoesOn) {
  TopView view;
  view.gpus = {busy_gpu()};
  const auto lines = TopScreen(2).draw(view, 24, plain(100));
  ASSERT_EQ(lines.size(), 24U);
  EXPECT_EQ(lines[1], no_run_text());
  EXPECT_EQ(lines[2], "");
  EXPECT_TRUE(lines[3].starts_with("GPU 0  NVIDIA H200"));
}

TEST(TopGpus, JsonHasNullForTheUnknown) {
  TopView view;
  EXPECT_EQ(top_json(view).at("gpus"), nlohmann::json::array());
  view.gpus = {busy_gpu(), {.index = 1, .name = "Old"}};
  const auto gpus = top_json(view).at("gpus");
  EXPECT_EQ(gpus.at(0).at("name"), "NVIDIA H200");
  EXPECT_EQ(gpus.at(0).at("memory_used_bytes"), 12_GiB);
  EXPECT_EQ(gpus.at(0).at("utilisation"), 0.87);
  EXPECT_EQ(gpus.at(0).at("processes").at(0).at("memory_bytes"), 6_GiB);
  EXPECT_EQ(gpus.at(0).at("processes").at(1).at("memory_bytes"), nullptr);
  for (const char* name :
       {"utilisation", "power_w", "power_limit_w", "temperature_c", "sm_clock_mhz", "processes"}) {
    EXPECT_EQ(gpus.at(1).at(name), nullptr) << name;
  }
}

TEST(Nvml, TellsOfTheGpusOfThisMachine) {
  const Nvml nvml;
  if (!nvml.present()) {
    EXPECT_TRUE(nvml.sample().empty());
    EXPECT_EQ(nvml.driver_version(), "");
    EXPECT_EQ(nvml.cuda_version(), "");
    GTEST_SKIP() << "no NVIDIA driver here";
  }
  EXPECT_NE(nvml.driver_version(), "");
  EXPECT_NE(nvml.cuda_version(), "");
  const auto gpus = nvml.sample();
  ASSERT_FALSE(gpus.empty());
  for (const auto& gpu : gpus) {
    EXPECT_NE(gpu.name, "");
    EXPECT_GT(gpu.memory_bytes, 1_GiB);
    EXPECT_LE(gpu.memory_used_bytes, gpu.memory_bytes);
    EXPECT_GE(gpu.utilisation.value_or(0), 0);
    EXPECT_LE(gpu.utilisation.value_or(0), 1);
    if (gpu.power_w) {
      EXPECT_GT(*gpu.power_w, 1);
      EXPECT_LT(*gpu.power_w, 2000);
    }
    if (gpu.temperature_c) {
      EXPECT_GT(*gpu.temperature_c, 0);
      EXPECT_LT(*gpu.temperature_c, 120);
    }
    if (gpu.sm_clock_mhz) {
      EXPECT_LT(*gpu.sm_clock_mhz, 5000);
    }
  }
}

}  // namespace
}  // namespace lockstep::cli::top_gpus_test
