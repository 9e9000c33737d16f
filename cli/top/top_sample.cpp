#include "cli/top/top_sample.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "base/process.hpp"

namespace lockstep::cli {
namespace {

constexpr int64_t kKeepEndedNs = 10'000'000'000;
constexpr double kLateAtLeastS = 3;   // a step is not late before this
constexpr double kLateFactor = 3;     // nor before this many times the last rate's time
constexpr double kQuietSeconds = 10;  // a silent rank is troubled from then on

ProcessState process_state(pid_t pid, pid_t launcher) {
  // A launcher that is alive but has no such number here runs in another container.
  if (pid <= 0 || !read_process_stat(launcher)) return ProcessState::kUnknown;
  const auto stat = read_process_stat(pid);
  if (!stat || stat->has_ended()) return ProcessState::kGone;
  return stat->is_stopped() ? ProcessState::kStopped : ProcessState::kRunning;
}

RankReading read_rank(const Board& board, int rank, pid_t launcher) {
  RankReading reading;
  reading.status.rank = rank;
  try {
    reading.status = board.status(rank);
    reading.process = process_state(reading.status.pid, launcher);
  } catch (const Error& error) {
    reading.problem = error.message();
  }
  return reading;
}

double seconds(int64_t nanoseconds) {
  return static_cast<double>(nanoseconds) * 1e-9;
}

double fraction(int64_t part_ns, int64_t whole_ns) {
  return std::clamp(static_cast<double>(part_ns) / static_cast<double>(whole_ns), 0.0, 1.0);
}

bool over(Phase phase) {
  return phase == Phase::kFinished || phase == Phase::kFailed;
}

void name_state(RankView& view, ProcessState process) {
  const RankStatus& status = view.status;
  view.troubled = true;
  if (!view.problem.empty()) {
    view.state = "unreadable";
  } else if (status.pid == 0) {
    view.state = "not started";
    view.troubled = false;
  } else if (process == ProcessState::kGone && !over(status.phase)) {
    view.state = "died";
  } else if (process == ProcessState::kStopped) {
    view.state = "stopped";
  } else {
    view.state = phase_name(status.phase);
    view.troubled = status.phase == Phase::kFailed ||
                    (status.phase == Phase::kTraining && view.quiet_s > kQuietSeconds);
  }
}

// Takes the rank's own clocks if it keeps them, otherwise the mean of its devices.
void take_shares(RankView& rates, const RankStatus& before, const RankStatus& after,
                 int64_t elapsed_ns) {
  const int64_t busy = after.busy_ns - before.busy_ns;
  const int64_t communicating = after.communicating_ns - before.communicating_ns;
  if (busy + communicating + after.idle_ns - before.idle_ns > 0) {
    rates.busy = fraction(busy, elapsed_ns);
    rates.communicating = std::min(fraction(communicating, elapsed_ns), 1 - rates.busy);
    rates.idle = 1 - rates.busy - rates.communicating;
    return;
  }
  rates.busy = rates.idle = rates.communicating = kUnknown;
  if (rates.devices.empty()) return;
  double sum = 0;
  for (const auto& device : rates.devices) sum += device.busy;
  rates.busy = sum / static_cast<double>(rates.devices.size());
  rates.idle = 1 - rates.busy;
}

}  // namespace

std::vector<RunReading> read_runs() {
  std::vector<RunReading> runs;
  for (const auto& entry : list_boards()) {
    if (entry.state != BoardState::kLive) continue;
    try {
      const Board board = Board::open(entry.path);
      RunReading run{.path = entry.path, .info = board.info()};
      for (int rank = 0; rank < board.ranks(); ++rank) {
        run.ranks.push_back(read_rank(board, rank, run.info.launcher_pid));
      }
      runs.push_back(std::move(run));
    } catch (const Error&) {
      continue;  // it ended a moment ago
    }
  }
  return runs;
}

std::vector<RunReading> select_runs(std::vector<RunReading> runs, const std::string& selection) {
  const auto named = [&](const RunReading& run) { return run.info.run_name == selection; };
  const bool exact = std::any_of(runs.begin(), runs.end(), named);
  std::erase_if(runs, [&](const RunReading& run) {
    return exact ? !named(run) : !run.info.run_name.starts_with(selection);
  });
  return runs;
}

void fail_no_run(const std::string& selection, const std::vector<RunReading>& runs) {
  const std::string message = fmt::format("no run's name is or starts with \"{}\"", selection);
  if (runs.empty()) throw Error(Code::kUsage, message, "no run of yours is going on at the moment");
  std::vector<std::string> names;
  std::map<std::string, std::string> beginnings;  // of a name, as long as what was asked for
  for (const auto& run : runs) {
    const std::string& name = names.emplace_back(run.info.run_name);
    for (const size_t size : {selection.size(), selection.size() + 1, name.size()}) {
      beginnings.emplace(name.substr(0, size), name);
    }
  }
  std::vector<std::string> candidates;
  for (const auto& [beginning, name] : beginnings) candidates.push_back(beginning);
  const std::string near = did_you_mean(selection, candidates);
  throw Error(Code::kUsage, message,
              near.empty() ? fmt::format("runs are: {}", fmt::join(names, ", "))
                           : fmt::format("did you mean {}?", beginnings[near]));
}

// Takes one rate from the anchor to this reading, if a step ended in between.
void TopRates::measure(RankTrack& track, const RankStatus& status, int64_t now_ns) {
  const RankStatus before = track.anchor;
  const bool same_process = track.anchored && before.pid == status.pid;
  if (!same_process || status.step < before.step) {
    track = {.anchor = status, .anchored = true};
    return;
  }
  const int64_t elapsed_ns = status.updated_ns - before.updated_ns;
  if (status.step == before.step || elapsed_ns <= 0) {
    const double late_s = std::max(kLateAtLeastS, kLateFactor * track.rated_s);
    if (track.rated_ns != 0 && seconds(now_ns - track.rated_ns) > late_s) {
      track.rates = {.steps_per_s = 0};
      track.rated_ns = 0;
    }
    return;
  }
  track.anchor = status;
  if (before.step == 0) return;  // the time since then is mostly start-up
  track.rates = {};
  track.rates.steps_per_s = static_cast<double>(status.step - before.step) / seconds(elapsed_ns);
  for (size_t i = 0; i < status.devices.size(); ++i) {
    DeviceView device;
    if (i < before.devices.size()) {
      device.busy = fraction(status.devices[i].busy_ns - before.devices[i].busy_ns, elapsed_ns);
    }
    track.rates.devices.push_back(device);
  }
  take_shares(track.rates, before, status, elapsed_ns);
  track.rated_s = seconds(elapsed_ns);
  track.rated_ns = now_ns;
}

RankView TopRates::rank_view(RankTrack& track, const RankReading& reading, int64_t now_ns) {
  const RankStatus& status = reading.status;
  if (reading.problem.empty()) measure(track, status, now_ns);
  RankView view = track.rates;
  view.status = status;
  view.status.devices.clear();
  view.problem = reading.problem;
  if (status.pid != 0) view.quiet_s = std::max(0.0, seconds(now_ns - status.updated_ns));
  const CollectiveStatus& collective = status.collective;
  if (collective.sequence != 0) {
    const int64_t until = collective.finished_ns != 0 ? collective.finished_ns : now_ns;
    view.collective_s = std::max(0.0, seconds(until - collective.started_ns));
  }
  view.devices.resize(status.devices.size());
  track.recent.resize(status.devices.size());
  for (size_t i = 0; i < status.devices.size(); ++i) {
    view.devices[i].status = status.devices[i];
    auto& recent = track.recent[i];
    const bool late = view.steps_per_s == 0;
    if (late || !std::isnan(view.devices[i].busy)) {
      recent.push_back(late ? 0 : view.devices[i].busy);
    }
    if (recent.size() > kRecentSamples) recent.erase(recent.begin());
    view.devices[i].recent = recent;
  }
  name_state(view, reading.process);
  return view;
}

TopView TopRates::update(const std::vector<RunReading>& readings, int64_t now_ns) {
  for (auto& [key, track] : runs_) {
    if (track.ended_ns == 0) track.ended_ns = now_ns;
  }
  for (const auto& reading : readings) {
    RunTrack& track = runs_[fmt::format("{} {}", reading.path, reading.info.started_ns)];
    track.ended_ns = 0;
    track.ranks.resize(reading.ranks.size());
    track.view = {.info = reading.info,
                  .age_s = std::max(0.0, seconds(now_ns - reading.info.started_ns))};
    for (size_t rank = 0; rank < reading.ranks.size(); ++rank) {
      track.view.ranks.push_back(rank_view(track.ranks[rank], reading.ranks[rank], now_ns));
    }
  }
  std::erase_if(runs_, [now_ns](const auto& run) {
    return run.second.ended_ns != 0 && now_ns - run.second.ended_ns > kKeepEndedNs;
  });
  TopView view;
  for (auto& [key, track] : runs_) {
    track.view.ended = track.ended_ns != 0;
    view.runs.push_back(track.view);
  }
  return view;
}

}  // namespace lockstep::cli
