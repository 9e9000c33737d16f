#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "cli/top/top_draw.hpp"
#include "cli/top/top_sample.hpp"
#include "lockstep/units.hpp"

namespace lockstep::test {

constexpr int64_t kSecond = 1'000'000'000;

/// Rank 0 of a made-up run after `step` steps of 0.1 s, device i busy for 8 - i tenths of them.
inline cli::RankReading rank_after(int64_t step, int devices = 2) {
  cli::RankReading reading;
  reading.process = cli::ProcessState::kRunning;
  RankStatus& status = reading.status;
  status.pid = 4712;
  status.phase = Phase::kTraining;
  status.program = "train";
  status.step = step;
  status.loss = 0.125;
  status.started_ns = kSecond;
  status.updated_ns = 2 * kSecond + step * kSecond / 10;
  for (int i = 0; i < devices; ++i) {
    status.devices.push_back({.name = "cpu:" + std::to_string(i),
                              .physical = "core " + std::to_string(i),
                              .capacity_bytes = 4_GiB,
                              .live_bytes = i == 0 ? 36_MiB : 18_MiB,
                              .peak_bytes = i == 0 ? 40_MiB : 20_MiB,
                              .busy_ns = step * kSecond / 100 * (8 - i)});
  }
  return reading;
}

inline cli::RunReading run_of(std::vector<cli::RankReading> ranks,
                              const std::string& name = "train-4711") {
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    ranks[rank].status.rank = static_cast<int>(rank);
  cli::RunReading run;
  run.path = "/dev/shm/lockstep-0-" + name;
  run.info = {.run_name = name,
              .ranks = static_cast<int>(ranks.size()),
              .launcher_pid = 4711,
              .launcher_alive = true,
              .started_ns = kSecond};
  run.ranks = std::move(ranks);
  return run;
}

/// When the rank of rank_after(step) has just written.
inline int64_t time_of(int64_t step) {
  return 2 * kSecond + step * kSecond / 10;
}

/// The view of a run with 10 steps between two samples.
inline cli::TopView two_samples(const std::function<void(cli::RankReading&)>& change =
                                    [](cli::RankReading&) {}) {
  cli::TopRates rates;
  rates.update({run_of({rank_after(10)})}, time_of(10));
  cli::RankReading later = rank_after(20);
  change(later);
  return rates.update({run_of({later})}, time_of(20));
}

inline const cli::RankView& first_rank(const cli::TopView& view) {
  return view.runs.at(0).ranks.at(0);
}

inline std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const auto& line : lines) text += line + "\n";
  return text;
}

inline cli::DrawStyle plain(size_t width, bool utf8 = true) {
  return {.width = width, .utf8 = utf8, .colour = false};
}

}  // namespace lockstep::test
