#pragma once

#include <limits>
#include <string>

#include "cli/lab/lab7_results.hpp"
#include "lab_support.hpp"

namespace lockstep::test {

/// A whole lab, as an ideal run on two ranks would leave it.
inline cli::Lab7Results made_lab7(const MadeRun& like = {}) {
  const std::string amp = like.amp == "off" ? "bf16" : like.amp;
  const auto with = [&like](auto change) {
    MadeRun made = like;
    made.amp = "off";
    change(made);
    return made;
  };
  const auto plain = with([](MadeRun&) {});
  const auto many = with([](MadeRun& run) { run.accum_steps = 4, run.ms = 320; });
  const auto low = with([&amp](MadeRun& run) { run.amp = amp, run.ms = 50; });
  const double nan = std::numeric_limits<double>::quiet_NaN();
  cli::Lab7Results results;
  results.fp32 = made_set(plain);
  results.amp = made_set(low);
  cli::AccumulationRuns runs{.micro_steps = 4};
  runs.no_sync = made_set(many);
  runs.synced =
      made_set(with([](MadeRun& run) { run.accum_steps = 4, run.ms = 400, run.syncs = 4; }));
  runs.undivided =
      made_set(with([](MadeRun& run) { run.accum_steps = 4, run.ms = 320, run.norm = 2; }), 1);
  runs.undivided.runs[0].losses = {1.0, 2.0, 4.0, 8.0};
  runs.one_batch = made_set(with([](MadeRun& run) { run.rows = 256, run.ms = 310; }));
  results.accumulations = {runs};
  results.combined =
      made_set(with([&amp](MadeRun& run) { run.accum_steps = 4, run.amp = amp, run.ms = 160; }));
  results.no_scaler = made_set(low, 1);
  results.no_scaler.runs[0].scale.reset();
  results.overflow_at = 2;
  results.overflow = made_set(low, 1);
  results.overflow.runs[0].scale = 32768;
  results.overflow.runs[0].skipped_steps = {{2, "layers.0.weight", 65536, 32768}};
  results.overflow_no_scaler = made_set(low, 1);
  results.overflow_no_scaler.runs[0].scale.reset();
  results.overflow_no_scaler.runs[0].losses = {1.0, 0.5, nan, nan};
  results.overflow_no_scaler.runs[0].nonfinite = 2;
  return results;
}

}  // namespace lockstep::test
